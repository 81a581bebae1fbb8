"""What runs inside the ranks: small DDP models whose gradients a test chooses freely.
A parameter's gradient is whatever it is multiplied with, so tests set gradients instead of inventing losses.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


class Bag(torch.nn.Module):
    """Parameters of given shapes; ``bag(gradients)`` is a loss whose gradient is ``gradients``."""

    def __init__(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            self.register_parameter(f"p{index}", torch.nn.Parameter(torch.zeros(tuple(shape), dtype=dtype)))

    def forward(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        total = torch.zeros(())
        for parameter, gradient in zip(self.parameters(), gradients, strict=True):
            if gradient is not None:
                product = (parameter * gradient.conj()).sum()
                total = total + (product.real if product.is_complex() else product)
        return total


def wrap(model: torch.nn.Module, state: Any, hook: Callable[..., Any], **options: Any) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(model, **{"bucket_cap_mb": 2000, **options})
    wrapped.register_comm_hook(state, hook)
    return wrapped


def step(model: DistributedDataParallel, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """One backward pass: the averaged gradients, in order of the parameters."""
    model.zero_grad(set_to_none=True)
    model(gradients).backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def random_gradients(
    shapes: Sequence[Sequence[int]], seed: int, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tuple(shape), generator=generator, dtype=dtype) for shape in shapes]


def train(
    rank: int,
    shapes: Sequence[Sequence[int]],
    state: Any,
    hook: Callable[..., Any],
    steps: int,
    dtype: torch.dtype = torch.float32,
    ddp: Mapping[str, Any] | None = None,
) -> list[list[torch.Tensor | None]]:
    """Averaged gradients of ``steps`` steps on gradients that are random but the same in every call."""
    model = wrap(Bag(shapes, dtype), state, hook, **(ddp or {}))
    return [step(model, random_gradients(shapes, 1000 * t + rank, dtype)) for t in range(steps)]
