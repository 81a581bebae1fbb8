"""A trial's checkpoints: what each rank needs to go on as if it had not stopped, one file a rank.
A checkpoint counts once every rank has written its part, so that a kill at any moment leaves the last whole one."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from powersgd_lab.training.journal import CHECKPOINT


class Checkpoints:
    """checkpoint/step-N/rankR.pt after N steps; plain tensors and numbers, loadable with `weights_only=True`."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._folder, self._rank = directory / CHECKPOINT, rank

    def save(self, steps: int, state: dict[str, Any]) -> None:
        """Write this rank's part; the last checkpoint is replaced once all ranks have. All ranks call it together."""
        whole = self._folder / f"step-{steps}"
        partial = whole.with_suffix(".partial")
        partial.mkdir(parents=True, exist_ok=True)
        torch.save(state, partial / self._name)
        dist.barrier()
        if self._rank == 0:
            os.replace(partial, whole)
            for other in self._folder.iterdir():
                if other != whole:
                    shutil.rmtree(other)

    def load(self) -> dict[str, Any] | None:
        """This rank's part of the latest whole checkpoint, on the CPU; None when there is none."""
        found = [path for path in self._folder.glob("step-*") if path.suffix != ".partial"]
        if not found:
            return None
        latest = max(found, key=lambda path: int(path.name.removeprefix("step-")))
        state: dict[str, Any] = torch.load(latest / self._name, map_location="cpu", weights_only=True)
        return state

    @property
    def _name(self) -> str:
        return f"rank{self._rank}.pt"
