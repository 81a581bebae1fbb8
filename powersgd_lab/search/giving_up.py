"""When a trial is given up: it trails the baseline's curve too far, twice in a row, with compression on.
A pure function of curves, so that what it would have stopped can be told from recorded studies too."""

from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np


Curve = Mapping[int, float]  # the metric by the number of steps trained, one point an evaluation

IN_A_ROW = 2  # one bad evaluation may be noise, or the shock of the first compressed steps


class GivingUp:
    """Compares curves with the baseline's at the same step: that of the same seed, whose data are the same.

    Args:
        baseline: the baseline's curve of every seed that has one.
        direction: of the metric, `min` or `max`.
        spreads: `search.give_up`, how many standard deviations of the baseline's seeds at that step are too far.
        least: a distance in the metric's unit that is never too far, the tolerance; with one seed it stands alone.
    """

    def __init__(self, baseline: Mapping[int, Curve], direction: str, spreads: float, least: float) -> None:
        assert direction in ("min", "max")
        self._baseline, self._spreads, self._least = baseline, spreads, least
        self._sign = 1.0 if direction == "min" else -1.0

    def reason(self, curve: Curve, seed: int, start: int) -> str | None:
        """Why a trial with this curve so far, compressing from step `start` on, is given up; None to go on."""
        compared = [step for step in sorted(curve) if step > start and self._reference(step, seed) is not None]
        latest = compared[-IN_A_ROW:]
        if len(latest) < IN_A_ROW or not all(self._trails(curve[step], step, seed) for step in latest):
            return None
        step = latest[-1]
        reference = self._reference(step, seed)
        return f"given up at step {step}: {curve[step]:.4g} where the baseline had {reference:.4g}"

    def _trails(self, value: float, step: int, seed: int) -> bool:
        reference = self._reference(step, seed)
        assert reference is not None
        return self._sign * (value - reference) > max(self._spreads * self._spread(step), self._least)

    def _reference(self, step: int, seed: int) -> float | None:
        """The baseline at that step with the same seed, else its mean over seeds; None where it was not evaluated."""
        own = self._baseline.get(seed, {}).get(step)
        values = self._values(step)
        return own if own is not None else float(np.mean(values)) if values else None

    def _spread(self, step: int) -> float:
        values = self._values(step)
        return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0

    def _values(self, step: int) -> Sequence[float]:
        return [curve[step] for curve in self._baseline.values() if step in curve]
