"""The strategies that judge, played to their end on made-up trials: what they spend, what they find, what they say.
A trial's bytes follow its shapes and its metric a made-up rule, so that the grid's answer is known."""

import math

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from powersgd_lab import config
from powersgd_lab import settings
from powersgd_lab import statistics
from powersgd_lab import study
from powersgd_lab.search import strategies
from powersgd_lab.search.strategies import tpe


STEPS = 400
GRID = ("search.max_rank=16", "search.rank_growth=2", "search.start_fractions=[0.1,0.2,0.4]", "search.seeds=2")
BASELINE = 10.0


def sweep_of(strategy, *overrides):
    return config.load([f"search={strategy}", *GRID, "search.tolerance=0.2", *overrides])


def payload(setting, floor=20, factor=10):
    """Run bytes: 1000 an uncompressed step, `floor` and `factor` a rank a compressed one."""
    if not setting.hook.compresses:
        return 1000 * STEPS
    start = setting.start_powerSGD_iter
    return 1000 * start + (STEPS - start) * min(1000, floor + factor * setting.matrix_approximation_rank)


def row(number, setting, seed, outcome, **shape):
    sent = payload(setting, **shape)
    state, metric = (outcome, None) if isinstance(outcome, str) else ("complete", outcome)
    found = {"trial": number, "state": state, "metric": metric, "metric_name": "perplexity", "loss": metric}
    if state == "complete":
        found |= {"payload_bytes": sent, "compression_ratio_run": 1000 * STEPS / sent}
    return study.facts_of(setting, seed, 2, STEPS) | found


def play(sweep, quality, direction="min", **shape):
    """Run the baseline and then whatever is wanted, a seed at a time; every prefix of the rows is seen once."""
    strategy = strategies.make(sweep, STEPS, direction)
    seeds = range(sweep.seed, sweep.seed + sweep.search.seeds)
    rows = [
        row(number, settings.PowerSGD(hook=hook), seed, BASELINE)
        for number, (hook, seed) in enumerate((hook, seed) for hook in sweep.search.baselines for seed in seeds)
    ]
    said = []
    while True:
        have = {(r["setting"], r["seed"]) for r in rows}
        wanted = [
            (s, seed) for s in strategy.next(rows) for seed in seeds if (settings.setting_key(s), seed) not in have
        ]
        now = strategy.decisions(rows)
        assert now[: len(said)] == said
        said = now
        if not wanted:
            return rows, said
        rows.append(row(len(rows), *wanted[0], quality(*wanted[0]), **shape))


def order(rows):
    """The settings tried, (start, rank) each, batched ones named."""
    keys = list(dict.fromkeys(r["setting"] for r in rows if r["start_powerSGD_iter"] is not None))
    return [key.removeprefix("layerwise-") for key in keys]


def recommended(sweep, rows, direction="min"):
    points = statistics.points(
        rows,
        baseline="off",
        direction=direction,
        tolerance=sweep.search.tolerance,
        confidence=sweep.search.confidence,
    )
    point = statistics.recommend(points, baseline="off", direction=direction)["point"]
    return None if point is None else point["setting"]


def needs(rank, start=0):
    """The quality of a task that wants at least this rank, whenever compression begins."""
    return lambda s, seed: BASELINE + (0.0 if s.matrix_approximation_rank >= rank else 0.3)


def test_ladder_climbs_until_satisfied_and_says_why():
    rows, said = play(sweep_of("ladder"), needs(4))
    assert order(rows) == ["r1-s40", "r2-s40", "r4-s40"]
    assert said == [
        "rank 1 at 10 %: perplexity 0.3 above baseline, tolerance 0.2: rank 2 next",
        "rank 2 at 10 %: perplexity 0.3 above baseline, tolerance 0.2: rank 4 next",
        "rank 4 at 10 %: perplexity 0 above baseline, tolerance 0.2: satisfactory",
        "rank 4 at 10 %: no untried setting sends fewer bytes, the ladder ends",
    ]


def test_ladder_starts_later_when_the_top_rank_does_not_do():
    rows, said = play(sweep_of("ladder"), lambda s, seed: BASELINE + (s.start_powerSGD_iter < 80))
    assert order(rows) == [*(f"r{r}-s40" for r in (1, 2, 4, 8, 16)), "r1-s80", "batched-r1-s80"]
    assert said[4].endswith("the top rank does not do, rank 1 at 20 % next")


def test_ladder_gives_up_after_the_whole_grid():
    rows, said = play(sweep_of("ladder"), lambda s, seed: BASELINE + 1)
    assert len(order(rows)) == 15
    assert said[-1].endswith("no rank at any start is satisfactory")


@pytest.mark.parametrize("hook", ["layerwise", "batched"])
def test_ladder_tries_the_batched_hook_only_beside_a_layerwise_rank_1(hook):
    rows, _ = play(sweep_of("ladder", f"powersgd={hook}"), needs(1))
    assert order(rows) == (["r1-s40", "batched-r1-s40"] if hook == "layerwise" else ["batched-r1-s40"])


