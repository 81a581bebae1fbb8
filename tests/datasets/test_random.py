"""Random pictures: cheap in any number, repeatable, of the shape asked for, and learnable."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from powersgd_lab.datasets.random import random_data


SIZES = {
    "train_samples": 50_000,
    "validation_samples": 10_000,
    "channels": 3,
    "height": 32,
    "width": 32,
    "classes": 10,
}


def test_cifar_shaped_data_takes_little_memory():
    data = random_data(**SIZES, data_dir=None)
    assert data.train.inputs.shape == (50_000, 3, 32, 32)
    assert data.train.inputs.dtype == torch.uint8
    assert data.train.inputs.untyped_storage().nbytes() < 1_000_000
    assert len(data.validation) == 10_000
    assert data.facts == {"channels": 3, "height": 32, "width": 32, "classes": 10}
    assert data.train.targets.bincount().tolist() == [5000] * 10


@given(
    samples=st.integers(1, 30),
    channels=st.integers(1, 4),
    height=st.integers(1, 6),
    width=st.integers(1, 6),
    classes=st.integers(1, 12),
)
def test_every_picture_is_within_memory_and_repeatable(samples, channels, height, width, classes):
    sizes = (samples, 2, channels, height, width, classes)
    one, two = random_data(*sizes), random_data(*sizes)
    assert one.train.inputs.shape == (samples, channels, height, width)
    assert torch.equal(one.train.inputs, two.train.inputs)  # reads every byte: a view beyond its storage would fail
    assert one.train.targets.max() < classes
    picture = one.train.inputs[-1].flatten()
    assert len(picture) == channels * height * width


def test_pictures_differ_within_and_between_the_splits():
    data = random_data(**SIZES | {"train_samples": 500, "validation_samples": 500})
    assert len(data.train.inputs.flatten(1).unique(dim=0)) == 500
    assert not torch.equal(data.train.inputs, data.validation.inputs)


def test_scaling_centres_the_pixels():
    data = random_data(**SIZES | {"train_samples": 1000})
    scaled = (data.train.inputs.to(torch.float32) - data.mean) / data.std
    assert abs(scaled.mean().item()) < 0.05
    assert abs(scaled.std().item() - 1) < 0.05


@pytest.mark.parametrize("channels", [1, 3])
def test_the_mean_colour_tells_the_class(channels):
    data = random_data(**SIZES | {"train_samples": 500, "validation_samples": 500, "channels": channels})
    colours = data.train.inputs.to(torch.float32).mean(dim=(2, 3))
    centres = torch.stack([colours[data.train.targets == label].mean(dim=0) for label in range(10)])
    seen = data.validation.inputs.to(torch.float32).mean(dim=(2, 3))
    guesses = torch.cdist(seen, centres).argmin(dim=1)
    assert (guesses == data.validation.targets).float().mean() > 0.9


@pytest.mark.parametrize("key", SIZES)
def test_a_size_below_one_is_named(key):
    with pytest.raises(ValueError, match=rf"^dataset\.{key}=0 is not allowed: it must be at least 1$"):
        random_data(**SIZES | {key: 0})
