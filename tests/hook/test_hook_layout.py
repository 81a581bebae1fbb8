"""Pure functions of shapes, and the small linear algebra: properties that need no ranks.
The last test asks the ranks whether arbitrary shapes, ranks and dtypes agree with the plain reference.
"""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from cases import Bag
from cases import random_gradients
from cases import step
from cases import wrap
from hypothesis import HealthCheck
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from ranks import Ranks
from reference import Reference

from powersgd_lab.hook import AllReduceState
from powersgd_lab.hook import PowerSGDState
from powersgd_lab.hook import allreduce_hook
from powersgd_lab.hook import payload_elements
from powersgd_lab.hook import powerSGD_hook
from powersgd_lab.hook.layout import equal_step_runs
from powersgd_lab.hook.layout import matrix_shape
from powersgd_lab.hook.orthogonal import orthonormalize_


def test_matrix_shapes() -> None:
    assert matrix_shape(()) == (1, 1)
    assert matrix_shape((5,)) == (5, 1)
    assert matrix_shape((0, 4)) == (0, 0)
    assert matrix_shape((8, 4, 3, 3)) == (8, 36)
    assert matrix_shape((8, 4, 3, 3), (36, 1, 12, 4)) == (8, 36)
    assert matrix_shape((30, 40), (1, 30)) == (40, 30)
    # Not dense: DDP lays such a gradient out contiguously.
    assert matrix_shape((30, 40), (80, 2)) == (30, 40)


def test_payload() -> None:
    count = payload_elements([(60, 50), (50,), ()], 2)
    assert (count.before, count.uncompressed, count.p, count.q) == (3051, 51, 120, 100)
    assert count.ratio == 3051 / 271
    square = payload_elements([(60, 50), (50,), ()], 2, batched=True)
    assert (square.p, square.q, square.uncompressed) == (112, 112, 0)
    with pytest.raises(ValueError, match="bucket_elements"):
        payload_elements([(3, 3)], 1, batched=True, bucket_elements=[4])


@given(st.lists(st.integers(0, 1000), max_size=12, unique=True).map(sorted))
def test_runs_cover_everything_at_equal_steps(offsets: list[int]) -> None:
    runs = equal_step_runs(offsets)
    assert [index for run in runs for index in run] == list(range(len(offsets)))
    for run in runs:
        assert len({offsets[b] - offsets[a] for a, b in itertools.pairwise(run)}) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_orthonormal_or_zero_never_nan(dtype: torch.dtype, rank: int) -> None:
    factor = torch.randn(rank, 30, generator=torch.Generator().manual_seed(0)).to(dtype)
    orthonormalize_(factor)
    close = 0.02 if dtype == torch.bfloat16 else 1e-5
    assert torch.allclose((factor @ factor.mH).abs().float(), torch.eye(rank), atol=close)
    zero = torch.zeros(rank, 30, dtype=dtype)
    for epsilon in (0.0, 1e-8):
        orthonormalize_(zero, epsilon)
        assert zero.isfinite().all()


def property_case(rank: int, world_size: int, rows: int, cols: int, r: int, dtype: torch.dtype, seed: int) -> float:
    """Steps of one matrix against the reference in double precision, which starts from the hook's own first factor."""
    shapes = [(rows, cols)]
    state = PowerSGDState(None, r, start_powerSGD_iter=2, min_compression_rate=0)
    model = wrap(Bag(shapes, dtype), state, powerSGD_hook)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    reference, worst = None, 0.0
    for t in range(6):
        every = [random_gradients(shapes, seed + 10 * t + other, dtype)[0] for other in range(world_size)]
        value = step(model, [every[rank]])[0]
        assert value is not None
        value, every = value.to(wide), [gradient.to(wide) for gradient in every]
        if t >= 2:
            (unit,) = state._units.values()
            if reference is None:
                reference = Reference(unit.q.mH.to(wide, copy=True))
                reference.errors = [g - value for g in every]
            else:
                worst = max(worst, float((value - reference.step(every)).norm() / value.norm()))
    return worst


# Relative, after three steps of errors fed back: random matrices have no gap between singular values to rely on, so
# that rounding grows by the step.
CLOSE = {
    torch.float64: 1e-10,
    torch.complex128: 1e-10,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.bfloat16: 0.1,
}


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(2, 40),
    cols=st.integers(2, 40),
    r=st.integers(1, 12),
    dtype=st.sampled_from(list(CLOSE)),
    seed=st.integers(0, 1000),
)
def test_any_matrix_agrees_with_the_reference(
    pair: Ranks, rows: int, cols: int, r: int, dtype: torch.dtype, seed: int
) -> None:
    assert max(pair.run(property_case, rows, cols, r, dtype, seed)) < CLOSE[dtype]


def plain_case(rank: int, world_size: int, dtype: torch.dtype | None) -> float:
    shapes = [(60, 50), (7,), ()]
    model = wrap(Bag(shapes), AllReduceState(dtype=dtype), allreduce_hook, bucket_cap_mb=0.005)
    worst = 0.0
    for t in range(3):
        every = [random_gradients(shapes, 10 * t + other) for other in range(world_size)]
        for position, value in enumerate(step(model, every[rank])):
            worst = max(worst, float((value - sum(g[position] for g in every) / world_size).abs().max()))
    return worst


@pytest.mark.parametrize(("dtype", "close"), [(None, 1e-6), (torch.float16, 5e-3), (torch.bfloat16, 5e-2)])
def test_plain_hooks(ranks: Ranks, dtype: torch.dtype | None, close: float) -> None:
    assert 0 <= max(ranks.run(plain_case, dtype)) < close


def test_plain_hook_refuses_other_dtypes() -> None:
    with pytest.raises(ValueError, match="dtype"):
        AllReduceState(dtype=torch.float64)


def alone_case(rank: int, world_size: int) -> None:
    groups = [dist.new_group([other]) for other in range(world_size)]
    state = PowerSGDState(groups[rank], 1, start_powerSGD_iter=2)
    model = wrap(Bag([(60, 50)]), state, powerSGD_hook, process_group=groups[rank])
    for t in range(4):
        (gradient,) = random_gradients([(60, 50)], 10 * t + rank)
        assert torch.equal(step(model, [gradient])[0], gradient)
    assert state.iter == 4
    assert math.isclose(state.compression_stats()[0], 0)


def test_one_process_passes_gradients_through(pair: Ranks) -> None:
    pair.run(alone_case)