def test_ladder_tries_what_sends_fewer_bytes_by_its_shapes():
    # Rank 16 is nearly as large as the gradient here, so that a later start of a low rank sends less.
    quality = lambda s, seed: BASELINE + (s.matrix_approximation_rank < 16 and s.start_powerSGD_iter < 80)  # noqa: E731
    rows, said = play(sweep_of("ladder"), quality, floor=20, factor=50)
    assert order(rows) == [*(f"r{r}-s40" for r in (1, 2, 4, 8, 16)), "r1-s80"]
    assert said[-3] == "rank 1 at 20 % sends fewer bytes by its shapes than rank 16 at 10 %: it is next"
    assert said[-2] == "rank 1 at 20 %: perplexity 0 above baseline, tolerance 0.2: taken"


def test_ladder_tries_a_rank_that_diverged_early_rather_than_miss_it():
    def quality(s, seed):
        return "pruned" if s.start_powerSGD_iter == 40 and s.matrix_approximation_rank < 16 else BASELINE

    rows, said = play(sweep_of("ladder"), quality, floor=20, factor=50)
    assert order(rows)[-1] == "r1-s80"
    assert said[0] == "rank 1 at 10 %: diverged: rank 2 next"


def test_a_running_seed_leaves_a_setting_open_and_crashed_seeds_do_not_satisfy():
    sweep = sweep_of("ladder")
    strategy = strategies.make(sweep, STEPS, "min")
    rows, _ = play(sweep, lambda s, seed: "fail" if s.matrix_approximation_rank == 1 else BASELINE)
    assert order(rows)[:2] == ["r1-s40", "r2-s40"]
    assert strategy.decisions(rows)[0] == "rank 1 at 10 %: every trial failed: rank 2 next"
    first = next(i for i, r in enumerate(rows) if r["setting"] == "layerwise-r1-s40")
    running = [*rows[: first + 1], rows[first + 1] | {"state": "running"}]
    assert strategy.decisions(running) == []
    assert [settings.setting_key(s) for s in strategy.next(running)] == ["layerwise-r1-s40"]


def test_with_a_confidence_an_undecided_rank_is_climbed_over():
    noise = {0: -0.3, 1: 0.35}
    quality = lambda s, seed: BASELINE + (noise[seed] if s.matrix_approximation_rank == 1 else 0.0)  # noqa: E731
    assert order(play(sweep_of("ladder"), quality)[0])[0:2] == ["r1-s40", "batched-r1-s40"]
    rows, said = play(sweep_of("ladder", "search.confidence=0.95"), quality)
    assert order(rows)[1] == "r2-s40"
    assert "95% interval" in said[0]
    assert said[0].endswith("tolerance 0.2, undecided: rank 2 next")


@st.composite
def monotone(draw):
    """For each start the lowest satisfactory rank's place on the ladder, never more for a later start."""
    return sorted(draw(st.lists(st.integers(0, 5), min_size=3, max_size=3)), reverse=True)


@examples(max_examples=60, deadline=None)
@given(lowest=monotone(), factor=st.sampled_from([1, 10, 30, 60]), direction=st.sampled_from(["min", "max"]))
def test_ladder_recommends_what_the_grid_does_and_never_spends_more(lowest, factor, direction):
    places = dict(zip((40, 80, 160), lowest, strict=True))

    def quality(s, seed):
        if s.hook is settings.Hook.batched:
            return BASELINE + (1 if direction == "min" else -1)
        good = math.log2(s.matrix_approximation_rank) >= places[s.start_powerSGD_iter]
        return BASELINE + (0 if good else 0.5 if direction == "min" else -0.5)

    grid, _ = play(GRID_SWEEP, quality, direction, factor=factor)
    ladder, _ = play(LADDER_SWEEP, quality, direction, factor=factor)
    assert recommended(LADDER_SWEEP, ladder, direction) == recommended(GRID_SWEEP, grid, direction)
    assert len([key for key in order(ladder) if "batched" not in key]) <= 15
    if lowest[0] < 5 and factor == 1:
        assert len(order(ladder)) <= 6


GRID_SWEEP, LADDER_SWEEP = sweep_of("grid"), sweep_of("ladder")


def test_halving_goes_down_until_the_metric_is_lost():
    rows, said = play(sweep_of("halving", "search.max_rank=20"), needs(4))
    assert order(rows) == ["r16-s40", "r8-s40", "r4-s40", "r2-s40"]
    assert said[0] == "rank 16 at 10 %: perplexity 0 above baseline, tolerance 0.2: satisfactory, rank 8 next"
    assert (
        said[-1] == "rank 2 at 10 %: perplexity 0.3 above baseline, tolerance 0.2: lost, rank 4 at 10 % is the answer"
    )


