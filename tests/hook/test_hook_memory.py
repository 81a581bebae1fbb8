"""What the hooks remember: low rank recovered, dead columns revived, steps that are not finite taken back, resuming.
All over real gloo processes with several buckets.
"""

import copy
import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import Bag
from cases import random_gradients
from cases import step
from cases import train
from cases import wrap
from ranks import Ranks
from test_hook_ddp import MANY
from test_hook_ddp import SHAPES
from test_hook_ddp import same_everywhere

from powersgd_lab.hook import PowerSGDState
from powersgd_lab.hook import batched_powerSGD_hook
from powersgd_lab.hook import powerSGD_hook


HOOKS = [powerSGD_hook, batched_powerSGD_hook]


def state_of(r: int = 2, **settings: Any) -> PowerSGDState:
    return PowerSGDState(None, r, **{"start_powerSGD_iter": 2, **settings})


def low_rank_case(rank: int, world_size: int, r: int) -> None:
    """Zeros, then rank one, then rank two with an empty head: every column must come back, and none be NaN."""
    shapes = [(60, 50), (40, 70)]
    state = state_of(r)
    model = wrap(Bag(shapes, torch.float64), state, powerSGD_hook, **MANY)
    for t in range(30):
        gradients = []
        for position, (rows, cols) in enumerate(shapes):
            k = 0 if t < 6 else 1 if t < 12 else 2
            core = (
                random_gradients([(k, k)], 1000 * t + 10 * position + rank, torch.float64)[0]
                if k
                else torch.zeros(0, 0)
            )
            left, right = random_gradients([(rows, k), (k, cols)], 7 + position + k, torch.float64)
            if k == 2:
                left[: rows // 2] = 0
                right[:, : cols // 2] = 0
            gradients.append(left @ core.double() @ right)
        averaged = step(model, gradients)
        for value, gradient in zip(averaged, gradients, strict=True):
            assert value is not None
            mean = gradient.clone()
            torch.distributed.all_reduce(mean)
            mean /= world_size
            assert value.isfinite().all()
            # A new row space takes a few steps to be found from a random column each.
            if r >= 2 and (t < 6 or 8 < t < 12 or t > 16):
                assert torch.allclose(value, mean, atol=1e-7), (t, (value - mean).abs().max())
    for unit in state._units.values():
        assert torch.allclose(torch.linalg.vector_norm(unit.q, dim=-1), torch.ones(r, dtype=torch.float64))


@pytest.mark.parametrize("r", [1, 2, 4, 8])
def test_low_rank_and_dead_columns(pair: Ranks, r: int) -> None:
    pair.run(low_rank_case, r)


def bounded_case(rank: int, world_size: int) -> None:
    """Over hundreds of steps of changing low-rank gradients the error stays in proportion."""
    state = state_of(4)
    model = wrap(Bag([(60, 50)]), state, powerSGD_hook)
    for t in range(400):
        k = t % 4
        left, right = random_gradients([(60, k), (k, 50)], 10 * t + rank)
        step(model, [left @ right if k else torch.zeros(60, 50)])
        (unit,) = state._units.values() if t >= 2 else (None,)
        if unit is not None:
            assert float(unit.error.norm()) < 2000


@pytest.mark.slow
def test_error_stays_bounded(pair: Ranks) -> None:
    pair.run(bounded_case)


def not_finite_case(rank: int, world_size: int, hook: Any, settings: dict[str, Any], where: int, bad: float) -> None:
    """A run with a bad step equals a run without it, before and after, on all ranks and in all buckets."""
    runs = []
    for spoiled in (False, True):
        state = state_of(2, **settings)
        model = wrap(Bag(SHAPES, torch.float64), state, hook, **MANY)
        results = []
        for t in range(8):
            gradients = random_gradients(SHAPES, 1000 * t + rank, torch.float64)
            if spoiled and t in (2, 5):
                before = state.rng.get_state()[2], bytes(state.rng.get_state()[1])
                poisoned = [g.clone() for g in gradients]
                if rank == world_size - 1:
                    poisoned[where].view(-1)[0] = bad
                averaged = step(model, poisoned)
                assert not all(bool(value.isfinite().all()) for value in averaged)
                assert before == (state.rng.get_state()[2], bytes(state.rng.get_state()[1]))
                # The poisoned element's own error restarts at 0, so it must not be the one compared.
            results.append(step(model, gradients))
        runs.append(results)
    for clean, after in zip(*runs, strict=True):
        for a, b in zip(clean, after, strict=True):
            assert same_everywhere(b, world_size)
            if where == 1 or settings.get("use_error_feedback") is False:
                assert torch.allclose(a, b, atol=1e-9)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("settings", [{}, {"warm_start": False}, {"use_error_feedback": False}], ids=str)
def test_not_finite_steps_are_taken_back(pair: Ranks, hook: Any, where: int, settings: dict[str, Any]) -> None:
    if hook is batched_powerSGD_hook and where == 1 and settings.get("use_error_feedback", True):
        pytest.skip("in one matrix with everything, the poisoned element itself loses its error")
    pair.run(not_finite_case, hook, settings, where, float("inf"))
    if where == 0:
        pair.run(not_finite_case, hook, settings, where, float("nan"))


def resume_case(rank: int, world_size: int, hook: Any, settings: dict[str, Any], how: str, at: int) -> None:
    """Saving after ``at`` steps and going on with a new model, wrapper and state gives the same bits."""
    straight = train(rank, SHAPES, state_of(2, **settings), hook, 9, torch.float32, MANY)
    state = state_of(2, **settings)
    model = wrap(Bag(SHAPES), state, hook, **MANY)
    results = [step(model, random_gradients(SHAPES, 1000 * t + rank)) for t in range(at)]
    if how == "pickle":
        state = pickle.loads(pickle.dumps(state))
        model = wrap(Bag(SHAPES), state, hook, **MANY)
    else:
        file = io.BytesIO()
        torch.save(state.state_dict(model), file)
        file.seek(0)
        bag = Bag(SHAPES)
        state = state_of(1)
        state.load_state_dict(torch.load(file, weights_only=True), bag)
        model = wrap(bag, state, hook, **MANY)
    results += [step(model, random_gradients(SHAPES, 1000 * t + rank)) for t in range(at, 9)]
    for t, (one, other) in enumerate(zip(straight, results, strict=True)):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b), (t, (a - b).abs().max())


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("how", ["state_dict", "pickle"])
@pytest.mark.parametrize("settings", [{}, {"warm_start": False}], ids=str)
def test_resuming_is_bitwise(pair: Ranks, hook: Any, how: str, settings: dict[str, Any]) -> None:
    for at in (1, 2, 5):
        pair.run(resume_case, hook, settings, how, at)


@pytest.mark.slow
def test_resuming_at_four_ranks_is_bitwise_too(four: Ranks) -> None:
    four.run(resume_case, powerSGD_hook, {}, "state_dict", 5)


def first_half(rank: int, world_size: int, directory: str, hook: Any) -> None:
    """A run without interruption for comparison, and one that saves after four steps and ends."""
    torch.save(train(rank, SHAPES, state_of(2), hook, 9, torch.float32, MANY), f"{directory}/expected{rank}")
    state = state_of(2)
    model = wrap(Bag(SHAPES), state, hook, **MANY)
    for t in range(4):
        step(model, random_gradients(SHAPES, 1000 * t + rank))
    torch.save(state.state_dict(model), f"{directory}/state{rank}")


def second_half(rank: int, world_size: int, directory: str, hook: Any) -> int:
    bag = Bag(SHAPES)
    state = state_of(1)
    state.load_state_dict(torch.load(f"{directory}/state{rank}", weights_only=True), bag)
    model = wrap(bag, state, hook, **MANY)
    expected = torch.load(f"{directory}/expected{rank}", weights_only=True)
    for t in range(4, 9):
        for a, b in zip(step(model, random_gradients(SHAPES, 1000 * t + rank)), expected[t], strict=True):
            assert torch.equal(a, b), t
    return os.getpid()


@pytest.mark.slow
def test_resuming_in_new_processes_is_bitwise(tmp_path: Path) -> None:
    groups = [Ranks(2), Ranks(2)]
    try:
        for hook in HOOKS:
            directory = tmp_path / hook.__name__
            directory.mkdir()
            groups[0].run(first_half, str(directory), hook)
        pids = groups[0].run(os_pid)
        groups[0].close()
        for hook in HOOKS:
            resumed = groups[1].run(second_half, str(tmp_path / hook.__name__), hook)
            assert not set(resumed) & set(pids)
    finally:
        for group in groups:
            group.close()


def os_pid(rank: int, world_size: int) -> int:
    return os.getpid()


def unused_step_case(rank: int, world_size: int, r: int) -> None:
    """A step in which no rank used a parameter: DDP leaves its gradient alone, and its error is paid out to nobody."""
    shapes = [(30, 20), (30, 20)]
    state = state_of(r)
    model = wrap(Bag(shapes, torch.float64), state, powerSGD_hook, find_unused_parameters=True)
    _, lone = model.parameters()
    for t in range(6):
        step(model, random_gradients(shapes, 10 * t + rank, torch.float64))
    unit = state._units[(id(lone),)]
    before = unit.error.clone()
    averaged = step(model, [random_gradients(shapes, rank, torch.float64)[0], None])
    assert averaged[0] is not None
    assert averaged[1] is None
    lost = before - unit.error
    assert lost.norm() > 1e-3 * before.norm()
    assert torch.linalg.matrix_rank(lost, rtol=1e-9) <= r
    # The same on all ranks, as a gradient to apply would be.
    mean = lost.clone()
    torch.distributed.all_reduce(mean)
    assert torch.allclose(mean / world_size, lost, atol=1e-12)


@pytest.mark.parametrize("r", [1, 2])
def test_a_parameter_that_no_rank_used(pair: Ranks, r: int) -> None:
    pair.run(unused_step_case, r)


def mismatch_case(rank: int, world_size: int) -> list[str]:
    state = state_of()
    model = wrap(Bag([(60, 50), (50,)]), state, powerSGD_hook)
    for t in range(4):
        step(model, random_gradients([(60, 50), (50,)], t))
    saved = state.state_dict(model)
    messages = []
    for other in (
        Bag([(50, 60), (50,)]),
        Bag([(60, 50)]),
        Bag([(60, 50), (50,), (3,)]),
        Bag([(60, 50), (50,)]).double(),
    ):
        with pytest.raises(ValueError, match="does not match") as caught:
            state_of().load_state_dict(saved, other)
        messages.append(str(caught.value))
    return messages


def test_loading_into_another_model_names_what_differs(pair: Ranks) -> None:
    shape, missing, unexpected, dtype = pair.run(mismatch_case)[0]
    assert "p0" in shape
    assert "(50, 60)" in shape
    assert "p1 is missing" in missing
    assert "p2 is not in state_dict" in unexpected
    assert "float64" in dtype


def rank_change_case(rank: int, world_size: int, hook: Any) -> None:
    state = state_of(1)
    model = wrap(Bag(SHAPES, torch.float64), state, hook, **MANY)
    for t, r in enumerate([1, 1, 1, 1, 4, 4, 2, 2, 30, 30, 1]):
        state.matrix_approximation_rank = r
        kept = {key: unit.q.clone() for key, unit in state._units.items() if unit.q is not None}
        for value in step(model, random_gradients(SHAPES, 10 * t + rank, torch.float64)):
            assert value.isfinite().all()
            assert same_everywhere(value, world_size)
        if hook is powerSGD_hook and t in (4, 6):
            assert {unit.q.shape[0] for unit in state._units.values()} == {r}
            assert kept


@pytest.mark.parametrize("hook", HOOKS)
def test_the_rank_may_change(pair: Ranks, hook: Any) -> None:
    pair.run(rank_change_case, hook)


def mass_case(rank: int, world_size: int) -> None:
    """Nothing is lost over a change of rank that ends compression: gradients in equal gradients out plus errors."""
    state = state_of(1)
    model = wrap(Bag([(60, 50)], torch.float64), state, powerSGD_hook)
    given = taken = torch.zeros(60, 50, dtype=torch.float64)
    for t in range(8):
        if t == 6:
            state.matrix_approximation_rank = 30
        every = [random_gradients([(60, 50)], 10 * t + other, torch.float64)[0] for other in range(world_size)]
        given = given + sum(every) / world_size
        taken = taken + step(model, [every[rank]])[0]
    assert torch.allclose(given, taken)


def test_errors_of_a_slice_that_is_no_longer_compressed_are_paid_out(pair: Ranks) -> None:
    pair.run(mass_case)


def streams_case(rank: int, world_size: int) -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    one = train(rank, SHAPES, state_of(2, warm_start=False), powerSGD_hook, 5, torch.float32, MANY)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()
    other = train(rank, SHAPES, state_of(2, warm_start=False), powerSGD_hook, 5, torch.float32, MANY)
    third = train(rank, SHAPES, state_of(2, warm_start=False, random_seed=3), powerSGD_hook, 5, torch.float32, MANY)
    assert all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))
    assert not torch.equal(one[-1][0], third[-1][0])


