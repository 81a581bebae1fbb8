"""ResNet-18 in its form for CIFAR pictures, the image model of the PowerSGD paper.
He et al., arXiv:1512.03385, with a 3x3 first convolution and no pooling after it, as 32x32 pictures need."""

import torch
from torch import nn
from torch.nn.functional import relu

from powersgd_lab.settings import require


class ResNet18(nn.Module):
    """Pictures (B, channels, height, width) to logits (B, classes); `width` is the first stage's channels.

    At width 64, for 3 channels and 10 classes, it has 11,173,962 parameters. Raises ValueError for a width below 1."""

    def __init__(self, channels: int, classes: int, width: int = 64) -> None:
        super().__init__()
        require(width >= 1, "model.width", width, "at least 1")
        self.first = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        blocks = []
        inputs = width
        for stage in range(4):
            outputs = width * 2**stage
            blocks += [Block(inputs, outputs, stride=1 if stage == 0 else 2), Block(outputs, outputs, stride=1)]
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.output = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # keeps the gradient's scale through the depth (arXiv:1502.01852)
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.blocks(relu(self.first_norm(self.first(images))))
        logits: torch.Tensor = self.output(features.mean(dim=(2, 3)))
        return logits


class Block(nn.Module):
    """Two convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = relu(self.first_norm(self.first(images)))
        return relu(self.second_norm(self.second(hidden)) + self.shortcut(images))
