"""A small convolutional network for small pictures: three convolutions and one linear layer.
Trains to a few per cent error on MNIST in a minute of one core."""

import torch
from torch import nn

from powersgd_lab.settings import require


class CNN(nn.Module):
    """Pictures (B, channels, height, width) of any size to logits (B, classes).

    Convolutions of `width`, 2 `width` and 4 `width` channels, each with batch norm and ReLU. Raises ValueError for a
    width below 1."""

    def __init__(self, width: int, channels: int, classes: int) -> None:
        super().__init__()
        require(width >= 1, "model.width", width, "at least 1")
        self.features = nn.Sequential(
            *_convolution(channels, width),
            nn.MaxPool2d(2, ceil_mode=True),  # rounded up, so that a picture of one pixel passes as well
            *_convolution(width, 2 * width),
            nn.MaxPool2d(2, ceil_mode=True),
            *_convolution(2 * width, 4 * width),
        )
        self.output = nn.Linear(4 * width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.output(self.features(images).mean(dim=(2, 3)))
        return logits


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
