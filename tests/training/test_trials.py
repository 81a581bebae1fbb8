"""Whole trials in real processes: what they measure, against shapes; what they train, against a plain loop.
A trial of this size takes a few tenths of a second once the fork server is there."""

import math

import numpy as np
import pytest
import tiny
import torch
from torch.nn.functional import cross_entropy

from powersgd_lab import settings
from powersgd_lab.hook import payload_elements
from powersgd_lab.settings import Hook
from powersgd_lab.settings import PowerSGD
from powersgd_lab.settings import Schedule
from powersgd_lab.training import assembly


STEPS, START = 12, 4
MATRICES = [(32, 64), (10, 32)]
VECTORS = [(32,), (10,)]
ELEMENTS = 32 * 64 + 10 * 32 + 32 + 10


def powersgd(hook, **changes):
    return PowerSGD(hook=hook, start_powerSGD_iter=START, start_fraction=None, **changes)


def expected_step_bytes(hook):
    """Bytes a rank sends in a step after compression began, by kind."""
    if hook in (Hook.bf16, Hook.fp16):
        return {"vanilla": 2 * ELEMENTS}
    if hook is Hook.off:
        return {"vanilla": 4 * ELEMENTS}
    count = payload_elements(MATRICES + VECTORS, 1, batched=hook is Hook.batched)
    if hook is Hook.torch:
        return {"compressed": 4 * count.after}
    kinds = {"uncompressed": count.uncompressed, "P": count.p, "Q": count.q}
    return {kind: 4 * elements for kind, elements in kinds.items() if elements}


@pytest.mark.parametrize("hook", list(Hook))
def test_a_trial_of_every_hook_counts_what_its_shapes_say(hook, server, tmp_path):
    result = tiny.complete(server, tmp_path, tiny.sweep(powersgd=powersgd(hook)))
    step = expected_step_bytes(hook)
    expected = {kind: (STEPS - START) * size for kind, size in step.items()}
    if hook.compresses:
        expected["vanilla"] = START * 4 * ELEMENTS
    else:
        expected["vanilla"] = STEPS * step["vanilla"]
    found = {key.removeprefix("payload."): value for key, value in result.items() if key.startswith("payload.")}
    assert found == expected
    assert result["payload_bytes"] == sum(expected.values())
    assert result["wire_bytes"] == result["payload_bytes"]  # 2 (W - 1) / W is 1 for two ranks
    assert result["compression_ratio_step"] == pytest.approx(4 * ELEMENTS / sum(step.values()))
    assert result["compression_ratio_run"] == pytest.approx(STEPS * 4 * ELEMENTS / sum(expected.values()))
    assert result["allreduces_step"] == {Hook.torch: 3}.get(hook, 2 if hook.compresses else 1)


def test_a_result_tells_all_of_a_trial(server, tmp_path):
    result = tiny.complete(server, tmp_path, tiny.sweep(powersgd=powersgd(Hook.layerwise)))
    assert (result["state"], result["reason"], result["steps"]) == ("complete", "", STEPS)
    assert result["metric_name"] == "accuracy"
    assert result["metric"] == result["metric.accuracy"]
    assert result["metric"] > 0.1  # ten classes, and noise that tells them apart
    assert 0 < result["loss"] < 2.3
    parts = ("compute_seconds", "compress_seconds", "communicate_seconds")
    assert sum(result[part] for part in parts) == pytest.approx(result["step_seconds"])
    assert all(result[part] > 0 for part in parts)
    assert result["seconds"] >= STEPS / 2 * result["step_seconds"]  # it is the median: half the steps took longer
    assert 0 < result["load_seconds"] + result["build_seconds"] < result["first_step_seconds"] < 10
    assert result["control_bytes"] > 0
    assert len(result["parameter_sha256"]) == 64


