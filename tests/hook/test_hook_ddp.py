"""Wherever DDP runs: many buckets, unused and frozen parameters, every layout and dtype, uneven inputs.
Expectations come from the plain reference, or from the mean where nothing is lost (rank at least the gradient's own).
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Bag
from cases import random_gradients
from cases import step
from cases import train
from cases import wrap
from ranks import Ranks
from reference import Reference

from powersgd_lab.hook import AllReduceState
from powersgd_lab.hook import PowerSGDState
from powersgd_lab.hook import allreduce_hook
from powersgd_lab.hook import batched_powerSGD_hook
from powersgd_lab.hook import powerSGD_hook


SHAPES = [(60, 50), (50,), (16, 8, 3, 3), (60, 50), (40, 3), (5, 60)]
MANY = {"bucket_cap_mb": 0.005}


def same_everywhere(tensor: torch.Tensor, world_size: int) -> bool:
    """Bitwise equal on all ranks."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = flat.contiguous().reshape(-1).view(torch.uint8)
    gathered = [torch.empty_like(bits) for _ in range(world_size)]
    dist.all_gather(gathered, bits)
    return all(bool((other == bits).all()) for other in gathered)


def against_reference(rank: int, world_size: int, r: int, settings: dict[str, Any], ddp: dict[str, Any]) -> float:
    state = PowerSGDState(None, r, start_powerSGD_iter=2, **settings)
    steps = 8
    got = train(rank, SHAPES, state, powerSGD_hook, steps, torch.float64, ddp)
    for gradients in got:
        for gradient in gradients:
            assert gradient is not None
            assert same_everywhere(gradient, world_size)
    # The factors' random start is the hook's own business as long as it is alike on all ranks; a full-rank start
    # matters only through its span, so the reference takes the committed factor after the first compressed step.
    references: dict[int, Reference] = {}
    state = PowerSGDState(None, r, start_powerSGD_iter=2, **settings)
    model = wrap(Bag(SHAPES, torch.float64), state, powerSGD_hook, **ddp)
    worst = 0.0
    for t in range(steps):
        every = [random_gradients(SHAPES, 1000 * t + other, torch.float64) for other in range(world_size)]
        averaged = step(model, every[rank])
        for position, parameter in enumerate(model.parameters()):
            gradients = [g[position].reshape(g[position].shape[0], -1) for g in every]
            mean = sum(gradients) / world_size
            value = averaged[position]
            assert value is not None
            value = value.reshape(mean.shape)
            unit = state._units.get((id(parameter),))
            if t < 2 or unit is None:
                expected = mean
            elif t == 2:
                # Checked through what it must be: an orthogonal projection of the mean.
                expected = value
                left = torch.linalg.svd(value).U[:, : unit.q.shape[0]]
                assert torch.allclose(left @ left.mT @ mean, value, atol=1e-9)
                references[position] = Reference(unit.q.mT.clone(), state.use_error_feedback)
                references[position].errors = [m - value for m in gradients]
            else:
                expected = references[position].step(gradients)
            worst = max(worst, float((value - expected).abs().max()))
    return worst


@pytest.mark.parametrize(
    "ddp", [pytest.param({}, marks=pytest.mark.slow), MANY, {**MANY, "gradient_as_bucket_view": True}], ids=str
)
@pytest.mark.parametrize("r", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_reference(ranks: Ranks, ddp: dict[str, Any], r: int) -> None:
    assert max(ranks.run(against_reference, r, {}, ddp)) < 1e-9


@pytest.mark.parametrize("ddp", [{"static_graph": True}, {"find_unused_parameters": True}], ids=str)
def test_ddp_options(pair: Ranks, ddp: dict[str, Any]) -> None:
    assert max(pair.run(against_reference, 2, {"use_error_feedback": False}, {**MANY, **ddp})) < 1e-9


def mean_case(rank: int, world_size: int, shapes: list, dtype: torch.dtype, hook: Any, tolerance: float) -> None:
    """At full rank nothing is lost: the hook must give the mean, whatever the shapes."""
    state = PowerSGDState(None, 64, start_powerSGD_iter=2, min_compression_rate=0)
    model = wrap(Bag(shapes, dtype), state, hook, **MANY)
    for t in range(5):
        every = [random_gradients(shapes, 10 * t + other, dtype) for other in range(world_size)]
        averaged = step(model, every[rank])
        for position, value in enumerate(averaged):
            assert value is not None
            assert same_everywhere(value, world_size), (t, position)
            mean = sum(g[position].to(torch.complex128 if dtype.is_complex else torch.float64) for g in every)
            if mean.numel():
                assert float((value - mean / world_size).abs().max()) < tolerance


@pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, 1e-12),
        (torch.float32, 1e-4),
        (torch.bfloat16, 0.3),
        (torch.float16, 0.05),
        (torch.complex64, 1e-4),
        (torch.complex128, 1e-12),
    ],
    ids=str,
)
def test_every_shape_and_dtype(pair: Ranks, hook: Any, dtype: torch.dtype, tolerance: float) -> None:
    shapes = [(), (0, 4), (7,), (12, 9), (4, 3, 3, 3), (1, 20), (20, 1), (3, 2, 2), (12, 9)]
    pair.run(mean_case, shapes, dtype, hook, tolerance)


