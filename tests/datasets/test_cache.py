"""The cache makes a thing once, whoever asks and however many at a time, and maps what it made."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from powersgd_lab.datasets.cache import prepared


class Maker:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return {"numbers": np.arange(6, dtype=np.uint8).reshape(2, 3)}, {"calls": self.calls}


def test_the_second_call_finds_what_the_first_made(tmp_path):
    make = Maker()
    for _ in range(2):
        arrays, record = prepared("thing", {"size": 6}, make, str(tmp_path))
        assert arrays["numbers"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert arrays["numbers"].dtype == torch.uint8
        assert record == {"calls": 1}


def test_another_source_is_another_place(tmp_path):
    make = Maker()
    records = [prepared("thing", source, make, str(tmp_path))[1]["calls"] for source in (["a", 1], ["a", 2], ["a", 1])]
    assert records == [1, 2, 1]


def test_one_of_many_makes_and_the_others_wait(tmp_path):
    callers = 6
    barrier = threading.Barrier(callers)
    make = Maker()

    def ask(_):
        barrier.wait()
        return prepared("thing", 0, make, str(tmp_path))[0]["numbers"].sum().item()

    with ThreadPoolExecutor(callers) as pool:
        assert list(pool.map(ask, range(callers))) == [15] * callers
    assert make.calls == 1


def test_writing_to_a_tensor_does_not_change_the_cache(tmp_path):
    arrays, _ = prepared("thing", 0, Maker(), str(tmp_path))
    arrays["numbers"].fill_(9)
    again, _ = prepared("thing", 0, Maker(), str(tmp_path))
    assert again["numbers"].max() == 5


def test_an_interrupted_preparation_is_done_again(tmp_path, monkeypatch):
    def full_disk(file, array):
        file.write(b"half")
        raise OSError("No space left on device")

    make = Maker()
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full_disk)
        with pytest.raises(OSError, match="No space left"):
            prepared("thing", 0, make, str(tmp_path))
    assert not any(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    arrays, _ = prepared("thing", 0, make, str(tmp_path))
    assert arrays["numbers"].sum() == 15


def test_an_error_in_making_frees_the_lock(tmp_path):
    def fail():
        raise ValueError("dataset.files: broken")

    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            prepared("thing", 0, fail, str(tmp_path))


def test_the_cache_is_in_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    prepared("thing", 0, Maker())
    assert list((tmp_path / "xdg" / "powersgd_lab").glob("thing-*/record.json"))
    monkeypatch.delenv("XDG_CACHE_HOME")
    prepared("thing", 0, Maker())
    assert list((tmp_path / "home" / ".cache" / "powersgd_lab").glob("thing-*/record.json"))


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    occupied = tmp_path / "file"
    occupied.write_text("")
    for folder in (occupied, occupied / "below"):
        with pytest.raises(ValueError, match=r"^dataset\.data_dir=.*file.* cannot be written: "):
            prepared("thing", 0, Maker(), str(folder))
    assert [Path(path).name for path in tmp_path.iterdir()] == ["file"]
