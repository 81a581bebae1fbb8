"""What the trials so far say of one setting: decided or not, satisfactory or not, and in which words.
The judging itself is `statistics.points`, the same as in the report."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from powersgd_lab import statistics
from powersgd_lab.settings import PowerSGD
from powersgd_lab.settings import Search
from powersgd_lab.settings import setting_key


Row = Mapping[str, Any]

ENDED = ("complete", "pruned", "fail")


@dataclass(frozen=True)
class Judgement:
    """`words` say what was measured, e.g. "perplexity 0.3 above baseline, tolerance 0.2"; `point` is statistics'."""

    setting: PowerSGD
    satisfactory: bool
    words: str
    point: statistics.Point

    @property
    def bytes(self) -> float | None:
        """Payload of the whole run; None where no trial is complete."""
        known: float | None = self.point["payload_bytes"]
        return known

    def step_bytes(self, steps: int) -> tuple[float, float] | None:
        """Payload of an uncompressed and of a compressed step, from the run's; None where no trial is complete."""
        if self.bytes is None:
            return None
        start = self.setting.start_powerSGD_iter
        assert start is not None
        assert start < steps
        uncompressed = self.bytes * self.point["compression_ratio_run"] / steps
        return uncompressed, (self.bytes - start * uncompressed) / (steps - start)


class Judge:
    """Judges settings by the trials of the baselines and of the settings that were wanted before them.

    What comes later is left out on purpose: the interval's spread is pooled over the study, so that a later trial
    could turn an earlier decision over, and a resumed search would walk another way than the one it is on."""

    def __init__(self, search: Search, seeds: Iterable[int], direction: str) -> None:
        assert direction in ("min", "max")
        self._search, self._seeds, self._direction = search, frozenset(seeds), direction
        self._baselines = [hook.name for hook in search.baselines]

    def points(self, rows: Sequence[Row]) -> dict[str, statistics.Point]:
        """The point of each setting that has rows, by its key."""
        found = statistics.points(
            rows,
            baseline=self._baselines[0],
            direction=self._direction,
            tolerance=self._search.tolerance,
            confidence=self._search.confidence,
        )
        return {point["setting"]: point for point in found}

    def ended(self, key: str, rows: Sequence[Row]) -> bool:
        """Whether nothing is to come: every seed has ended, or one diverged, which settles the setting."""
        latest = {row["seed"]: row["state"] for row in sorted(rows, key=_number) if row["setting"] == key}
        diverged = "pruned" in latest.values()
        return diverged or all(latest.get(seed) in ENDED for seed in self._seeds)

    def judge(self, setting: PowerSGD, earlier: Sequence[PowerSGD], rows: Sequence[Row]) -> Judgement | None:
        """None while a trial of the setting or of a baseline is still to come.

        With `search.confidence` a setting that is undecided is not satisfactory."""
        key = setting_key(setting)
        if not all(self.ended(one, rows) for one in (*self._baselines, key)):
            return None
        counted = {*self._baselines, *map(setting_key, earlier), key}
        point = self.points([row for row in rows if row["setting"] in counted])[key]
        metric = next(row["metric_name"] for row in rows if row["setting"] == key)
        return Judgement(setting, point["satisfactory"] == "yes", self._words(point, metric), point)

    def _words(self, point: statistics.Point, metric: str) -> str:
        if point["pruned"]:
            return "diverged"
        if point["n"] == 0:
            return "every trial failed"
        difference = point["difference"]
        if difference is None:
            return f"{metric} {point['metric']:.3g}, but no seed in common with the baseline"
        words = f"{metric} {abs(difference):.3g} {'below' if difference < 0 else 'above'} baseline"
        if self._search.confidence is not None:
            low, high = point["difference_low"], point["difference_high"]
            interval = "no interval" if low is None else f"{point['confidence']:.0%} interval {low:+.3g} to {high:+.3g}"
            words += f" ({interval})"
        words += f", tolerance {point['tolerance']:.3g}"
        return f"{words}, undecided" if point["satisfactory"] == "undecided" else words


def _number(row: Row) -> int:
    return int(row["trial"])
