"""The controller: one process and one thread that asks the plan, runs trials on the fork server and tells the record.
Ranks know nothing of the search, so that a rank that dies costs one trial and no more."""

import math
import time
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any
from typing import Protocol

import optuna
from optuna.distributions import BaseDistribution
from optuna.distributions import CategoricalDistribution
from optuna.distributions import FloatDistribution
from optuna.distributions import IntDistribution
from optuna.trial import TrialState

from powersgd_lab import settings
from powersgd_lab import study as record
from powersgd_lab.search.giving_up import GivingUp
from powersgd_lab.search.planning import Plan
from powersgd_lab.settings import Hook
from powersgd_lab.settings import PowerSGD
from powersgd_lab.study import Row
from powersgd_lab.training import journal
from powersgd_lab.training.launch import ForkServer
from powersgd_lab.training.launch import Outcome
from powersgd_lab.training.launch import RunningTrial
from powersgd_lab.training.preflight import Prepared
from powersgd_lab.training.preflight import make_trial
from powersgd_lab.training.slots import Slot


# Wide enough for every setting, since a study may grow. The rank's logarithm is an integer for the same reason.
DISTRIBUTIONS: dict[str, BaseDistribution] = {
    "hook": CategoricalDistribution([hook.name for hook in Hook if hook.compresses]),
    "log2_rank": IntDistribution(0, 16),
    "start_fraction": FloatDistribution(0, 1),
    "min_compression_rate": FloatDistribution(0, 1e6),
    "use_error_feedback": CategoricalDistribution([False, True]),
    "warm_start": CategoricalDistribution([False, True]),
}


class View(Protocol):
    """Who watches a sweep: the terminal's live view, or nobody."""

    def planned(self, trials: int) -> None: ...
    def started(self, row: Row) -> None: ...
    def progress(self, number: int, event: dict[str, Any]) -> None: ...
    def ended(self, row: Row, rows: list[Row]) -> None: ...
    def decided(self, sentence: str) -> None: ...


@dataclass
class _Running:
    trial: optuna.Trial
    process: RunningTrial
    slot: Slot
    events: Iterator[dict[str, Any] | None]
    curve: dict[int, float] = field(default_factory=dict)  # the metric by steps, as far as it is evaluated
    given_up: bool = False


