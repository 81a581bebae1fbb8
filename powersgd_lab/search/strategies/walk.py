"""A strategy that goes step by step, written as the procedure it is: yield a setting, receive its judgement.
Replaying the procedure on the rows makes it a pure function of them, so that a resumed search takes the same way."""

from abc import ABC
from abc import abstractmethod
from collections.abc import Generator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from powersgd_lab.search.strategies.judging import Judge
from powersgd_lab.search.strategies.judging import Judgement
from powersgd_lab.search.strategies.space import Space
from powersgd_lab.settings import PowerSGD
from powersgd_lab.settings import setting_key


class Walk(ABC):
    """A strategy of ranks and starts that goes on from one judgement to the next setting."""

    searched = frozenset({"matrix_approximation_rank", "start_powerSGD_iter", "start_fraction"})

    def __init__(self, space: Space, judge: Judge) -> None:
        space.require_rank()
        self.space, self._judge = space, judge
        self.starts = space.starts()

    @abstractmethod
    def procedure(self, said: list[str]) -> Generator[PowerSGD, Judgement, None]:
        """The settings in order; a sentence on each decision goes to `said` when it is taken."""

    def next(self, rows: Sequence[Mapping[str, Any]]) -> list[PowerSGD]:
        return self._replay(rows)[0]

    def decisions(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        return self._replay(rows)[1]

    def _replay(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[PowerSGD], list[str]]:
        tried: list[PowerSGD] = []
        said: list[str] = []
        procedure = self.procedure(said)
        try:
            setting = next(procedure)
            while True:
                judgement = self._judge.judge(setting, tried, rows)
                tried.append(setting)
                if judgement is None:
                    return tried, said
                setting = procedure.send(judgement)
        except StopIteration:
            return tried, said


def name(setting: PowerSGD) -> str:
    """A setting in a sentence: "rank 2 at 10 %"."""
    if setting.start_fraction is None:
        return setting_key(setting)
    return f"rank {setting.matrix_approximation_rank} at {100 * setting.start_fraction:.3g} %"
