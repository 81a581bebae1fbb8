"""Text becomes windows of tokens that line up with their targets, splits do not share files, mistakes are named."""

import hashlib
import os
import random
import sysconfig

import pytest
import torch

from powersgd_lab.datasets import text
from powersgd_lab.datasets.text import python_source
from powersgd_lab.datasets.text import text_files


def decode(tokens: torch.Tensor, record) -> str:
    return "".join("�" if token == 0 else record["vocabulary"][token - 1] for token in tokens.flatten().tolist())


def letters(count: int, seed: int = 0, alphabet: str = "abcdefgh \n") -> str:
    return "".join(random.Random(seed).choices(alphabet, k=count))


@pytest.fixture
def cache(tmp_path):
    return str(tmp_path / "cache")


@pytest.fixture
def folder(tmp_path):
    """60 files, each of one letter of its own, so that a window tells which file it is from."""
    folder = tmp_path / "texts"
    for index in range(60):
        path = folder / f"part{index % 3}" / f"{index}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(chr(ord("A") + index) * (80 + index))
    return folder


def test_one_file_is_split_by_position_and_keeps_every_character(tmp_path, cache):
    written = letters(2000)
    (tmp_path / "one.txt").write_text(written)
    data = text_files([str(tmp_path / "one.txt")], context=9, data_dir=cache)
    assert decode(data.train.inputs, data.record) == written[: len(data.train) * 9]
    assert decode(data.train.targets, data.record) == written[1 : len(data.train) * 9 + 1]
    assert decode(data.validation.inputs, data.record) == written[1900 : 1900 + len(data.validation) * 9]
    assert len(data.train) == (1900 - 1) // 9
    assert len(data.validation) == (100 - 1) // 9
    assert data.task == "language"
    assert data.facts == {"vocabulary": 11, "context": 9}
    assert data.record["characters"] == 2000
    assert data.record["validation_characters"] == 100


def test_samples_are_views_of_one_row_of_bytes(tmp_path, cache):
    (tmp_path / "one.txt").write_text(letters(500))
    split = text_files([str(tmp_path / "one.txt")], context=10, data_dir=cache).train
    assert split.inputs.dtype == torch.uint8
    assert split.targets.data_ptr() == split.inputs.data_ptr() + 1
    assert torch.equal(split.inputs.flatten()[1:], split.targets.flatten()[:-1])


@pytest.mark.filterwarnings("ignore:.*outside the vocabulary")
def test_files_are_not_divided_between_the_splits(folder, cache):
    data = text_files([f"{folder}/**/*.txt"], context=1, data_dir=cache)
    train = set(decode(data.train.inputs, data.record))
    # letters of the validation files are in no training file, so all of them are unknown
    assert set(decode(data.validation.inputs, data.record)) == {"�"}
    assert 55 <= len(train) <= 58
    assert abs(data.record["validation_characters"] / data.record["characters"] - 0.05) < 0.02
    assert data.record["files"] == 60


@pytest.mark.filterwarnings("ignore:.*outside the vocabulary")
def test_the_split_does_not_depend_on_where_the_files_are_or_how_they_are_named(folder, tmp_path, cache, monkeypatch):
    one = text_files([f"{folder}/*/*.txt"], context=7, data_dir=cache)
    moved = tmp_path / "elsewhere" / "deeper"
    moved.parent.mkdir()
    folder.rename(moved)
    monkeypatch.setenv("HOME", str(moved.parent))
    two = text_files(["~/deeper/part2/*", "~/deeper/part0/*", "~/deeper/part1/*", "~/deeper/part1/1.txt"], 7, cache)
    assert one.record == two.record
    assert torch.equal(one.validation.inputs, two.validation.inputs)


def test_the_record_identifies_the_tokens(tmp_path, cache):
    (tmp_path / "one.txt").write_text("ab" * 100)
    data = text_files([str(tmp_path / "one.txt")], context=4, data_dir=cache)
    assert data.record["sha256"] == hashlib.sha256(b"\1\2" * 100).hexdigest()


def test_a_changed_file_is_prepared_anew(tmp_path, cache):
    path = tmp_path / "one.txt"
    path.write_text("ab" * 100)
    before = text_files([str(path)], context=4, data_dir=cache)
    path.write_text("ba" * 100)
    os.utime(path, ns=(1, 1))
    after = text_files([str(path)], context=4, data_dir=cache)
    assert before.record["sha256"] != after.record["sha256"]


