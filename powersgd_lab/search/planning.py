"""Which trial to run next: the settings a strategy wants, times the seeds, less what the record has.
A pure function of the rows, so that a resumed study goes on exactly where the record ends."""

from collections.abc import Sequence

from powersgd_lab import settings
from powersgd_lab.search.strategies import Strategy
from powersgd_lab.settings import PowerSGD
from powersgd_lab.study import Row


class BaselineError(Exception):
    """No seed of the first baseline gave a metric, so that nothing can be judged."""


class Plan:
    """The order of a study's trials: the baselines with every seed, then the strategy's settings with every seed."""

    def __init__(self, sweep: settings.Sweep, strategy: Strategy) -> None:
        self._baselines = [PowerSGD(hook=hook) for hook in sweep.search.baselines]
        self._strategy = strategy
        self._seeds = range(sweep.seed, sweep.seed + sweep.search.seeds)

    def settings(self, rows: Sequence[Row]) -> dict[str, PowerSGD]:
        """Every setting wanted so far by its key, in the order in which they run."""
        return {settings.setting_key(setting): setting for setting in self._baselines + self._strategy.next(rows)}

    def trials(self, rows: Sequence[Row]) -> list[tuple[str, int]]:
        """Every (setting key, seed) wanted so far, those that have rows included.

        A setting that diverged once cannot be satisfactory, so its seeds that have not begun are left out."""
        diverged = {row["setting"] for row in rows if row["state"] == "pruned"}
        begun = _pairs(rows)
        wanted = [(key, seed) for key in self.settings(rows) for seed in self._seeds]
        return [pair for pair in wanted if pair in begun or pair[0] not in diverged]

    def decisions(self, rows: Sequence[Row]) -> list[str]:
        """The strategy's decisions so far, each with its reason."""
        return self._strategy.decisions(rows)

    def next(self, rows: Sequence[Row]) -> tuple[PowerSGD, int] | None:
        """The next trial to enqueue, or None when there is none, or none before a running one ends.

        Raises BaselineError when every seed of the first baseline has failed, or one has diverged: it has no mean."""
        first = settings.setting_key(self._baselines[0])
        judged = [row for row in rows if row["setting"] == first]
        failed = [row for row in judged if row["state"] in ("fail", "pruned")]
        pairs = self.trials(rows)
        reasons = "; ".join(sorted({str(row["reason"]) for row in failed}))
        if any(row["state"] == "pruned" for row in failed):
            raise BaselineError(f"a seed of the baseline {first} failed: {reasons}: nothing can be compared with it")
        if _pairs(failed) >= {pair for pair in pairs if pair[0] == first}:
            hint = "search.retry_failed=true tries again"
            raise BaselineError(f"every seed of the baseline {first} failed: {reasons} ({hint})")
        wanted, begun = self.settings(rows), _pairs(rows)
        missing = [pair for pair in pairs if pair not in begun]
        if not missing:
            return None
        key, seed = missing[0]
        judgeable = any(row["state"] == "complete" for row in judged)
        return (wanted[key], seed) if judgeable or not wanted[key].hook.compresses else None


def _pairs(rows: Sequence[Row]) -> set[tuple[str, int]]:
    return {(row["setting"], row["seed"]) for row in rows}
