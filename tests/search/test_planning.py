"""The plan: order of trials, what a resumed study still lacks, and when nothing can be judged.
Rows are made up, since the plan reads nothing else."""

import pytest

from powersgd_lab import config
from powersgd_lab import settings
from powersgd_lab.search import strategies
from powersgd_lab.search.planning import BaselineError
from powersgd_lab.search.planning import Plan


def plan(*overrides):
    defaults = ("search.max_rank=4", "search.start_fractions=[0.1]", "search.seeds=2")
    sweep = config.load([*defaults, *overrides])
    return Plan(sweep, strategies.make(sweep, 400))


def row(setting, seed, state="complete", reason=None):
    return {"setting": setting, "seed": seed, "state": state, "reason": reason}


def play(plan, state=lambda setting, seed: "complete"):
    """Run trials one after another until the plan has no more."""
    rows = []
    while (pair := plan.next(rows)) is not None:
        key = settings.setting_key(pair[0])
        rows.append(row(key, pair[1], state(key, pair[1]), "boom"))
    return rows


def test_baselines_first_then_the_grid_every_seed():
    order = [(r["setting"], r["seed"]) for r in play(plan())]
    keys = ["off", "bf16", "layerwise-r1-s40", "layerwise-r4-s40"]
    assert order == [(key, seed) for key in keys for seed in (0, 1)]


def test_a_resumed_study_runs_what_is_missing_and_nothing_twice():
    whole = play(plan())
    for kept in range(len(whole)):
        pair = plan().next(whole[:kept])
        assert pair is not None
        assert (settings.setting_key(pair[0]), pair[1]) == (whole[kept]["setting"], whole[kept]["seed"])


def test_more_seeds_and_ranks_grow_the_study():
    rows = play(plan())
    grown = plan("search.seeds=3", "search.max_rank=16")
    assert len(grown.trials(rows)) == 15
    pair = grown.next(rows)
    assert (settings.setting_key(pair[0]), pair[1]) == ("off", 2)


def test_first_seed_moves_all_seeds():
    assert {r["seed"] for r in play(plan("seed=5"))} == {5, 6}


def test_a_setting_that_diverged_is_not_tried_with_further_seeds():
    rows = play(plan(), lambda key, seed: "pruned" if key == "layerwise-r1-s40" else "complete")
    assert [r["seed"] for r in rows if r["setting"] == "layerwise-r1-s40"] == [0]
    assert len(rows) == 7 == len(plan().trials(rows))


def test_a_crash_costs_one_trial_only():
    rows = play(plan(), lambda key, seed: "fail" if (key, seed) == ("layerwise-r1-s40", 0) else "complete")
    assert [r["seed"] for r in rows if r["setting"] == "layerwise-r1-s40"] == [0, 1]


def test_no_setting_starts_before_a_baseline_can_judge_it():
    rows = [row("off", 0, "running"), row("off", 1, "running"), row("bf16", 0, "running"), row("bf16", 1, "running")]
    assert plan().next(rows) is None
    rows[0] = row("off", 0)
    assert settings.setting_key(plan().next(rows)[0]) == "layerwise-r1-s40"


@pytest.mark.parametrize("state", ["fail", "pruned"])
def test_nothing_can_be_judged_without_the_first_baseline(state):
    with pytest.raises(BaselineError, match="baseline off failed: boom"):
        play(plan(), lambda key, seed: state if key == "off" else "complete")


def test_one_diverged_seed_of_the_baseline_ends_the_study():
    with pytest.raises(BaselineError, match="a seed of the baseline off failed"):
        play(plan(), lambda key, seed: "pruned" if (key, seed) == ("off", 1) else "complete")


def test_one_failed_seed_of_the_baseline_is_borne():
    rows = play(plan(), lambda key, seed: "fail" if (key, seed) == ("off", 0) else "complete")
    assert len(rows) == 8