def test_random_streams(pair: Ranks) -> None:
    pair.run(streams_case)


def observed_case(rank: int, world_size: int) -> list[dict[str, int]]:
    class Log:
        def __init__(self) -> None:
            self.payloads: list[dict[str, int]] = []
            self.seconds = 0.0

        def issued(self, payload: Any) -> None:
            self.payloads.append(dict(payload))

        def compressed(self, seconds: float) -> None:
            self.seconds += seconds

        def waited(self, seconds: float) -> None:
            self.seconds += seconds

    state = state_of(2)
    model = wrap(Bag(SHAPES), state, powerSGD_hook, **MANY)
    for t in range(3):
        step(model, random_gradients(SHAPES, t))
    state.observer = log = Log()
    step(model, random_gradients(SHAPES, 9))
    assert log.seconds > 0
    assert len(log.payloads) <= 2 * len(state._memories)
    with pytest.raises(TypeError):
        copy.deepcopy(state)
    return log.payloads


def test_observer_sees_two_collectives_a_bucket(pair: Ranks) -> None:
    from powersgd_lab.hook import payload_elements

    payloads = pair.run(observed_case)[0]
    count = payload_elements(SHAPES, 2)
    sums = {kind: sum(p.get(kind, 0) for p in payloads) for kind in ("P", "Q", "uncompressed")}
    assert sums == {"P": 4 * count.p, "Q": 4 * count.q, "uncompressed": 4 * count.uncompressed}


