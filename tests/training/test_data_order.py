"""Which samples are seen when: pure functions, over many sizes, that make runs on few and many ranks comparable.
What matters is that nothing is seen twice or left out, and that the order is the seed's alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from powersgd_lab.training.sharding import Shards
from powersgd_lab.training.sharding import evaluation_shard
from powersgd_lab.training.sharding import evenly_spaced
from powersgd_lab.training.sharding import rank_seed


def global_batches(samples, batch_size, accumulation, world_size, seed, steps):
    """What all ranks see together in each step, in the order of ranks."""
    ranks = [Shards(samples, batch_size, accumulation, rank, world_size, seed) for rank in range(world_size)]
    return [torch.cat([shards.step(step).flatten() for shards in ranks]).tolist() for step in range(steps)]


@pytest.mark.parametrize(("world_size", "batch_size", "accumulation"), [(1, 24, 1), (2, 12, 1), (3, 4, 2), (4, 2, 3)])
def test_the_order_does_not_depend_on_how_the_global_batch_is_dealt_out(world_size, batch_size, accumulation):
    alone = global_batches(100, 24, 1, 1, seed=5, steps=9)
    assert global_batches(100, batch_size, accumulation, world_size, seed=5, steps=9) == alone


@given(st.data())
def test_an_epoch_holds_each_sample_once_but_for_what_is_left_over(data):
    world_size, batch_size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    accumulation = data.draw(st.integers(1, 3))
    whole = world_size * batch_size * accumulation
    samples = data.draw(st.integers(whole, 4 * whole))
    per_epoch = Shards(samples, batch_size, accumulation, 0, world_size, 0).steps_per_epoch
    assert per_epoch == samples // whole
    seen = global_batches(samples, batch_size, accumulation, world_size, 0, 2 * per_epoch)
    for epoch in (seen[:per_epoch], seen[per_epoch:]):
        flat = [sample for batch in epoch for sample in batch]
        assert len(set(flat)) == len(flat) == samples - samples % whole
        assert set(flat) <= set(range(samples))


def test_epochs_and_seeds_have_orders_of_their_own():
    first, second = global_batches(64, 16, 1, 2, seed=0, steps=4)[::2]
    assert first != second
    assert global_batches(64, 16, 1, 2, seed=1, steps=1) != [first]


def test_any_step_can_be_asked_for_without_those_before():
    steps = [Shards(50, 4, 2, 1, 2, seed=3).step(step) for step in range(12)]
    shards = Shards(50, 4, 2, 1, 2, seed=3)
    assert all(torch.equal(shards.step(step), steps[step]) for step in (11, 4, 0, 7))
    assert steps[0].shape == (2, 4)


@given(samples=st.integers(1, 40), limit=st.none() | st.integers(1, 60), world_size=st.integers(1, 9))
def test_evaluation_counts_every_chosen_sample_once_on_any_number_of_ranks(samples, limit, world_size):
    chosen = evenly_spaced(samples, limit)
    parts = [evaluation_shard(chosen, rank, world_size) for rank in range(world_size)]
    assert torch.equal(torch.cat(parts), chosen)  # contiguous, in order, once
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert len(set(chosen.tolist())) == len(chosen) == min(samples, limit or samples)
    assert chosen.min() >= 0
    assert chosen.max() < samples


def test_a_limited_evaluation_is_spread_over_the_whole_split():
    assert evenly_spaced(100, 4).tolist() == [0, 25, 50, 75]
    assert evenly_spaced(3, 10).tolist() == [0, 1, 2]
    gaps = evenly_spaced(1000, 30).diff()
    assert set(gaps.tolist()) == {33, 34}


def test_every_seed_and_rank_has_a_random_stream_of_its_own():
    seeds = [rank_seed(seed, rank) for seed in range(20) for rank in range(20)]
    assert len(set(seeds)) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)  # what torch.manual_seed takes


def test_epochs_of_different_seeds_do_not_meet():
    """Seed and epoch are apart: the second epoch of seed 0 is not the first of seed 1."""
    _, second = global_batches(16, 16, 1, 1, seed=0, steps=2)
    assert [second] != global_batches(16, 16, 1, 1, seed=1, steps=1)
