"""What a person sees while a sweep runs: a live view in a terminal, plain lines elsewhere, and the table of points.
The controller only calls the methods of `controller.View`."""

import math
import time
from collections.abc import Callable
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from powersgd_lab.study import Row


Point = dict[str, Any]
Points = Callable[[list[Row]], list[Point]]

SHOWN_POINTS = 40  # a live view taller than the terminal cannot be redrawn


class _Clock:
    """How much of the work is done, in trials and parts of trials, and the time that the rest may take."""

    def __init__(self, steps: int) -> None:
        self._steps, self._began = steps, time.monotonic()
        self.planned = 0
        self.ended = 0  # ever, in this run or an earlier one
        self._ended_here = 0
        self.running: dict[int, Row] = {}

    def start(self, row: Row) -> None:
        self.running[row["trial"]] = row | {"step": 0}

    def end(self, row: Row, rows: Sequence[Row]) -> None:
        self.running.pop(row["trial"], None)
        self._ended_here += 1
        ended = [r for r in rows if r["state"] in ("complete", "pruned", "fail")]
        self.ended = len({(r["setting"], r["seed"]) for r in ended})  # one that was tried again counts once

    def done(self) -> float:
        return sum(int(row["step"]) for row in self.running.values()) / self._steps

    def left(self) -> str:
        done = self._ended_here + self.done()
        if done < 0.1:
            return "time left: not known yet"
        elapsed = time.monotonic() - self._began
        return f"about {_duration(elapsed / done * max(0.0, self.planned - self.ended - self.done()))} left"

    def elapsed(self) -> str:
        return _duration(time.monotonic() - self._began)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def summary(row: Row) -> str:
    """One line on a trial that ended."""
    name = f"{row['setting']} seed {row['seed']}"
    if row["state"] != "complete":
        return f"{name}: {row['state']}: {row['reason']}"
    ratios = f"{row['compression_ratio_step']:.3g}x a step, {row['compression_ratio_run']:.3g}x the run"
    seconds = f"{row['seconds']:.1f} s and {row['evaluation_seconds']:.1f} s of evaluation"
    return f"{name}: {row['metric_name']} {row['metric']:.4g} in {seconds}, {ratios}"


