"""Names for error messages: hooks see tensors, users know their parameters by name.
Only ever used on the way to raising, so it may search.
"""

import gc
from collections.abc import Sequence

import torch


def name_of(parameters: Sequence[torch.Tensor]) -> str:
    """The first of ``parameters`` by its name in the model, found among the DDP models alive, or by its shape."""
    first = parameters[0]
    for model in gc.get_objects():
        if type(model) is torch.nn.parallel.DistributedDataParallel:
            for name, parameter in model.module.named_parameters():
                if parameter is first:
                    return f"parameter {name!r}"
    return f"a parameter of shape {tuple(first.shape)}"
