"""From a setting to DDP's communication hook, with the meter in between.
Baselines are hooks too, so that every setting is metered in the same way."""

import time
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # torch.distributed has it too, but type checkers do not see that
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as pytorchs
from torch.nn.parallel import DistributedDataParallel

from powersgd_lab import hook as ours
from powersgd_lab.settings import Backend
from powersgd_lab.settings import Hook
from powersgd_lab.settings import PowerSGD
from powersgd_lab.settings import Trial
from powersgd_lab.training.meter import Meter


ONE_BUCKET_MB = 2000.0  # more than the gradients of any model that is trained over gloo


def bucket_cap_mb(trial: Trial, backend: Backend) -> float:
    """DDP's bucket size. PyTorch's own PowerSGD starts all-reduces from callbacks, in an order that differs between
    ranks when there are several buckets, and gloo matches collectives by their order: one bucket alone is safe."""
    if trial.powersgd.hook is Hook.torch and backend is Backend.gloo:
        return ONE_BUCKET_MB
    return trial.trainer.ddp.bucket_cap_mb


def register(model: DistributedDataParallel, powersgd: PowerSGD, seed: int, meter: Meter) -> Any:
    """Let `model` average its gradients as `powersgd` says, and `meter` see it. `seed` is added to the random seed.

    Returns the hook's state."""
    state, hook = _state_and_hook(powersgd, seed)
    if powersgd.hook is Hook.torch:
        hook = _timed(hook, meter)
    else:
        state.observer = meter

    # DDP compares a hook's annotations, and wants a plain function
    def metered(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = hook(state, bucket)
        meter.hook_returned()
        return future

    model.register_comm_hook(state, metered)
    return state


def factors(state: Any, model: DistributedDataParallel) -> list[torch.Tensor]:
    """The factors Q that our hook keeps for its next step, alike on all ranks; none with another hook."""
    if not isinstance(state, ours.PowerSGDState):
        return []
    return [matrix["q"] for matrix in state.state_dict(model)["matrices"] if matrix["q"] is not None]


AnyHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def _state_and_hook(powersgd: PowerSGD, seed: int) -> tuple[Any, AnyHook]:
    plain = {Hook.off: None, Hook.bf16: torch.bfloat16, Hook.fp16: torch.float16}
    if powersgd.hook in plain:
        return ours.AllReduceState(dtype=plain[powersgd.hook]), ours.allreduce_hook
    arguments: dict[str, Any] = {
        "process_group": None,
        "matrix_approximation_rank": powersgd.matrix_approximation_rank,
        "start_powerSGD_iter": powersgd.start_powerSGD_iter,
        "min_compression_rate": powersgd.min_compression_rate,
        "use_error_feedback": powersgd.use_error_feedback,
        "warm_start": powersgd.warm_start,
        "orthogonalization_epsilon": powersgd.orthogonalization_epsilon,
        "random_seed": (powersgd.random_seed + seed) % 2**32,
        "compression_stats_logging_frequency": powersgd.compression_stats_logging_frequency,
        "batch_tensors_with_same_shape": powersgd.batch_tensors_with_same_shape,
    }
    if powersgd.hook is Hook.torch:
        return pytorchs.PowerSGDState(**arguments), pytorchs.powerSGD_hook
    hook = ours.batched_powerSGD_hook if powersgd.hook is Hook.batched else ours.powerSGD_hook
    return ours.PowerSGDState(**arguments), hook


def _timed(hook: AnyHook, meter: Meter) -> AnyHook:
    """PyTorch's hook tells no one how long it compresses: the calls are timed. What it computes later, in callbacks,
    falls into the time that DDP waits."""

    def timed(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        began = time.perf_counter()
        future = hook(state, bucket)
        meter.compressed(time.perf_counter() - began)
        return future

    return timed


@contextmanager
def metered_all_reduce(powersgd: PowerSGD, meter: Meter) -> Iterator[None]:
    """PyTorch's hook reports no bytes either: while it trains, every all-reduce of a backward pass is counted."""
    if powersgd.hook is not Hook.torch:
        yield
        return
    original = dist.all_reduce
    start = powersgd.start_powerSGD_iter
    assert start is not None, "a trial's start is resolved"

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if meter.in_backward:
            kind = "vanilla" if meter.step < start else "compressed"
            meter.issued({kind: tensor.numel() * tensor.element_size()})
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        yield
    finally:
        dist.all_reduce = original
