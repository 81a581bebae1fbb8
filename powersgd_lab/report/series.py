"""How settings are told apart in pictures: one series for all ranks of a hook and start, always drawn alike.
Colours are Okabe and Ito's, told apart by colour-blind readers; markers and lines differ too, for grey prints."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from powersgd_lab.statistics import Point
from powersgd_lab.statistics import is_baseline


INK = "black"
BASELINE_MARKERS = {"off": "P", "bf16": "*", "fp16": "X"}

# Fill, and the text that is read on it. Source: Okabe and Ito 2008, Color Universal Design.
COLOURS = (
    ("#0072B2", "white"),
    ("#D55E00", "white"),
    ("#009E73", "white"),
    ("#E69F00", "black"),
    ("#56B4E9", "black"),
    ("#CC79A7", "black"),
)
# A number fits into each; sizes in points make their areas look alike.
MARKERS = (("o", 13.0), ("s", 12.0), ("D", 12.5), ("p", 14.0), ("h", 14.0), ("8", 13.5), ("d", 16.0))
LINES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))


@dataclass(frozen=True)
class Series:
    """Points that differ only in rank, and their look."""

    name: str
    points: list[Point]
    colour: str
    text: str
    marker: str
    size: float
    line: Any


def series_of(points: Sequence[Point]) -> list[Series]:
    """The PowerSGD points by hook, start and every other key that is not at its default, in the points' order."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        if not is_baseline(point):
            groups.setdefault(_name(point), []).append(point)
    crowd = 1.0 if len(points) <= 20 else 0.8
    found = []
    for k, (name, members) in enumerate(groups.items()):
        colour, text = COLOURS[k % len(COLOURS)]
        marker, size = MARKERS[k % len(MARKERS)]
        found.append(Series(name, members, colour, text, marker, size * crowd, LINES[k % len(LINES)]))
    return found


def _name(point: Point) -> str:
    start, fraction = point["start_powerSGD_iter"], point["start_fraction"]
    rest = point["setting"].partition(f"-s{start}")[2].replace("-", "\n   ")
    share = f" ({100 * fraction:.3g} % of the run)" if fraction is not None else ""
    return f"{point['hook']}, start {start}{share}{rest}"
