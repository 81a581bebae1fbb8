"""Which settings to try next: one small pure class a strategy, from the space and the results so far.
Nothing here runs, stores or prints, so each is tested with made-up rows alone."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Protocol

from powersgd_lab import settings
from powersgd_lab.search.strategies.grid import Grid
from powersgd_lab.search.strategies.halving import Halving
from powersgd_lab.search.strategies.judging import Judge
from powersgd_lab.search.strategies.ladder import Ladder
from powersgd_lab.search.strategies.space import Space
from powersgd_lab.search.strategies.tpe import Tpe
from powersgd_lab.settings import PowerSGD


class Strategy(Protocol):
    @property
    def searched(self) -> frozenset[str]:
        """The keys of `powersgd` that the strategy chooses, so that one set by hand is ignored."""

    def next(self, rows: Sequence[Mapping[str, Any]]) -> list[PowerSGD]:
        """All settings wanted so far, in order, with their starts resolved; those that have rows are not run again."""

    def decisions(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """A sentence on each decision so far and why, in order; as rows grow, only further sentences follow."""


class WithSettings:
    """A strategy and, after what it wants itself, the settings that were given by hand.

    While a strategy waits for a trial to end, the settings by hand fill free slots."""

    def __init__(self, strategy: Strategy, by_hand: Sequence[PowerSGD]) -> None:
        self._strategy, self._by_hand = strategy, list(by_hand)
        self.searched = strategy.searched

    def next(self, rows: Sequence[Mapping[str, Any]]) -> list[PowerSGD]:
        # Two fractions may round to one step, and a setting given by hand may be the strategy's already.
        wanted = self._strategy.next(rows) + self._by_hand
        return list({settings.setting_key(setting): setting for setting in wanted}.values())

    def decisions(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        return self._strategy.decisions(rows)


def make(sweep: settings.Sweep, steps: int, direction: str | None = None) -> Strategy:
    """The sweep's strategy with its `search.settings`; `steps` are those of one run.

    `direction` is the metric's, `min` or `max`; only the grid, which judges nothing, does without.
    Raises ValueError when the sweep's settings do not fit the strategy."""
    space = Space(sweep.search, sweep.powersgd, steps, sweep.trainer.warmup_steps)
    return WithSettings(_make(sweep, space, direction), space.by_hand())


def _make(sweep: settings.Sweep, space: Space, direction: str | None) -> Strategy:
    if sweep.search.strategy is settings.Strategy.grid:
        return Grid(space)
    assert direction is not None, "a strategy that judges must know which way the metric gets better"
    judge = Judge(sweep.search, range(sweep.seed, sweep.seed + sweep.search.seeds), direction)
    match sweep.search.strategy:
        case settings.Strategy.ladder:
            return Ladder(space, judge)
        case settings.Strategy.halving:
            return Halving(space, judge)
        case settings.Strategy.tpe:
            return Tpe(space, judge, sweep.seed, direction)
