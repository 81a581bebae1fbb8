"""Halving: from little compression down, the way the authors of PowerSGD advise to look for the rank.
Good where most ranks satisfy and each trial that loses quality is a loss: at most one per start is run."""

from collections.abc import Generator

from powersgd_lab.search.strategies.judging import Judgement
from powersgd_lab.search.strategies.walk import Walk
from powersgd_lab.search.strategies.walk import name
from powersgd_lab.settings import PowerSGD


FLOOR = 0.9  # a halving of the rank that leaves more of a compressed step's payload than this was the last


class Halving(Walk):
    """The largest power of two within `search.max_rank` at the earliest start, then half the rank, until one is not
    satisfactory. The last satisfactory one is the answer.

    A compressed step sends its uncompressed slices whatever the rank, and each halving saves half of what the one
    before it saved: once a halving saves little, all later ones together save no more, and the search ends there.
    The authors say nothing of starts: a later one is taken only when even the largest rank does not satisfy, since
    every step of delay costs more bytes than any rank."""

    def procedure(self, said: list[str]) -> Generator[PowerSGD, Judgement, None]:
        for start, later in zip(self.starts, [*self.starts[1:], None], strict=True):
            found = yield from self._descend(start, said)
            if found:
                return
            said.append("no start is left" if later is None else f"a later start, {100 * later:.3g} %, is next")

    def _descend(self, start: float, said: list[str]) -> Generator[PowerSGD, Judgement, bool]:
        """Whether a rank satisfies at this start."""
        last: Judgement | None = None
        rank = 2 ** (self.space.search.max_rank.bit_length() - 1)
        while True:
            judgement = yield self.space.at(rank, start)
            said.append(f"{name(judgement.setting)}: {judgement.words}: {self._following(judgement, last)}")
            if not judgement.satisfactory:
                return last is not None
            if rank == 1 or self._at_floor(judgement, last):
                return True
            last, rank = judgement, rank // 2

    def _following(self, judgement: Judgement, last: Judgement | None) -> str:
        if not judgement.satisfactory:
            return "the largest rank does not do" if last is None else f"lost, {name(last.setting)} is the answer"
        if judgement.setting.matrix_approximation_rank == 1:
            return "satisfactory, the lowest rank"
        if self._at_floor(judgement, last):
            return "satisfactory, and the uncompressed slices are most of its payload: the floor"
        return f"satisfactory, rank {judgement.setting.matrix_approximation_rank // 2} next"

    def _at_floor(self, judgement: Judgement, last: Judgement | None) -> bool:
        if last is None:
            return False
        now, before = judgement.step_bytes(self.space.steps), last.step_bytes(self.space.steps)
        assert now is not None, "it is satisfactory"
        assert before is not None, "it was satisfactory"
        # At a large rank no slice may be worth compressing yet: nothing was saved, and the floor is still far.
        return before[1] < before[0] and now[1] > FLOOR * before[1]
