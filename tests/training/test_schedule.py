"""The learning rate's factor at single steps, against numbers worked out by hand, and when the curve is drawn.
A resumed run has only its step, so the factor must follow from that alone."""

import math

import pytest

from powersgd_lab.settings import Schedule
from powersgd_lab.settings import Trainer
from powersgd_lab.training.schedule import evaluation_interval
from powersgd_lab.training.schedule import factor


def factors(steps, **fields):
    trainer = Trainer(steps=steps, **fields)
    return [factor(step, steps, trainer) for step in range(steps)]


@pytest.mark.parametrize("schedule", Schedule)
def test_the_warm_up_rises_in_equal_parts_to_the_highest_rate(schedule):
    assert factors(10, warmup_steps=4, schedule=schedule)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_constant_stays():
    assert factors(5, schedule=Schedule.constant) == [1.0] * 5


def test_a_step_falls_at_each_milestone_a_part_of_all_steps():
    found = factors(8, schedule=Schedule.step, milestones=[0.25, 0.75], gamma=0.5, warmup_steps=1)
    assert found == [1, 1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25]


def test_cosine_is_half_way_down_in_the_middle_and_would_end_after_the_last_step():
    found = factors(12, schedule=Schedule.cosine, final_fraction=0.2, warmup_steps=2)
    assert found[2] == 1.0
    assert found[2 + 5] == pytest.approx(0.6)
    assert found[-1] == pytest.approx(0.2 + 0.8 * (1 + math.cos(0.9 * math.pi)) / 2)
    assert found[2:] == sorted(found[2:], reverse=True)
    assert found[-1] > 0.2


@pytest.mark.parametrize(
    ("fields", "steps", "interval"),
    [
        ({"eval_steps": 7}, 100, 7),
        ({"eval_epochs": 0.5}, 100, 15),
        ({"eval_epochs": 0.001}, 100, 1),
        ({}, 100, 10),
        ({}, 101, 11),
        ({}, 4, 1),
    ],
)
def test_evaluations_are_as_far_apart_as_asked_else_a_tenth_of_the_run(fields, steps, interval):
    assert evaluation_interval(Trainer(steps=steps, **fields), steps, steps_per_epoch=30) == interval
