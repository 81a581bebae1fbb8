"""What a batch means: the loss that is minimized and the metrics that judge, both from logits and class indices.
A classified picture and a predicted token differ only in how many predictions a sample holds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from powersgd_lab.datasets.base import Data
from powersgd_lab.datasets.base import Split
from powersgd_lab.settings import require


@dataclass(frozen=True)
class Task:
    """metrics: each one's direction, `min` or `max`; the first is the one that judges unless another is asked for."""

    name: str
    metrics: Mapping[str, str]

    def metric(self, asked: str | None) -> str:
        """The metric that judges. Raises ValueError for one that the task does not have."""
        if asked is not None:
            require(asked in self.metrics, "trainer.metric", asked, f"one of {', '.join(self.metrics)} ({self.name})")
        return asked if asked is not None else next(iter(self.metrics))

    def values(self, sums: torch.Tensor) -> dict[str, float]:
        """Every metric from `evaluation_sums` over the whole validation split.

        loss: nats a prediction. perplexity: exp(loss). accuracy: a fraction, 0 to 1."""
        count, loss, correct = sums.tolist()
        mean = loss / count
        found = {"loss": mean, "accuracy": correct / count}
        if "perplexity" in self.metrics:
            # exp overflows at 710 nats; such a model has diverged all the same
            found["perplexity"] = math.exp(mean) if mean < 700 else math.inf
        return found


TASKS = {
    "classification": Task("classification", {"accuracy": "max", "loss": "min"}),
    "language": Task("language", {"perplexity": "min", "accuracy": "max", "loss": "min"}),
}


def task_of(data: Data) -> Task:
    """Raises ValueError for a data set of a task that there is not."""
    require(data.task in TASKS, "the data set's task", data.task, f"one of {', '.join(TASKS)}")
    return TASKS[data.task]


def batch(data: Data, split: Split, samples: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of the `samples` (indices), on the device, in the dtypes that models and losses take.

    Pictures come as float32, scaled by the data set's mean and deviation; tokens and classes as int64."""
    inputs = split.inputs[samples].to(device, non_blocking=True)
    targets = split.targets[samples].to(device, non_blocking=True).long()
    if data.task == "language":
        return inputs.long(), targets
    return (inputs.float() - data.mean) / data.std, targets


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy in nats, the mean over all predictions. logits (…, classes), targets (…) class indices."""
    return cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def evaluation_sums(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(3,) float64: predictions, sum of their cross entropies, how many are right. Sums add up over any sharding."""
    flat, wanted = logits.float().flatten(0, -2), targets.flatten()
    loss = cross_entropy(flat, wanted, reduction="sum")
    correct = (flat.argmax(dim=-1) == wanted).sum()
    count = torch.tensor(float(len(wanted)), dtype=torch.float64, device=flat.device)
    return torch.stack([count, loss.double(), correct.double()])
