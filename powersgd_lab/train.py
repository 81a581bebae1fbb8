"""`python -m powersgd_lab.train`: one trial of the configured setting, alone or as one process of torchrun.
Thin: what a sweep does many times, once, with its events printed as they come."""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from powersgd_lab import config
from powersgd_lab import settings
from powersgd_lab.training import journal
from powersgd_lab.training import preflight
from powersgd_lab.training import rank
from powersgd_lab.training.launch import ForkServer
from powersgd_lab.training.launch import Outcome


DESCRIPTION = """Train once, with the setting that `powersgd` says, and print what was measured.

Alone it starts launcher.world_size ranks itself; under torchrun each process is one rank, on one host or several.
Exit code: 0 complete, 1 wrong input or failed, 130 interrupted."""

POLL_SECONDS = 0.05


def main(arguments: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("train: interrupted", file=sys.stderr)
        return 130


def _run(arguments: Sequence[str]) -> int:
    try:
        sweep = config.from_command_line("train", DESCRIPTION, arguments)
        under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        if under_torchrun:
            given, sweep.launcher.world_size = sweep.launcher.world_size, int(os.environ["WORLD_SIZE"])
            if given != sweep.launcher.world_size and os.environ["RANK"] == "0":
                print(f"torchrun started {sweep.launcher.world_size} ranks: launcher.world_size={given} is ignored")
        prepared = preflight.prepare(sweep)
        trial = preflight.make_trial(sweep, prepared, sweep.powersgd, sweep.seed)
        directory = _directory(sweep, trial)
    except ValueError as error:
        print(f"train: {error}", file=sys.stderr)
        return 1
    if under_torchrun:
        return _one_rank(directory, trial)
    early = preflight.start_warning(trial.powersgd, prepared.warmup_steps)
    for warning in filter(None, [*prepared.warnings, early]):
        print(f"warning: {warning}")
    try:
        outcome = _all_ranks(directory, trial)
    except OSError as error:
        print(f"train: {error.strerror} ({error.filename})", file=sys.stderr)
        return 1
    if outcome.state != "complete":
        print(f"train: {outcome.state}: {outcome.reason} ({directory})", file=sys.stderr)
        return 1
    print(json.dumps(outcome.result, indent=1))
    return 0


def _directory(sweep: settings.Sweep, trial: settings.Trial) -> Path:
    """runs_dir/train/STUDY/SETTING-seedN, made if it is not there; the same trial again replaces what is in it."""
    name = f"{settings.setting_key(trial.powersgd)}-seed{trial.seed}"
    directory = Path(sweep.runs_dir) / "train" / sweep.study / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{error.strerror} ({error.filename})"
        raise ValueError(f"runs_dir={sweep.runs_dir} cannot be written: {reason}") from None
    return directory


def _all_ranks(directory: Path, trial: settings.Trial) -> Outcome:
    with ForkServer() as server:
        running = server.launch(directory, trial)
        events = journal.follow(directory / journal.METRICS)
        while True:
            outcome = running.poll()
            while (event := next(events)) is not None:
                print(json.dumps(event), flush=True)
            if outcome is not None:
                return outcome
            time.sleep(POLL_SECONDS)


def _one_rank(directory: Path, trial: settings.Trial) -> int:
    settings.write_trial(trial, directory / journal.CONFIG)  # every rank writes the same
    rank.run_under_torchrun(directory)
    if int(os.environ["RANK"]) == 0:
        print((directory / journal.RESULT).read_text(), end="")
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
