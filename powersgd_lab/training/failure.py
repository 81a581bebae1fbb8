"""How a rank's error gets out: each writes its own file, and the launcher finds the first cause among them.
When one rank goes, the others fail too, with errors about a lost connection that explain nothing."""

import json
import re
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from powersgd_lab.training import journal


# What gloo, NCCL and the store say when another rank is gone
LOST_PEER = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|socket closed|remote process exited|peer closed",
    re.IGNORECASE,
)


LOG_LINES = 20  # of a rank that left no traceback


@dataclass(frozen=True)
class Exit:
    """status: as subprocess has it, negative for a signal. time: when it was noticed (time.time())."""

    status: int
    time: float


@dataclass(frozen=True)
class Failure:
    """line: one line that names the error. details: its traceback, or what else is known."""

    rank: int
    time: float
    line: str
    details: str

    @property
    def secondary(self) -> bool:
        """Whether it only says that another rank is gone."""
        return LOST_PEER.search(self.line) is not None


def write(directory: Path, rank: int, error: BaseException) -> None:
    line = " ".join(traceback.format_exception_only(error)[-1].split())
    text = {"time": time.time(), "line": line, "details": "".join(traceback.format_exception(error))}
    journal.write_whole(directory / journal.rank_error_name(rank), json.dumps(text))


def first(directory: Path, exits: Mapping[int, Exit]) -> Failure:
    """The first cause why a trial failed; all that is known of every rank goes to error.txt, the cause on top.

    exits: how each rank that failed of its own accord left."""
    failures = [_read(directory, rank) or _died(directory, rank, left) for rank, left in exits.items()]
    failures.sort(key=lambda found: (found.secondary, found.time))
    parts = [f"rank {found.rank}: {found.details.rstrip()}\n" for found in failures]
    journal.write_whole(directory / journal.ERROR, "\n".join(parts))
    return failures[0]


def _read(directory: Path, rank: int) -> Failure | None:
    path = directory / journal.rank_error_name(rank)
    return Failure(rank, **json.loads(path.read_text())) if path.exists() else None


def _died(directory: Path, rank: int, left: Exit) -> Failure:
    """A rank that could not say why: killed from outside, or crashed in native code."""
    how = f"signal {-left.status}" if left.status < 0 else f"exit status {left.status}"
    line = f"rank {rank} died ({how})"
    path = directory / journal.log_name(rank)
    # a rank that is killed as soon as it is forked has no log yet
    log = path.read_text(errors="replace").splitlines()[-LOG_LINES:] if path.exists() else []
    return Failure(rank, left.time, line, "\n".join([line, f"the end of {journal.log_name(rank)}:", *log]))
