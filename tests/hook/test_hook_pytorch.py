"""Side by side with PyTorch's hooks where those work: one bucket, double precision, the same random stream.
PyTorch's own hangs on gloo with more buckets, so it always runs in one and under the group's time limit.
"""

from typing import Any

import pytest
import torch
from cases import train
from ranks import Ranks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as pytorch

from powersgd_lab import hook as ours


SHAPES = [(24, 16), (16,), (8, 4, 3, 3), (24, 16), (40, 3), (5, 60), (24, 16), (30, 30)]
SWITCHES: list[dict[str, Any]] = [
    {"use_error_feedback": False},
    {"warm_start": False},
    {"use_error_feedback": False, "warm_start": False},
    {"batch_tensors_with_same_shape": True},
    {"batch_tensors_with_same_shape": True, "warm_start": False},
    {"orthogonalization_epsilon": 1e-3},
    {"orthogonalization_epsilon": 1e-8},
    {"min_compression_rate": 0.5},
    {"min_compression_rate": 4},
    {"random_seed": 7},
]


def side_by_side(rank: int, world_size: int, settings: dict[str, Any], steps: int) -> float:
    """The largest difference between the two hooks' gradients, and statistics that must be equal."""
    results, stats = [], []
    for module in (pytorch, ours):
        state = module.PowerSGDState(None, start_powerSGD_iter=2, **settings)
        results.append(train(rank, SHAPES, state, module.powerSGD_hook, steps, torch.float64))
        stats.append(state.compression_stats())
    assert stats[0] == stats[1]
    return max(float((a - b).abs().max()) for x, y in zip(*results, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("rank", [1, 2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_twenty_steps_agree(ranks: Ranks, rank: int) -> None:
    for difference in ranks.run(side_by_side, {"matrix_approximation_rank": rank}, 22):
        assert difference < 1e-9


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_every_switch_agrees(pair: Ranks, switch: dict[str, Any], rank: int) -> None:
    for difference in pair.run(side_by_side, {"matrix_approximation_rank": rank, **switch}, 22):
        assert difference < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_every_switch_agrees_at_four_ranks(four: Ranks, switch: dict[str, Any]) -> None:
    for difference in four.run(side_by_side, {"matrix_approximation_rank": 2, **switch}, 22):
        assert difference < 1e-9


def test_defaults_are_pytorchs() -> None:
    assert torch.__version__
    mine, theirs = ours.PowerSGDState(None), pytorch.PowerSGDState(None)
    for name in pytorch.PowerSGDState.__slots__:
        if name not in ("rng", "error_dict", "p_memory_dict", "q_memory_dict"):
            assert getattr(mine, name) == getattr(theirs, name), name


def large(rank: int, world_size: int, r: int) -> float:
    results = []
    for module in (pytorch, ours):
        state = module.PowerSGDState(None, r, start_powerSGD_iter=2)
        results.append(train(rank, [(900, 700), (5,)], state, module.powerSGD_hook, 6, torch.float64))
    return max(float((a - b).abs().max()) for x, y in zip(*results, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("r", [1, 3])
def test_matrices_beyond_the_cache_agree(pair: Ranks, r: int) -> None:
    assert max(pair.run(large, r)) < 1e-9
