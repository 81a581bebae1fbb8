"""The two hooks to register with DDP: PowerSGD layer by layer, and on a whole bucket as one square matrix.
They decide what a call is (plain phase, first bucket, another model's) and leave the compressed step to the pipeline.
"""

import torch
import torch.distributed as dist

from powersgd_lab.hook.errors import name_of
from powersgd_lab.hook.pipeline import Item
from powersgd_lab.hook.pipeline import Step
from powersgd_lab.hook.plain import mean_all_reduce
from powersgd_lab.hook.state import PowerSGDState
from powersgd_lab.hook.statistics import report


def powerSGD_hook(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Average gradients over the ranks as low-rank matrices, layer by layer.

    Register with ``ddp_model.register_comm_hook(state, powerSGD_hook)``. Every parameter's gradient is seen as a matrix
    M (``layout.matrix_shape``). If that pays (``layout.is_compressed``) the ranks agree on M ≈ PQᵀ with two
    all-reduces a bucket: P = MQ of the last step's Q goes first, together with the slices that are not compressed;
    then, with P orthonormal, Q = MᵀP. What is lost is added to the next gradient. Before ``state.start_powerSGD_iter``
    buckets are averaged as they are.

    Gradients of a bucket are ready when the step's last bucket has been handed in. If the gradient is not finite on
    some rank, all ranks receive NaN in every compressed slice, and errors, factors and the random stream stay as they
    were, so that a loss scaler can skip the step.

    In a step in which no rank used a parameter (``find_unused_parameters``) its bucket slice is zero and DDP leaves
    its ``.grad`` as it was. The hook is not told: it sends an approximation of that parameter's error alone, subtracts
    it from the error, and DDP drops it, so that this part of the error is lost. A parameter that never has a gradient
    has no error to lose.

    Args:
        state: one for each DDP model.
        bucket: DDP's; floating or complex, on CPU or CUDA.

    Returns:
        a future of the bucket's flat gradient, averaged in place.

    Raises:
        ValueError: for sparse gradients, and for a second model whose backward pass interleaves with the first's.

    Source: Vogels et al. 2019, algorithms 1 and 2.
    """
    return _run(state, bucket, batched=False)


def batched_powerSGD_hook(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Average gradients over the ranks with each whole bucket, padded with zeros to a square, as one low-rank matrix.

    Fewer and larger products than ``powerSGD_hook``, but rows and columns of layers no longer line up, so that higher
    ranks gain little: PyTorch's document advises it only where rank 1 is satisfactory. ``min_compression_rate`` has no
    effect. Arguments, result and errors are ``powerSGD_hook``'s.
    """
    return _run(state, bucket, batched=True)


@torch.no_grad()
def _run(state: PowerSGDState, bucket: dist.GradBucket, batched: bool) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    group = state.process_group if state.process_group is not None else dist.group.WORLD
    assert group is not None, "hooks run under DDP, which needs a process group"
    gradient = bucket.buffer()
    parameters = bucket.parameters()
    if gradient.is_sparse:
        raise ValueError(
            f"the gradient of {name_of(parameters)} is sparse, which PowerSGD cannot compress: "
            "make it dense (for an embedding, sparse=False)"
        )
    state._meet(parameters)
    if state._restored is not None and bucket.is_last():
        state._restored.resolve(state)
    if group.size() == 1:
        state.maybe_increase_iter(bucket)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(gradient)
        return done
    if state._step is None and state.iter < state.start_powerSGD_iter:
        state._note_bucket(bucket)
        state.maybe_increase_iter(bucket)
        return mean_all_reduce(gradient, group, None, state.observer)
    step = state._step
    if step is not None and bucket.index() <= step.items[-1].index:
        _end_early(state, step, parameters)
        step = None
    if step is None:
        step = state._step = Step(state, group, batched)
    # DDP keeps complex gradients as pairs of real numbers; a matrix of such pairs has another rank than its own.
    paired = not gradient.is_complex() and parameters[0].is_complex()
    matrix = torch.view_as_complex(gradient.view(-1, 2)) if paired else gradient
    item = Item(bucket.index(), matrix, parameters, result=gradient)
    step.add(item, bucket.is_last())
    if bucket.is_last():
        state._step = None
        report(state, step.items)
        state.maybe_increase_iter(bucket)
    return item.future


def _end_early(state: PowerSGDState, step: Step, parameters: list[torch.Tensor]) -> None:
    """A first bucket again, before the last: the backward pass was given up, or the state serves two models at once."""
    known = {id(parameter) for item in step.items for parameter in item.parameters}
    if not known & {id(parameter) for parameter in parameters}:
        raise ValueError(
            f"the bucket of {name_of(parameters)} belongs to a second model whose backward pass interleaves with the "
            "first's: give each DDP model a PowerSGDState of its own"
        )
    step.abandon()
    state._step = None
