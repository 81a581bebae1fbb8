"""The main command end to end, with real ranks on a small model: complete, resumed, grown, refused, interrupted.
What is checked is what a user relies on: exit codes, the tables' columns, the record, and that no process stays."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from powersgd_lab import study
from powersgd_lab import sweep


SMALL = [
    "model=mlp",
    "model.hidden=[32]",
    "dataset=random",
    "dataset.train_samples=512",
    "dataset.validation_samples=64",
    "dataset.height=8",
    "dataset.width=8",
    "trainer.steps=12",
    "trainer.warmup_steps=2",
    "trainer.batch_size=8",
    "trainer.eval_steps=6",
    "search.max_rank=2",
    "search.rank_growth=2",
    "search.start_fractions=[0.25]",
    "search.seeds=2",
    "study=small",
]

DESIGN = (
    "trial, state, setting, seed, hook, matrix_approximation_rank, start_powerSGD_iter, start_fraction, world_size, "
    "steps, metric_name, metric, loss, payload_bytes, wire_bytes, compression_ratio_step, compression_ratio_run, "
    "seconds, step_seconds, compute_seconds, compress_seconds, communicate_seconds, reason, contended"
)


def own_model(folder, body):
    """A module with a model in it that misbehaves as `body` says, importable by the sweep and its ranks."""
    (folder / "misbehaving.py").write_text(
        "import os, signal, time\nimport torch\nfrom torch import nn\nimport torch.distributed as dist\n\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, channels, height, width, classes):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(channels * height * width, classes)\n"
        "        self.calls = 0\n"
        "    def forward(self, images):\n"
        "        self.calls += 1\n"
        "        rank = dist.get_rank() if dist.is_initialized() else None\n"
        f"        {body}\n"
        "        return self.layer(images.flatten(1))\n"
    )
    own = [override for override in SMALL if not override.startswith("model")]
    return [*own, "model=own", "model._target_=misbehaving.Net"]


def start(folder, overrides):
    """The command as a user starts it, in a folder of its own."""
    environment = os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "200"}
    return subprocess.Popen(
        [sys.executable, "-m", "powersgd_lab.sweep", *overrides],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder, overrides):
    process = start(folder, overrides)
    printed, errors = process.communicate(timeout=240)
    return process.returncode, printed, errors


def processes_of(folder):
    """Processes that run in `folder`: the controller, its fork server and the ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                cwd = os.readlink(entry / "cwd")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if cwd == str(folder) and state != "Z":
                found.append(int(entry.name))
    return found


