"""Hooks without compression: the mean all-reduce in the gradient's own precision or in 16 bit.
They are the baselines that PowerSGD is measured against, observed the same way, and run on gloo as well as NCCL.
"""

import time

import torch
import torch.distributed as dist

from powersgd_lab.hook.observer import VANILLA
from powersgd_lab.hook.observer import Observer


class AllReduceState:
    """What ``allreduce_hook`` needs to know.

    Args:
        process_group: the ranks to average over; None is the default group.
        dtype: None averages in the gradient's own dtype; ``torch.bfloat16`` or ``torch.float16`` halves the bytes of
            a float32 gradient. Complex gradients are sent as their real and imaginary parts.
        observer: see ``Observer``; may be set later, is never pickled.

    Raises:
        ValueError: for another dtype.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        *,
        observer: Observer | None = None,
    ) -> None:
        if dtype not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"dtype must be None, torch.bfloat16 or torch.float16, not {dtype!r}")
        self.process_group = process_group
        self.dtype = dtype
        self.observer = observer


def allreduce_hook(state: AllReduceState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Average a bucket over the ranks, asynchronously, so that it overlaps with the rest of the backward pass.

    The gradient is divided by the world size before it is cast and summed, so that 16 bit overflows no sooner than the
    mean does (as PyTorch's ``fp16_compress_hook``; unlike its bfloat16 hook this one needs no NCCL).
    """
    return mean_all_reduce(bucket.buffer(), state.process_group, state.dtype, state.observer)


def mean_all_reduce(
    gradient: torch.Tensor,
    process_group: dist.ProcessGroup | None,
    dtype: torch.dtype | None,
    observer: Observer | None,
) -> torch.futures.Future[torch.Tensor]:
    """Average ``gradient`` in place over the group, in ``dtype`` if given; the future holds ``gradient`` itself."""
    group = process_group if process_group is not None else dist.group.WORLD
    assert group is not None, "hooks run under DDP, which needs a process group"
    started = time.perf_counter() if observer is not None else 0.0
    parts = torch.view_as_real(gradient) if gradient.is_complex() and dtype is not None else gradient
    gradient.div_(group.size())
    sent = parts if dtype is None or parts.is_sparse else parts.to(dtype)
    if observer is not None:
        if dtype is not None:
            observer.compressed(time.perf_counter() - started)
        observer.issued({VANILLA: payload_bytes(sent)})
    work = dist.all_reduce(sent, group=group, async_op=True)

    def receive(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        reduced = future.value()[0]
        if sent is parts:
            # A sparse all-reduce hands back a new tensor; a dense one is the gradient itself.
            return reduced if gradient.is_sparse else gradient
        parts.copy_(sent)
        return gradient

    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(receive)
    return averaged


def payload_bytes(tensor: torch.Tensor) -> int:
    """Bytes that ``tensor`` hands to an all-reduce; of a sparse one, its indices and values."""
    if tensor.is_sparse:
        parts = (tensor._indices(), tensor._values())
        return sum(part.numel() * part.element_size() for part in parts)
    return tensor.numel() * tensor.element_size()
