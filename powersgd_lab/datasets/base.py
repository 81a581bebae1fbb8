"""What a data set is to the rest of the lab: two splits in memory and what a model must know of them.
Any callable that returns a `Data` serves as a `dataset._target_`."""

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch


@dataclass(frozen=True)
class Split:
    """Samples along the first dimension of both tensors; they may be views of a memory-mapped file, of any dtype.

    images: inputs (N, channels, height, width), targets (N,) class indices.
    language: inputs (N, context) tokens, targets (N, context) the tokens that follow each.
    """

    inputs: torch.Tensor
    targets: torch.Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets) or len(self.inputs) == 0:
            raise ValueError(
                f"a split needs as many targets as inputs and at least one: {len(self.targets)} and {len(self.inputs)}"
            )

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Data:
    """A prepared data set.

    task: `classification` or `language`; says how a batch is turned into a loss and metrics.
    facts: what models are offered as arguments: channels, height, width, classes; or vocabulary, context.
    mean, std: classification inputs are scaled (x - mean) / std a batch at a time, so that uint8 images stay
        memory-mapped.
    record: what identifies the data (size, sha256, files), kept with the study; plain JSON values.
    """

    task: str
    train: Split
    validation: Split
    facts: Mapping[str, int]
    record: Mapping[str, Any] = field(default_factory=dict)
    mean: float = 0.0
    std: float = 1.0