def test_events_tell_the_curve_in_order(server, tmp_path):
    tiny.complete(server, tmp_path, tiny.sweep(eval_steps=5))
    assert [event["step"] for event in tiny.events(tmp_path, "start")] == [0]
    trained = tiny.events(tmp_path, "train")
    steps = [event["step"] for event in trained]
    assert steps == sorted(set(steps))
    assert {1, 5, 10, STEPS} <= set(steps)
    assert trained[0]["lr"] == pytest.approx(0.025)
    assert trained[0]["loss"] > trained[-1]["loss"]
    assert [event["step"] for event in tiny.events(tmp_path, "eval")] == [5, 10, STEPS]
    (end,) = tiny.events(tmp_path, "end")
    assert (end["step"], end["state"]) == (STEPS, "complete")


@pytest.mark.parametrize("hook", [Hook.off, Hook.layerwise])
def test_the_same_trial_twice_is_the_same_model(hook, server, tmp_path):
    asked = tiny.sweep(powersgd=powersgd(hook))
    first = tiny.complete(server, tmp_path / "first", asked)
    again = tiny.complete(server, tmp_path / "again", asked)
    other = tiny.complete(server, tmp_path / "other", asked, seed=1)
    assert first["parameter_sha256"] == again["parameter_sha256"] != other["parameter_sha256"]


