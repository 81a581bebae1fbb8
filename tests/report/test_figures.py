"""The pictures' content, read off the drawn axes: what is in them, not how it looks.
That nothing is cut or overlaps is also checked, since that is what breaks with one point and with forty."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from powersgd_lab import report
from powersgd_lab import study
from powersgd_lab.report import figures
from powersgd_lab.report import tables
from powersgd_lab.settings import Hook


OFF, BF16 = (Hook.off, None, None), (Hook.bf16, None, None)
FORTY = {
    (Hook.layerwise, rank, fraction): 6.7 + (1 - fraction) / rank
    for fraction in (0.1, 0.2, 0.4, 0.6, 0.8)
    for rank in (1, 2, 4, 8, 16, 32, 64, 128)
}
STUDIES = {
    "empty": {},
    "failed": {OFF: "fail"},
    "baseline alone": {OFF: 6.7},
    "one": {OFF: 6.7, (Hook.layerwise, 4, 0.1): 7.0},
    "no baseline": {(Hook.layerwise, 4, 0.1): 7.0},
    "diverged": {OFF: 6.7, BF16: 6.7, (Hook.layerwise, 1, 0.1): "pruned"},
    "forty": {OFF: 6.7, BF16: 6.7, (Hook.fp16, None, None): 6.7} | FORTY,
}
NAMES = ("metric_vs_step_ratio", "metric_vs_run_bytes")


def legend_of(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def numbers_of(figure):
    return sorted(int(text.get_text()) for text in figure.axes[0].texts)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("metrics", STUDIES.values(), ids=STUDIES)
def test_every_study_can_be_drawn_and_nothing_is_cut(write, metrics, name):
    figure = report.load(write("drawn", metrics)).figures[name]
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    axes, renderer = figure.axes[0], canvas.get_renderer()
    labels = [label for label in axes.get_xticklabels() if label.get_text()]
    boxes = [label.get_window_extent(renderer) for label in labels]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])
    boxes += [axes.xaxis.label.get_window_extent(renderer), axes.yaxis.label.get_window_extent(renderer)]
    boxes += [axes.title.get_window_extent(renderer), *(x.get_window_extent(renderer) for x in figure.legends)]
    for box in boxes:
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
    for legend in figure.legends:
        assert not legend.get_window_extent(renderer).overlaps(axes.get_window_extent(renderer))


def test_a_line_for_each_start_and_a_number_for_each_rank(made_up):
    figure = report.load(made_up).figures["metric_vs_step_ratio"]
    assert numbers_of(figure) == [1, 1, 4, 4, 16, 16]
    legend = legend_of(figure)
    assert "layerwise, start 40 (10 % of the run)" in legend
    assert "layerwise, start 120 (30 % of the run)" in legend
    assert "bf16 (baseline)" in legend
    assert {"off: mean of 2", "off: ± standard deviation", "tolerance: 5% worse"} <= set(legend)
    assert figure.axes[0].get_xscale() == "log"
    assert figure.axes[0].get_ylabel() == "perplexity (lower is better)"


def test_the_tolerance_line_lies_on_the_worse_side(made_up):
    record = study.load(made_up)
    for direction, sign in (("min", 1), ("max", -1)):
        record.sweep["metric"]["direction"] = direction
        points = tables.judged(record)
        axes = figures.metric_against_ratio(record.sweep, points).axes[0]
        lines = {line.get_label(): line.get_ydata()[0] for line in axes.lines if len(line.get_ydata())}
        mean = points[0]["metric"]
        assert lines["off: mean of 2"] == mean
        assert lines["tolerance: 5% worse"] == pytest.approx(mean + sign * 0.05 * mean)


def test_the_front_joins_the_points_that_nothing_beats(write):
    metrics = {OFF: 6.0, BF16: 6.1, (Hook.layerwise, 1, 0.1): 9.0, (Hook.layerwise, 1, 0.3): 9.5}
    figure = report.load(write("front", metrics, seeds=1)).figures["metric_vs_run_bytes"]
    (front,) = [line for line in figure.axes[0].lines if str(line.get_label()).startswith("Pareto")]
    megabytes = 2.4 * 400
    start_at_40 = 2.4 * (40 + 360 / 90)
    assert list(front.get_xdata()) == pytest.approx([start_at_40, megabytes / 2, megabytes])
    assert "(MB, log scale)" in figure.axes[0].get_xlabel()


def test_settings_without_a_mean_are_counted(write):
    figure = report.load(write("diverged", STUDIES["diverged"])).figures["metric_vs_step_ratio"]
    assert "without a mean, not shown: 1" in legend_of(figure)


def test_settings_that_differ_in_another_key_are_series_of_their_own(write):
    metrics = {OFF: 6.0, (Hook.layerwise, 1, 0.1): 9.0, (Hook.batched, 1, 0.1): 9.5}
    legend = legend_of(report.load(write("keys", metrics, extra={"warm_start": False})).figures[NAMES[0]])
    assert "layerwise, start 40 (10 % of the run)\n   warm_start=false" in legend
    assert "batched, start 40 (10 % of the run)\n   warm_start=false" in legend


def test_the_same_study_gives_the_same_bytes(made_up):
    record = study.load(made_up)
    first = {path: path.read_bytes() for path in figures.write(record, tables.judged(record), made_up)}
    second = {path: path.read_bytes() for path in figures.write(record, tables.judged(record), made_up)}
    assert {path.name for path in first} == {f"{name}.{kind}" for name in NAMES for kind in ("png", "svg")}
    assert first == second
    assert b"<dc:date>" not in first[made_up / "metric_vs_step_ratio.svg"]