class PlainView:
    """A line when a trial ends and for each decision, for logs and pipes."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._clock = console, _Clock(steps)

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        pass

    def planned(self, trials: int) -> None:
        self._clock.planned = trials

    def started(self, row: Row) -> None:
        self._clock.start(row)

    def progress(self, number: int, event: dict[str, Any]) -> None:
        self._clock.running[number]["step"] = event.get("step", 0)

    def ended(self, row: Row, rows: list[Row]) -> None:
        self._clock.end(row, rows)
        count = f"[{self._clock.ended:>3}/{self._clock.planned}]"
        left = "" if self._clock.ended >= self._clock.planned else f" ({self._clock.left()})"
        self._console.print(f"{count} {summary(row)}{left}", markup=False, highlight=False, soft_wrap=True)

    def decided(self, sentence: str) -> None:
        self._console.print(f"-> {sentence}", markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """A bar over all trials, the running ones with step and metric, and the points so far."""

    def __init__(self, console: Console, steps: int, metric: str, direction: str, points: Points) -> None:
        self._steps, self._metric, self._direction, self._points = steps, metric, direction, points
        self._clock = _Clock(steps)
        self._console = console
        self._table: Table | None = None
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render, transient=True)

    def __enter__(self) -> "LiveView":
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._live.stop()

    def planned(self, trials: int) -> None:
        self._clock.planned = trials

    def started(self, row: Row) -> None:
        self._clock.start(row)

    def progress(self, number: int, event: dict[str, Any]) -> None:
        row = self._clock.running[number]
        row["step"] = event.get("step", row["step"])
        row["evaluating"] = event["event"] == "evaluating"
        if event["event"] == "train":
            row["train_loss"] = event["loss"]
        elif event["event"] == "eval":
            row["metric"] = event[self._metric]

    def ended(self, row: Row, rows: list[Row]) -> None:
        self._clock.end(row, rows)
        if row["state"] != "complete":
            self._console.print(Text(f"trial {row['trial']}: {summary(row)}", style="yellow"))
        self._table = points_table(self._points(rows)[-SHOWN_POINTS:], self._metric, self._direction)

    def decided(self, sentence: str) -> None:
        self._console.print(Text(f"-> {sentence}"))

    def _render(self) -> Group:
        clock = self._clock
        line = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=max(clock.planned, 1), completed=clock.ended + clock.done(), width=40)
        line.add_row(f"[bold]{clock.ended} of {clock.planned} trials[/bold]", bar, f"{clock.elapsed()}, {clock.left()}")
        return Group(line, self._running(), *([self._table] if self._table is not None else []))

    def _running(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for row in list(self._clock.running.values()):
            known = row.get("train_loss")  # None also where the loss is not finite
            loss = f"loss {known:.4g}" if known is not None else "starting" if row["step"] == 0 else "loss not finite"
            metric = f"{self._metric} {row['metric']:.4g}" if row["metric"] is not None else ""
            bar = ProgressBar(total=self._steps, completed=row["step"], width=20)
            name = f"{row['setting']} seed {row['seed']}"
            if row.get("evaluating"):
                metric = "evaluating"
            table.add_row(f"trial {row['trial']}", name, bar, f"step {row['step']}/{self._steps}", loss, metric)
        return table


def points_table(points: Sequence[Point], metric: str, direction: str) -> Table:
    """One line a setting: mean ± sample standard deviation, the paired difference with its interval, both ratios, bytes
    a rank hands over in the run, seconds of training, and the predicted time of a step's all-reduces on the link."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    better = "lower" if direction == "min" else "higher"
    table.add_column("setting", overflow="fold")
    table.add_column("n", justify="right")
    for title in (f"{metric}\n({better} is better)", "against baseline", "ratio\na step", "ratio\nthe run"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("MB a rank", "seconds\na run", "link ms\na step", "satisfactory"):
        table.add_column(title, justify="right")
    for point in points:
        payload = None if point["payload_bytes"] is None else point["payload_bytes"] / 1e6
        table.add_row(
            point["setting"],
            str(point["n"]) + (f" ({point['failed']} failed)" if point["failed"] else ""),
            "ended early" if point["pruned"] else _plus_minus(point["metric"], point["metric_std"]),
            _interval(point),
            _ratio(point["compression_ratio_step"]),
            _ratio(point["compression_ratio_run"]),
            "" if payload is None else f"{payload:.1f}",
            "" if point["seconds"] is None else f"{point['seconds']:.1f}",
            "" if point["link_step_seconds"] is None else f"{1e3 * point['link_step_seconds']:.2f}",
            point["satisfactory"],
        )
    return table


def _plus_minus(mean: float | None, spread: float | None) -> str:
    if mean is None:
        return "-"
    if not spread:
        return f"{mean:.4g}"
    decimals = max(0, 1 - math.floor(math.log10(spread)))  # two digits of the spread are all that it is worth
    return f"{mean:.{decimals}f} ± {spread:.{decimals}f}"


def _interval(point: Point) -> str:
    difference, low, high = point["difference"], point["difference_low"], point["difference_high"]
    if difference is None or point["difference_std"] is None:
        return "" if difference is None else f"{difference:+.3g}"
    return f"{difference:+.3g} [{low:+.2g}, {high:+.2g}]" if low is not None else f"{difference:+.3g}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3g}x"


def view_for(console: Console, steps: int, metric: str, direction: str, points: Points) -> LiveView | PlainView:
    if console.is_terminal:
        return LiveView(console, steps, metric, direction, points)
    return PlainView(console, steps)
