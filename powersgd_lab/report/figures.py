"""A study's two pictures: the metric against the step's compression ratio, and against the run's payload bytes.
Drawn without pyplot, so that nothing global is touched; the same study gives the same bytes."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator
from matplotlib.ticker import FuncFormatter
from matplotlib.ticker import NullLocator

from powersgd_lab.report import files
from powersgd_lab.report.series import BASELINE_MARKERS
from powersgd_lab.report.series import INK
from powersgd_lab.report.series import Series
from powersgd_lab.report.series import series_of
from powersgd_lab.statistics import Point
from powersgd_lab.statistics import is_baseline
from powersgd_lab.statistics import pareto
from powersgd_lab.study import Record


SIZE = (9.0, 5.0)  # inches; the PNG has 150 dots an inch
DIRECTIONS = {"min": "lower is better", "max": "higher is better"}
BYTE_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
LEGEND_TITLE = (
    "number in a marker: approximation rank\n"
    "bars: ± standard deviation over seeds\n"
    "(smaller than the marker where unseen)"
)


def figures(record: Record, points: Sequence[Point]) -> dict[str, Figure]:
    """Both pictures by their file names; `points` are those of `tables.judged`."""
    return {
        "metric_vs_step_ratio": metric_against_ratio(record.sweep, points),
        "metric_vs_run_bytes": metric_against_bytes(record.sweep, points),
    }


def write(record: Record, points: Sequence[Point], folder: Path) -> list[Path]:
    """Both pictures as PNG and SVG in `folder`, each replaced whole; returns their paths."""
    written = []
    for name, figure in figures(record, points).items():
        for kind, options in (("png", {"dpi": 150}), ("svg", {"metadata": {"Date": None}})):
            buffer = io.BytesIO()
            with mpl.rc_context({"svg.hashsalt": "powersgd_lab"}):
                figure.savefig(buffer, format=kind, **options)
            written.append(files.replace(folder / f"{name}.{kind}", buffer.getvalue()))
    return written


def metric_against_ratio(sweep: dict[str, Any], points: Sequence[Point]) -> Figure:
    """What a compressed step's ratio costs, a line for each start: later starts lie nearer to the baseline."""
    figure, axes = _frame(sweep, "compression ratio of a compressed step (uncompressed ÷ sent bytes, log scale)")
    shown = _with_a_mean(points, "compression_ratio_step")
    reference = sweep["configuration"]["search"]["baselines"][0]
    if not shown:
        return _say_empty(figure, axes)
    _draw_limits(axes, sweep, points)
    for series in series_of(shown):
        ordered = sorted(series.points, key=lambda p: float(p["compression_ratio_step"]))
        values = [(p["compression_ratio_step"], p["metric"]) for p in ordered]
        axes.plot(*zip(*values, strict=True), color=series.colour, linestyle=series.line, linewidth=1.6, zorder=2)
        _draw_points(axes, series, "compression_ratio_step", line=series.line)
    others = [point for point in shown if is_baseline(point) and point["setting"] != reference]
    _draw_baselines(axes, others, "compression_ratio_step")
    _log_axis(axes, [p["compression_ratio_step"] for p in shown if p["setting"] != reference] or [1.0], "x")
    return _legend(figure, axes, points)


def metric_against_bytes(sweep: dict[str, Any], points: Sequence[Point]) -> Figure:
    """What a whole run sends for its metric; the front joins the points that nothing beats in both."""
    shown = _with_a_mean(points, "payload_bytes")
    largest = max((p["payload_bytes"] for p in shown), default=1e6)
    scale, unit = next((s, u) for s, u in BYTE_UNITS if largest >= 2 * s or s == 1)
    figure, axes = _frame(sweep, f"payload of the run, one rank, start phase included ({unit}, log scale)")
    if not shown:
        return _say_empty(figure, axes)
    shown = [point | {"payload_shown": point["payload_bytes"] / scale} for point in shown]
    _draw_limits(axes, sweep, points)
    front = pareto(shown, sweep["metric"]["direction"])
    steps = [[p[key] for p in front] for key in ("payload_shown", "metric")]
    axes.step(*steps, where="post", color="0.8", linewidth=6, zorder=1, label="Pareto front (black rims)")
    best = {point["setting"] for point in front}
    for series in series_of(shown):
        _draw_points(axes, series, "payload_shown", line="none", rimmed=best)
    _draw_baselines(axes, [point for point in shown if is_baseline(point)], "payload_shown")
    _log_axis(axes, [p["payload_shown"] for p in shown], "")
    return _legend(figure, axes, points)


