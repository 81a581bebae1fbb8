"""What ranks share beside gradients: evaluation, one small all-reduce a report, and their summaries at the end.
What travels while they train is metered as control traffic, apart from the gradients."""

import hashlib
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from powersgd_lab.datasets.base import Data
from powersgd_lab.training import sharding
from powersgd_lab.training import tasks
from powersgd_lab.training.meter import Meter


@dataclass(frozen=True)
class Signals:
    """What all ranks know alike after a report. loss is the mean over ranks and the steps since the last report."""

    loss: float
    stop: bool
    save: bool
    steps_to_next: int


class Agreement:
    """The collectives beside DDP's, all on the default group and the rank's device."""

    def __init__(self, device: torch.device, meter: Meter) -> None:
        self._device, self._meter = device, meter
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()

    def report(self, losses: Sequence[torch.Tensor], stop: bool, save: bool, steps_to_next: int) -> Signals:
        """Share the losses (0-dimensional, one a pass) since the last report, and rank 0's three decisions."""
        deciding = self._rank == 0
        mean = torch.stack(list(losses)).double().mean() / self._world_size
        decisions = [float(decision) if deciding else 0.0 for decision in (stop, save, steps_to_next)]
        shared = torch.cat([mean.view(1), torch.tensor(decisions, dtype=torch.float64, device=self._device)])
        self._sum(shared)
        loss, stopped, saved, steps = shared.tolist()
        return Signals(loss, stopped > 0, saved > 0, int(steps))

    def evaluate(
        self, model: nn.Module, data: Data, batch_size: int, autocast: bool, limit: int | None = None
    ) -> dict[str, float]:
        """Every metric over the validation split, each sample once, with rank 0's buffers on all ranks.

        limit: with more samples than so many, that many of them are taken, evenly spaced. `model` is the one inside
        DDP, whose forward pass would wait for other ranks."""
        self.broadcast_buffers(model)
        chosen = sharding.evenly_spaced(len(data.validation), limit)
        shard = sharding.evaluation_shard(chosen, self._rank, self._world_size)
        sums = torch.zeros(3, dtype=torch.float64, device=self._device)
        modes = {module: module.training for module in model.modules()}
        model.eval()
        with torch.no_grad(), torch.autocast(self._device.type, torch.bfloat16, enabled=autocast):
            for begin in range(0, len(shard), batch_size):
                samples = shard[begin : begin + batch_size]
                inputs, targets = tasks.batch(data, data.validation, samples, self._device)
                sums += tasks.evaluation_sums(model(inputs), targets)
        for module, training in modes.items():
            module.training = training  # a user may have frozen a part
        self._sum(sums)
        assert sums[0].item() == len(chosen) * data.validation.targets[0].numel(), "every prediction is counted once"
        return tasks.task_of(data).values(sums)

    def broadcast_buffers(self, model: nn.Module) -> None:
        for buffer in model.buffers():
            self._meter.control(buffer)
            dist.broadcast(buffer, 0)

    def gather(self, summary: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's summary, on every rank, in the order of ranks."""
        summaries: list[dict[str, Any]] = [{} for _ in range(self._world_size)]
        dist.all_gather_object(summaries, summary)
        return summaries

    def _sum(self, tensor: torch.Tensor) -> None:
        self._meter.control(tensor)
        dist.all_reduce(tensor)


def sha256_of(tensors: Iterable[torch.Tensor]) -> str:
    """Of the bytes of all tensors, one after another."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
