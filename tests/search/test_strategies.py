"""The strategies as pure functions: which settings they want, without a process or a storage.
Ranks and starts are compared with the lists that the documents' words give."""

import pytest

from powersgd_lab import config
from powersgd_lab import settings
from powersgd_lab.search import strategies


def wanted(*overrides, steps=400):
    sweep = config.load(overrides)
    return strategies.make(sweep, steps).next([])


def pairs(found):
    return [(setting.start_powerSGD_iter, setting.matrix_approximation_rank) for setting in found]


def test_grid_is_exponential_in_the_rank():
    found = wanted("search.max_rank=20", "search.rank_growth=2", "search.start_fractions=[0.1]")
    assert pairs(found) == [(40, 1), (40, 2), (40, 4), (40, 8), (40, 16)]


def test_grid_crosses_ranks_and_starts():
    found = wanted("search.max_rank=4", "search.rank_growth=4", "search.start_fractions=[0.1,0.3]")
    assert pairs(found) == [(40, 1), (40, 4), (120, 1), (120, 4)]
    assert [setting.start_fraction for setting in found] == [0.1, 0.1, 0.3, 0.3]


def test_fraction_is_rounded_up_and_never_before_warm_up_or_step_two():
    assert pairs(wanted("search.max_rank=1", "search.start_fractions=[0.1,0.101]")) == [(40, 1), (41, 1)]
    assert pairs(wanted("search.max_rank=1", "trainer.warmup_steps=60", "search.start_fractions=[0.1]")) == [(60, 1)]
    assert pairs(wanted("search.max_rank=1", "trainer.warmup_steps=0", "search.start_fractions=[0]")) == [(2, 1)]


def test_starts_that_fall_on_one_step_are_one_setting():
    found = wanted("search.max_rank=1", "trainer.warmup_steps=50", "search.start_fractions=[0.05,0.1,0.5]")
    assert pairs(found) == [(50, 1), (200, 1)]


def test_other_keys_come_from_the_base_and_settings_by_hand_follow():
    found = wanted(
        "powersgd.warm_start=false",
        "search.max_rank=1",
        "search.start_fractions=[0.1]",
        "search.settings=[{hook: batched, start_powerSGD_iter: 99}, {matrix_approximation_rank: 1}]",
    )
    assert [settings.setting_key(setting) for setting in found] == [
        "layerwise-r1-s40-warm_start=false",
        "batched-r1-s99-warm_start=false",
    ]


@pytest.mark.parametrize("hook", ["off", "bf16", "fp16"])
def test_a_hook_without_a_rank_cannot_be_searched(hook):
    with pytest.raises(ValueError, match=f"powersgd={hook}.*layerwise"):
        wanted(f"powersgd={hook}")
