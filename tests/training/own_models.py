"""Models as a user might bring them, with the habits and mistakes that the tests of this room need.
Ranks import this module by its name: the launcher hands them this process's import path."""

import hashlib
import math

import torch
import torch.distributed as dist
from torch import nn

from powersgd_lab.datasets.base import Data
from powersgd_lab.datasets.base import Split
from powersgd_lab.settings import OwnModel


def own(name, **args):
    return OwnModel(name="own", _target_=f"own_models.{name}", args=args)


class Net(nn.Module):
    """Pictures to logits over one hidden layer with a norm: matrices, biases and a one-dimensional weight."""

    def __init__(self, channels, height, width, classes):
        super().__init__()
        self.first = nn.Linear(channels * height * width, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, classes)

    def forward(self, images):
        return self.last(torch.relu(self.norm(self.first(images.flatten(1)))))


class EndsAfter(Net):
    """Fails once it has been trained `passes` times, so that the checkpoint before that stays to be looked at."""

    def __init__(self, passes, **facts):
        super().__init__(**facts)
        self.left = passes

    def forward(self, images):
        if self.training and dist.is_initialized():
            self.left -= 1
            assert self.left >= 0, "enough"
        return super().forward(images)


class Tells(Net):
    """Prints what it sees and does in training, so that the ranks' logs can be compared."""

    def __init__(self, dropout, **facts):
        super().__init__(**facts)
        self.dropout = nn.Dropout(dropout)

    def forward(self, images):
        logits = super().forward(images)
        dropped = self.dropout(torch.ones(64))
        if self.training:
            seen = hashlib.sha256(images.contiguous().numpy().tobytes()).hexdigest()
            mask = "".join(str(int(kept > 0)) for kept in dropped)
            print(f"told dtype={logits.dtype} seen={seen} mask={mask}", flush=True)
        return logits * dropped.mean()


class KnowsItsRank(Net):
    """Its buffer differs between ranks after training; evaluated, it answers the class that the buffer names."""

    def __init__(self, **facts):
        super().__init__(**facts)
        self.register_buffer("answer", torch.tensor(-1))

    def forward(self, images):
        logits = super().forward(images)
        if self.training:
            self.answer.fill_(2 * dist.get_rank() if dist.is_initialized() else 0)
            return logits
        return logits * 0 + nn.functional.one_hot(self.answer, logits.shape[1])


class DivergesAlone(Net):
    """The logits of rank 1 are infinite from its third training pass on."""

    def __init__(self, **facts):
        super().__init__(**facts)
        self._passes = 0

    def forward(self, images):
        self._passes += self.training and dist.is_initialized()
        alone = self._passes >= 3 and dist.get_rank() == 1
        return super().forward(images) * (math.inf if alone else 1.0)


class DriftsInEvaluation(Net):
    """Each evaluation moves one bit of one weight in rank 1."""

    def forward(self, images):
        if not self.training and dist.get_rank() == 1:
            bias = self.last.bias.data
            bias[0] = torch.nextafter(bias[0], torch.tensor(math.inf))
        return super().forward(images)


class Unused(Net):
    def __init__(self, **facts):
        super().__init__(**facts)
        self.spare = nn.Linear(3, 3)


class Sparse(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.table = nn.Embedding(4096, classes, sparse=True)

    def forward(self, images):
        return self.table(images.flatten(1)[:, 0].long().abs() % 4096)


class WrongShape(Net):
    def forward(self, images):
        return super().forward(images).sum(1)


class Frozen(Net):
    def __init__(self, **facts):
        super().__init__(**facts)
        self.requires_grad_(False)


def not_a_model():
    return "a model"


def not_data(data_dir=None):
    return "data"


def not_an_optimizer(groups, lr, weight_decay):
    return "an optimizer"


def regression(data_dir=None):
    """A data set of a task that there is not."""
    split = Split(torch.zeros(100, 1, 8, 8), torch.zeros(100))
    return Data("regression", split, split, {"channels": 1, "height": 8, "width": 8, "classes": 10})
