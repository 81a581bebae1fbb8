"""A group of real gloo processes that runs many test functions in turn.
Groups start once and are then asked again, since starting costs more than most tests; a failure replaces the group.
"""

import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class Ranks:
    """``world_size`` processes; ``run(function, *args)`` calls ``function(rank, world_size, *args)`` in each."""

    def __init__(self, world_size: int, seconds: float = 60) -> None:
        self.world_size = world_size
        self.seconds = seconds
        self._processes: list[mp.Process] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, seconds: float | None = None) -> list[Any]:
        """The results in order of rank; AssertionError with the ranks' tracebacks if one raises or takes too long."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        results, errors = [], []
        for rank, pipe in enumerate(self._pipes):
            # Once a rank has failed the others may wait for it forever: a moment is enough for theirs.
            allowed = 1.0 if errors else (seconds or self.seconds)
            if not pipe.poll(allowed):
                errors.append(f"rank {rank}: no answer within {allowed} s")
                continue
            try:
                good, value = pipe.recv()
            except EOFError:
                good, value = False, "died"
            if good:
                results.append(value)
            else:
                errors.append(f"rank {rank}: {value}")
        if errors:
            self.close()
            raise AssertionError("\n".join(errors))
        return results

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        # A process of their own with fresh memory, but with the imports done once for all groups of the session.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "torch.distributed", "hypothesis", "powersgd_lab.hook"])
        for rank in range(self.world_size):
            here, there = context.Pipe()
            store = str(Path(self._directory.name) / "store")
            process = context.Process(target=_serve, args=(rank, self.world_size, store, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        if self._processes:
            self._directory.cleanup()
        self._processes, self._pipes = [], []


def _serve(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            pipe.send((True, function(rank, world_size, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