def _with_a_mean(points: Sequence[Point], key: str) -> list[Point]:
    return [point for point in points if point["metric"] is not None and point[key] is not None]


def _frame(sweep: dict[str, Any], label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    configuration, metric = sweep["configuration"], sweep["metric"]
    axes.set_title(
        f"{configuration['study']}: {configuration['model']['name']} on {configuration['dataset']['name']}, "
        f"{sweep['steps']} steps, {configuration['launcher']['world_size']} ranks",
        loc="left",
        fontsize=11,
    )
    axes.set_xlabel(label)
    axes.set_ylabel(f"{metric['name']} ({DIRECTIONS[metric['direction']]})")
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _say_empty(figure: Figure, axes: Axes) -> Figure:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, "no setting has a mean to show yet", transform=axes.transAxes, ha="center", va="center")
    return figure


def _draw_limits(axes: Axes, sweep: dict[str, Any], points: Sequence[Point]) -> None:
    """The baseline's mean and spread across the whole picture, and how much worse is still satisfactory."""
    search = sweep["configuration"]["search"]
    reference = next((p for p in points if p["setting"] == search["baselines"][0]), None)
    if reference is None or reference["metric"] is None:
        return
    mean, std, name = reference["metric"], reference["metric_std"], reference["setting"]
    axes.axhline(mean, color=INK, linewidth=1.2, zorder=1.2, label=f"{name}: mean of {reference['n']}")
    if std is not None:
        band = f"{name}: ± standard deviation"
        axes.axhspan(mean - std, mean + std, color="0.6", alpha=0.35, linewidth=0, zorder=0, label=band)
    sign = 1 if sweep["metric"]["direction"] == "min" else -1
    allowed = f"{search['tolerance']}" if str(search["tolerance"]).endswith("%") else f"{reference['tolerance']:.3g}"
    limit = mean + sign * reference["tolerance"]
    axes.axhline(
        limit, color=INK, linestyle=(0, (6, 4)), linewidth=1.2, zorder=1.2, label=f"tolerance: {allowed} worse"
    )


def _draw_points(
    axes: Axes, series: Series, key: str, line: Any, rimmed: frozenset[str] | set[str] = frozenset()
) -> None:
    """Markers with the rank in them, each with its error bar; a later one covers an earlier one with its number."""
    colour, marker = series.colour, series.marker
    axes.plot([], [], color=colour, marker=marker, linestyle=line, markersize=9, label=series.name)
    for k, point in enumerate(series.points):
        x, y, depth = point[key], point["metric"], 3 + 0.01 * k
        axes.errorbar(x, y, yerr=point["metric_std"], color=colour, capsize=4, linewidth=1.4, zorder=depth)
        rim, width = (INK, 2.0) if point["setting"] in rimmed else ("white", 0.8)
        axes.plot(
            *(x, y, marker),
            color=colour,
            markersize=series.size,
            markeredgecolor=rim,
            markeredgewidth=width,
            zorder=depth,
        )
        rank = str(point["matrix_approximation_rank"])
        axes.text(
            *(x, y, rank),
            color=series.text,
            fontsize=series.size * (0.58 if len(rank) < 3 else 0.42),
            fontweight="bold",
            ha="center",
            va="center_baseline",
            zorder=depth,
        )


def _draw_baselines(axes: Axes, points: Sequence[Point], key: str) -> None:
    for point in points:
        axes.errorbar(
            *(point[key], point["metric"]),
            yerr=point["metric_std"],
            color=INK,
            marker=BASELINE_MARKERS[point["hook"]],
            markersize=11,
            markerfacecolor="white",
            markeredgewidth=1.6,
            linestyle="none",
            capsize=4,
            zorder=4,
            label=f"{point['setting']} (baseline)",
        )


def _log_axis(axes: Axes, values: Sequence[float], suffix: str) -> None:
    """A log axis with round numbers as ticks, also where it spans less than a decade or a single value."""
    margin = max(1.3, 2 / math.sqrt(max(values) / min(values)))
    low, high = min(values) / margin, max(values) * margin
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), tuple(k / 10 for k in range(10, 100, 2))):
        ticks = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(ticks) >= 4:
            break
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{suffix}"))


def _legend(figure: Figure, axes: Axes, points: Sequence[Point]) -> Figure:
    missing = sum(point["metric"] is None for point in points)
    if missing:
        axes.plot([], [], linestyle="none", label=f"without a mean, not shown: {missing}")
    figure.legend(
        loc="outside right upper",
        title=LEGEND_TITLE,
        title_fontsize=8,
        fontsize=9,
        frameon=False,
        alignment="left",
        handlelength=2.8,
        labelspacing=0.7,
    )
    return figure