def test_halving_ends_at_rank_1_or_where_uncompressed_slices_are_the_floor():
    assert order(play(sweep_of("halving"), needs(1), floor=0)[0])[-1] == "r1-s40"
    rows, said = play(sweep_of("halving"), needs(1), floor=600, factor=10)
    assert order(rows) == ["r16-s40", "r8-s40", "r4-s40"]
    assert "the floor" in said[-1]


def test_halving_passes_ranks_at_which_nothing_is_compressed_yet():
    assert order(play(sweep_of("halving"), needs(4), factor=250)[0]) == ["r16-s40", "r8-s40", "r4-s40", "r2-s40"]


def test_halving_starts_later_only_when_the_largest_rank_does_not_do():
    rows, said = play(sweep_of("halving"), lambda s, seed: BASELINE + (s.start_powerSGD_iter < 80), floor=0)
    assert order(rows) == ["r16-s40", *(f"r{r}-s80" for r in (16, 8, 4, 2, 1))]
    rows, said = play(sweep_of("halving"), lambda s, seed: BASELINE + 1)
    assert (len(order(rows)), said[-1]) == (3, "no start is left")


def wide(s, seed):
    """A made-up task that wants error feedback, a rank of 4, and diverges under the batched hook at rank 1."""
    if s.hook is settings.Hook.batched and s.matrix_approximation_rank == 1:
        return "pruned"
    return BASELINE + (not s.use_error_feedback) + max(0.0, 2 - math.log2(s.matrix_approximation_rank)) / 2


@pytest.mark.parametrize("direction", ["min", "max"])
def test_tpe_tries_so_many_different_settings_and_resumes_alike(direction):
    sweep = sweep_of("tpe", "search.trials=14")
    rows, said = play(sweep, wide, direction)
    whole = order(rows)
    assert len(whole) == len(said) == 14
    strategy = strategies.make(sweep, STEPS, direction)
    for kept in (4, 11, 24, len(rows) - 1):  # the record cut anywhere: the same settings go on
        known = [r["setting"] for r in rows[: kept + 1]]
        again = [settings.setting_key(s) for s in strategy.next(rows[:kept])]
        assert again[-1] == known[-1] or known[-1] in again
    other = play(sweep_of("tpe", "search.trials=3", "seed=7"), wide, direction)[0]
    assert order(other) != whole[:3]


def test_tpe_varies_what_it_says_and_its_parameters_can_be_recovered():
    rows, _ = play(sweep_of("tpe", "search.trials=14", "search.seeds=1"), wide)
    tried = [study.setting_of(r) for r in rows if r["start_powerSGD_iter"] is not None]
    assert {s.hook.name for s in tried} == {"layerwise", "batched"}
    assert all(40 <= s.start_powerSGD_iter <= 160 for s in tried)
    assert all(s.matrix_approximation_rank in (1, 2, 4, 8, 16) for s in tried)
    assert all(("min_compression_rate" in tpe.parameters(s)) == (s.hook.name == "layerwise") for s in tried)
    assert len({s.min_compression_rate for s in tried if s.hook is settings.Hook.layerwise}) > 1


def test_tpe_grows_and_keeps_what_it_tried():
    short, _ = play(sweep_of("tpe", "search.trials=4", "search.seeds=1"), wide)
    long, _ = play(sweep_of("tpe", "search.trials=6", "search.seeds=1"), wide)
    assert order(long)[:4] == order(short)


@pytest.mark.parametrize("strategy", ["grid", "ladder", "halving", "tpe"])
def test_settings_by_hand_run_beside_any_strategy_and_count_for_none(strategy):
    by_hand = "search.settings=[{hook: layerwise, matrix_approximation_rank: 3, start_powerSGD_iter: 99}]"
    small = ("search.trials=3", "search.seeds=1")
    alone, _ = play(sweep_of(strategy, *small), wide)
    beside, _ = play(sweep_of(strategy, *small, by_hand), wide)
    assert order(beside) == [*order(alone), "r3-s99"]


@pytest.mark.parametrize("strategy", ["ladder", "halving", "tpe"])
def test_a_start_that_no_run_reaches_is_named_before_anything_runs(strategy):
    with pytest.raises(ValueError, match=r"start_powerSGD_iter=400.*before the end"):
        strategies.make(sweep_of(strategy, "search.start_fractions=[0.1,0.999]"), STEPS, "min")


@pytest.mark.parametrize("strategy", ["grid", "ladder", "halving"])
def test_a_walk_over_ranks_needs_a_hook_with_a_rank(strategy):
    with pytest.raises(ValueError, match=f"powersgd=bf16: search={strategy}"):
        strategies.make(sweep_of(strategy, "powersgd=bf16"), STEPS, "min")


@pytest.mark.parametrize("growth", [1, 3, 6])
def test_ranks_grow_by_powers_of_two(growth):
    with pytest.raises(ValueError, match=f"search.rank_growth={growth} is not allowed: it must be a power of two"):
        sweep_of("grid", f"search.rank_growth={growth}")