class Controller:
    """Runs a study to its end. `ended` is called with the rows after each trial, to rewrite tables."""

    POLL_SECONDS = 0.02

    def __init__(
        self,
        sweep: settings.Sweep,
        prepared: Prepared,
        directory: Path,
        plan: Plan,
        view: View,
        ended: Callable[[list[Row]], None],
    ) -> None:
        self._sweep, self._prepared, self._directory = sweep, prepared, directory
        self._plan, self._view, self._ended = plan, view, ended
        self._study = record.open_study(directory)
        self._running: dict[int, _Running] = {}
        self._free = list(prepared.slots)
        self._decided = 0  # sentences that were passed on
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            record.requeue(self._study, trial)  # the controller that ran it is gone: this one holds the study
        self._first_new = len(self._study.get_trials(deepcopy=False))

    def rows(self) -> list[Row]:
        return [record.row_of(trial) for trial in self._study.get_trials(deepcopy=False)]

    def run(self) -> None:
        """Raises planning.BaselineError; on KeyboardInterrupt running trials go back to waiting."""
        self._view.planned(len(self._plan.trials(self._planning_rows())))
        with ForkServer() as server:
            try:
                self._fill(server)
                while self._running:
                    if self._follow():
                        self._fill(server)
                    time.sleep(self.POLL_SECONDS)
            except BaseException:
                self._give_back()
                raise

    def _fill(self, server: ForkServer) -> None:
        """Start trials while slots are free and the plan has any."""
        while self._free and self._enqueue():
            self._start(server, self._study.ask())

    def _enqueue(self) -> bool:
        """Make sure that a trial is waiting, an interrupted one first; False when there is nothing to run now."""
        waiting = self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        rows = self._planning_rows()
        self._view.planned(len(self._plan.trials(rows)))
        if waiting:
            return True
        pair = self._plan.next(rows)
        if pair is None:
            return False
        setting, seed = pair
        facts = record.facts_of(setting, seed, self._sweep.launcher.world_size, self._prepared.steps)
        self._study.enqueue_trial(_parameters(setting), user_attrs=facts | {"metric_name": self._prepared.metric})
        return True

    def _planning_rows(self) -> list[Row]:
        """All rows, less those of trials that failed in an earlier run and are to be tried again."""
        retry = self._sweep.search.retry_failed
        return [row for row in self.rows() if not (retry and row["state"] == "fail" and row["trial"] < self._first_new)]

    def _start(self, server: ForkServer, trial: optuna.Trial) -> None:
        setting = record.setting_of(trial.user_attrs)
        for name, value in _parameters(setting).items():
            if name not in trial.params:  # an interrupted trial has them
                suggested = trial._suggest(name, DISTRIBUTIONS[name])
                assert suggested == value
        directory = self._trial_directory(trial.number)
        config = make_trial(self._sweep, self._prepared, setting, trial.user_attrs["seed"])
        slot = self._free.pop(0)
        process = server.launch(directory, config, slot=slot, resume=True)
        self._running[trial.number] = _Running(trial, process, slot, journal.follow(directory / journal.METRICS))
        self._view.started(self._row(trial.number))

    def _follow(self) -> bool:
        """Pass on what the running trials report, and record those that ended; whether any did."""
        before = len(self._running)
        for number, running in list(self._running.items()):
            outcome = running.process.poll()
            while (event := next(running.events)) is not None:
                self._view.progress(number, event)
                self._watch(running, event)
            if outcome is not None:
                self._free.append(self._running.pop(number).slot)
                self._tell(running.trial, outcome)
                rows = self.rows()
                self._ended(rows)
                self._view.ended(self._row(number), rows)
                self._decide(self._planning_rows())
        return len(self._running) < before

    def _watch(self, running: _Running, event: dict[str, Any]) -> None:
        """Give a trial up that trails the baseline too far: all its ranks leave together at their next report."""
        value = event.get(self._prepared.metric)
        if event["event"] != "eval" or value is None or self._sweep.search.give_up is None or running.given_up:
            return
        running.curve[event["step"]] = value
        facts = running.trial.user_attrs
        if not Hook[facts["hook"]].compresses:
            return
        reason = self._giving_up().reason(running.curve, facts["seed"], facts["start_powerSGD_iter"])
        if reason is not None:
            running.process.ask_to_stop(reason)
            running.given_up = True

    def _giving_up(self) -> GivingUp:
        search = self._sweep.search
        assert search.give_up is not None
        complete = [
            row for row in self.rows() if row["setting"] == search.baselines[0].name and row["state"] == "complete"
        ]
        curves = {row["seed"]: self._curve(row["trial"]) for row in complete}
        mean = math.fsum(row["metric"] for row in complete) / len(complete)
        least = settings.tolerance(search.tolerance, mean)
        return GivingUp(curves, self._prepared.direction, search.give_up, least)

    def _curve(self, number: int) -> dict[int, float]:
        """The metric by steps, read from a trial that has ended."""
        events = iter(journal.follow(self._trial_directory(number) / journal.METRICS).__next__, None)
        told = {event["step"]: event[self._prepared.metric] for event in events if event["event"] == "eval"}
        return {step: value for step, value in told.items() if value is not None}

    def _trial_directory(self, number: int) -> Path:
        return self._directory / "trials" / f"{number:04d}"

    def _decide(self, rows: list[Row]) -> None:
        decisions = self._plan.decisions(rows)
        for sentence in decisions[self._decided :]:
            self._view.decided(sentence)
        self._decided = len(decisions)

    def _tell(self, trial: optuna.Trial, outcome: Outcome) -> None:
        """Write the facts as attributes first, so that a trial that is told has all of them."""
        for key, value in outcome.result.items():
            if key not in ("state", "reason"):
                trial.set_user_attr(key, value)
        trial.set_user_attr("reason", outcome.reason or None)
        if outcome.state == "complete":
            values = [outcome.result["metric"], outcome.result["payload_bytes"]]
            assert all(math.isfinite(value) for value in values), "a trial with a non-finite metric is pruned"
            self._study.tell(trial, values)
        else:
            self._study.tell(trial, state=TrialState.PRUNED if outcome.state == "pruned" else TrialState.FAIL)

    def _give_back(self) -> None:
        """End what runs, and set it back to waiting: it runs again under its number when the study is resumed."""
        for running in self._running.values():
            running.process.terminate()
        while any(running.process.poll() is None for running in self._running.values()):
            time.sleep(self.POLL_SECONDS)
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            record.requeue(self._study, trial)

    def _row(self, number: int) -> Row:
        return self.rows()[number]


def _parameters(setting: PowerSGD) -> dict[str, Any]:
    """What Optuna knows of a setting as parameters; a baseline has none, and what has no value is left out."""
    if not setting.hook.compresses:
        return {}
    rank = setting.matrix_approximation_rank
    found = {
        "hook": setting.hook.name,
        "log2_rank": rank.bit_length() - 1 if rank & (rank - 1) == 0 else None,
        "start_fraction": setting.start_fraction,
        "min_compression_rate": setting.min_compression_rate if setting.hook is not Hook.batched else None,
        "use_error_feedback": setting.use_error_feedback,
        "warm_start": setting.warm_start,
    }
    return {name: value for name, value in found.items() if value is not None}
