"""What ranks do apart and what they must share, seen from inside the model: dropout, samples, buffers, bad news.
The models print what they see to the ranks' logs, or answer by their rank."""

import numpy as np
import pytest
import tiny
import torch
from own_models import own
from torch.nn.functional import cross_entropy

from powersgd_lab import settings
from powersgd_lab.settings import Hook
from powersgd_lab.settings import PowerSGD
from powersgd_lab.training import assembly


def told(directory, rank, key):
    lines = (directory / f"rank{rank}.log").read_text().splitlines()
    parts = [dict(part.split("=") for part in line.split()[1:]) for line in lines if line.startswith("told ")]
    return [part[key] for part in parts]


def test_ranks_drop_apart_and_see_apart_but_train_one_model(server, tmp_path):
    asked = tiny.sweep(model=own("Tells", dropout=0.5), powersgd=PowerSGD(start_powerSGD_iter=3, start_fraction=None))
    first = tiny.complete(server, tmp_path / "first", asked)  # which compares the ranks' parameters at its end
    masks = [told(tmp_path / "first", rank, "mask") for rank in (0, 1)]
    assert len(set(masks[0] + masks[1])) == 2 * asked.trainer.steps
    seen = [told(tmp_path / "first", rank, "seen") for rank in (0, 1)]
    assert len(set(seen[0] + seen[1])) == 2 * asked.trainer.steps
    again = tiny.complete(server, tmp_path / "again", asked)
    assert [told(tmp_path / "again", rank, "mask") for rank in (0, 1)] == masks
    assert again["parameter_sha256"] == first["parameter_sha256"]


def test_dropout_leaves_the_samples_of_a_seed_as_they_are(server, tmp_path):
    for dropout in (0.0, 0.5):
        tiny.complete(server, tmp_path / str(dropout), tiny.sweep(model=own("Tells", dropout=dropout)))
    seen = [[told(tmp_path / name, rank, "seen") for rank in (0, 1)] for name in ("0.0", "0.5")]
    assert seen[0] == seen[1]


@pytest.mark.parametrize(("autocast", "dtype"), [(False, "torch.float32"), (True, "torch.bfloat16")])
def test_autocast_is_seen_in_the_forward_pass(autocast, dtype, server, tmp_path):
    tiny.complete(server, tmp_path, tiny.sweep(model=own("Tells", dropout=0.0), autocast=autocast))
    assert set(told(tmp_path, 0, "dtype")) == {dtype}


def test_evaluation_uses_rank_0s_buffers_on_all_ranks(server, tmp_path):
    asked = tiny.sweep(model=own("KnowsItsRank"))
    result = tiny.complete(server, tmp_path, asked)
    targets = assembly.make_data(settings.component(asked.dataset)).validation.targets
    zeros, twos = ((targets == answer).double() for answer in (0, 2))
    half = len(targets) // 2
    assert zeros.mean() != torch.cat([zeros[:half], twos[half:]]).mean()  # what each rank's own buffer would give
    assert result["metric"] == zeros.mean().item()


def test_a_loss_that_only_one_rank_lost_ends_the_trial_on_all(server, tmp_path):
    outcome = tiny.run(server, tmp_path, tiny.sweep(model=own("DivergesAlone"), steps=60, powersgd=PowerSGD()))
    assert (outcome.state, outcome.reason) == ("pruned", "diverged")
    assert 3 <= outcome.result["steps"] < 60


@pytest.mark.parametrize("hook", [Hook.off, Hook.batched])
def test_one_bit_of_drift_fails_the_trial(hook, server, tmp_path):
    asked = tiny.sweep(model=own("DriftsInEvaluation"), powersgd=PowerSGD(hook=hook))
    outcome = tiny.run(server, tmp_path, asked)
    assert outcome.state == "fail"
    assert "2 ranks hold 2 different models" in outcome.reason


def first_step(server, directory, **choices):
    """The data, the model that the trial begins with, and its state after one step of plain SGD with rate 0.5."""
    asked = tiny.sweep(
        model=own("EndsAfter", passes=choices.get("accumulation", 1)),
        optimizer=settings.Sgd(_target_="torch.optim.SGD", lr=0.5, momentum=0.0, nesterov=False),
        warmup_steps=0,
        steps=2,
        checkpoint_seconds=0,
        **choices,
    )
    assert tiny.run(server, directory, asked).reason == "AssertionError: enough"
    data = assembly.make_data(settings.component(asked.dataset))
    drawn = assembly.make_model(settings.component(asked.model), data, seed=0)
    saved = torch.load(directory / "checkpoint/step-1/rank0.pt", weights_only=True)["model"]
    assert saved.keys() == drawn.state_dict().keys()
    return data, drawn, saved


def test_passes_and_ranks_add_up_to_the_gradient_of_their_mean(server, tmp_path):
    data, drawn, saved = first_step(server, tmp_path, batch_size=4, accumulation=3)
    chosen = torch.from_numpy(np.random.default_rng((0, 0)).permutation(len(data.train))[: 2 * 3 * 4])
    logits = drawn((data.train.inputs[chosen].float() - data.mean) / data.std)
    cross_entropy(logits, data.train.targets[chosen]).backward()
    for name, parameter in drawn.named_parameters():
        torch.testing.assert_close(saved[name], parameter.detach() - 0.5 * parameter.grad, rtol=1e-5, atol=1e-6)


def test_a_clipped_step_is_as_long_as_the_norm_allows(server, tmp_path):
    _, drawn, saved = first_step(server, tmp_path, clip_norm=1e-2)
    moved = torch.cat([(saved[name] - p).flatten() for name, p in drawn.state_dict().items()]).norm().item()
    assert moved == pytest.approx(0.5 * 1e-2, rel=1e-3)  # lr * clip_norm