def reference(seed, steps, batch, warmup_steps, clip_norm, weight_decay, final_fraction):
    """The validation loss after a plain loop in this process: AdamW, cosine, clipping, no decay of biases."""
    data = assembly.make_data(settings.component(tiny.noise()))
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    named = dict(model.named_parameters())
    decayed = [p for name, p in named.items() if name.endswith("weight")]
    spared = [p for name, p in named.items() if name.endswith("bias")]
    groups = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=weight_decay)
    per_epoch = len(data.train) // batch
    for step in range(steps):
        order = np.random.default_rng((seed, step // per_epoch)).permutation(len(data.train))
        place = step % per_epoch * batch
        chosen = torch.from_numpy(order[place : place + batch])
        if step < warmup_steps:
            factor = (step + 1) / warmup_steps
        else:
            turn = math.pi * (step - warmup_steps) / (steps - warmup_steps)
            factor = final_fraction + (1 - final_fraction) * (1 + math.cos(turn)) / 2
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * factor
        inputs = (data.train.inputs[chosen].float() - data.mean) / data.std
        optimizer.zero_grad()
        cross_entropy(model(inputs), data.train.targets[chosen]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    inputs = (data.validation.inputs.float() - data.mean) / data.std
    with torch.no_grad():
        return cross_entropy(model(inputs), data.validation.targets).item()


@pytest.mark.parametrize(("world_size", "batch_size", "accumulation"), [(1, 24, 1), (1, 8, 3), (2, 6, 2), (3, 8, 1)])
def test_any_number_of_ranks_trains_what_a_plain_loop_trains(world_size, batch_size, accumulation, server, tmp_path):
    chosen = {"steps": 25, "warmup_steps": 3, "clip_norm": 0.5, "final_fraction": 0.1}
    asked = tiny.sweep(
        optimizer=settings.Adam(_target_="torch.optim.AdamW", lr=0.01, weight_decay=0.5),
        launcher=settings.Launcher(world_size=world_size),
        batch_size=batch_size,
        accumulation=accumulation,
        schedule=Schedule.cosine,
        decay_norms_and_biases=False,
        **chosen,
    )
    result = tiny.complete(server, tmp_path, asked, seed=7)
    assert result["loss"] == pytest.approx(reference(7, batch=24, weight_decay=0.5, **chosen), rel=1e-4)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("validation_samples", [2, 64, 65])
def test_each_validation_sample_counts_once(world_size, validation_samples, server, tmp_path):
    asked = tiny.sweep(
        dataset=tiny.noise(validation_samples=validation_samples),
        optimizer=settings.Sgd(_target_="torch.optim.SGD", lr=0.0),  # the model stays as it is drawn
        launcher=settings.Launcher(world_size=world_size),
        steps=2,
        warmup_steps=0,
        eval_batch_size=7,
    )
    result = tiny.complete(server, tmp_path, asked)
    data = assembly.make_data(settings.component(asked.dataset))
    model = assembly.make_model(settings.component(asked.model), data, seed=0)
    logits = model((data.validation.inputs.float() - data.mean) / data.std)
    assert result["loss"] == pytest.approx(cross_entropy(logits, data.validation.targets).item(), rel=1e-5)
    right = (logits.argmax(1) == data.validation.targets).sum().item()
    assert result["metric"] == right / validation_samples


def test_a_language_task_is_judged_by_its_perplexity(server, tmp_path):
    asked = tiny.sweep(
        model=tiny.own_model("Table"),
        dataset=settings.OwnDataset(name="own", _target_="tiny.language"),
        optimizer=settings.Adam(_target_="torch.optim.Adam", lr=0.3),
        batch_size=8,
        steps=30,
    )
    result = tiny.complete(server, tmp_path, asked)
    assert result["metric_name"] == "perplexity"
    assert result["metric"] == pytest.approx(math.exp(result["loss"]))
    assert result["metric.accuracy"] == 1.0  # what follows is always one more
    assert "metric.loss" not in result


def test_another_metric_may_judge(server, tmp_path):
    result = tiny.complete(server, tmp_path, tiny.sweep(metric="loss"))
    assert result["metric_name"] == "loss"
    assert result["metric"] == result["loss"]


def test_buffers_follow_rank_0(server, tmp_path):
    asked = tiny.sweep(model=tiny.own_model("Normed"), powersgd=powersgd(Hook.layerwise))
    result = tiny.complete(server, tmp_path, asked)
    buffers = 2 * 16 * 4 + 8  # running mean and variance in float32, the count in int64
    evaluations = 2
    agreed = len(tiny.events(tmp_path, "train")) * 4 * 8 + evaluations * 3 * 8
    assert result["control_bytes"] == (evaluations + 1) * buffers + agreed


def test_autocast_computes_in_bfloat16(server, tmp_path):
    full = tiny.complete(server, tmp_path / "full", tiny.sweep())
    half = tiny.complete(server, tmp_path / "half", tiny.sweep(autocast=True))
    assert half["loss"] != full["loss"]
    assert half["loss"] == pytest.approx(full["loss"], rel=0.05)
    assert half["payload_bytes"] == full["payload_bytes"]  # parameters and gradients stay in float32


@pytest.mark.parametrize("hook", [Hook.layerwise, Hook.batched])
def test_many_buckets_and_three_ranks(hook, server, tmp_path):
    asked = tiny.sweep(
        powersgd=powersgd(hook),
        launcher=settings.Launcher(world_size=3),
        ddp=settings.Ddp(bucket_cap_mb=0.001, gradient_as_bucket_view=False),
    )
    result = tiny.complete(server, tmp_path, asked)
    assert result["allreduces_step"] > 2
    assert result["wire_bytes"] == round(4 / 3 * result["payload_bytes"])


def test_pytorchs_hook_gets_one_bucket_on_gloo_and_says_so(server, tmp_path):
    asked = tiny.sweep(powersgd=powersgd(Hook.torch), ddp=settings.Ddp(bucket_cap_mb=0.002))
    result = tiny.complete(server, tmp_path, asked)
    assert result["allreduces_step"] == 3
    assert [event["bucket_cap_mb"] for event in tiny.events(tmp_path, "start")] == [2000]
    assert "one bucket" in (tmp_path / "rank0.log").read_text()


def test_what_an_earlier_attempt_left_is_gone(server, tmp_path):
    tiny.complete(server, tmp_path, tiny.sweep(launcher=settings.Launcher(world_size=3)))
    (tmp_path / "stop").write_text("an old wish")
    (tmp_path / "error.txt").write_text("an old error")
    tiny.complete(server, tmp_path, tiny.sweep())
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept - {"rendezvous"} == {"config.json", "metrics.jsonl", "rank0.log", "rank1.log", "result.json"}
    assert len(tiny.events(tmp_path, "start")) == 1


def test_trials_run_side_by_side(server, tmp_path):
    trial = tiny.trial_of(tiny.sweep())
    both = [server.launch(tmp_path / name, trial) for name in ("one", "two")]
    results = [tiny.finish(running).result for running in both]
    assert results[0]["parameter_sha256"] == results[1]["parameter_sha256"]
