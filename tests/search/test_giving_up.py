"""When a trial is given up, on made-up curves: how far, how often, from which step, in which direction.
The baseline's seeds differ by a known spread, so that each limit can be computed by hand."""

import pytest

from powersgd_lab.search.giving_up import GivingUp


STEPS = (10, 20, 30, 40)
# standard deviation 1 at every step
BASELINE = {0: {s: 10.0 - s / 10 for s in STEPS}, 1: {s: 10.0 - s / 10 + 2**0.5 for s in STEPS}}


def judge(spreads=2.0, least=0.0, direction="min", baseline=BASELINE):
    return GivingUp(baseline, direction, spreads, least)


def curve(behind, steps=STEPS, seed=0):
    return {step: BASELINE[seed][step] + behind for step in steps}


def test_too_far_behind_twice_in_a_row():
    reason = judge().reason(curve(2.1, STEPS[:3]), 0, 10)
    assert reason == "given up at step 30: 9.1 where the baseline had 7"


def test_near_enough_goes_on():
    assert judge().reason(curve(1.9), 0, 10) is None


def test_once_is_not_enough_nor_twice_with_a_better_one_between():
    assert judge().reason({**curve(0.0, (20,)), **curve(5.0, (30,))}, 0, 10) is None
    assert judge().reason({**curve(5.0, (20, 40)), **curve(0.0, (30,))}, 0, 10) is None


def test_evaluations_without_compression_do_not_count():
    far = curve(5.0, (10, 20, 30))
    assert judge().reason(far, 0, 20) is None  # only the one at 30 is after a compressed step
    assert judge().reason(far, 0, 19) is not None


def test_each_seed_is_compared_with_its_own_baseline():
    other = {step: BASELINE[1][step] + 1.5 for step in STEPS}
    assert judge(spreads=1.6).reason(other, 1, 0) is None
    assert judge(spreads=1.6).reason(other, 0, 0) is not None
    assert judge(spreads=1.6).reason(other, 7, 0) is not None  # a seed without a baseline: the mean


def test_the_tolerance_is_never_too_far():
    assert judge(least=2.2).reason(curve(2.1), 0, 0) is None
    one = {0: BASELINE[0]}
    assert judge(least=0.5, baseline=one).reason(curve(0.6), 0, 0) is not None
    assert judge(least=0.5, baseline=one).reason(curve(0.4), 0, 0) is None


@pytest.mark.parametrize(("behind", "given_up"), [(-2.1, True), (2.1, False)])
def test_a_metric_that_rises_trails_below(behind, given_up):
    assert (judge(direction="max").reason(curve(behind), 0, 0) is not None) == given_up


def test_steps_that_the_baseline_did_not_evaluate_are_left_out():
    assert judge().reason({15: 99.0, 25: 99.0}, 0, 0) is None
