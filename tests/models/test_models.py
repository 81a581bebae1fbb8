"""Every model: the shapes of its output, repeatable weights, gradients everywhere, and wrong arguments named.
Language models must not look ahead, or next-token loss means nothing."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from torch import nn

from powersgd_lab.models.cnn import CNN
from powersgd_lab.models.gpt import GPT
from powersgd_lab.models.lstm import LSTM
from powersgd_lab.models.mlp import MLP
from powersgd_lab.models.resnet18 import ResNet18
from powersgd_lab.settings import build


IMAGES = {
    "mlp": {"_target_": "powersgd_lab.models.mlp.MLP", "name": "mlp", "hidden": [12, 7]},
    "cnn": {"_target_": "powersgd_lab.models.cnn.CNN", "name": "cnn", "width": 4},
    "resnet18": {"_target_": "powersgd_lab.models.resnet18.ResNet18", "name": "resnet18", "width": 2},
}
TEXT = {
    "lstm": {
        "_target_": "powersgd_lab.models.lstm.LSTM",
        "name": "lstm",
        "layers": 2,
        "units": 12,
        "dropout": 0.0,
        "tied": True,
    },
    "gpt": {
        "_target_": "powersgd_lab.models.gpt.GPT",
        "name": "gpt",
        "layers": 2,
        "width": 12,
        "heads": 3,
        "dropout": 0.0,
    },
}


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", IMAGES)
@settings(deadline=None, max_examples=15)
@given(
    batch=st.integers(1, 3),
    channels=st.integers(1, 4),
    height=st.integers(1, 20),
    width=st.integers(1, 20),
    classes=st.integers(1, 7),
)
def test_an_image_model_takes_its_shapes_from_the_data(name, batch, channels, height, width, classes):
    model = build("model", IMAGES[name], channels=channels, height=height, width=width, classes=classes).eval()
    logits = model(torch.randn(batch, channels, height, width))
    assert logits.shape == (batch, classes)
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", TEXT)
@settings(deadline=None, max_examples=15)
@given(data=st.data(), context=st.integers(1, 12), vocabulary=st.integers(2, 40))
def test_a_language_model_does_not_look_ahead(name, data, context, vocabulary):
    length = data.draw(st.integers(1, context))
    changed = data.draw(st.integers(0, length - 1))
    model = build("model", TEXT[name], vocabulary=vocabulary, context=context).eval()
    tokens = torch.randint(vocabulary, (2, length))
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % vocabulary
    before, after = model(tokens), model(other)
    assert before.shape == (2, length, vocabulary)
    torch.testing.assert_close(before[:, :changed], after[:, :changed], rtol=0, atol=1e-6)
    assert (before[:, changed] - after[:, changed]).abs().max() > 1e-6


@pytest.mark.parametrize("name", TEXT)
def test_a_language_model_uses_earlier_tokens(name):
    model = build("model", TEXT[name], vocabulary=20, context=10).eval()
    tokens = torch.zeros(1, 10, dtype=torch.int64)
    other = tokens.clone()
    other[0, 3] = 5
    changed = (model(tokens) - model(other)).abs().amax(dim=2)[0]
    assert (changed[3:] > 1e-6).all()


FACTS = {"channels": 3, "height": 8, "width": 8, "classes": 10, "vocabulary": 30, "context": 8}


def some_input(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if name in IMAGES:
        return torch.randn(4, 3, 8, 8, generator=generator)
    return torch.randint(30, (4, 8), generator=generator)


@pytest.mark.parametrize("name", [*IMAGES, *TEXT])
def test_a_seed_gives_the_same_weights(name):
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(nn.utils.parameters_to_vector(build("model", (IMAGES | TEXT)[name], **FACTS).parameters()))
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])


@pytest.mark.parametrize("name", [*IMAGES, *TEXT])
def test_every_parameter_is_trained(name):
    model = build("model", (IMAGES | TEXT)[name], **FACTS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    losses = []
    for _ in range(30):
        logits = model(some_input(name)).flatten(0, -2)
        loss = nn.functional.cross_entropy(logits, torch.arange(len(logits)) % 10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    for key, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[key]), key


@pytest.mark.parametrize("name", TEXT)
def test_an_untrained_language_model_is_about_as_good_as_guessing(name):
    torch.manual_seed(0)
    model = build("model", TEXT[name], vocabulary=50, context=16)
    tokens = torch.randint(50, (16, 16))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
    assert abs(loss.item() - math.log(50)) < 1


def test_resnet18_has_the_published_number_of_parameters():
    assert parameters(ResNet18(channels=3, classes=10)) == 11_173_962


def test_lstm_is_the_papers():
    with torch.device("meta"):
        model = LSTM(layers=3, units=650, dropout=0.4, tied=True, vocabulary=28_869)
    recurrent = 3 * (2 * 4 * 650 * 650 + 2 * 4 * 650)
    assert parameters(model) == 28_869 * 650 + 28_869 + recurrent


@pytest.mark.parametrize(("tied", "matrices"), [(True, 1), (False, 2)])
def test_a_tied_lstm_has_one_matrix_for_tokens(tied, matrices):
    model = LSTM(layers=1, units=8, dropout=0.5, tied=tied, vocabulary=30)
    assert parameters(model) == matrices * 30 * 8 + 30 + 2 * 4 * 8 * 8 + 2 * 4 * 8


def test_an_mlp_without_hidden_layers_is_linear():
    assert parameters(MLP(hidden=[], channels=1, height=4, width=4, classes=3)) == 16 * 3 + 3


@pytest.mark.parametrize("name", TEXT)
def test_dropout_acts_in_training_only(name):
    model = build("model", TEXT[name] | {"dropout": 0.5}, **FACTS)
    tokens = some_input(name)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: MLP(hidden=[8, 0], channels=1, height=2, width=2, classes=2), "model.hidden=[8, 0]"),
        (lambda: CNN(width=0, channels=1, classes=2), "model.width=0"),
        (lambda: ResNet18(width=-1, channels=1, classes=2), "model.width=-1"),
        (lambda: LSTM(layers=0, units=8, dropout=0, tied=True, vocabulary=9), "model.layers=0"),
        (lambda: LSTM(layers=1, units=0, dropout=0, tied=True, vocabulary=9), "model.units=0"),
        (lambda: LSTM(layers=1, units=8, dropout=1.0, tied=True, vocabulary=9), "model.dropout=1.0"),
        (lambda: GPT(layers=0, width=8, heads=2, dropout=0, vocabulary=9, context=4), "model.layers=0"),
        (lambda: GPT(layers=1, width=0, heads=1, dropout=0, vocabulary=9, context=4), "model.width=0"),
        (lambda: GPT(layers=1, width=8, heads=3, dropout=0, vocabulary=9, context=4), "model.heads=3"),
        (lambda: GPT(layers=1, width=8, heads=0, dropout=0, vocabulary=9, context=4), "model.heads=0"),
        (lambda: GPT(layers=1, width=8, heads=2, dropout=-0.1, vocabulary=9, context=4), "model.dropout=-0.1"),
    ],
)
def test_arguments_that_cannot_work_are_named(make, key):
    with pytest.raises(ValueError, match="is not allowed") as caught:
        make()
    assert str(caught.value).startswith(key)
    assert "\n" not in str(caught.value)


def test_gpt_refuses_samples_longer_than_its_context():
    model = GPT(layers=1, width=8, heads=2, dropout=0, vocabulary=9, context=4)
    with pytest.raises(ValueError, match="at most the model's context of 4"):
        model(torch.zeros(1, 5, dtype=torch.int64))
