"""Slots: which cores or GPUs a trial may use when several run side by side.
Disjoint, so that trials do not disturb each other's seconds, and their threads stay where they belong."""

import os
import sys
from dataclasses import dataclass
from dataclasses import field

import torch

from powersgd_lab.settings import Device
from powersgd_lab.settings import Launcher
from powersgd_lab.settings import require


@dataclass(frozen=True)
class Slot:
    """cores: the only ones that the trial's ranks run on; None: all. environment: variables for its ranks."""

    cores: tuple[int, ...] | None = None
    environment: dict[str, str] = field(default_factory=dict)


def cores() -> list[int]:
    """The cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))


def local_ranks(launcher: Launcher) -> int:
    """A trial's ranks on this host: all of them, unless torchrun has spread them over several."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", launcher.world_size))


def slots(launcher: Launcher, device: Device) -> list[Slot]:
    """`launcher.slots` resolved: `auto` is as many trials as have a core, or a GPU, for each rank, at least one.

    Raises ValueError for more slots than there are cores, or GPUs."""
    units = _visible_gpus() if device is Device.cuda else [str(core) for core in cores()]
    if isinstance(launcher.slots, str):
        count = max(1, len(units) // launcher.world_size)
    else:
        count = launcher.slots
        kind = "GPUs" if device is Device.cuda else "cores"
        require(count <= len(units), "launcher.slots", count, f"at most the {len(units)} {kind} here, or auto")
    if count == 1:
        return [Slot()]
    share = len(units) // count
    shares = [units[slot * share : (slot + 1) * share] for slot in range(count)]
    if device is Device.cuda:
        return [Slot(environment={"CUDA_VISIBLE_DEVICES": ",".join(part)}) for part in shares]
    return [Slot(cores=tuple(int(core) for core in part)) for part in shares]


def _visible_gpus() -> list[str]:
    """Names of the GPUs as CUDA_VISIBLE_DEVICES has them: an outer choice stands."""
    outer = os.environ.get("CUDA_VISIBLE_DEVICES")
    return outer.split(",") if outer else [str(gpu) for gpu in range(torch.cuda.device_count())]
