"""From trials to points, intervals and the verdict: plain rows in, plain rows out.
No file, no table, no picture is known here, so that a live view, a report and a strategy judge alike."""

import math
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import stdtrit

from powersgd_lab import settings
from powersgd_lab.settings import Hook


Row = Mapping[str, Any]
Point = dict[str, Any]

SHOWN_CONFIDENCE = 0.95  # of the interval that is shown when `search.confidence` leaves the decision to the mean

SHARED = ("setting", "hook", "matrix_approximation_rank", "start_powerSGD_iter", "start_fraction")
FACTS = (
    "payload_bytes",
    "wire_bytes",
    "compression_ratio_step",
    "compression_ratio_run",
    "allreduces_step",
)
TIMES = ("seconds", "step_seconds", "compute_seconds", "compress_seconds", "communicate_seconds")

# The keys that every point has, in this order; points.csv promises them. `metric.<name>` follow.
COLUMNS = (
    *SHARED,
    "n",
    "pruned",
    "failed",
    "metric",
    "metric_std",
    "loss",
    "difference",
    "difference_low",
    "difference_high",
    "difference_std",
    "confidence",
    "tolerance",
    "satisfactory",
    *FACTS,
    *TIMES,
)


def points(
    rows: Sequence[Row], *, baseline: str, direction: str, tolerance: float | str, confidence: float | None
) -> list[Point]:
    """One dict a setting, with the keys `COLUMNS`; the baseline first, the other baselines, then hook, start, rank.

    Args:
        rows: trials as `study.COLUMNS` has them, in any state; of a setting's seed the latest trial counts.
        baseline: the setting that the others are compared with.
        direction: of the metric, `min` or `max`.
        tolerance: `search.tolerance`, see `settings.tolerance`.
        confidence: of the intervals that decide; None lets the mean decide, and intervals are of 95 %.

    `metric` and `loss` are means over the `n` complete seeds, `metric_std` is the sample's standard deviation. A point
    with a diverged (pruned) seed has no mean; crashed (failed) seeds are left out. `difference` is the mean over seeds
    of metric - baseline's metric, `difference_low` and `difference_high` the ends of its interval, `difference_std`
    the standard deviation of one seed's difference, pooled over the study; None where nothing can be pooled. Times are
    in seconds and leave contended trials out. `satisfactory` is yes, no or undecided."""
    assert direction in ("min", "max")
    groups = _by_setting(rows, baseline)
    metrics = {key: _metric_by_seed(group) for key, group in groups.items()}
    reference = metrics.get(baseline, {})
    allowed = settings.tolerance(tolerance, _mean(reference.values()) or 0.0) if reference else None
    level = SHOWN_CONFIDENCE if confidence is None else confidence
    spread = _spread([metric for metric in metrics.values() if metric])
    found = []
    for key, group in groups.items():
        point = _means(group, metrics[key]) | _difference(metrics[key], reference, key == baseline, spread, level)
        point["tolerance"] = allowed
        point["satisfactory"] = _judge(point, direction, by_interval=confidence is not None and key != baseline)
        extras = {name: value for name, value in point.items() if name not in COLUMNS}
        found.append({name: point[name] for name in COLUMNS} | extras)
    return found


def is_baseline(point: Row) -> bool:
    return not Hook[point["hook"]].compresses


def pareto(points: Iterable[Point], direction: str) -> list[Point]:
    """The points that no other beats in both metric and run payload bytes, from the fewest bytes on.

    Points without a mean are left out."""
    sign = 1 if direction == "min" else -1
    known = [point for point in points if point["metric"] is not None and point["payload_bytes"] is not None]
    found: list[Point] = []
    for point in sorted(known, key=lambda p: (p["payload_bytes"], sign * p["metric"])):
        last = found[-1] if found else None
        twin = last is not None and all(point[key] == last[key] for key in ("metric", "payload_bytes"))
        if last is None or twin or sign * point["metric"] < sign * last["metric"]:
            found.append(point)
    return found


def _by_setting(rows: Sequence[Row], baseline: str) -> dict[str, list[Row]]:
    """Each setting's latest trial of every seed, settings in the points' order."""
    latest: dict[tuple[str, int], Row] = {}
    for row in sorted(rows, key=lambda r: int(r["trial"])):
        latest[row["setting"], row["seed"]] = row
    groups: dict[str, list[Row]] = {}
    for (key, _), row in latest.items():
        groups.setdefault(key, []).append(row)
    hooks = [hook.name for hook in Hook]

    def order(key: str) -> tuple[Any, ...]:
        first = groups[key][0]
        start, rank = first["start_powerSGD_iter"] or 0, first["matrix_approximation_rank"] or 0
        return (key != baseline, Hook[first["hook"]].compresses, hooks.index(first["hook"]), start, rank, key)

    return {key: groups[key] for key in sorted(groups, key=order)}


