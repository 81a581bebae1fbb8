"""A study's record as two pandas tables: a row a trial, and a row a point.
Columns and their types do not depend on what has run, so that a table of an empty study has them too."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from powersgd_lab import statistics
from powersgd_lab import study
from powersgd_lab.network.cost import ring_seconds
from powersgd_lab.network.links import link
from powersgd_lab.report import files
from powersgd_lab.statistics import Point
from powersgd_lab.study import Record


WHOLE = (
    "trial",
    "seed",
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "world_size",
    "steps",
    "random_seed",
    "compression_stats_logging_frequency",
    "n",
    "pruned",
    "failed",
)
BYTES = ("payload_bytes", "wire_bytes", "control_bytes")
TEXT = ("state", "setting", "hook", "metric_name", "reason", "satisfactory")
SWITCHES = ("contended", "use_error_feedback", "warm_start", "batch_tensors_with_same_shape")

# Predicted from bytes and link, not measured: no overlap with backward, no time to compress.
LINK_SECONDS = "link_step_seconds"
POINT_COLUMNS = (*statistics.COLUMNS, LINK_SECONDS)


def trials(record: Record) -> pd.DataFrame:
    """A row a trial, `study.COLUMNS` first; missing values are pandas.NA, bytes and seconds as their names say."""
    return _frame(sorted(record.rows, key=lambda row: int(row["trial"])), study.COLUMNS)


def points(judged_points: Sequence[Point]) -> pd.DataFrame:
    """A row for each of the points from `judged`, `POINT_COLUMNS` first."""
    return _frame(judged_points, POINT_COLUMNS)


def judged(record: Record) -> list[Point]:
    """The points of a study by its own tolerance and confidence, each with `link_step_seconds`: the seconds that the
    gradient all-reduces of a compressed step (of a baseline: any step) take alone on `network.link`, predicted."""
    configuration, search = record.sweep["configuration"], record.sweep["configuration"]["search"]
    network, world_size = link(configuration["network"]["link"]), configuration["launcher"]["world_size"]
    found = statistics.points(
        record.rows,
        baseline=search["baselines"][0],
        direction=record.sweep["metric"]["direction"],
        tolerance=search["tolerance"],
        confidence=search["confidence"],
    )
    for point in found:
        ratio, allreduces = point["compression_ratio_step"], point["allreduces_step"]
        if ratio is None or allreduces is None:
            point[LINK_SECONDS] = None
        else:
            payload = record.sweep["gradient_bytes"] / ratio
            point[LINK_SECONDS] = ring_seconds(payload, world_size, network, allreduces)
    return found


def write(record: Record, folder: Path) -> list[Path]:
    """trials.csv and points.csv in `folder`, each replaced whole; returns their paths."""
    written = []
    for name, frame in (("trials.csv", trials(record)), ("points.csv", points(judged(record)))):
        written.append(files.replace(folder / name, frame.to_csv(index=False).encode()))
    return written


def _frame(rows: Sequence[Mapping[str, Any]], first: Iterable[str]) -> pd.DataFrame:
    extras = sorted({key for row in rows for key in row} - set(first))
    return pd.DataFrame({key: _column([row.get(key) for row in rows], key) for key in (*first, *extras)})


def _column(values: list[Any], key: str) -> "pd.Series[Any]":
    if key in WHOLE:
        return pd.Series(values, dtype="Int64")
    if key in BYTES:  # a mean over seeds, or a ring's share, need not be whole
        return pd.Series([None if value is None else round(value) for value in values], dtype="Int64")
    if key in TEXT:
        return pd.Series(values, dtype="string")
    if key in SWITCHES:
        return pd.Series(values, dtype="boolean")
    try:
        return pd.Series(values, dtype="Float64")
    except (TypeError, ValueError):  # a fact that somebody's own trial recorded
        return pd.Series([None if value is None else str(value) for value in values], dtype="string")
