"""Text as a data set for next-character prediction: any UTF-8 files, or the sources of Python's standard library.
The latter is the default data set, because every machine that runs the lab has it."""

import glob
import hashlib
import os
import platform
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from powersgd_lab.datasets.base import Data
from powersgd_lab.datasets.base import Split
from powersgd_lab.datasets.cache import Arrays
from powersgd_lab.datasets.cache import Record
from powersgd_lab.datasets.cache import prepared
from powersgd_lab.settings import require


TRAIN_PART = 0.95
VOCABULARY = 128  # at most; token 0 stands for all characters outside it

# Folders of the standard library that stay out: what is installed into it; tests (many distributions ship without
# them, and they hold files that are broken on purpose); tables and texts that a program wrote.
LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}


def python_source(context: int, data_dir: str | None = None) -> Data:
    """The .py files of the standard library of the Python that runs this, about 9 million characters.

    Two Python versions give different data: compare results by `record`'s sha256. `context` is the length of a
    sample in characters. Raises ValueError when this Python came without its sources, or as `text_files` does."""
    root = Path(sysconfig.get_path("stdlib"))
    files = {path.relative_to(root).as_posix(): path for path in _library_files(root)}
    if not files:
        raise ValueError(f"dataset=python_source finds no .py files in {root}: use dataset=text with files of your own")
    return _language("python_source", files, context, data_dir, key="dataset.context", skip_undecodable=True)


def text_files(files: Sequence[str], context: int, data_dir: str | None = None) -> Data:
    """Any UTF-8 files, as paths or globs (`~` and `**` included); `context` is the length of a sample in characters.

    Raises ValueError naming `dataset.files` when a pattern matches no file, a file is not UTF-8, or a split is
    shorter than one sample."""
    paths: set[Path] = set()
    for pattern in map(os.path.expanduser, files):
        # a name that exists is taken as it stands, so that brackets in it need no escape
        matches = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        found = {Path(match).resolve() for match in matches if os.path.isfile(match)}
        require(len(found) > 0, "dataset.files", pattern, "a file that exists, or a glob that matches one")
        paths |= found
    require(len(paths) > 0, "dataset.files", list(files), "a list of one file or more")
    root = os.path.commonpath([path.parent for path in paths])
    named = {path.relative_to(root).as_posix(): path for path in paths}
    return _language("text", named, context, data_dir, key="dataset.files", skip_undecodable=False)


def _library_files(root: Path) -> list[Path]:
    paths = []
    for folder, subfolders, names in os.walk(root):
        # config-* and _sysconfigdata* hold the paths of the machine that built this Python
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT and not name.startswith("config-")]
        sources = [name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
        paths += [Path(folder, name) for name in sources]
    return paths


def _language(
    name: str, files: dict[str, Path], context: int, data_dir: str | None, key: str, skip_undecodable: bool
) -> Data:
    require(context >= 1, "dataset.context", context, "at least 1 (characters)")
    states = [(str(path), (state := path.stat()).st_size, state.st_mtime_ns) for path in files.values()]
    source = [platform.python_version(), sorted(states)]
    tokens, record = prepared(name, source, lambda: _prepare(files, skip_undecodable), data_dir)
    return Data(
        task="language",
        train=_windows(tokens["train"], context, "training", key),
        validation=_windows(tokens["validation"], context, "validation", key),
        facts={"vocabulary": len(record["vocabulary"]) + 1, "context": context},
        record=record,
    )


def _windows(tokens: torch.Tensor, context: int, split: str, key: str) -> Split:
    """Samples that do not overlap, as views; each target is the token that follows the input at the same place."""
    samples = (len(tokens) - 1) // context
    if samples < 1:
        raise ValueError(
            f"{key}: the {split} split has {len(tokens)} characters, too few for one sample of "
            f"dataset.context={context} and the character after it"
        )
    size = samples * context
    return Split(tokens[:size].view(samples, context), tokens[1 : size + 1].view(samples, context))


def _prepare(files: dict[str, Path], skip_undecodable: bool) -> tuple[Arrays, Record]:
    texts = _read(files, skip_undecodable)
    train, validation = _split(texts)
    vocabulary = _vocabulary(train)
    arrays = {"train": _encode(train, vocabulary), "validation": _encode(validation, vocabulary)}
    stream = np.concatenate(list(arrays.values()))
    unknown = int((stream == 0).sum())
    if unknown > 0.01 * len(stream):
        warnings.warn(
            f"{unknown / len(stream):.0%} of the characters are outside the vocabulary of the {VOCABULARY - 1} most "
            "frequent ones and look alike to the model",
            stacklevel=2,
        )
    record = {
        "files": len(texts),
        "skipped_files": len(files) - len(texts),
        "characters": len(stream),
        "validation_characters": len(arrays["validation"]),
        "unknown_characters": unknown,
        "vocabulary": vocabulary,
        "sha256": hashlib.sha256(stream.tobytes()).hexdigest(),
        "python": platform.python_version(),
    }
    return arrays, record


def _read(files: dict[str, Path], skip_undecodable: bool) -> list[str]:
    """The texts that are not empty, in the order of a hash of their names: mixed, and alike on every machine."""
    texts = []
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        try:
            text = files[name].read_bytes().decode()
        except UnicodeDecodeError as error:
            if skip_undecodable:
                continue
            raise ValueError(f"dataset.files: {files[name]} is not UTF-8 (byte {error.start})") from None
        except OSError as error:
            raise ValueError(f"dataset.files: {files[name]} cannot be read: {error.strerror}") from None
        if text:
            texts.append(text)
    if not texts:
        raise ValueError("dataset.files: all files are empty")
    return texts


def _split(texts: list[str]) -> tuple[list[str], list[str]]:
    """The first 95 % of the characters and the rest, cut at the file boundary nearest to that; one file is cut inside.

    Whole files, because the pieces of one file are alike, and validation should not be on what was trained on."""
    if len(texts) == 1:
        cut = round(TRAIN_PART * len(texts[0]))
        return [texts[0][:cut]], [texts[0][cut:]]
    ends = np.cumsum([len(text) for text in texts])
    cut = 1 + int(np.abs(ends[:-1] - TRAIN_PART * ends[-1]).argmin())
    return texts[:cut], texts[cut:]


def _vocabulary(train: list[str]) -> str:
    """The training split's most frequent characters in the order of their code points; the i-th is token i + 1.

    With 127 of them a token is a byte, and Python's sources keep all of ASCII that they use."""
    counts: Counter[str] = Counter()
    for text in train:
        counts.update(text)
    return "".join(sorted(character for character, _ in counts.most_common(VOCABULARY - 1)))


def _encode(texts: list[str], vocabulary: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    table = np.zeros(sys.maxunicode + 1, np.uint8)
    table[[ord(character) for character in vocabulary]] = np.arange(1, len(vocabulary) + 1)
    return np.concatenate([table[np.frombuffer(text.encode("utf-32-le"), np.uint32)] for text in texts])