def _metric_by_seed(group: Sequence[Row]) -> dict[int, float]:
    if any(row["state"] == "pruned" for row in group):
        return {}
    return {row["seed"]: float(row["metric"]) for row in group if row["state"] == "complete"}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _means(group: Sequence[Row], metric: Mapping[int, float]) -> Point:
    complete = [row for row in group if row["seed"] in metric]
    calm = [row for row in complete if not row.get("contended")]
    point: Point = {key: group[0][key] for key in SHARED}
    point |= {"n": len(metric), "pruned": _count(group, "pruned"), "failed": _count(group, "fail")}
    point["metric"] = _mean(metric.values())
    point["metric_std"] = float(np.std(list(metric.values()), ddof=1)) if len(metric) > 1 else None
    point |= {key: _mean(row.get(key) for row in complete) for key in ("loss", *FACTS)}
    point |= {key: _mean(row.get(key) for row in calm) for key in TIMES}
    named = sorted({key for row in group for key in row if key.startswith("metric.")})
    return point | {key: _mean(row.get(key) for row in complete) for key in named}


def _count(group: Sequence[Row], state: str) -> int:
    return sum(row["state"] == state for row in group)


def _spread(metrics: Sequence[Mapping[int, float]]) -> tuple[float, int] | None:
    """The standard deviation of one trial's metric beside what its setting and its seed add, and its degrees of
    freedom; None when there are none.

    Least squares of metric = setting + seed + noise (randomized blocks). Where every setting has every seed, this is
    the variance of paired differences pooled over the settings, with sum(n - 1) degrees of freedom over the compared
    ones; it allows for all differences sharing one baseline, whose noise plain pooling would count many times."""
    cells = [(i, seed, value) for i, metric in enumerate(metrics) for seed, value in metric.items()]
    seeds = sorted({seed for _, seed, _ in cells})
    design = np.zeros((len(cells), len(metrics) + len(seeds)))
    for k, (i, seed, _) in enumerate(cells):
        design[k, i] = design[k, len(metrics) + seeds.index(seed)] = 1
    values = np.array([value for *_, value in cells])
    if len(cells) == 0:
        return None
    fit, _, rank, _ = np.linalg.lstsq(design, values)
    freedom = len(cells) - int(rank)
    residual = values - design @ fit
    return (math.sqrt(float(residual @ residual) / freedom), freedom) if freedom else None


def _difference(
    metric: Mapping[int, float],
    reference: Mapping[int, float],
    is_reference: bool,
    spread: tuple[float, int] | None,
    level: float,
) -> Point:
    """The mean difference over the seeds that both have, and its interval."""
    paired = [metric[seed] - reference[seed] for seed in metric if seed in reference]
    difference = _mean(paired)
    point: Point = dict.fromkeys(("difference_low", "difference_high", "difference_std", "confidence"))
    point["difference"] = difference
    if difference is None or spread is None or is_reference:
        return point
    std, freedom = spread
    both = math.sqrt(2) * std
    half = float(stdtrit(freedom, (1 + level) / 2)) * both / math.sqrt(len(paired))
    return point | {
        "difference_low": difference - half,
        "difference_high": difference + half,
        "difference_std": both,
        "confidence": level,
    }


def loss_of_quality(point: Row, direction: str) -> tuple[float, float | None, float | None]:
    """How much worse than the baseline a point is, positive is worse: its mean and the interval's better, worse end."""
    mean, low, high = point["difference"], point["difference_low"], point["difference_high"]
    if direction == "min":
        return mean, low, high
    return -mean, None if high is None else -high, None if low is None else -low


def _judge(point: Row, direction: str, *, by_interval: bool) -> str:
    if point["pruned"]:
        return "no"
    if point["difference"] is None or point["tolerance"] is None:
        return "undecided"
    mean, better, worse = loss_of_quality(point, direction)
    if not by_interval:
        return "yes" if mean <= point["tolerance"] else "no"
    if better is None or worse is None:
        return "undecided"
    if worse <= point["tolerance"]:
        return "yes"
    return "no" if better > point["tolerance"] else "undecided"


