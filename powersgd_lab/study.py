"""The record: an Optuna study in its journal file on one side, plain rows, one a trial, on the other.
Search writes it and the report reads it, so that nothing else needs to know how a study is kept."""

import json
import os
from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import fields
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock
from filelock import Timeout
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial
from optuna.trial import TrialState

from powersgd_lab import settings


Row = dict[str, Any]

JOURNAL = "journal.log"  # Optuna's storage, in the study's directory

# The columns that every row has, in this order; trials.csv promises them.
COLUMNS = (
    "trial",
    "state",
    "setting",
    "seed",
    "hook",
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "start_fraction",
    "world_size",
    "steps",
    "metric_name",
    "metric",
    "loss",
    "payload_bytes",
    "wire_bytes",
    "compression_ratio_step",
    "compression_ratio_run",
    "seconds",
    "step_seconds",
    "compute_seconds",
    "compress_seconds",
    "communicate_seconds",
    "reason",
    "contended",
    *(
        f.name
        for f in fields(settings.PowerSGD)
        if f.name not in ("hook", "matrix_approximation_rank", "start_powerSGD_iter", "start_fraction")
    ),
)

STATES = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "fail",
}


def facts_of(setting: settings.PowerSGD, seed: int, world_size: int, steps: int) -> Row:
    """What a row says of a trial before it ran. A baseline has no PowerSGD hyperparameters: they stay None."""
    facts: Row = {"setting": settings.setting_key(setting), "seed": seed, "world_size": world_size, "steps": steps}
    for f in fields(setting):
        value = getattr(setting, f.name)
        facts[f.name] = value if setting.hook.compresses else None
    facts["hook"] = setting.hook.name
    return facts


def setting_of(facts: Mapping[str, Any]) -> settings.PowerSGD:
    """The setting that `facts_of` described."""
    hook = settings.Hook[facts["hook"]]
    names = [f.name for f in fields(settings.PowerSGD) if f.name != "hook"] if hook.compresses else []
    return settings.PowerSGD(hook=hook, **{name: facts[name] for name in names})


def row_of(trial: FrozenTrial) -> Row:
    row: Row = dict.fromkeys(COLUMNS)
    row |= {key: trial.user_attrs[key] for key in sorted(trial.user_attrs)}
    return row | {"trial": trial.number, "state": STATES[trial.state]}


@dataclass(frozen=True)
class Record:
    """A study as plain values: `sweep` is sweep.json, `rows` has one dict a trial with at least COLUMNS as keys."""

    sweep: dict[str, Any]
    rows: list[Row]


def load(directory: Path) -> Record:
    """Reads only: a study may be on a disk that cannot be written, or in another process's hands.

    Raises ValueError when there is no study in `directory`."""
    if not (directory / "sweep.json").is_file():
        raise ValueError(f"{directory} is not a study: it has no sweep.json")
    sweep, rows = read_sweep(directory), []
    if (directory / JOURNAL).exists():  # opening a storage would make it
        storage = _storage(directory)
        for study in storage.get_all_studies():
            rows = [row_of(trial) for trial in storage.get_all_trials(study._study_id, deepcopy=False)]
    return Record(sweep, rows)


def read_sweep(directory: Path) -> dict[str, Any]:
    try:
        sweep: dict[str, Any] = json.loads((directory / "sweep.json").read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{directory / 'sweep.json'} is broken: {error}") from None
    return sweep


def write_sweep(directory: Path, sweep: Mapping[str, Any]) -> None:
    temporary = directory / "sweep.json.new"
    temporary.write_text(json.dumps(sweep, indent=1) + "\n")
    os.replace(temporary, directory / "sweep.json")


def open_study(directory: Path) -> optuna.Study:
    """The study kept in `directory`/journal.log, made when there is none: minimize or maximize the metric, and
    minimize the payload bytes."""
    sweep = read_sweep(directory)
    return optuna.create_study(
        storage=_storage(directory),
        study_name=sweep["configuration"]["study"],
        directions=["minimize" if sweep["metric"]["direction"] == "min" else "maximize", "minimize"],
        load_if_exists=True,
    )


def _storage(directory: Path) -> JournalStorage:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return JournalStorage(JournalFileBackend(str(directory / JOURNAL)))


def requeue(study: optuna.Study, trial: FrozenTrial) -> None:
    """Set an interrupted trial back to waiting: it keeps its number and directory."""
    study._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)


def _cut_torn_line(journal: Path) -> None:
    """Drop what a power loss or a full disk left of a journal's last line: Optuna cannot read on from there.

    Only the holder of the study may do this. Nothing is lost: what was half told is a trial that runs again."""
    if journal.exists():
        whole = journal.read_bytes().rfind(b"\n") + 1
        os.truncate(journal, whole)


@contextmanager
def controlled(directory: Path) -> Iterator[None]:
    """Hold the study for one controller. Raises ValueError that names the process that holds it already."""
    holder = directory / "controller.pid"
    lock = FileLock(directory / "controller.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        owner = holder.read_text().strip() if holder.exists() else "unknown"
        raise ValueError(f"{directory} is in use: a sweep with process id {owner} is running it") from None
    try:
        holder.write_text(f"{os.getpid()}\n")
        _cut_torn_line(directory / JOURNAL)
        yield
        holder.unlink(missing_ok=True)
    finally:
        lock.release()