def none_left(folder, seconds=10):
    deadline = time.monotonic() + seconds
    while processes_of(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    return processes_of(folder) == []


def table(folder, name="trials"):
    with (folder / "runs" / "small" / "report" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    code, printed, errors = run(folder, SMALL)
    assert code == 0, errors
    return folder, printed


def test_a_sweep_runs_baselines_and_grid_with_every_seed(finished):
    folder, printed = finished
    rows = table(folder)
    assert list(rows[0])[:24] == DESIGN.split(", ")
    settings = ["off", "bf16", "layerwise-r1-s3", "layerwise-r2-s3"]
    assert [(r["setting"], r["seed"]) for r in rows] == [(s, str(seed)) for s in settings for seed in (0, 1)]
    assert {r["state"] for r in rows} == {"complete"}
    assert none_left(folder)
    for words in ("[  8/8]", "layerwise-r2-s3", "±", "recommendation.yaml"):
        assert words in printed


def test_bytes_follow_from_shapes(finished):
    folder, _ = finished
    # 3·8·8 inputs, 32 units, 10 classes: two matrices and two biases
    gradient = 4 * (192 * 32 + 32 + 32 * 10 + 10)
    for row in table(folder):
        payload, ratio = int(row["payload_bytes"]), float(row["compression_ratio_run"])
        if row["hook"] == "layerwise":
            rank = int(row["matrix_approximation_rank"])
            compressed = 4 * ((192 + 32) * rank + 32 + (32 + 10) * rank + 10)
            assert payload == 3 * gradient + 9 * compressed
            assert float(row["compression_ratio_step"]) == pytest.approx(gradient / compressed)
        else:
            assert payload == 12 * gradient // (2 if row["hook"] == "bf16" else 1)
        assert ratio == pytest.approx(12 * gradient / payload)
        assert int(row["wire_bytes"]) == payload  # 2 (W - 1) / W at W = 2


def test_files_written_are_those_printed(finished):
    folder, printed = finished
    names = [line.strip() for line in printed.splitlines() if line.startswith("  runs/")]
    assert all((folder / name).is_file() for name in names)
    assert {Path(name).suffix for name in names} == {".csv", ".yaml", ".png", ".svg"}
    recommendation = yaml.safe_load((folder / "runs/small/report/recommendation.yaml").read_text())
    assert recommendation["verdict"] in ("use", "do_not_use", "undecided")


def test_resuming_a_complete_study_runs_nothing(finished):
    folder, _ = finished
    before = table(folder)
    code, printed, _ = run(folder, SMALL)
    assert code == 0
    assert "[" not in "".join(line[:1] for line in printed.splitlines())
    assert table(folder) == before


def test_a_study_grows(finished):
    folder, _ = finished
    before = table(folder)
    code, _, errors = run(folder, [*SMALL, "search.seeds=3"])
    assert code == 0, errors
    after = table(folder)
    assert after[:8] == before[:8]
    assert [r["seed"] for r in after[8:]] == ["2"] * 4


def refused(arguments, capsys):
    assert sweep.main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("sweep: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_another_study_under_the_same_name_is_refused_with_its_keys(finished, capsys, monkeypatch):
    folder, _ = finished
    monkeypatch.chdir(folder)
    before = (folder / "runs/small/sweep.json").read_bytes()
    message = refused([*SMALL, "trainer.batch_size=4", "optimizer.lr=0.5"], capsys)
    assert "trainer.batch_size is 8 there, 4 here" in message
    assert "optimizer.lr" in message
    assert (folder / "runs/small/sweep.json").read_bytes() == before


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["powersgd.matrix_approximation_rank=0"], "matrix_approximation_rank=0"),
        (["powersgd.matrix_approximation_rank=1.5"], "matrix_approximation_rank"),
        (["search.settings=[{start_powerSGD_iter: 1}]"], "start_powerSGD_iter=1"),
        (["search.settings=[{start_powerSGD_iter: 12}]"], "start_powerSGD_iter=12"),
        (["launcher.world_size=0"], "launcher.world_size=0"),
        (["launcher.world_size=1"], "launcher.world_size=1"),
        (["launcher.slots=1000"], "launcher.slots=1000"),
        (["launcher.device=cuda"], "launcher.device=cuda"),
        (["runs_dir=/proc/nowhere"], "runs_dir=/proc/nowhere"),
        (["trainer.metric=f1"], "trainer.metric"),
        (["trainer.warmup_steps=12"], "trainer.warmup_steps"),
        (["network.link=5g"], "network.link"),
        (["model=gpt"], "vocabulary"),
        (["powersgd=off"], "powersgd=off"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_leaves_nothing(overrides, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = [override for override in SMALL if not (override.startswith("model") and overrides == ["model=gpt"])]
    assert words in refused([*kept, *overrides], capsys)
    assert list(tmp_path.iterdir()) == []


def test_only_one_controller(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "without torchrun" in refused(SMALL, capsys)


@pytest.mark.slow
def test_a_rank_that_raises_costs_its_trial_only(tmp_path):
    body = (
        "if rank == 1 and self.calls == 5 and not os.path.exists('once'): "
        "open('once', 'w').close(); raise AssertionError('out of luck')"
    )
    code, printed, errors = run(tmp_path, own_model(tmp_path, body))
    assert code == 0, errors
    rows = table(tmp_path)
    failed = [row for row in rows if row["state"] == "fail"]
    assert len(rows) == 8
    assert [row["reason"] for row in failed] == ["AssertionError: out of luck"]
    text = (tmp_path / "runs/small/trials" / f"{int(failed[0]['trial']):04d}" / "error.txt").read_text()
    assert "Traceback" in text
    assert "out of luck" in text
    assert "out of luck" in printed
    assert none_left(tmp_path)
    overrides = [*own_model(tmp_path, body), "search.retry_failed=true"]
    code, printed, errors = run(tmp_path, overrides)
    assert code == 0, errors
    again = table(tmp_path)
    assert again[:8] == rows
    assert (again[8]["setting"], again[8]["seed"], again[8]["state"]) == (
        failed[0]["setting"],
        failed[0]["seed"],
        "complete",
    )
    assert len(again) == 9
    assert "[  8/8]" in printed
    assert {point["n"] for point in table(tmp_path, "points")} == {"2"}


@pytest.mark.slow
def test_nothing_to_judge_without_a_baseline_ends_with_one(tmp_path):
    code, _, errors = run(tmp_path, own_model(tmp_path, "assert rank is None or self.calls < 3, 'never works'"))
    assert code == 1
    last = errors.strip().splitlines()[-1]
    assert last.startswith("sweep: every seed of the baseline off failed: AssertionError: never works")
    assert len(table(tmp_path)) == 2
    assert none_left(tmp_path)


@pytest.mark.slow
def test_a_rank_that_is_killed_costs_its_trial_only(tmp_path):
    body = (
        "if rank == 1 and self.calls == 3 and not os.path.exists('once'): "
        "open('once', 'w').close(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    code, _, errors = run(tmp_path, own_model(tmp_path, body))
    assert code == 0, errors
    assert [row["state"] for row in table(tmp_path)] == ["fail"] + ["complete"] * 7
    assert "signal 9" in table(tmp_path)[0]["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_everything_and_the_same_command_resumes(number, tmp_path):
    slow = own_model(tmp_path, "time.sleep(0.1 if rank is not None else 0)")
    process = start(tmp_path, slow)
    metrics = tmp_path / "runs/small/trials/0001/metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= 6):  # a resumed trial writes fewer at first
        assert process.poll() is None
        time.sleep(0.02)
    began = time.monotonic()
    process.send_signal(number)
    assert process.wait(timeout=30) == 130
    assert time.monotonic() - began < 10
    process.communicate()
    assert none_left(tmp_path, seconds=2)
    assert [row["state"] for row in study.load(tmp_path / "runs/small").rows] == ["complete", "waiting"]
    code, _, errors = run(tmp_path, slow)
    assert code == 0, errors
    rows = table(tmp_path)
    assert [row["trial"] for row in rows] == [str(number) for number in range(8)]
    assert {row["state"] for row in rows} == {"complete"}


@pytest.mark.slow
def test_a_trial_that_trails_the_baseline_is_given_up_with_its_step(tmp_path):
    hopeless = ["trainer.steps=40", "trainer.eval_steps=4", "trainer.metric=loss", "search.tolerance=0"]
    code, printed, errors = run(tmp_path, [*SMALL, *hopeless, "search.give_up=0.01", "optimizer.lr=0.01"])
    assert code == 0, errors
    first = next(row for row in table(tmp_path) if row["hook"] == "layerwise")
    assert first["state"] == "pruned"
    assert first["reason"].startswith("stopped: given up at step ")
    assert 10 < int(first["steps"]) < 40  # compression begins at step 10
    assert [row["seed"] for row in table(tmp_path) if row["setting"] == first["setting"]] == ["0"]
    assert first["reason"] in printed
    assert none_left(tmp_path)


@pytest.mark.slow
def test_a_controller_killed_again_and_again_loses_nothing(finished, tmp_path):
    """SIGKILL at moments spread over the run: the study ends with the same trials and results as an undisturbed one."""
    for pause in (3.5, 4.5, 4.0, 5.0):
        process = start(tmp_path, [*SMALL, "trainer.checkpoint_seconds=0"])
        try:
            process.wait(timeout=pause)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
        assert none_left(tmp_path, seconds=5), "ranks outlive a controller that was killed"
    code, _, errors = run(tmp_path, SMALL)
    assert code == 0, errors
    timeless = ("trial", "state", "setting", "seed", "metric", "loss", "payload_bytes", "parameter_sha256", "steps")
    undisturbed = [row for row in table(finished[0]) if row["seed"] in ("0", "1")]  # another test may have grown it
    assert [[row[key] for key in timeless] for row in table(tmp_path)] == [
        [row[key] for key in timeless] for row in undisturbed
    ]