def layouts_case(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.conv = torch.nn.Parameter(torch.zeros(16, 8, 3, 3).to(memory_format=torch.channels_last))
    model.turned = torch.nn.Parameter(torch.zeros(40, 30).t())
    model.other = torch.nn.Parameter(torch.zeros(30, 30, dtype=torch.float64))
    model.forward = lambda gs: sum((p * g).sum().double() for p, g in zip(model.parameters(), gs, strict=True))
    state = PowerSGDState(None, 2, start_powerSGD_iter=2)
    ddp = wrap(model, state, powerSGD_hook, **MANY)
    shapes = [(16, 8, 3, 3), (30, 40), (30, 30)]
    # Row and column spaces stay, so rank 2 loses nothing if the matrix is read as the parameter means it.
    left = [random_gradients([(s[0], 2)], 5)[0] for s in shapes]
    right = [random_gradients([(2, torch.Size(s[1:]).numel())], 6)[0] for s in shapes]
    for t in range(6):
        every = []
        for other in range(world_size):
            cores = random_gradients([(2, 2)] * 3, 100 * t + other)
            every.append([(a @ c @ b).reshape(s) for a, b, c, s in zip(left, right, cores, shapes, strict=True)])
        every = [[g.double() if i == 2 else g for i, g in enumerate(gs)] for gs in every]
        averaged = step(ddp, every[rank])
        for position, value in enumerate(averaged):
            mean = sum(g[position] for g in every) / world_size
            assert torch.allclose(value, mean, atol=1e-4), (t, position, (value - mean).abs().max())
    assert len(state._units) == 3


def test_memory_layouts_keep_low_rank(pair: Ranks) -> None:
    pair.run(layouts_case)


def unused_case(rank: int, world_size: int) -> None:
    """Never used, used by one rank only, and frozen midway."""
    shapes = [(30, 30), (30, 30), (30, 30), (30, 30), (30,)]
    state = PowerSGDState(None, 2, start_powerSGD_iter=2)
    bag = Bag(shapes)
    model = wrap(bag, state, powerSGD_hook, find_unused_parameters=True, **MANY)
    for t in range(8):
        if t == 5:
            bag.p3.requires_grad_(False)
        gradients: list[torch.Tensor | None] = list(random_gradients(shapes, 10 * t + rank))
        gradients[1] = None
        if rank:
            gradients[2] = None
        averaged = step(model, gradients)
        assert averaged[1] is None
        assert averaged[2] is not None
        assert (averaged[3] is None) == (t >= 5)
        for value in averaged:
            assert value is None or (value.isfinite().all() and same_everywhere(value, world_size))


def test_unused_and_frozen(ranks: Ranks) -> None:
    ranks.run(unused_case)


def no_sync_case(rank: int, world_size: int) -> float:
    results = []
    for parts in (1, 3):
        state = PowerSGDState(None, 2, start_powerSGD_iter=2)
        model = wrap(Bag(SHAPES, torch.float64), state, powerSGD_hook, **MANY)
        for t in range(5):
            gradients = random_gradients(SHAPES, 10 * t + rank, torch.float64)
            model.zero_grad()
            with model.no_sync():
                for _ in range(parts - 1):
                    model([g / parts for g in gradients]).backward()
            model([g / parts for g in gradients]).backward()
        assert state.iter == 5
        results.append([p.grad.clone() for p in model.parameters()])
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


def test_no_sync_accumulates(pair: Ranks) -> None:
    assert max(pair.run(no_sync_case)) < 1e-9


def join_case(rank: int, world_size: int, plain: bool) -> int:
    state: Any = AllReduceState() if plain else PowerSGDState(None, 2, start_powerSGD_iter=2)
    model = wrap(Bag(SHAPES), state, allreduce_hook if plain else powerSGD_hook, **MANY)
    with model.join():
        for t in range(4 + 2 * rank):
            for value in step(model, random_gradients(SHAPES, 10 * t + rank)):
                assert value.isfinite().all()
    dist.barrier()
    for parameter in model.parameters():
        assert same_everywhere(parameter.detach(), world_size)
    return 0 if plain else state.iter


def test_join_with_uneven_inputs(ranks: Ranks) -> None:
    steps = ranks.run(join_case, False)
    assert set(steps) == {4 + 2 * (ranks.world_size - 1)}


def test_join_with_the_plain_hook(pair: Ranks) -> None:
    pair.run(join_case, True)


def two_models_case(rank: int, world_size: int) -> None:
    state = PowerSGDState(None, 64, start_powerSGD_iter=2, min_compression_rate=0)
    models = [wrap(Bag([(9, 8)] * 3), state, powerSGD_hook, **MANY) for _ in range(2)]
    for t in range(5):
        for turn, model in enumerate(models):
            every = [random_gradients([(9, 8)] * 3, 100 * t + 10 * turn + other) for other in range(world_size)]
            for position, value in enumerate(step(model, every[rank])):
                mean = sum(g[position] for g in every) / world_size
                assert torch.allclose(value, mean, atol=1e-5)
    # In one backward pass autograd finishes one model before it begins the other: two steps like any others.
    (models[0](every[rank]) + models[1](every[rank])).backward()
    assert state.iter == 12


class Handed:
    """A bucket that is not the step's last, as DDP would hand it in."""

    def __init__(self) -> None:
        self.parameter = torch.zeros(9, 8)

    def buffer(self) -> torch.Tensor:
        return self.parameter.view(-1)

    def parameters(self) -> list[torch.Tensor]:
        return [self.parameter]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return False


def interleaved_case(rank: int, world_size: int) -> None:
    state = PowerSGDState(None, 1, start_powerSGD_iter=2)
    state.iter = 2
    first = Handed()
    powerSGD_hook(state, first)
    # The same model again: its backward pass was given up. Another: refused.
    powerSGD_hook(state, first)
    with pytest.raises(ValueError, match="PowerSGDState of its own"):
        powerSGD_hook(state, Handed())


def test_interleaving_models_are_refused(pair: Ranks) -> None:
    pair.run(interleaved_case)


def test_one_state_on_two_models(pair: Ranks) -> None:
    pair.run(two_models_case)


def sparse_case(rank: int, world_size: int) -> str:
    model = torch.nn.Embedding(20, 4, sparse=True)
    ddp = wrap(model, PowerSGDState(None, 1, start_powerSGD_iter=2), powerSGD_hook)
    try:
        ddp(torch.tensor([1, 2])).sum().backward()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "accepted"


def test_sparse_is_refused_by_name(pair: Ranks) -> None:
    for message in pair.run(sparse_case):
        assert "'weight'" in message
        assert "sparse=False" in message


def wrapper_case(rank: int, world_size: int) -> None:
    """PyTorch's 16-bit wrapper around our hook, as its document advises around its own."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper

    state = PowerSGDState(None, 2, start_powerSGD_iter=2)
    model = wrap(Bag(SHAPES), state, fp16_compress_wrapper(powerSGD_hook), **MANY)
    for t in range(5):
        for value in step(model, random_gradients(SHAPES, 10 * t + rank)):
            assert value is not None
            assert value.dtype == torch.float32
            assert value.isfinite().all()
            assert same_everywhere(value, world_size)
    assert all(unit.error.dtype == torch.float16 for unit in state._units.values())


def test_inside_the_16_bit_wrapper(pair: Ranks) -> None:
    pair.run(wrapper_case)


def skipping_case(rank: int, world_size: int) -> None:
    """DDP may leave out buckets nobody used, the last one included."""
    shapes = [(30, 30)] * 4
    state = PowerSGDState(None, 2, start_powerSGD_iter=2)
    options = {**MANY, "find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    model = wrap(Bag(shapes), state, powerSGD_hook, **options)
    for t in range(5):
        gradients: list[torch.Tensor | None] = list(random_gradients(shapes, 10 * t + rank))
        gradients[0] = None
        averaged = step(model, gradients)
        assert averaged[1].isfinite().all()
    assert state.iter == 5


def test_skipped_buckets(pair: Ranks) -> None:
    pair.run(skipping_case, seconds=15)
