"""Parameter shapes of the models that the benchmark runs on.
Written out, so that the benchmark stands on nothing but the hook.
"""


def resnet18() -> list[tuple[int, ...]]:
    """The CIFAR form for 10 classes: 11,173,962 parameters."""
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3), (64,), (64,)]
    before = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            shapes += [(width, before, 3, 3), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            if block == 0 and before != width:
                shapes += [(width, before, 1, 1), (width,), (width,)]
            before = width
    return [*shapes, (10, 512), (10,)]


def gpt(layers: int = 6, width: int = 384, vocabulary: int = 4096, context: int = 256) -> list[tuple[int, ...]]:
    """A small decoder with tied embeddings."""
    shapes: list[tuple[int, ...]] = [(vocabulary, width), (context, width)]
    for _ in range(layers):
        shapes += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [*shapes, (width,), (width,)]


def lstm(layers: int = 3, width: int = 650, vocabulary: int = 10000) -> list[tuple[int, ...]]:
    """The paper's language model (Vogels et al. 2019, appendix F), embeddings tied."""
    shapes: list[tuple[int, ...]] = [(vocabulary, width), (vocabulary,)]
    for _ in range(layers):
        shapes += [(4 * width, width), (4 * width, width), (4 * width,), (4 * width,)]
    return shapes


MODELS = {"resnet18": resnet18, "gpt": gpt, "lstm": lstm}
