"""The ladder: the tuning procedure that the PowerSGD documents describe, for a fraction of the grid's trials.
It leans on quality growing with the rank and with a later start, and at last on shapes alone."""

from collections.abc import Generator
from dataclasses import replace

from powersgd_lab.search.strategies.judging import Judge
from powersgd_lab.search.strategies.judging import Judgement
from powersgd_lab.search.strategies.space import Space
from powersgd_lab.search.strategies.walk import Walk
from powersgd_lab.search.strategies.walk import name
from powersgd_lab.settings import Hook
from powersgd_lab.settings import PowerSGD
from powersgd_lab.settings import setting_key


class Ladder(Walk):
    """Rank 1 at the earliest start; the next rank until one is satisfactory; the next start when no rank is.

    Where rank 1 satisfies, the batched hook is tried too: it sends one factor pair a bucket, and the PyTorch document
    advises it only then. Last, each setting of the grid that is untried and sends fewer bytes over the run than the
    answer is tried, the one with the fewest first (a lower rank from a later start: usually there is none)."""

    def __init__(self, space: Space, judge: Judge) -> None:
        super().__init__(space, judge)
        self._grid = [space.at(rank, start) for start in self.starts for rank in space.ranks()]

    def procedure(self, said: list[str]) -> Generator[PowerSGD, Judgement, None]:
        judged: dict[str, Judgement] = {}
        answer = yield from self._climb(judged, said)
        if answer is None:
            return
        if answer.setting.matrix_approximation_rank == 1 and answer.setting.hook is Hook.layerwise:
            answer = yield from self._batched(answer, said)
        yield from self._cheaper(answer, judged, said)

    def _climb(self, judged: dict[str, Judgement], said: list[str]) -> Generator[PowerSGD, Judgement, Judgement | None]:
        for rung, after in zip(self._grid, [*self._grid[1:], None], strict=True):
            judgement = yield rung
            judged[setting_key(rung)] = judgement
            if judgement.satisfactory:
                said.append(f"{name(rung)}: {judgement.words}: satisfactory")
                return judgement
            if after is None:
                following = "no rank at any start is satisfactory"
            elif after.start_powerSGD_iter == rung.start_powerSGD_iter:
                following = f"rank {after.matrix_approximation_rank} next"
            else:
                following = f"the top rank does not do, {name(after)} next"
            said.append(f"{name(rung)}: {judgement.words}: {following}")
        return None

    def _batched(self, answer: Judgement, said: list[str]) -> Generator[PowerSGD, Judgement, Judgement]:
        said.append(f"{name(answer.setting)} satisfies, so that the batched hook may do as well: it is next")
        judgement = yield replace(answer.setting, hook=Hook.batched)
        better = judgement.satisfactory and _bytes(judgement) < _bytes(answer)
        if better:
            following = "satisfactory with fewer bytes, taken"
        else:
            following = "satisfactory, but not fewer bytes" if judgement.satisfactory else "not satisfactory"
        said.append(f"batched hook, {name(judgement.setting)}: {judgement.words}: {following}")
        return judgement if better else answer

    def _cheaper(
        self, answer: Judgement, judged: dict[str, Judgement], said: list[str]
    ) -> Generator[PowerSGD, Judgement, None]:
        while untried := [setting for setting in self._grid if setting_key(setting) not in judged]:
            few, setting = min(
                ((self._expected_bytes(one, answer, judged), one) for one in untried), key=lambda pair: pair[0]
            )
            if few >= _bytes(answer):
                break
            said.append(f"{name(setting)} sends fewer bytes by its shapes than {name(answer.setting)}: it is next")
            judgement = judged[setting_key(setting)] = yield setting
            good = judgement.satisfactory and _bytes(judgement) < _bytes(answer)
            said.append(f"{name(setting)}: {judgement.words}: {'taken' if good else 'not taken'}")
            if good:
                answer = judgement
        said.append(f"{name(answer.setting)}: no untried setting sends fewer bytes, the ladder ends")

    def _expected_bytes(self, setting: PowerSGD, answer: Judgement, judged: dict[str, Judgement]) -> float:
        """Run bytes that an untried setting sends at the least, from an uncompressed and a compressed step's payload.

        The latter is that of its rank, or of the next lower rank that has a complete trial; without one it counts
        nothing, so that a low rank that diverged at an earlier start is tried rather than missed."""
        steps, start = self.space.steps, setting.start_powerSGD_iter
        vanilla = answer.step_bytes(steps)
        assert start is not None
        assert vanilla is not None
        up_to_rank = [
            known[1]
            for one in judged.values()
            if one.setting.matrix_approximation_rank <= setting.matrix_approximation_rank
            and (known := one.step_bytes(steps)) is not None
        ]
        return start * vanilla[0] + (steps - start) * max(up_to_rank, default=0.0)


def _bytes(judgement: Judgement) -> float:
    assert judgement.bytes is not None, "a satisfactory setting has complete trials"
    return judgement.bytes
