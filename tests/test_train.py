"""The train command: one trial alone and under torchrun, which must agree, and what it says when it cannot run.
Both ways use the same rank entry, so that a trial tried by hand is the trial that a sweep runs."""

import json
import os
import subprocess
import sys

import pytest

from powersgd_lab import train


SMALL = [
    "model=mlp",
    "model.hidden=[32]",
    "dataset=random",
    "dataset.train_samples=512",
    "dataset.validation_samples=65",
    "dataset.height=8",
    "dataset.width=8",
    "trainer.steps=12",
    "trainer.warmup_steps=2",
    "trainer.batch_size=8",
    "trainer.eval_steps=6",
    "powersgd.start_powerSGD_iter=4",
    "study=small",
    "seed=3",
]
PLACE = "train/small/layerwise-r1-s4-seed3"


def run(folder, launcher):
    command = [*launcher, "-m", "powersgd_lab.train", *SMALL]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    return found.stdout, json.loads((folder / "runs" / PLACE / "result.json").read_text())


@pytest.mark.slow
def test_alone_and_under_torchrun_the_same_model_comes_out(tmp_path):
    (tmp_path / "alone").mkdir()
    (tmp_path / "torchrun").mkdir()
    printed, alone = run(tmp_path / "alone", [sys.executable])
    events = [json.loads(line) for line in printed.splitlines() if line.startswith('{"event"')]
    assert events[0]["event"] == "start"
    assert [event["step"] for event in events if event["event"] == "eval"] == [6, 12]
    assert json.loads(printed[printed.index("{\n") :]) == alone
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    _, under = run(tmp_path / "torchrun", torchrun)
    assert under["parameter_sha256"] == alone["parameter_sha256"]
    assert under["payload_bytes"] == alone["payload_bytes"]
    assert under["metric"] == alone["metric"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("powersgd.start_powerSGD_iter=1", "start_powerSGD_iter=1"),
        ("powersgd.start_powerSGD_iter=12", "start_powerSGD_iter=12"),
        ("trainer.stepz=3", "trainer.stepz"),
        ("runs_dir=/proc/nowhere", "runs_dir=/proc/nowhere"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(override, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.main([*SMALL, override]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("train: ")
    assert printed.count("\n") == 1
    assert words in printed
    assert list(tmp_path.iterdir()) == []
