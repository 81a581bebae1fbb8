"""Points, intervals, the front and the verdict, on rows whose answers can be worked out by hand.
The interval's coverage is found by simulation, since a formula that is off by a root of two looks just as good."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from powersgd_lab import statistics
from powersgd_lab.statistics import COLUMNS
from powersgd_lab.statistics import pareto
from powersgd_lab.statistics import recommend


BYTES = {"off": 1000, "bf16": 500}


def rows_of(settings, **overrides):
    """Rows from {setting: [metric of seed 0, of seed 1, …]}; a metric may be a state instead.

    PowerSGD settings are named rank/start, and send start + rank bytes."""
    rows = []
    for name, metrics in settings.items():
        rank, start = (None, None) if name in BYTES else map(int, name.split("/"))
        for seed, metric in enumerate(metrics):
            state, value = (metric, None) if isinstance(metric, str) else ("complete", metric)
            payload = BYTES.get(name) or start + rank
            row = {"trial": len(rows), "state": state, "setting": name, "seed": seed, "metric": value, "loss": value}
            row |= {"hook": name if rank is None else "layerwise", "matrix_approximation_rank": rank}
            row |= {"start_powerSGD_iter": start, "start_fraction": None, "payload_bytes": payload}
            row |= {"compression_ratio_run": 1000 / payload, "step_seconds": 0.1 * (seed + 1), "contended": False}
            rows.append(row | overrides.get(name, {}))
    return rows


def points_of(settings, *, direction="min", tolerance="2%", confidence=None):
    rows = settings if isinstance(settings, list) else rows_of(settings)
    return statistics.points(rows, baseline="off", direction=direction, tolerance=tolerance, confidence=confidence)


def by_name(points):
    return {point["setting"]: point for point in points}


def verdict_of(settings, *, direction="min", **options):
    return recommend(points_of(settings, direction=direction, **options), baseline="off", direction=direction)


def test_no_rows_give_no_points():
    assert points_of({}) == []
    assert recommend([], baseline="off", direction="min")["verdict"] == "undecided"


def test_means_spread_and_order():
    points = points_of({"4/40": [7.0, 7.2], "1/120": [7.5], "1/40": [8.0, 8.4], "bf16": [6.9], "off": [6.8, 7.0]})
    assert [point["setting"] for point in points] == ["off", "bf16", "1/40", "4/40", "1/120"]
    first, four = points[0], points[3]
    assert list(four)[: len(COLUMNS)] == list(COLUMNS)
    assert (first["metric"], first["n"], first["difference"]) == (pytest.approx(6.9), 2, 0)
    assert first["metric_std"] == pytest.approx(0.2 / math.sqrt(2))
    assert (four["difference"], four["tolerance"]) == (pytest.approx(0.2), pytest.approx(0.138))
    assert points[1]["metric_std"] is None
    assert (four["payload_bytes"], four["compression_ratio_run"]) == (44, pytest.approx(1000 / 44))


def test_differences_are_paired_by_seed():
    # The second seed is hard for every setting: it must not count for or against one that lacks it.
    points = by_name(points_of({"off": [1.0, 5.0, 3.0], "1/10": ["fail", 5.5, 3.5]}))
    assert points["1/10"]["difference"] == pytest.approx(0.5)
    assert (points["1/10"]["n"], points["1/10"]["failed"]) == (2, 1)


def test_a_diverged_seed_takes_the_mean_away_and_settles_it():
    point = by_name(points_of({"off": [1.0, 1.1], "1/10": [0.5, "pruned"]}, confidence=0.9))["1/10"]
    assert (point["metric"], point["n"], point["pruned"], point["satisfactory"]) == (None, 0, 1, "no")


def test_a_retried_seed_counts_by_its_latest_trial():
    rows = rows_of({"off": [1.0], "1/10": ["fail"]})
    retried = rows[1] | {"trial": 2, "state": "complete", "metric": 1.5}
    point = by_name(points_of([*rows, retried]))["1/10"]
    assert (point["metric"], point["failed"]) == (1.5, 0)


def test_contended_trials_feed_no_time():
    rows = rows_of({"off": [1.0, 1.0, 1.0]})
    rows[2]["contended"] = True
    (point,) = points_of(rows)
    assert (point["step_seconds"], point["n"]) == (pytest.approx(0.15), 3)
    assert points_of(rows_of({"off": [1.0]}, off={"contended": True}))[0]["step_seconds"] is None


def test_every_metric_of_the_rows_is_averaged():
    rows = rows_of({"off": [1.0, 1.0]})
    rows[0]["metric.accuracy"], rows[1]["metric.accuracy"] = 0.5, 0.7
    assert points_of(rows)[0]["metric.accuracy"] == pytest.approx(0.6)


def test_one_compared_setting_has_the_interval_of_the_paired_t_test():
    off, other = [1.0, 1.4, 1.1, 1.9], [1.3, 1.5, 1.6, 2.0]
    point = by_name(points_of({"off": off, "1/10": other}, confidence=0.9))["1/10"]
    expected = stats.ttest_rel(other, off).confidence_interval(0.9)
    assert (point["difference_low"], point["difference_high"]) == pytest.approx(tuple(expected))


def test_one_seed_each_has_no_interval():
    points = by_name(points_of({"off": [1.0], "1/10": [1.5]}, confidence=0.9))
    assert points["1/10"]["difference_low"] is points["1/10"]["difference_std"] is None
    assert points["1/10"]["satisfactory"] == "undecided"
    assert points["off"]["satisfactory"] == "yes"


def test_a_single_seed_borrows_the_spread_of_the_others():
    points = by_name(points_of({"off": [1.0, 1.2, 1.1], "1/10": [1.5, 1.6, 1.7], "2/10": [1.3]}))
    one, three = points["2/10"], points["1/10"]
    width = one["difference_high"] - one["difference_low"]
    assert width == pytest.approx(math.sqrt(3) * (three["difference_high"] - three["difference_low"]))


@pytest.mark.parametrize("seeds", [2, 3])
def test_intervals_cover_the_truth_as_often_as_they_say(seeds):
    random = np.random.default_rng(7)
    names, truth = ["off", "bf16", "1/10", "4/10", "16/10"], np.array([0.0, 0.0, 2.0, 1.0, 0.3])
    covered = total = 0
    for _ in range(1500):
        metrics = 6 + truth[:, None] + random.normal(0, 0.3, (1, seeds)) + random.normal(0, 0.1, (5, seeds))
        points = points_of(dict(zip(names, metrics.tolist(), strict=True)), confidence=0.95)
        for point, difference in zip(points[1:], truth[1:], strict=True):
            covered += point["difference_low"] <= difference <= point["difference_high"]
            total += 1
    assert 0.93 <= covered / total <= 0.97


@pytest.mark.parametrize(
    ("metrics", "tolerance", "expected"),
    [([1.30, 1.31], 1.0, "yes"), ([1.30, 1.31], 0.1, "no"), ([1.30, 1.31], 0.3, "undecided")],
)
def test_an_interval_inside_outside_and_across_the_tolerance(metrics, tolerance, expected):
    settings = {"off": [1.0, 1.02], "1/10": metrics}
    point = by_name(points_of(settings, tolerance=tolerance, confidence=0.9))["1/10"]
    assert point["satisfactory"] == expected
    # The same trial values with the opposite sense: higher is better, everything mirrored.
    mirrored = {name: [-value for value in values] for name, values in settings.items()}
    point = by_name(points_of(mirrored, direction="max", tolerance=tolerance, confidence=0.9))["1/10"]
    assert point["satisfactory"] == expected


def test_without_confidence_the_mean_decides_by_the_metrics_direction():
    settings = {"off": [0.9, 0.9], "1/10": [0.8, 1.0], "2/10": [0.5, 0.7]}
    found = by_name(points_of(settings, direction="max", tolerance=0.05))
    assert (found["1/10"]["satisfactory"], found["2/10"]["satisfactory"]) == ("yes", "no")
    assert found["1/10"]["confidence"] == statistics.SHOWN_CONFIDENCE


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12), st.sampled_from(["min", "max"]))
def test_the_front_is_what_nothing_dominates(pairs, direction):
    points = [{"metric": m, "payload_bytes": b, "id": i} for i, (m, b) in enumerate(pairs)]
    sign = 1 if direction == "min" else -1

    def dominated(p):
        return any(
            sign * q["metric"] <= sign * p["metric"]
            and q["payload_bytes"] <= p["payload_bytes"]
            and (q["metric"], q["payload_bytes"]) != (p["metric"], p["payload_bytes"])
            for q in points
        )

    front = pareto([*points, {"metric": None, "payload_bytes": 1, "id": -1}], direction)
    assert sorted(p["id"] for p in front) == [p["id"] for p in points if not dominated(p)]
    assert [p["payload_bytes"] for p in front] == sorted(p["payload_bytes"] for p in front)


def test_the_satisfactory_setting_with_the_fewest_run_bytes_is_used():
    found = verdict_of({"off": [1.0], "bf16": [1.0], "1/100": [2.0], "4/100": [1.01], "2/200": [1.0]})
    assert (found["verdict"], found["point"]["setting"]) == ("use", "4/100")
    assert "4.81 times fewer bytes in the run than bf16" in found["reason"]
    assert "0.01 worse" in found["reason"]
    assert "too few seeds" in found["reason"]


def test_the_16_bit_baseline_must_be_beaten_too():
    found = verdict_of({"off": [1.0], "bf16": [1.0], "1/600": [1.0], "1/100": [2.0]})
    assert (found["verdict"], found["point"]["setting"]) == ("do_not_use", "bf16")
    assert verdict_of({"off": [1.0], "bf16": [2.0], "1/600": [1.0]})["verdict"] == "use"


def test_nothing_within_the_tolerance_names_the_best_there_was():
    found = verdict_of({"off": [0.9], "1/10": [0.5], "2/20": [0.6]}, direction="max")
    assert (found["verdict"], found["point"]["setting"]) == ("do_not_use", "off")
    assert "the best, 2/20, has a metric that is 0.3 worse" in found["reason"]
    assert "diverged" in verdict_of({"off": [0.9], "1/10": ["pruned"]})["reason"]


def test_an_undecided_setting_below_the_baselines_bytes_leaves_the_verdict_open():
    found = verdict_of({"off": [1.0, 1.02], "1/10": [1.3, 1.31]}, tolerance=0.3, confidence=0.9)
    assert (found["verdict"], found["point"]) == ("undecided", None)
    # The interval is 0.295 ± 0.0316 with two seeds: 2 · (0.0316 / 0.005)² seeds make it as narrow as the gap.
    assert found["seeds_needed"] == 80


def test_an_undecided_baseline_that_sends_less_leaves_it_open():
    settings = {"off": [1.0, 1.02], "bf16": [1.3, 1.31], "1/600": [1.0, 1.02]}
    found = verdict_of(settings, tolerance=0.3, confidence=0.9)
    assert found["verdict"] == "undecided"
    assert "bf16" in found["reason"]


def test_a_baseline_without_a_mean_decides_nothing():
    found = verdict_of({"off": [1.0, "pruned"], "1/10": [1.0, 1.0]})
    assert found["verdict"] == "undecided"
    assert "baseline off" in found["reason"]


def test_only_crashed_settings_decide_nothing():
    assert verdict_of({"off": [1.0], "1/10": ["fail"]})["verdict"] == "undecided"
