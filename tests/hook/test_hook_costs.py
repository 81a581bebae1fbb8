"""What the hooks cost beside time: memory that stays, memory that a step asks for, and the log of what they save.
Memory is counted, not estimated: every tensor that hangs on a state, every allocation that the profiler sees.
"""

import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import Bag
from cases import random_gradients
from cases import step
from cases import train
from cases import wrap
from ranks import Ranks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as pytorch

from powersgd_lab import hook as ours
from powersgd_lab.hook import PowerSGDState
from powersgd_lab.hook import batched_powerSGD_hook
from powersgd_lab.hook import payload_elements
from powersgd_lab.hook import powerSGD_hook


SHAPES = [(60, 50), (50,), (16, 8, 3, 3), (60, 50), (40, 3), (5, 60)]
MANY = {"bucket_cap_mb": 0.005}


def tensors_of(thing: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Every tensor reachable from ``thing`` through containers and attributes, the model's parameters excepted."""
    if id(thing) in seen or isinstance(thing, torch.nn.Parameter):
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
        return
    parts: list[Any] = []
    if isinstance(thing, dict):
        parts = list(thing.values())
    elif isinstance(thing, list | tuple | set):
        parts = list(thing)
    elif type(thing).__module__.startswith("powersgd_lab"):
        names = [*getattr(thing, "__dict__", {}), *getattr(thing, "__slots__", ())]
        parts = [getattr(thing, name) for name in names if hasattr(thing, name)]
    for part in parts:
        yield from tensors_of(part, seen)


def memory_case(rank: int, world_size: int, r: int) -> None:
    """One error buffer, what travels, and Q twice: nothing else, not even after another rank."""
    state = PowerSGDState(None, r + 1, start_powerSGD_iter=2)
    model = wrap(Bag(SHAPES), state, powerSGD_hook, **MANY)
    for t in range(8):
        state.matrix_approximation_rank = r + (t < 5)
        step(model, random_gradients(SHAPES, 10 * t + rank))
    storages = {}
    for tensor in tensors_of(state, set()):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    count = payload_elements(SHAPES, r)
    errors = count.before - count.uncompressed
    norms = r * len(state._units)
    assert sum(storages.values()) == 4 * (errors + count.after + count.q + norms)


@pytest.mark.parametrize("r", [1, 2])
def test_one_error_buffer_and_the_factors(pair: Ranks, r: int) -> None:
    pair.run(memory_case, r)


class Whole:
    """A step's only bucket, as DDP hands it in."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        self._parameters = [torch.empty(shape) for shape in shapes]
        self._buffer = torch.randn(sum(parameter.numel() for parameter in self._parameters))

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def largest_allocation(action: Any) -> int:
    """Bytes of the largest single allocation that torch makes during ``action``."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        action()
    return max(event.self_cpu_memory_usage for event in profile.events())


def allocation_case(rank: int, world_size: int, hook: Any, settings: dict[str, Any]) -> int:
    bucket = Whole([(1000, 900), (300, 200), (300, 200), (900,)])
    state = PowerSGDState(None, start_powerSGD_iter=2, **settings)
    for _ in range(4):
        hook(state, bucket).wait()
    gradient = bucket.buffer().numel() * 4
    # The measurement itself: a clone of the gradient would be seen.
    assert largest_allocation(lambda: bucket.buffer().clone()) == gradient
    assert state.iter == 4
    largest = largest_allocation(lambda: hook(state, bucket).wait())
    return gradient // max(1, largest)


@pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
@pytest.mark.parametrize("r", [1, 4])
@pytest.mark.parametrize("settings", [{}, {"use_error_feedback": False}, {"warm_start": False}], ids=str)
def test_a_step_allocates_nothing_of_the_gradients_size(
    pair: Ranks, hook: Any, r: int, settings: dict[str, Any]
) -> None:
    for times_smaller in pair.run(allocation_case, hook, {"matrix_approximation_rank": r, **settings}):
        assert times_smaller > 50


class Lines(logging.Handler):
    """The arguments of every line that reports statistics."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word = word
        self.lines: list[tuple[Any, ...]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith(self.word):
            self.lines.append(tuple(record.args or ()))


def logging_case(rank: int, world_size: int, frequency: int) -> list[list[tuple[Any, ...]]]:
    heard = []
    for module, name in ((ours, "powersgd_lab.hook.statistics"), (pytorch, pytorch.logger.name)):
        logger, lines = logging.getLogger(name), Lines("Compression stat")
        level = logger.level
        logger.addHandler(lines)
        logger.setLevel(logging.INFO)
        try:
            state = module.PowerSGDState(None, 2, start_powerSGD_iter=2, compression_stats_logging_frequency=frequency)
            train(rank, SHAPES, state, module.powerSGD_hook, 12)
        finally:
            logger.removeHandler(lines)
            logger.setLevel(level)
        heard.append(lines.lines)
    return heard


@pytest.mark.parametrize(("frequency", "steps"), [(3, [2, 5, 8, 11]), (100, [2]), (0, list(range(2, 12)))])
def test_statistics_are_logged_at_the_given_frequency(pair: Ranks, frequency: int, steps: list[int]) -> None:
    mine, theirs = pair.run(logging_case, frequency)[0]
    assert [line[0] for line in mine] == steps
    assert [line[0] for line in theirs] == steps
    count = payload_elements(SHAPES, 2)
    for at, before, after, rate in mine:
        # Compression starts at step 2, and the step that logs is counted in.
        assert (before, after) == ((at - 1) * count.before, (at - 1) * count.after)
        assert math.isclose(rate, count.ratio)


def scale_case(rank: int, world_size: int, hook: Any, r: int) -> None:
    """A loss scale four times larger from step 5 on: the same gradients times four, bit for bit, if told so."""
    runs = {}
    for told in (None, True, False):
        state = PowerSGDState(None, r, start_powerSGD_iter=2)
        model = wrap(Bag(SHAPES), state, hook, **MANY)
        runs[told] = []
        for t in range(9):
            scale = 4.0 if told is not None and t >= 5 else 1.0
            if t == 5 and told:
                state.scale_errors(4.0)
            averaged = step(model, [scale * g for g in random_gradients(SHAPES, 10 * t + rank)])
            runs[told].append([value / scale for value in averaged if value is not None])
    same = [
        [all(torch.equal(a, b) for a, b in zip(x, y, strict=True)) for x, y in zip(runs[None], other, strict=True)]
        for other in (runs[True], runs[False])
    ]
    assert all(same[0])
    assert same[1] == [True] * 5 + [False] * 4
    for factor in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match="factor"):
            state.scale_errors(factor)


@pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
@pytest.mark.parametrize("r", [1, 2])
def test_errors_follow_a_loss_scale(pair: Ranks, hook: Any, r: int) -> None:
    pair.run(scale_case, hook, r)
