"""The parts of a trial, made from its settings: device, model, DDP, optimizer.
The check before a sweep makes them the same way, so that what fails in a rank fails there first."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_lab import settings
from powersgd_lab.datasets.base import Data
from powersgd_lab.settings import Backend
from powersgd_lab.settings import Device
from powersgd_lab.settings import Launcher
from powersgd_lab.settings import Trial
from powersgd_lab.training import communication
from powersgd_lab.training.meter import Meter


def device_and_backend(launcher: Launcher) -> tuple[Device, Backend]:
    """What `auto` stands for on this machine. Raises ValueError when what is asked for is not there."""
    there = torch.cuda.is_available()
    device = launcher.device
    if device is Device.auto:
        device = Device.cuda if there else Device.cpu
    if device is Device.cuda and not there:
        raise ValueError("launcher.device=cuda is not allowed: there is no CUDA device here, it must be cpu or auto")
    backend = launcher.backend
    if backend is Backend.auto:
        backend = Backend.nccl if device is Device.cuda else Backend.gloo
    if backend is Backend.nccl and device is Device.cpu:
        raise ValueError("launcher.backend=nccl is not allowed: there is no CUDA device here, it must be gloo or auto")
    return device, backend


def rank_device(device: Device, local_rank: int) -> torch.device:
    """A rank's device; ranks share devices when there are fewer, which gloo allows."""
    if device is Device.cpu:
        return torch.device("cpu")
    chosen = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    return chosen


def make_data(node: Mapping[str, Any]) -> Data:
    """Raises ValueError when the data set's target returns something else."""
    # An own target need not take a data_dir that nobody gave.
    data = settings.build("dataset", {key: value for key, value in node.items() if (key, value) != ("data_dir", None)})
    if not isinstance(data, Data):
        raise ValueError(
            f"dataset._target_={node['_target_']} must return a powersgd_lab.datasets.base.Data, "
            f"not {type(data).__name__}"
        )
    return data


def make_model(node: Mapping[str, Any], data: Data, seed: int) -> nn.Module:
    """The model with the weights that `seed` gives, the same on every rank.

    Raises ValueError when the target returns something else, or a model with nothing to train."""
    torch.manual_seed(seed)
    model = settings.build("model", node, **data.facts)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model._target_={node['_target_']} must return a torch.nn.Module, not {type(model).__name__}")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"model._target_={node['_target_']} has no parameter that is trained")
    return model


def make_optimizer(node: Mapping[str, Any], model: nn.Module, decay_norms_and_biases: bool) -> torch.optim.Optimizer:
    """The optimizer over all trained parameters. Without `decay_norms_and_biases` those of at most one dimension
    are in a group of their own, whose weight decay is 0.

    Raises ValueError when the target refuses its arguments or returns something else."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained}]
    if not decay_norms_and_biases:
        vectors = [p for p in trained if p.ndim <= 1]
        groups = [{"params": [p for p in trained if p.ndim > 1]}, {"params": vectors, "weight_decay": 0.0}]
    try:
        optimizer = settings.build("optimizer", node, [group for group in groups if group["params"]])
    except (TypeError, ValueError) as error:
        text = str(error)
        raise ValueError(text if text.startswith("optimizer.") else f"optimizer: {text}") from None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer._target_={node['_target_']} must return a torch.optim.Optimizer, not {type(optimizer).__name__}"
        )
    return optimizer


def distribute(
    model: nn.Module, trial: Trial, device: torch.device, meter: Meter
) -> tuple[DistributedDataParallel, Any]:
    """`model` under DDP with the trial's hook. Buffers are not broadcast at every step: evaluation does it.

    Returns the hook's state beside it."""
    ddp = trial.trainer.ddp
    distributed = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        forward_sync_buffers=False,
        bucket_cap_mb=communication.bucket_cap_mb(trial, trial.launcher.backend),
        find_unused_parameters=ddp.find_unused_parameters,
        static_graph=ddp.static_graph,
        gradient_as_bucket_view=ddp.gradient_as_bucket_view,
    )
    return distributed, communication.register(distributed, trial.powersgd, trial.seed, meter)


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of all gradients in their own precision: what one rank hands over in an uncompressed step."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
