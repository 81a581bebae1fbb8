"""A trial's directory as its ranks see it: the journal that rank 0 keeps, the wish to stop, the result.
The launcher and the controller read what is written here; names of files are agreed on here alone."""

import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


CONFIG = "config.json"
METRICS = "metrics.jsonl"
RESULT = "result.json"
ERROR = "error.txt"
STOP = "stop"
RENDEZVOUS = "rendezvous"
CHECKPOINT = "checkpoint"


def log_name(rank: int | str) -> str:
    return f"rank{rank}.log"


def rank_error_name(rank: int | str) -> str:
    return f"rank{rank}.error"


def write_whole(path: Path, text: str) -> None:
    """The file appears with all of its text or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)


def clear(directory: Path, keep_progress: bool) -> None:
    """Remove what an earlier attempt left, its checkpoint and curve too unless the progress is kept."""
    if not keep_progress:
        shutil.rmtree(directory / CHECKPOINT, ignore_errors=True)
        (directory / METRICS).unlink(missing_ok=True)
    for pattern in (RESULT, ERROR, STOP, RENDEZVOUS, log_name("*"), rank_error_name("*")):
        for path in directory.glob(pattern):
            path.unlink()


class Journal:
    """metrics.jsonl, one flushed line an event, written by rank 0; the other ranks' journals do nothing.

    launched: the time (time.time()) at which the trial was launched. steps: those that an earlier attempt trained up
    to its checkpoint; what it told of later ones is forgotten."""

    def __init__(self, directory: Path, rank: int, launched: float, steps: int) -> None:
        self._directory, self._writes, self._launched = directory, rank == 0, launched
        self.first_step_seconds = math.nan
        if self._writes:
            write_whole(directory / METRICS, "".join(_told(directory / METRICS, steps)))
            self._file = (directory / METRICS).open("a")

    def write(self, event: str, **values: Any) -> None:
        """A number that is not finite is written as null: JSON has no word for it."""
        if self._writes:
            self._file.write(json.dumps({"event": event} | _plain(values)) + "\n")
            self._file.flush()

    def first_step(self) -> None:
        self.first_step_seconds = time.time() - self._launched

    def stop_asked(self) -> str | None:
        """Why the trial is to stop, as the file `stop` says it (perhaps an empty text); None when it is not."""
        if not self._writes:
            return None
        try:
            return (self._directory / STOP).read_text().strip()
        except FileNotFoundError:
            return None

    def write_result(self, result: dict[str, Any]) -> None:
        if self._writes:
            write_whole(self._directory / RESULT, json.dumps(_plain(result), indent=1) + "\n")
            self._file.close()
            shutil.rmtree(self._directory / CHECKPOINT, ignore_errors=True)  # nobody goes on from here


def _told(path: Path, steps: int) -> list[str]:
    """The whole lines on what happened up to `steps`, none of them for a trial that begins anew."""
    if not path.exists() or steps == 0:
        return []
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if json.loads(line)["step"] <= steps]


def follow(path: Path) -> Iterator[dict[str, Any] | None]:
    """The lines of a growing file as they come, None while there is no further whole line.

    A resumed trial writes its journal anew: then it is told from the beginning."""
    position, rest, file_id = 0, b"", 0
    while True:
        if path.exists():
            with path.open("rb") as file:
                if (found := os.fstat(file.fileno()).st_ino) != file_id:
                    position, rest, file_id = 0, b"", found
                file.seek(position)
                rest += file.read()
                position = file.tell()
        *lines, rest = rest.split(b"\n")
        for line in lines:
            yield json.loads(line)
        yield None


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
