"""The grid: every approximation rank at every start, whatever the results.
It spends the most and misses nothing, so the other strategies are compared with it."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from powersgd_lab.search.strategies.space import Space
from powersgd_lab.settings import PowerSGD


class Grid:
    """Every approximation rank 1, g, g², … up to the largest at every start.

    The exponential grid of ranks and the start at 10 % of all steps or later are the PyTorch document's advice."""

    searched = frozenset({"matrix_approximation_rank", "start_powerSGD_iter", "start_fraction"})

    def __init__(self, space: Space) -> None:
        space.require_rank()
        self._settings = [space.at(rank, start) for start in space.search.start_fractions for rank in space.ranks()]

    def next(self, rows: Sequence[Mapping[str, Any]]) -> list[PowerSGD]:
        return self._settings

    def decisions(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        return []
