"""Which settings to try next: one small pure class a strategy, from the space and the results so far.
Nothing here runs, stores or prints, so each is tested with made-up rows alone."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Protocol

from powersgd_lab import settings
from powersgd_lab.settings import PowerSGD


class Strategy(Protocol):
    searched: frozenset[str]  # the keys of `powersgd` that the strategy chooses, so that one set by hand is ignored

    def next(self, rows: Sequence[Mapping[str, Any]]) -> list[PowerSGD]:
        """All settings wanted so far, in order, with their starts resolved; those that have rows are not run again."""


class Grid:
    """Every approximation rank 1, g, g², … up to the largest at every start, then the settings given by hand.

    The exponential grid of ranks and the start at 10 % of all steps or later are the PyTorch document's advice."""

    searched = frozenset({"matrix_approximation_rank", "start_powerSGD_iter", "start_fraction"})

    def __init__(self, search: settings.Search, base: PowerSGD, steps: int, warmup_steps: int) -> None:
        if not base.hook.compresses:
            raise ValueError(
                f"powersgd={base.hook.name}: search=grid varies the approximation rank, which needs a hook that has "
                "one: layerwise, batched or torch"
            )
        changes: list[dict[str, Any]] = [
            {"matrix_approximation_rank": rank, "start_fraction": fraction}
            for fraction in search.start_fractions
            for rank in _ranks(search)
        ]
        wanted = [
            settings.resolved(settings.vary(base, change), steps, warmup_steps) for change in changes + search.settings
        ]
        # Two fractions may round to one step, and a setting given by hand may be in the grid already.
        self._settings = list({settings.setting_key(setting): setting for setting in wanted}.values())

    def next(self, rows: Sequence[Mapping[str, Any]]) -> list[PowerSGD]:
        return self._settings


def _ranks(search: settings.Search) -> list[int]:
    ranks = [1]
    while ranks[-1] * search.rank_growth <= search.max_rank:
        ranks.append(ranks[-1] * search.rank_growth)
    return ranks


STRATEGIES = {settings.Strategy.grid: Grid}


def make(sweep: settings.Sweep, steps: int) -> Strategy:
    """Raises ValueError when the sweep's settings do not fit the strategy."""
    strategy = STRATEGIES[sweep.search.strategy]
    return strategy(sweep.search, sweep.powersgd, steps, sweep.trainer.warmup_steps)
