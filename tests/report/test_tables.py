"""The two tables as users load them: columns, types and order, whatever a study has run so far.
Studies are written by the record's own functions, so that a change there is met here."""

import pandas as pd
import pytest

from powersgd_lab import report
from powersgd_lab import settings
from powersgd_lab import study
from powersgd_lab.network.cost import ring_seconds
from powersgd_lab.network.links import link
from powersgd_lab.report import tables
from powersgd_lab.settings import Hook


OFF, BF16 = (Hook.off, None, None), (Hook.bf16, None, None)


def test_csv_files_hold_what_load_returns(made_up):
    report.write_tables(study.load(made_up), made_up / "report")
    loaded = report.load(made_up)
    for name, frame in (("trials", loaded.trials), ("points", loaded.points)):
        read = pd.read_csv(made_up / "report" / f"{name}.csv", dtype=frame.dtypes.to_dict(), keep_default_na=True)
        pd.testing.assert_frame_equal(read, frame)


def test_columns_are_the_promised_ones_first(made_up):
    loaded = report.load(made_up)
    assert tuple(loaded.trials.columns[: len(study.COLUMNS)]) == study.COLUMNS
    assert list(loaded.trials.columns[len(study.COLUMNS) :]) == [
        "allreduces_step",
        "control_bytes",
        "metric.perplexity",
    ]
    assert tuple(loaded.points.columns) == (*tables.POINT_COLUMNS, "metric.perplexity")


@pytest.mark.parametrize("metrics", [{}, {OFF: "waiting"}, {OFF: "fail"}, {OFF: 6.0, BF16: "pruned"}])
def test_types_do_not_depend_on_what_has_run(write, made_up, metrics):
    full, partial = report.load(made_up), report.load(write("partial", metrics))
    for name in ("trials", "points"):
        types, expected = getattr(partial, name).dtypes, getattr(full, name).dtypes
        promised = study.COLUMNS if name == "trials" else tables.POINT_COLUMNS
        assert types[list(promised)].equals(expected[list(promised)])
    assert len(partial.trials) == 2 * len(metrics)


def test_trials_are_in_the_order_of_their_numbers(made_up):
    assert list(report.load(made_up).trials["trial"]) == list(range(16))


def test_a_failed_trial_keeps_its_reason_and_no_numbers(write):
    trials = report.load(write("failed", {OFF: 6.0, (Hook.layerwise, 1, 0.1): "fail"})).trials
    failed = trials[trials["state"] == "fail"]
    assert set(failed["reason"]) == {"RuntimeError: boom"}
    assert failed["metric"].isna().all()
    assert set(failed["start_powerSGD_iter"]) == {40}


def test_a_foreign_fact_is_kept_as_text(made_up):
    record = study.load(made_up)
    record.rows[0]["colour"] = "blue"
    trials = tables.trials(record)
    assert trials["colour"].tolist()[0] == "blue"
    assert trials["colour"].isna().sum() == 15


def test_the_predicted_time_is_of_a_compressed_step_on_the_named_link(made_up):
    record = study.load(made_up)
    record.sweep["configuration"]["network"]["link"] = "100mbit"
    times = {point["setting"]: point[tables.LINK_SECONDS] for point in tables.judged(record)}
    whole = record.sweep["gradient_bytes"]
    assert times["off"] == pytest.approx(ring_seconds(whole, 2, link("100mbit"), 2))
    assert times["layerwise-r4-s40"] == pytest.approx(ring_seconds(whole / 30, 2, link("100mbit"), 2))


def test_an_unknown_link_is_refused_by_its_key(made_up):
    record = study.load(made_up)
    record.sweep["configuration"]["network"]["link"] = "tin can"
    with pytest.raises(ValueError, match=r"network\.link=tin can"):
        tables.judged(record)


def test_tables_are_replaced_whole(made_up):
    folder = made_up / "report"
    report.write_tables(study.load(made_up), folder)
    before = (folder / "trials.csv").open()
    first = before.readline()
    report.write_tables(study.load(made_up), folder)
    # A reader that had the old file open still reads all of it; nothing else is left in the folder.
    assert len(before.readlines()) == 16
    assert first.startswith("trial,state,setting,seed,hook,matrix_approximation_rank,start_powerSGD_iter")
    assert sorted(path.name for path in folder.iterdir()) == ["points.csv", "trials.csv"]


def test_a_setting_of_trials_csv_can_be_trained_again(made_up):
    for row in study.load(made_up).rows:
        assert settings.setting_key(study.setting_of(row)) == row["setting"]
