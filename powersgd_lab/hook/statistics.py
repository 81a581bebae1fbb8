"""Counts what compression saves, and logs it now and then.
As PyTorch's hook counts: elements of compressed steps only, on one rank.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from powersgd_lab.hook.pipeline import Item
    from powersgd_lab.hook.state import PowerSGDState


logger = logging.getLogger(__name__)


def report(state: "PowerSGDState", items: Sequence["Item"]) -> None:
    """Add one compressed step's elements, and log the totals when they are due."""
    state.total_numel_before_compression += sum(item.gradient.numel() for item in items)
    # Every bucket's memory is at its place until the step after this one binds it anew.
    state.total_numel_after_compression += sum(held.after for held in state._memories.values())
    if state.iter >= state.next_stats_report:
        rate, before, after = state.compression_stats()
        logger.info(
            "Compression statistics: step %s, elements before compression %s, after compression %s, rate %s",
            state.iter,
            before,
            after,
            rate,
        )
        state.next_stats_report = state.iter + state.compression_stats_logging_frequency
