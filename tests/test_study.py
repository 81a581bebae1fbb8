"""The record between Optuna and plain rows, on real journal files.
What search writes must be what a report reads, also from another process and after an interrupt."""

import os
import subprocess
import sys
import time

import pytest
from optuna.trial import TrialState

from powersgd_lab import settings
from powersgd_lab import study
from powersgd_lab.settings import Hook
from powersgd_lab.settings import PowerSGD


SWEEP = {"configuration": {"study": "s"}, "metric": {"name": "accuracy", "direction": "max"}}
SETTING = settings.resolved(PowerSGD(matrix_approximation_rank=4, warm_start=False), 400, 20)


def begin(directory, setting=SETTING, seed=0):
    opened = study.open_study(directory)
    opened.enqueue_trial({}, user_attrs=study.facts_of(setting, seed, 2, 400))
    return opened, opened.ask()


@pytest.fixture
def directory(tmp_path):
    study.write_sweep(tmp_path, SWEEP)
    return tmp_path


def test_rows_have_every_column_in_order_and_what_a_trial_told(directory):
    opened, trial = begin(directory)
    trial.set_user_attr("metric", 0.9)
    trial.set_user_attr("metric.accuracy", 0.9)
    trial.set_user_attr("control_bytes", 12)
    opened.tell(trial, [0.9, 1000])
    (row,) = study.load(directory).rows
    assert list(row)[: len(study.COLUMNS)] == list(study.COLUMNS)
    assert list(row)[len(study.COLUMNS) :] == ["control_bytes", "metric.accuracy"]
    assert (row["trial"], row["state"], row["setting"]) == (0, "complete", "layerwise-r4-s40-warm_start=false")
    assert (row["metric"], row["start_fraction"], row["seconds"]) == (0.9, 0.1, None)


@pytest.mark.parametrize("setting", [SETTING, PowerSGD(hook=Hook.bf16)])
def test_a_setting_comes_back_from_its_facts(setting):
    assert study.setting_of(study.facts_of(setting, 0, 2, 400)) == setting


def test_a_baseline_has_no_hyperparameters():
    facts = study.facts_of(PowerSGD(hook=Hook.off), 0, 2, 400)
    assert facts["hook"] == facts["setting"] == "off"
    assert facts["matrix_approximation_rank"] is facts["warm_start"] is None


def test_an_interrupted_trial_waits_again_under_its_number(directory):
    opened, trial = begin(directory)
    (running,) = opened.get_trials(states=(TrialState.RUNNING,))
    study.requeue(opened, running)
    again = study.open_study(directory).ask()
    assert again.number == trial.number
    assert again.user_attrs["setting"] == trial.user_attrs["setting"]
    assert len(study.load(directory).rows) == 1


def test_reading_writes_nothing(directory):
    assert study.load(directory).rows == []
    assert [path.name for path in directory.iterdir()] == ["sweep.json"]
    begin(directory)
    before = (directory / study.JOURNAL).read_bytes()
    study.load(directory)
    assert (directory / study.JOURNAL).read_bytes() == before


def test_a_broken_record_is_named(directory):
    (directory / "sweep.json").write_text("{")
    with pytest.raises(ValueError, match=r"sweep\.json is broken"):
        study.load(directory)


def test_a_folder_without_a_study_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a study"):
        study.load(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_second_controller_is_refused_by_the_first_ones_process_id(directory):
    hold = (
        "import sys, pathlib; from powersgd_lab import study\n"
        "with study.controlled(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match=f"process id {other.pid}"), study.controlled(directory):
        pass
    other.kill()
    other.wait()
    deadline = time.monotonic() + 5
    while True:  # the kernel frees a dead process's lock, perhaps a moment later
        try:
            with study.controlled(directory):
                assert (directory / "controller.pid").read_text() == f"{os.getpid()}\n"
            break
        except ValueError:
            assert time.monotonic() < deadline


def test_a_journal_torn_at_any_byte_of_its_last_line_costs_nothing(directory):
    opened, trial = begin(directory)
    trial.set_user_attr("metric", 0.9)
    journal = directory / study.JOURNAL
    before = journal.read_bytes()
    opened.tell(trial, [0.9, 1000])
    whole = journal.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    assert last >= len(before)
    for end in range(last, len(whole)):
        journal.write_bytes(whole[:end])
        assert len(study.load(directory).rows) == 1  # a report may be asked for before the sweep is resumed
        assert journal.read_bytes() == whole[:end]
        with study.controlled(directory):
            (row,) = study.load(directory).rows
            assert (row["state"], row["metric"]) == ("running", 0.9)
            reopened = study.open_study(directory)
            (running,) = reopened.get_trials(states=(TrialState.RUNNING,))
            study.requeue(reopened, running)
            assert study.load(directory).rows[0]["state"] == "waiting"
