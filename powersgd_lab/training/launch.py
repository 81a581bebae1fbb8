"""The controller's side of the fork server: launch a trial, follow it, end it, learn how it ended.
Everything is driven by `poll`, so that one thread can follow any number of trials."""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from powersgd_lab import settings
from powersgd_lab.settings import Backend
from powersgd_lab.settings import Hook
from powersgd_lab.settings import Launcher
from powersgd_lab.settings import Trial
from powersgd_lab.training import failure
from powersgd_lab.training import journal
from powersgd_lab.training.failure import Exit
from powersgd_lab.training.slots import Slot
from powersgd_lab.training.slots import cores


# PyTorch's own hook can leave ranks waiting for each other, so a trial with it always has a limit; a longer run asks
# for a longer one with trainer.timeout.
SECONDS_WITH_PYTORCHS_HOOK = 1800.0

START_SECONDS = 120.0  # to import torch on a slow disk


@dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    state: `complete`, `pruned` (diverged, stopped) or `fail`. reason: one line, empty for a complete trial.
    result: result.json, empty for a failed trial."""

    state: str
    reason: str
    result: dict[str, Any]


class ForkServer:
    """A context manager around the server's process. Leaving it ends whatever still runs.

    Enter it from a thread that stays: the kernel ends the server when the thread that started it ends."""

    def __init__(self) -> None:
        self._trials: dict[int, RunningTrial] = {}
        self._launched = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket
        self._rest = b""  # of a line that has not come whole

    def __enter__(self) -> "ForkServer":
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        assert self._process is not None
        self._socket.close()  # the server kills its ranks and ends
        self._process.wait()

    def launch(
        self,
        directory: Path,
        trial: Trial,
        *,
        slot: Slot | None = None,
        resume: bool = False,
    ) -> "RunningTrial":
        """Start the trial's ranks and return at once. What an earlier attempt left in `directory` is removed.

        resume: keep the checkpoint and the curve of an earlier attempt at the same trial, to go on from there.
        slot: the cores or GPUs that the trial may use, all of this process's if None.
        Raises OSError when the directory cannot be written."""
        if self._process is None or self._process.poll() is not None:
            self._start()  # a server that was killed takes its trials with it, not the ones to come
        directory, slot = directory.absolute(), slot or Slot()
        directory.mkdir(parents=True, exist_ok=True)
        journal.clear(directory, keep_progress=resume and _same_trial(directory, trial))
        settings.write_trial(trial, directory / journal.CONFIG)
        self._launched += 1
        running = RunningTrial(self, self._launched, directory, trial)
        self._trials[self._launched] = running
        self._send(
            {
                "launch": self._launched,
                "directory": str(directory),
                "world_size": trial.launcher.world_size,
                "threads": threads(trial.launcher, len(slot.cores or cores())),
                "cores": slot.cores,
                "environment": _network(trial.launcher) | slot.environment,
                "path": sys.path,
                "launched": time.time(),
            }
        )
        return running

    def signal(self, trial: int, number: int) -> None:
        self._send({"signal": number, "trial": trial})

    def pump(self) -> None:
        """Pass on what the server has told since the last call."""
        while self._readable(0) and (received := self._receive()):
            *lines, self._rest = (self._rest + received).split(b"\n")
            for line in lines:
                told = json.loads(line)
                self._trials[told["trial"]].rank_ended(told["rank"], told["status"])

    def _start(self) -> None:
        if self._process is not None:
            self._socket.close()  # it led to a server that is gone
        self._socket, theirs = socket.socketpair()
        self._rest = b""
        # One thread a pool: a process that forks must have no other threads, and ranks set their own number.
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "powersgd_lab.training.server", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C in the terminal is the controller's to handle
            )
        if not (self._readable(START_SECONDS) and self._receive()):
            raise RuntimeError("the fork server did not start; its error is above")

    def _send(self, request: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            self._lost()

    def _readable(self, seconds: float) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            return bool(selector.select(seconds))

    def _receive(self) -> bytes:
        try:
            received = self._socket.recv(1 << 16)
        except ConnectionResetError:
            received = b""
        if not received:
            self._lost()
        return received

    def _lost(self) -> None:
        """The server is gone, and the kernel has killed its ranks."""
        for running in self._trials.values():
            running.server_lost()


class RunningTrial:
    """One trial's ranks, from launch to outcome. Nothing happens but in `poll`, which is to be called often."""

    def __init__(self, server: ForkServer, number: int, directory: Path, trial: Trial) -> None:
        self._server, self._number, self._directory, self._trial = server, number, directory, trial
        limit = time_limit(trial)
        self._limit = limit
        self._deadline = None if limit is None else time.monotonic() + limit
        self._exits: dict[int, Exit] = {}  # ranks that have ended
        self._own: dict[int, Exit] = {}  # those of them that failed before anyone ended them
        self._ending: str | None = None  # why the ranks are being ended, once they are
        self._kill_at: float | None = None
        self._outcome: Outcome | None = None

    def poll(self) -> Outcome | None:
        """The outcome once every rank is gone, else None. Does not block."""
        if self._outcome is None:
            self._server.pump()
        if self._outcome is None and len(self._exits) == self._trial.launcher.world_size:
            self._outcome = self._conclude()
        if self._outcome is None:
            self._enforce()
        return self._outcome

    def ask_to_stop(self, reason: str) -> None:
        """Let the ranks leave together at their next report; the trial ends as pruned, `stopped: reason`."""
        journal.write_whole(self._directory / journal.STOP, reason)

    def terminate(self) -> None:
        """End the ranks: SIGTERM now, SIGKILL after `launcher.grace` to those that are still there."""
        self._end("ended by the controller")

    def kill(self) -> None:
        """End the ranks at once."""
        self._end("killed by the controller")
        self._kill_at = time.monotonic()

    def rank_ended(self, rank: int, status: int) -> None:
        self._exits[rank] = Exit(status, time.time())
        if status != 0 and (self._ending is None or status not in (-signal.SIGTERM, -signal.SIGKILL)):
            self._own[rank] = self._exits[rank]

    def server_lost(self) -> None:
        if self._outcome is None:
            self._outcome = self._failed("the fork server died, and its ranks with it")

    def _enforce(self) -> None:
        now = time.monotonic()
        if self._own:
            self._end("a rank failed")
        elif self._deadline is not None and now >= self._deadline:
            self._end(f"timeout: not finished after {self._limit:g} s (trainer.timeout)")
        if self._kill_at is not None and now >= self._kill_at:
            self._server.signal(self._number, signal.SIGKILL)
            self._kill_at = None

    def _end(self, why: str) -> None:
        if self._ending is None and self._outcome is None:
            self._ending = why
            self._kill_at = time.monotonic() + self._trial.launcher.grace
            self._server.signal(self._number, signal.SIGTERM)

    def _conclude(self) -> Outcome:
        if self._own and self._ending in (None, "a rank failed"):
            return Outcome("fail", failure.first(self._directory, self._own).line, {})
        result = self._directory / journal.RESULT
        if all(left.status == 0 for left in self._exits.values()) and result.exists():
            read = json.loads(result.read_text())
            return Outcome(read["state"], read["reason"], read)
        return self._failed(self._ending or "the ranks ended without a result")

    def _failed(self, reason: str) -> Outcome:
        journal.write_whole(self._directory / journal.ERROR, reason + "\n")
        return Outcome("fail", reason, {})


def time_limit(trial: Trial) -> float | None:
    """Seconds that a trial may take: `trainer.timeout`; without it none, but with PyTorch's own hook half an hour."""
    if trial.trainer.timeout is not None:
        return trial.trainer.timeout
    return SECONDS_WITH_PYTORCHS_HOOK if trial.powersgd.hook is Hook.torch else None


def threads(launcher: Launcher, cores: int) -> int:
    """A rank's threads: `launcher.threads`, else the trial's cores shared out among its ranks."""
    return launcher.threads or max(1, cores // launcher.world_size)


def _network(launcher: Launcher) -> dict[str, str]:
    """Ranks of one host talk over loopback: the host's name may resolve to an address that nobody listens on."""
    if launcher.backend is Backend.nccl and launcher.interface is None:
        return {}
    loopback = "lo" if sys.platform == "linux" else "lo0"
    return {"GLOO_SOCKET_IFNAME": launcher.interface or loopback}


def _same_trial(directory: Path, trial: Trial) -> bool:
    """Whether an earlier attempt in `directory` trained this very trial."""
    try:
        earlier = settings.read_trial(directory / journal.CONFIG)
    except (OSError, ValueError):
        return False
    return settings.identity(earlier) == settings.identity(trial)
