"""`python -m powersgd_lab.report` and the notebook, run as a user runs them, on a study on disk.
The notebook is executed by a kernel of its own, without a display."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "tradeoff.ipynb"
WRITTEN = [
    "figures/metric_vs_run_bytes.png",
    "figures/metric_vs_run_bytes.svg",
    "figures/metric_vs_step_ratio.png",
    "figures/metric_vs_step_ratio.svg",
    "points.csv",
    "recommendation.yaml",
    "trials.csv",
]


def report(*directories):
    command = [sys.executable, "-m", "powersgd_lab.report", *map(str, directories)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_it_rebuilds_every_file_and_prints_the_paths(made_up, write):
    other = write("other", {})
    ran = report(made_up, other)
    assert ran.returncode == 0, ran.stderr
    expected = [str(study / "report" / name) for study in (made_up, other) for name in WRITTEN]
    assert sorted(ran.stdout.split()) == sorted(expected)
    found = [path for study in (made_up, other) for path in (study / "report").rglob("*") if path.is_file()]
    assert sorted(map(str, found)) == sorted(expected)


def test_a_wrong_path_is_one_line_and_nothing_is_made(tmp_path):
    ran = report(tmp_path / "typo")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == f"report: {tmp_path / 'typo'} is not a study: it has no sweep.json\n"
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_cannot_be_written_is_one_line(made_up):
    (made_up / "report").write_text("in the way")
    ran = report(made_up)
    assert ran.returncode == 1
    assert ran.stderr.startswith("report: ")
    assert ran.stderr.count("\n") == 1


def execute(folder, environment, monkeypatch):
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def test_the_notebook_shows_the_points_and_both_figures(made_up, tmp_path, monkeypatch):
    outputs = execute(tmp_path, {"POWERSGD_LAB_STUDY": str(made_up), "IPYTHONDIR": str(tmp_path)}, monkeypatch)
    data = [output["data"] for output in outputs if "data" in output]
    assert sum("image/png" in shown for shown in data) == 2
    assert any("layerwise-r16-s120" in shown.get("text/html", "") for shown in data)


def test_without_a_name_the_notebook_takes_the_newest_study(write, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    for name, age in (("newer", 10), ("older", 1000)):
        sweep = write(f"runs/{name}", {}) / "sweep.json"
        os.utime(sweep, (sweep.stat().st_mtime - age,) * 2)
    monkeypatch.delenv("POWERSGD_LAB_STUDY", raising=False)
    outputs = execute(tmp_path, {"IPYTHONDIR": str(tmp_path)}, monkeypatch)
    printed = [output["text"] for output in outputs if output.get("name") == "stdout"]
    assert "".join(printed).startswith("newer (0 trials)\nundecided: ")
