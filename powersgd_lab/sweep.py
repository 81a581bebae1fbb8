"""`python -m powersgd_lab.sweep`: a study from its configuration to its tables, figures and recommendation.
Thin: it checks, hands over to the controller, and prints what the rooms return."""

import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from powersgd_lab import config
from powersgd_lab import report
from powersgd_lab import settings
from powersgd_lab import statistics
from powersgd_lab import study
from powersgd_lab.search import directory as study_directory
from powersgd_lab.search import live
from powersgd_lab.search import strategies
from powersgd_lab.search.controller import Controller
from powersgd_lab.search.planning import BaselineError
from powersgd_lab.search.planning import Plan
from powersgd_lab.study import Row
from powersgd_lab.training import preflight


DESCRIPTION = """Train a model with and without PowerSGD, count every byte, and say whether it pays.

Runs the baselines, then the search's settings, each with several seeds, every trial in real DDP processes.
The same command again resumes. Exit code: 0 complete, 1 wrong input or nothing succeeded, 130 interrupted."""


def main(arguments: Sequence[str]) -> int:
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a pipe has no width; tables keep their columns
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with ExitStack() as held:
            try:
                _refuse_torchrun()
                sweep = config.from_command_line("sweep", DESCRIPTION, arguments)
                prepared = preflight.prepare(sweep)
                strategy = strategies.make(sweep, prepared.steps, prepared.direction)
                plan = Plan(sweep, strategy)
                for setting in plan.settings([]).values():
                    preflight.make_trial(sweep, prepared, setting, sweep.seed)
                command = shlex.join(["python", "-m", "powersgd_lab.sweep", *arguments])
                described = study_directory.describe(sweep, prepared, strategy, command)
                directory = held.enter_context(study_directory.claimed(sweep, described))
            except ValueError as error:
                print(f"sweep: {error}", file=sys.stderr)
                return 1
            early = [preflight.start_warning(setting, prepared.warmup_steps) for setting in plan.settings([]).values()]
            for warning in filter(None, [*prepared.warnings, *_ignored(sweep, strategy), *early]):
                _say(console, f"warning: {warning}", style="yellow")
            return _run(console, sweep, prepared, plan, directory)
    except KeyboardInterrupt:
        print("sweep: interrupted; the same command resumes the study", file=sys.stderr)
        return 130


def _run(console: Console, sweep: settings.Sweep, prepared: preflight.Prepared, plan: Plan, directory: Path) -> int:
    """The part with processes: from here on nothing that has run is lost."""

    def points(rows: list[Row]) -> list[dict[str, Any]]:
        return report.judged(study.Record(study.read_sweep(directory), rows))

    def rewrite_tables(rows: list[Row]) -> None:
        report.write_tables(study.Record(study.read_sweep(directory), rows), directory / "report")

    began = time.monotonic()
    with live.view_for(console, prepared.steps, prepared.metric, prepared.direction, points) as view:
        controller = Controller(sweep, prepared, directory, plan, view, rewrite_tables)
        before = len(_ended(controller.rows()))
        try:
            controller.run()
        except BaselineError as error:
            print(f"sweep: {error}", file=sys.stderr)
            return 1
        except OSError as error:
            reason = f"{error.strerror} ({error.filename})"
            print(f"sweep: {reason}; the same command resumes {directory}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            done = len(_ended(controller.rows()))
            print(f"sweep: interrupted with {done} trials ended; the same command resumes {directory}", file=sys.stderr)
            return 130
    rows = controller.rows()
    written = report.write(directory)
    judged = points(rows)
    verdict = statistics.recommend(judged, baseline=sweep.search.baselines[0].name, direction=prepared.direction)
    console.print(live.points_table(judged, prepared.metric, prepared.direction))
    _say(console, f"{verdict['verdict'].replace('_', ' ')}: {verdict['reason']}", style="bold")
    ran = len(_ended(rows)) - before
    took = f"{ran} of them in this run, in {time.monotonic() - began:.0f} s" if ran else "none was left to run"
    _say(console, f"{len(rows)} trials in {directory}, {took}. Written:")
    for path in written:
        _say(console, f"  {path}")
    return 0


def _ended(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["state"] in ("complete", "pruned", "fail")]


def _say(console: Console, text: str, style: str = "") -> None:
    """A line that is neither read as markup nor broken where a pipe has no width."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends a sweep as Ctrl-C does."""
    raise KeyboardInterrupt


def _refuse_torchrun() -> None:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ValueError("this is the one controller that starts a trial's ranks itself: run it without torchrun")


def _ignored(sweep: settings.Sweep, strategy: strategies.Strategy) -> list[str]:
    """A key that the strategy chooses, set by hand, has no effect: say so."""
    default = settings.PowerSGD()
    return [
        f"powersgd.{key}={getattr(sweep.powersgd, key)} is ignored: search={sweep.search.strategy.name} chooses it"
        for key in sorted(strategy.searched)
        if getattr(sweep.powersgd, key) != getattr(default, key)
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
