"""Prepared arrays on disk: one process makes them under a file lock, every later one memory-maps them.
So the ranks of a trial start without parsing anything, and share one copy of the data in the page cache."""

import hashlib
import json
import os
from collections.abc import Callable
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock


FORMAT = 1  # part of every key: raise it when what is prepared from the same source changes


Arrays = Mapping[str, np.ndarray[Any, Any]]
Record = dict[str, Any]


def prepared(
    name: str, source: Any, make: Callable[[], tuple[Arrays, Record]], data_dir: str | None = None
) -> tuple[dict[str, torch.Tensor], Record]:
    """The arrays and the record that `make` returns, from the cache if they were made before.

    `source` (JSON values) is all that the result depends on: another source is another place in the cache. The
    tensors are copy-on-write maps of the files. Concurrent callers wait for the one that makes.

    Raises ValueError when the cache folder cannot be written."""
    key = hashlib.sha256(json.dumps([FORMAT, source]).encode()).hexdigest()[:16]
    folder = _cache_folder(data_dir)
    place = folder / f"{name}-{key}"
    if not _complete(place):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / f"{place.name}.lock").acquire()
        except OSError as error:
            raise ValueError(f"dataset.data_dir={folder} cannot be written: {error.strerror}") from None
        with lock:
            if not _complete(place):
                _write(place, *make())
    # "c": a private map that may be written to, which is what torch asks of the memory it is given
    arrays = {path.stem: torch.from_numpy(np.load(path, mmap_mode="c")) for path in place.glob("*.npy")}
    return arrays, json.loads((place / "record.json").read_text())


def _cache_folder(data_dir: str | None) -> Path:
    if data_dir is not None:
        return Path(data_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "powersgd_lab"


def _complete(place: Path) -> bool:
    return (place / "record.json").exists()


def _write(place: Path, arrays: Arrays, record: Record) -> None:
    """Each file appears whole or not at all, the record last: with it the place is complete."""
    place.mkdir(exist_ok=True)
    partial = place / "partial"
    try:
        for name, array in arrays.items():
            with partial.open("wb") as file:
                np.save(file, array)
            os.replace(partial, place / f"{name}.npy")
        partial.write_text(json.dumps(record))
        os.replace(partial, place / "record.json")
    finally:
        partial.unlink(missing_ok=True)