def test_characters_beyond_the_most_frequent_127_are_unknown(tmp_path, cache):
    frequent = "".join(chr(0x4E00 + index) for index in range(127))
    rare = "".join(chr(0x1F600 + index) for index in range(3))
    (tmp_path / "one.txt").write_text(frequent * 20 + rare + frequent * 20, encoding="utf-8")
    data = text_files([str(tmp_path / "one.txt")], context=5, data_dir=cache)
    assert data.facts["vocabulary"] == 128
    assert data.record["vocabulary"] == frequent
    assert data.record["unknown_characters"] == 3
    assert data.train.inputs.max() == 127


def test_many_unknown_characters_are_told(tmp_path, cache):
    (tmp_path / "one.txt").write_text("".join(chr(0x4E00 + index) for index in range(2000)), encoding="utf-8")
    with pytest.warns(UserWarning, match="94% of the characters are outside the vocabulary"):
        text_files([str(tmp_path / "one.txt")], context=5, data_dir=cache)


def test_a_name_with_brackets_is_a_name(tmp_path, cache):
    (tmp_path / "notes [1].txt").write_text(letters(300))
    assert text_files([str(tmp_path / "notes [1].txt")], context=4, data_dir=cache).record["files"] == 1


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], r"dataset\.files=\[\] is not allowed"),
        (["good.txt", "absent.txt"], r"dataset\.files=.*absent\.txt is not allowed: it must be a file that exists"),
        (["*.absent"], r"dataset\.files=.*\*\.absent is not allowed"),
        (["folder"], r"dataset\.files=.*folder is not allowed"),
        (["good.txt", "latin1.txt"], r"dataset\.files: .*latin1\.txt is not UTF-8 \(byte 3\)"),
        (["empty.txt"], r"dataset\.files: all files are empty"),
        (["short.txt"], r"dataset\.files: the validation split has 5 characters, too few .* dataset\.context=8"),
    ],
)
def test_files_that_cannot_serve_are_named(tmp_path, cache, names, message):
    (tmp_path / "good.txt").write_text(letters(1000))
    (tmp_path / "latin1.txt").write_bytes("caf\u00e9".encode("latin-1") * 300)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text(letters(100))
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=message) as caught:
        text_files([str(tmp_path / name) for name in names], context=8, data_dir=cache)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("context", [0, -3])
def test_a_context_below_one_is_named(cache, context):
    with pytest.raises(ValueError, match=rf"dataset\.context={context} is not allowed"):
        python_source(context, cache)


@pytest.fixture(scope="module")
def library_cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("library"))


def test_python_source_is_python(library_cache):
    data = python_source(64, library_cache)
    written = decode(data.train.inputs[:2000], data.record)
    assert "def " in written
    assert "import " in written
    assert data.facts == {"vocabulary": len(data.record["vocabulary"]) + 1, "context": 64}
    assert data.facts["vocabulary"] <= 128
    assert data.record["characters"] > 3_000_000
    assert data.record["unknown_characters"] < 0.001 * data.record["characters"]
    assert abs(data.record["validation_characters"] / data.record["characters"] - 0.05) < 0.01


def test_python_source_holds_no_path_of_the_machine(library_cache):
    data = python_source(64, library_cache)
    stdlib = sysconfig.get_path("stdlib")
    assert stdlib not in decode(data.train.inputs, data.record)
    assert stdlib not in decode(data.validation.inputs, data.record)


def test_python_source_from_the_cache_is_the_same(library_cache):
    first = python_source(64, library_cache)
    again = python_source(32, library_cache)
    assert first.record == again.record
    assert torch.equal(first.validation.inputs.flatten()[:3200], again.validation.inputs.flatten()[:3200])


def test_a_context_longer_than_the_library_is_named(library_cache):
    with pytest.raises(ValueError, match=r"^dataset\.context: the training split has"):
        python_source(10**8, library_cache)


def test_a_python_without_sources_says_what_else_to_use(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match="use dataset=text with files of your own"):
        python_source(64, cache)


def test_tests_and_installed_packages_are_left_out(tmp_path, cache, monkeypatch):
    for name, content in {
        "kept.py": "kept\n" * 40,
        "package/also_kept.py": "kept\n" * 40,
        "site-packages/other.py": "Z" * 99,
        "package/test/case.py": "Z" * 99,
        "config-3/python-config.py": "Z" * 99,
        "_sysconfigdata_linux.py": "Z" * 99,
        "notes.txt": "Z" * 99,
    }.items():
        path = tmp_path / "library" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (tmp_path / "library" / "broken.py").write_bytes(b"\xff\xfe")
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path / "library"))
    data = python_source(8, cache)
    assert data.record["files"] == 2
    assert data.record["skipped_files"] == 1
    assert data.record["characters"] == 400
