"""A multilayer perceptron on flattened pictures: large square-ish matrices and nothing else.
The plainest case for gradient compression, and quick to train in tests."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from powersgd_lab.settings import require


class MLP(nn.Module):
    """Pictures (B, channels, height, width) to logits (B, classes), with ReLU after each of the `hidden` layers.

    Without hidden layers it is logistic regression. Raises ValueError for a hidden layer without units."""

    def __init__(self, hidden: Sequence[int], channels: int, height: int, width: int, classes: int) -> None:
        super().__init__()
        require(all(units >= 1 for units in hidden), "model.hidden", list(hidden), "a list of layer sizes, each >= 1")
        sizes = [channels * height * width, *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1], classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(images)
        return logits