def recommend(points: Sequence[Point], *, baseline: str, direction: str) -> dict[str, Any]:
    """What the points say: `verdict` (use, do_not_use, undecided), `reason` (a sentence), `point`, `seeds_needed`.

    `point` is what to train with: the satisfactory setting that sends the fewest run bytes, which is a PowerSGD
    setting only if it sends fewer than every satisfactory baseline; 16-bit baselines count. It is None when nothing
    is decided; then `seeds_needed` is how many seeds may settle it, where intervals can tell."""
    reference = next((point for point in points if point["setting"] == baseline), None)
    if reference is None or reference["metric"] is None:
        return _verdict("undecided", f"the baseline {baseline} has no mean metric, so that nothing can be compared")
    plain = sorted((p for p in points if is_baseline(p) and p["n"]), key=_bytes)
    compared = sorted((p for p in points if not is_baseline(p) and (p["n"] or p["pruned"])), key=_bytes)
    if not compared:
        return _verdict("undecided", "no PowerSGD setting has a finished trial")
    cheapest = next(p for p in plain if p["satisfactory"] == "yes")  # the reference at the latest
    good = next((p for p in compared if p["satisfactory"] == "yes"), None)
    limit = cheapest if good is None or _bytes(cheapest) <= _bytes(good) else good
    unsettled = [p for p in (*plain, *compared) if p["satisfactory"] == "undecided" and _bytes(p) < _bytes(limit)]
    if limit is good:
        rival = next((p for p in unsettled if is_baseline(p)), None)
        if rival is None:
            return _verdict("use", _praise(good, cheapest, unsettled, direction), good)
        reason = f"{good['setting']} is satisfactory, but {rival['setting']} sends fewer bytes and is undecided"
        return _verdict("undecided", reason, seeds_needed=_seeds_to_settle([rival], direction))
    doubtful = [p for p in unsettled if not is_baseline(p)]
    if doubtful:
        reason = (
            f"no setting that sends fewer bytes than {cheapest['setting']} is surely within the tolerance: "
            f"{doubtful[0]['setting']} has {_quality(doubtful[0], direction)}"
        )
        return _verdict("undecided", reason, seeds_needed=_seeds_to_settle(doubtful, direction))
    return _verdict("do_not_use", _refusal(compared, good, cheapest, direction), cheapest)


def _verdict(verdict: str, reason: str, point: Point | None = None, seeds_needed: int | None = None) -> dict[str, Any]:
    return {"verdict": verdict, "reason": reason, "point": point, "seeds_needed": seeds_needed}


def _bytes(point: Row) -> float:
    """Of the run; a point whose trials tell none (all diverged) sorts last and is never chosen for them."""
    return math.inf if point["payload_bytes"] is None else float(point["payload_bytes"])


def _quality(point: Row, direction: str) -> str:
    if point["difference"] is None:
        return "no seed in common with the baseline"
    mean, better, worse = loss_of_quality(point, direction)
    words = f"a metric that is {abs(mean):.3g} {'worse' if mean > 0 else 'better'} than the baseline's"
    interval = "no interval: too few seeds"
    if better is not None and worse is not None:
        interval = f"{point['confidence']:.0%} interval {better:.3g} to {worse:.3g} worse"
    return f"{words} ({interval}; allowed: {point['tolerance']:.3g})"


def _praise(good: Row, cheapest: Row, unsettled: Sequence[Row], direction: str) -> str:
    words = (
        f"{good['setting']} sends {_bytes(cheapest) / _bytes(good):.3g} times fewer bytes in the run than "
        f"{cheapest['setting']}, the cheapest satisfactory baseline, and has {_quality(good, direction)}"
    )
    worse = loss_of_quality(good, direction)[2]
    if worse is None:
        words += "; without an interval this may be chance: run more seeds"
    elif worse > good["tolerance"]:
        words += "; its interval reaches beyond the tolerance: by the mean only, more seeds would make it sure"
    return f"{words}; undecided and cheaper: {', '.join(p['setting'] for p in unsettled)}" if unsettled else words


def _refusal(compared: Sequence[Row], good: Row | None, cheapest: Row, direction: str) -> str:
    if good is not None:
        return f"the cheapest satisfactory setting, {good['setting']}, sends no fewer bytes than {cheapest['setting']}"
    known = [p for p in compared if p["difference"] is not None]
    if not known:
        return "no PowerSGD setting ran to its end: all diverged or were given up"
    best = min(known, key=lambda p: loss_of_quality(p, direction)[0])
    return f"no PowerSGD setting is within the tolerance: the best, {best['setting']}, has {_quality(best, direction)}"


def _seeds_to_settle(doubtful: Sequence[Row], direction: str) -> int | None:
    """The fewest seeds with which one of the points would be decided, if its difference stays as it is.

    An interval shrinks with the root of the seeds; its quantile is taken as it is now, though it shrinks as well."""
    needed = []
    for point in doubtful:
        if point["difference"] is None:
            continue
        mean, better, worse = loss_of_quality(point, direction)
        if better is None or worse is None or point["tolerance"] == mean:
            continue
        needed.append(math.ceil(point["n"] * ((worse - better) / 2 / (point["tolerance"] - mean)) ** 2))
    return min(needed, default=None)
