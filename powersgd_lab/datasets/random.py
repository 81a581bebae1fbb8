"""Seeded noise in the shape of pictures, for tests, probes of speed and plans: nothing is stored or downloaded.
Classes differ in brightness and colour, so a model can learn them."""

import torch

from powersgd_lab.datasets.base import Data
from powersgd_lab.datasets.base import Split
from powersgd_lab.settings import require


def random_data(
    train_samples: int,
    validation_samples: int,
    channels: int,
    height: int,
    width: int,
    classes: int,
    data_dir: str | None = None,
) -> Data:
    """Pictures (N, channels, height, width) of uint8 and their classes 0 … classes - 1 in turn.

    However many, they take a few bytes a picture. `data_dir` is what every data set is offered; it is not used.
    Raises ValueError for a size below 1, naming its key."""
    sizes = {
        "train_samples": train_samples,
        "validation_samples": validation_samples,
        "channels": channels,
        "height": height,
        "width": width,
        "classes": classes,
    }
    for name, size in sizes.items():
        require(size >= 1, f"dataset.{name}", size, "at least 1")
    shape = (channels, height, width)
    return Data(
        task="classification",
        train=_split(train_samples, shape, classes, seed=0),
        validation=_split(validation_samples, shape, classes, seed=1),
        facts={"channels": channels, "height": height, "width": width, "classes": classes},
        record=sizes,
        mean=127.0,
        std=55.0,
    )


def _split(samples: int, shape: tuple[int, int, int], classes: int, seed: int) -> Split:
    """All pictures as overlapping views of one row of bytes.

    Byte t is noise plus a brightness that depends on t modulo classes. Picture i starts at byte i; a step to the next
    pixel is a multiple of `classes`, so a whole channel has the brightness of class i modulo classes, and a step to
    the next channel is one more, so channels differ: class k is dark in one colour and bright in another."""
    channels, height, width = shape
    channel_step = height * width * classes + 1
    strides = (1, channel_step, width * classes, classes)
    size = samples + (channels - 1) * channel_step + (height * width - 1) * classes
    periods = -(-size // classes)
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(0, 128, (periods, classes), dtype=torch.uint8, generator=generator)
    row += torch.linspace(0, 127, classes).to(torch.uint8)
    return Split(row.as_strided((samples, *shape), strides), torch.arange(samples) % classes)
