"""Which samples a rank sees, and when: functions of the seed and the place in the run alone.
The global batches are the same for every world size, so that runs on few and many ranks can be compared."""

import numpy as np
import torch


class Shards:
    """The training split dealt out to ranks, a step at a time.

    An epoch's permutation, drawn from (seed, epoch), is cut into global batches of `world_size * accumulation *
    batch_size` samples; what is left over at its end is not seen in that epoch. Rank r gets the r-th contiguous part
    of each global batch, in `accumulation` passes."""

    def __init__(self, samples: int, batch_size: int, accumulation: int, rank: int, world_size: int, seed: int) -> None:
        self._samples, self._batch_size, self._accumulation = samples, batch_size, accumulation
        self._rank, self._seed = rank, seed
        self._part = batch_size * accumulation
        self._global = self._part * world_size
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    @property
    def steps_per_epoch(self) -> int:
        return self._samples // self._global

    def step(self, step: int) -> torch.Tensor:
        """The rank's sample indices in `step`: (accumulation, batch_size) int64, a row a pass."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            order = np.random.default_rng((self._seed, epoch)).permutation(self._samples)
            self._epoch, self._order = epoch, torch.from_numpy(order)
        begin = place * self._global + self._rank * self._part
        return self._order[begin : begin + self._part].view(self._accumulation, self._batch_size)


def evaluation_shard(chosen: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """The rank's part of the chosen samples: contiguous, sizes differ by one at most, every sample in one part."""
    return chosen[len(chosen) * rank // world_size : len(chosen) * (rank + 1) // world_size]


def evenly_spaced(samples: int, limit: int | None) -> torch.Tensor:
    """Indices of all samples, or of `limit` of them spread over the whole split, where files or classes may follow one
    another."""
    count = samples if limit is None else min(limit, samples)
    return torch.arange(count) * samples // count


def rank_seed(seed: int, rank: int) -> int:
    """A rank's own random stream (dropout), apart from other ranks' and from the shared one of the weights."""
    return int(np.random.SeedSequence((seed, rank)).generate_state(1, np.uint64)[0] >> 1)
