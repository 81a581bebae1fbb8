"""The first cause among the errors that ranks leave, and a journal read while it is written.
A lost connection is noticed by every other rank, often before the one that caused it has written why."""

import json

import pytest

from powersgd_lab.training import failure
from powersgd_lab.training import journal
from powersgd_lab.training.failure import Exit
from powersgd_lab.training.journal import Journal


@pytest.fixture
def told(tmp_path):
    """Writes the error of a rank as if it came at a given time."""

    def write(rank, time, error):
        try:
            raise error
        except type(error) as raised:
            failure.write(tmp_path, rank, raised)
        path = tmp_path / journal.rank_error_name(rank)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"time": time}))

    return write


LOST = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
RESET = RuntimeError("Read error [127.0.0.1]:4711: Connection reset by peer")
OWN = ValueError("dataset.data_dir=x:\n  not there")


def test_the_earliest_error_is_the_cause(tmp_path, told):
    told(0, 20.0, KeyError("later"))
    told(1, 10.0, OWN)
    found = failure.first(tmp_path, {0: Exit(1, 21.0), 1: Exit(1, 22.0)})
    assert (found.rank, found.line) == (1, "ValueError: dataset.data_dir=x: not there")
    text = (tmp_path / journal.ERROR).read_text()
    assert text.startswith("rank 1: Traceback")
    assert text.index("not there") < text.index("rank 0: Traceback") < text.index("later")


def test_a_lost_connection_is_never_the_cause_while_there_is_another(tmp_path, told):
    told(0, 1.0, LOST)
    told(1, 30.0, OWN)
    told(2, 2.0, RESET)
    found = failure.first(tmp_path, {rank: Exit(1, 40.0) for rank in (0, 1, 2)})
    assert found.rank == 1
    assert not found.secondary


def test_a_lost_connection_is_told_when_nothing_else_is_known(tmp_path, told):
    told(0, 5.0, LOST)
    found = failure.first(tmp_path, {0: Exit(1, 6.0)})
    assert "Connection closed by peer" in found.line


def test_a_rank_without_a_word_is_described_by_its_end_and_its_log(tmp_path, told):
    told(0, 1.0, LOST)
    (tmp_path / journal.log_name(1)).write_text("\n".join(f"line {n}" for n in range(100)))
    (tmp_path / journal.log_name(2)).write_text("")
    found = failure.first(tmp_path, {0: Exit(1, 1.0), 1: Exit(-9, 2.0), 2: Exit(3, 4.0)})
    assert (found.rank, found.line) == (1, "rank 1 died (signal 9)")
    text = (tmp_path / journal.ERROR).read_text()
    assert "line 99" in text
    assert "line 50" not in text
    assert "rank 2 died (exit status 3)" in text


def test_a_torn_line_is_told_once_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = journal.follow(path)
    assert next(lines) is None  # there is no file yet
    path.write_text('{"step": 1}\n{"st')
    assert next(lines) == {"step": 1}
    assert next(lines) is None
    assert next(lines) is None
    with path.open("a") as file:
        file.write('ep": 2}\n{"step": 3}\n')
    assert [next(lines), next(lines), next(lines)] == [{"step": 2}, {"step": 3}, None]


def test_the_journal_is_rank_zeros_alone_and_has_no_numbers_that_json_lacks(tmp_path):
    for rank in (0, 1):
        Journal(tmp_path, rank, launched=0.0, steps=0).write("train", step=1, loss=float("nan"), lr=float(rank))
    text = (tmp_path / journal.METRICS).read_text()
    assert text == '{"event": "train", "step": 1, "loss": null, "lr": 0.0}\n'


def test_a_resumed_journal_forgets_what_came_after_the_checkpoint(tmp_path):
    path = tmp_path / journal.METRICS
    path.write_text('{"event": "train", "step": 4}\n{"event": "train", "step": 5}\n{"event": "train", "st')
    Journal(tmp_path, 0, launched=0.0, steps=4).write("start", step=4)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [4, 4]
    Journal(tmp_path, 0, launched=0.0, steps=0)
    assert path.read_text() == ""


def test_the_wish_to_stop_is_read_by_rank_zero_alone(tmp_path):
    deciding, other = (Journal(tmp_path, rank, launched=0.0, steps=0) for rank in (0, 1))
    assert deciding.stop_asked() is None
    journal.write_whole(tmp_path / journal.STOP, "trailing\n")
    assert deciding.stop_asked() == "trailing"
    assert other.stop_asked() is None


def test_a_journal_that_a_resumed_trial_writes_anew_is_told_from_its_beginning(tmp_path):
    kept = Journal(tmp_path, 0, 0.0, 0)
    for step in (10, 20, 30):
        kept.write("train", step=step)
    events = journal.follow(tmp_path / "metrics.jsonl")
    assert [next(events)["step"] for _ in range(3)] == [10, 20, 30]
    assert next(events) is None
    resumed = Journal(tmp_path, 0, 0.0, 20)
    resumed.write("train", step=25)
    assert [next(events)["step"] for _ in range(3)] == [10, 20, 25]
    assert next(events) is None
