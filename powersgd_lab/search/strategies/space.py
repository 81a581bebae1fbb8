"""What a strategy may choose from: ranks, starts and the settings given by hand, each made from the base setting.
All strategies build their settings here, so that a start is resolved and checked in one way."""

from dataclasses import dataclass

from powersgd_lab import settings
from powersgd_lab.settings import PowerSGD
from powersgd_lab.training.preflight import check_start


@dataclass(frozen=True)
class Space:
    """The part of a sweep that strategies read. `steps` and `warmup_steps` are those of one run."""

    search: settings.Search
    base: PowerSGD
    steps: int
    warmup_steps: int

    def setting(self, **changes: object) -> PowerSGD:
        """The base with some keys changed and its start in steps. Raises ValueError for what no run can do."""
        found = settings.resolved(settings.vary(self.base, changes), self.steps, self.warmup_steps)
        check_start(found, self.steps)
        return found

    def at(self, rank: int, fraction: float) -> PowerSGD:
        return self.setting(matrix_approximation_rank=rank, start_fraction=fraction)

    def ranks(self) -> list[int]:
        """1, g, g², … up to the largest: the exponential grid of the PyTorch document."""
        ranks = [1]
        while ranks[-1] * self.search.rank_growth <= self.search.max_rank:
            ranks.append(ranks[-1] * self.search.rank_growth)
        return ranks

    def starts(self) -> list[float]:
        """The start fractions from the earliest on; of those that fall on one step, only the first."""
        by_step: dict[int | None, float] = {}
        for fraction in sorted(self.search.start_fractions):
            by_step.setdefault(self.at(1, fraction).start_powerSGD_iter, fraction)
        return list(by_step.values())

    def by_hand(self) -> list[PowerSGD]:
        return [self.setting(**changes) for changes in self.search.settings]

    def require_rank(self) -> None:
        """Raises ValueError when the base is a hook whose rank cannot be varied."""
        name = self.base.hook.name
        if not self.base.hook.compresses:
            raise ValueError(
                f"powersgd={name}: search={self.search.strategy.name} varies the approximation rank, which needs a "
                "hook that has one: layerwise, batched or torch"
            )
