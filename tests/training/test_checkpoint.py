"""A trial that is killed and launched again must end as one that was never disturbed, to the last bit at W = 2.
Ranks are ended for real, at a step before or after compression began, and the curve must have no gap or repeat."""

import json
import time
from pathlib import Path

import pytest
import torch

from powersgd_lab import config
from powersgd_lab.training import preflight
from powersgd_lab.training.launch import ForkServer


pytestmark = pytest.mark.slow

OVERRIDES = [
    "model=gpt",
    "model.width=16",
    "model.layers=1",
    "model.heads=2",
    "model.dropout=0.1",  # so that the random state matters
    "dataset=text",
    f"dataset.files=[{Path(__file__).parent}/*.py]",
    "dataset.context=16",
    "trainer.steps=60",
    "trainer.warmup_steps=2",
    "trainer.batch_size=4",
    "trainer.eval_steps=10",
    "trainer.checkpoint_seconds=0",
    "powersgd.start_powerSGD_iter=25",
    "powersgd.matrix_approximation_rank=2",
    "powersgd.min_compression_rate=1",
    "study=checkpoint",
]


@pytest.fixture(scope="module")
def server():
    with ForkServer() as running:
        yield running


def trial_of(tmp_path, *overrides):
    sweep = config.load([*OVERRIDES, f"dataset.data_dir={tmp_path}/data", *overrides])
    return preflight.make_trial(sweep, preflight.prepare(sweep), sweep.powersgd, sweep.seed)


def finish(running):
    deadline = time.monotonic() + 60
    while (outcome := running.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return outcome


def curve(directory):
    """What was told of each step, without the seconds; the start is told once an attempt."""
    events = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in e.items() if k != "seconds"} for e in events if e["event"] == "eval"]


def kill_after(running, directory, step):
    """Kill the ranks without warning once a checkpoint of `step` steps or more is whole."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        running.poll()
        steps = [int(p.name[5:]) for p in (directory / "checkpoint").glob("step-*") if p.suffix != ".partial"]
        if steps and max(steps) >= step:
            running.kill()
            assert finish(running).state == "fail"
            return max(steps)
    raise AssertionError("no checkpoint came")


@pytest.mark.parametrize(
    ("hook", "step"),
    [("off", 5), ("layerwise", 5), ("layerwise", 30), ("batched", 30), ("bf16", 30)],
)
def test_a_killed_trial_ends_as_an_undisturbed_one(hook, step, tmp_path, server):
    trial = trial_of(tmp_path, f"powersgd.hook={hook}")
    undisturbed = finish(server.launch(tmp_path / "whole", trial)).result
    assert undisturbed["state"] == "complete"
    interrupted = tmp_path / "interrupted"
    kill_after(server.launch(interrupted, trial), interrupted, step)
    resumed = server.launch(interrupted, trial, resume=True)
    result = finish(resumed).result
    starts = [json.loads(line) for line in (interrupted / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in starts if event["event"] == "start"][-1] >= step
    for key in ("parameter_sha256", "metric", "loss", "payload_bytes", "compression_ratio_run"):
        assert result[key] == undisturbed[key], key
    assert curve(interrupted) == curve(tmp_path / "whole")


def test_another_trial_in_the_same_directory_begins_anew(tmp_path, server):
    directory = tmp_path / "trial"
    kill_after(server.launch(directory, trial_of(tmp_path)), directory, 5)
    other = trial_of(tmp_path, "optimizer.lr=0.01")
    result = finish(server.launch(directory, other, resume=True)).result
    fresh = finish(server.launch(tmp_path / "fresh", other)).result
    assert result["parameter_sha256"] == fresh["parameter_sha256"]


def test_without_being_asked_a_launch_begins_anew(tmp_path, server):
    directory = tmp_path / "trial"
    kill_after(server.launch(directory, trial_of(tmp_path)), directory, 5)
    finish(server.launch(directory, trial_of(tmp_path)))
    events = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "start"] == [0]


def test_a_checkpoint_is_plain_tensors_and_numbers(tmp_path, server):
    directory = tmp_path / "trial"
    step = kill_after(server.launch(directory, trial_of(tmp_path)), directory, 30)
    for rank in (0, 1):
        saved = torch.load(directory / f"checkpoint/step-{step}/rank{rank}.pt", weights_only=True)
        assert saved["steps"] == step
        assert set(saved) >= {"model", "optimizer", "hook", "meter", "random"}
    assert len(list((directory / "checkpoint").glob("step-*"))) <= 2  # at most one more, half written
