"""TPE: Optuna's sampler over every PowerSGD hyperparameter, for spaces too wide for a grid.
The settings tried so far are read from the rows, so that a resumed search goes on as an undisturbed one."""

import warnings
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Literal

import numpy as np
import optuna
from optuna.trial import TrialState

from powersgd_lab import study
from powersgd_lab.search.strategies.judging import Judge
from powersgd_lab.search.strategies.space import Space
from powersgd_lab.settings import Hook
from powersgd_lab.settings import PowerSGD
from powersgd_lab.settings import setting_key


Row = Mapping[str, Any]

RATES = (1.0, 8.0)  # of min_compression_rate: below 1 a slice would grow, above 8 little is left to compress
REPEATS = 100  # how often a setting that was tried is refused before the space counts as used up


class Tpe:
    """`search.trials` settings, one after another, the two objectives being the mean metric and the run's payload.

    Searched: hook (layerwise or batched), log2 of the rank from 0 to log2 `search.max_rank`, the start between the
    smallest and the largest of `search.start_fractions`, error feedback, warm start, and, for the layerwise hook
    only (the batched hook has none), the minimum compression rate. The sampler's first ten are random.

    Each setting is asked of a fresh sampler seeded by the sweep's seed and the setting's number, once the settings
    before it have ended with every seed."""

    searched = frozenset(
        {
            "hook",
            "matrix_approximation_rank",
            "start_powerSGD_iter",
            "start_fraction",
            "min_compression_rate",
            "use_error_feedback",
            "warm_start",
        }
    )

    def __init__(self, space: Space, judge: Judge, seed: int, direction: str) -> None:
        self._space, self._judge, self._seed = space, judge, seed
        self._directions: list[Literal["minimize", "maximize"]]
        self._directions = ["minimize" if direction == "min" else "maximize", "minimize"]
        self._starts = space.starts()
        self._others = {*(hook.name for hook in space.search.baselines), *map(setting_key, space.by_hand())}

    def next(self, rows: Sequence[Row]) -> list[PowerSGD]:
        tried = self._tried(rows)
        keys = [setting_key(setting) for setting in tried]
        if len(tried) >= self._space.search.trials or not all(self._judge.ended(key, rows) for key in keys):
            return tried
        fresh = self._ask(rows, tried)
        return tried if fresh is None else [*tried, fresh]

    def decisions(self, rows: Sequence[Row]) -> list[str]:
        said = []
        tried = self._tried(rows)
        for number, setting in enumerate(tried):
            judgement = self._judge.judge(setting, tried[:number], rows)
            if judgement is None:
                break
            good = "satisfactory" if judgement.satisfactory else "not satisfactory"
            said.append(f"setting {number + 1}, {setting_key(setting)}: {judgement.words}: {good}")
        return said

    def _tried(self, rows: Sequence[Row]) -> list[PowerSGD]:
        """The settings asked before, in their order: all that are neither a baseline nor given by hand."""
        first = {row["setting"]: row for row in sorted(rows, key=lambda row: -int(row["trial"]))}
        own = [row for key, row in first.items() if key not in self._others]
        return [study.setting_of(row) for row in sorted(own, key=lambda row: int(row["trial"]))]

    def _ask(self, rows: Sequence[Row], tried: Sequence[PowerSGD]) -> PowerSGD | None:
        """The next setting; None when the sampler finds none that is new."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # `group`: for conditional parts
            seed = int(np.random.SeedSequence([self._seed, len(tried)]).generate_state(1)[0])
            sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        memory = optuna.create_study(directions=self._directions, sampler=optuna.samplers.RandomSampler())
        points = self._judge.points(rows)
        for setting in tried:
            self._remember(memory, setting, points[setting_key(setting)])
        memory.sampler = sampler
        known = self._others | {setting_key(setting) for setting in tried}
        for _ in range(REPEATS):
            setting = self._suggest(memory.ask())
            if setting_key(setting) not in known:
                return setting
        return None

    def _suggest(self, trial: optuna.Trial) -> PowerSGD:
        hook = Hook[trial.suggest_categorical("hook", [Hook.layerwise.name, Hook.batched.name])]
        rate = PowerSGD().min_compression_rate
        if hook is Hook.layerwise:
            rate = round(trial.suggest_float("min_compression_rate", *RATES, log=True), 2)
        return self._space.setting(
            hook=hook,
            matrix_approximation_rank=2
            ** trial.suggest_int("log2_rank", 0, self._space.search.max_rank.bit_length() - 1),
            start_fraction=trial.suggest_float("start_fraction", self._starts[0], self._starts[-1]),
            use_error_feedback=trial.suggest_categorical("use_error_feedback", [False, True]),
            warm_start=trial.suggest_categorical("warm_start", [False, True]),
            min_compression_rate=rate,
        )

    def _remember(self, memory: optuna.Study, setting: PowerSGD, point: Row) -> None:
        """Go through a setting and its result as if the sampler had just suggested it."""
        memory.enqueue_trial(parameters(setting))
        trial = memory.ask()
        self._suggest(trial)
        if point["pruned"]:
            memory.tell(trial, state=TrialState.PRUNED)
        elif point["n"]:
            memory.tell(trial, [point["metric"], point["payload_bytes"]])
        else:
            memory.tell(trial, state=TrialState.FAIL)  # it crashed: nothing is known of the setting


def parameters(setting: PowerSGD) -> dict[str, Any]:
    """A setting of this search as Optuna's parameters: what the sampler suggested for it."""
    found = {
        "hook": setting.hook.name,
        "log2_rank": setting.matrix_approximation_rank.bit_length() - 1,
        "start_fraction": setting.start_fraction,
        "use_error_feedback": setting.use_error_feedback,
        "warm_start": setting.warm_start,
    }
    layerwise = setting.hook is Hook.layerwise
    return found | ({"min_compression_rate": setting.min_compression_rate} if layerwise else {})
