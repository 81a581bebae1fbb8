"""Losses and metrics against sums written out in double precision, and that shards add up to the whole.
A metric that depends on how samples were batched would differ with the number of ranks."""

import math

import pytest
import torch

from powersgd_lab.datasets.base import Data
from powersgd_lab.datasets.base import Split
from powersgd_lab.training.tasks import TASKS
from powersgd_lab.training.tasks import batch
from powersgd_lab.training.tasks import evaluation_sums
from powersgd_lab.training.tasks import mean_loss
from powersgd_lab.training.tasks import task_of


CPU = torch.device("cpu")


@pytest.fixture(params=[(23, 5), (7, 11, 5)], ids=["pictures", "tokens"])
def logits_and_targets(request):
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(request.param, generator=generator)
    return logits, torch.randint(5, request.param[:-1], generator=generator)


def direct(logits, targets):
    """Each prediction's cross entropy in nats, and whether it is right, one by one."""
    losses, right = [], []
    for scores, target in zip(logits.double().reshape(-1, 5).tolist(), targets.flatten().tolist(), strict=True):
        losses.append(math.log(sum(math.exp(score) for score in scores)) - scores[target])
        right.append(scores.index(max(scores)) == target)
    return sum(losses) / len(losses), sum(right) / len(right)


def test_loss_accuracy_and_perplexity_are_means_over_predictions(logits_and_targets):
    loss, accuracy = direct(*logits_and_targets)
    assert mean_loss(*logits_and_targets).item() == pytest.approx(loss, rel=1e-6)
    values = TASKS["language"].values(evaluation_sums(*logits_and_targets))
    assert values == pytest.approx({"loss": loss, "accuracy": accuracy, "perplexity": math.exp(loss)}, rel=1e-6)
    assert 0 < accuracy < 1
    assert "perplexity" not in TASKS["classification"].values(evaluation_sums(*logits_and_targets))


def test_sums_over_uneven_shards_are_the_sums_of_the_whole(logits_and_targets):
    logits, targets = logits_and_targets
    parts = [evaluation_sums(logits[a:b], targets[a:b]) for a, b in ((0, 1), (1, 6), (6, len(logits)))]
    assert torch.allclose(sum(parts), evaluation_sums(logits, targets), rtol=1e-6)
    assert sum(parts)[0] == targets.numel()


def test_logits_in_bfloat16_are_judged_in_float32():
    logits, targets = torch.tensor([[20.0, 0.0]]).bfloat16(), torch.tensor([1])
    assert mean_loss(logits, targets).dtype == torch.float32
    assert mean_loss(logits, targets).item() == pytest.approx(20.0)


def test_a_perplexity_beyond_all_numbers_is_infinite():
    sums = torch.tensor([1.0, 1e4, 0.0], dtype=torch.float64)
    assert TASKS["language"].values(sums)["perplexity"] == math.inf


def test_pictures_are_scaled_and_tokens_are_not():
    pixels = torch.tensor([[[[0, 255]]], [[[100, 50]]]], dtype=torch.uint8)
    pictures = Split(pixels, torch.tensor([1, 0], dtype=torch.uint8))
    data = Data("classification", pictures, pictures, {}, mean=100.0, std=50.0)
    inputs, targets = batch(data, data.train, torch.tensor([1, 0]), CPU)
    assert inputs.tolist() == [[[[0.0, -1.0]]], [[[-2.0, pytest.approx(3.1)]]]]
    assert targets.tolist() == [0, 1]
    assert targets.dtype == torch.int64
    tokens = Split(torch.tensor([[3, 4]], dtype=torch.uint8), torch.tensor([[4, 5]], dtype=torch.uint8))
    inputs, targets = batch(Data("language", tokens, tokens, {}), tokens, torch.tensor([0]), CPU)
    assert (inputs.tolist(), targets.tolist()) == ([[3, 4]], [[4, 5]])
    assert inputs.dtype == torch.int64


def test_what_judges_and_which_way_is_better():
    assert TASKS["classification"].metric(None) == "accuracy"
    assert TASKS["language"].metric(None) == "perplexity"
    assert TASKS["language"].metric("loss") == "loss"
    assert {name: way for task in TASKS.values() for name, way in task.metrics.items()} == {
        "accuracy": "max",
        "loss": "min",
        "perplexity": "min",
    }
    with pytest.raises(ValueError, match=r"trainer.metric=perplexity .* accuracy, loss \(classification\)"):
        TASKS["classification"].metric("perplexity")


def test_an_unknown_task_is_named():
    split = Split(torch.zeros(1, 1), torch.zeros(1))
    with pytest.raises(ValueError, match=r"task=regression .* classification, language"):
        task_of(Data("regression", split, split, {}))