def device_case(rank: int, world_size: int, hook: Any, settings: dict[str, Any]) -> None:
    """The branch that asks nothing of the device, run on CPU, gives what the branch for the CPU gives."""
    from powersgd_lab.hook import pipeline

    original, runs = pipeline.on_host, []
    for branch in (original, lambda parts: False):
        pipeline.on_host = branch
        try:
            state = state_of(2, **settings)
            model = wrap(Bag(SHAPES, torch.float64), state, hook, **MANY)
            results = []
            for t in range(9):
                gradients = random_gradients(SHAPES, 1000 * t + rank, torch.float64)
                if t in (3, 6) and rank == 0:
                    gradients[1][0] = float("inf")
                results.append(step(model, gradients))
            runs.append(results)
        finally:
            pipeline.on_host = original
    for t, (one, other) in enumerate(zip(*runs, strict=True)):
        for a, b in zip(one, other, strict=True):
            assert torch.allclose(a, b, atol=1e-9, equal_nan=True), t


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("settings", [{}, {"warm_start": False}, {"use_error_feedback": False}], ids=str)
def test_the_device_branch_without_a_device(pair: Ranks, hook: Any, settings: dict[str, Any]) -> None:
    """Not run on a GPU: streams, futures with devices and the absence of synchronization wait for one."""
    pair.run(device_case, hook, settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("matrix_approximation_rank", 0),
        ("matrix_approximation_rank", 1.5),
        ("matrix_approximation_rank", -1),
        ("matrix_approximation_rank", True),
        ("start_powerSGD_iter", 1),
        ("start_powerSGD_iter", -3),
        ("min_compression_rate", -1),
        ("min_compression_rate", float("nan")),
        ("orthogonalization_epsilon", -1e-8),
        ("random_seed", -1),
        ("random_seed", None),
    ],
)
def test_arguments_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        PowerSGDState(None, **{name: value})
