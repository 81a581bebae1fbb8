"""A finished or running study as tables, figures and a recommendation, read from its record alone.
Nothing here trains or searches, so that a report can be made anew at any time, on any machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from powersgd_lab import study
from powersgd_lab.report import figures
from powersgd_lab.report import recommendation
from powersgd_lab.report import tables


write_tables = tables.write
judged = tables.judged


@dataclass(frozen=True)
class Report:
    """trials: a row a trial. points: a row a setting. figures: by name. recommendation: what recommendation.yaml says.
    sweep: what sweep.json says of the study."""

    trials: pd.DataFrame
    points: pd.DataFrame
    figures: dict[str, Figure]
    recommendation: dict[str, Any]
    sweep: dict[str, Any]


def load(study_dir: Path) -> Report:
    """Raises ValueError when there is no study in `study_dir`."""
    record = study.load(study_dir)
    points = tables.judged(record)
    return Report(
        trials=tables.trials(record),
        points=tables.points(points),
        figures=figures.figures(record, points),
        recommendation=recommendation.recommendation(record, points),
        sweep=record.sweep,
    )


def write(study_dir: Path) -> list[Path]:
    """Write a study's tables, recommendation and figures into its report folder; the paths are returned.

    Raises ValueError when there is no study in `study_dir`, OSError when the folder cannot be written."""
    record, folder = study.load(study_dir), study_dir / "report"
    points = tables.judged(record)
    written = tables.write(record, folder)
    written.append(recommendation.write(record, points, folder))
    return written + figures.write(record, points, folder / "figures")
