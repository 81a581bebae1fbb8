"""Which slices of a gradient are compressed, seen as which matrices: pure functions of shapes.
The hooks, the planner and the tests all ask here, so that the rule of compression is written once.
"""

import math
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass


def is_compressed(rows: int, cols: int, rank: int, min_compression_rate: float) -> bool:
    """Whether a ``rows`` by ``cols`` matrix is worth two factors of ``rank`` columns.

    Source: PyTorch's document of ``PowerSGDState``: ``(rows + cols) * rank * min_compression_rate < rows * cols``.
    """
    return (rows + cols) * rank * min_compression_rate < rows * cols


def matrix_shape(shape: Sequence[int], strides: Sequence[int] | None = None) -> tuple[int, int]:
    """The matrix (rows, columns) as which the memory of one parameter's gradient is compressed.

    Args:
        shape: the parameter's sizes.
        strides: its strides in elements; None means contiguous.

    A convolution's kernel is a matrix of output channels by everything else (Vogels et al. 2019, section 3).
    DDP lays a dense parameter's gradient out with the parameter's own strides, so the matrix is read in memory order:
    channels_last only permutes its columns, and a transposed parameter gives the transposed matrix, which has the same
    low-rank structure (reading it as if it were contiguous, as PyTorch's hook does, would scramble it).
    Vectors are (n, 1), scalars (1, 1), and parameters without elements (0, 0).
    """
    elements = math.prod(shape)
    if elements == 0:
        return 0, 0
    if len(shape) < 2:
        return elements, 1
    first = shape[0]
    if strides is None or first == 1 or not _is_dense(shape, strides):
        return first, elements // first
    order = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: -strides[d])
    if order[0] != 0 and order[-1] == 0:
        return elements // first, first
    outermost = shape[order[0]]
    return outermost, elements // outermost


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, which is when DDP keeps the strides."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class Slice:
    """One parameter's place in a bucket: where it lies, as which matrix, and at which rank (0: not compressed)."""

    position: int
    offset: int
    elements: int
    rows: int
    cols: int
    rank: int


def slices_of(
    shapes: Sequence[Sequence[int]],
    strides: Sequence[Sequence[int] | None] | None,
    rank: int,
    min_compression_rate: float,
) -> list[Slice]:
    """The slices of a bucket that holds parameters of these ``shapes`` one after the other."""
    result = []
    offset = 0
    for position, shape in enumerate(shapes):
        rows, cols = matrix_shape(shape, None if strides is None else strides[position])
        own = min(rows, cols, rank)
        # A scalar is never worth a factor, whatever rate is asked for: PyTorch's hook cannot even see it as a matrix.
        compressed = len(shape) > 0 and own > 0 and is_compressed(rows, cols, own, min_compression_rate)
        elements = math.prod(shape)
        result.append(Slice(position, offset, elements, rows, cols, own if compressed else 0))
        offset += elements
    return result


def equal_step_runs(offsets: Sequence[int]) -> list[list[int]]:
    """Split indices of rising ``offsets`` into runs of constant distance, each of which one strided view can cover."""
    runs: list[list[int]] = []
    for index, offset in enumerate(offsets):
        run = runs[-1] if runs else []
        if run and (len(run) == 1 or offset - offsets[run[-1]] == offsets[run[1]] - offsets[run[0]]):
            run.append(index)
        else:
            runs.append([index])
    return runs


def square_side(elements: int) -> int:
    """The side of the smallest square that holds ``elements``: the batched hook's matrix."""
    root = math.isqrt(elements)
    return root if root * root == elements else root + 1


@dataclass(frozen=True)
class PayloadElements:
    """Elements that one rank hands to all-reduces in one compressed step, by kind.

    ``before`` counts the gradient itself; ``after`` is the sum of the three kinds; ``ratio`` is before ÷ after.
    """

    before: int
    uncompressed: int
    p: int
    q: int

    @property
    def after(self) -> int:
        return self.uncompressed + self.p + self.q

    @property
    def ratio(self) -> float:
        return self.before / self.after if self.after else 1.0


def payload_elements(
    shapes: Iterable[Sequence[int]],
    matrix_approximation_rank: int,
    min_compression_rate: float = 2,
    *,
    batched: bool = False,
    bucket_elements: Sequence[int] | None = None,
) -> PayloadElements:
    """Count what one compressed step sends, without training.

    Args:
        shapes: sizes of every trained parameter.
        matrix_approximation_rank: the number of factor columns.
        min_compression_rate: as in ``PowerSGDState``; the batched hook ignores it.
        batched: count for ``batched_powerSGD_hook`` instead of ``powerSGD_hook``.
        bucket_elements: elements in each of DDP's buckets, which only the batched hook's payload depends on;
            None counts one bucket. Buckets that do not add up to the parameters raise ValueError.

    Elements, not bytes: multiply by the element size of the gradient's dtype.
    """
    listed = [tuple(shape) for shape in shapes]
    before = sum(math.prod(shape) for shape in listed)
    if not batched:
        uncompressed = p = q = 0
        for piece in slices_of(listed, None, matrix_approximation_rank, min_compression_rate):
            if piece.rank:
                p += piece.rows * piece.rank
                q += piece.cols * piece.rank
            else:
                uncompressed += piece.elements
        return PayloadElements(before, uncompressed, p, q)
    buckets = [before] if bucket_elements is None else list(bucket_elements)
    if sum(buckets) != before:
        raise ValueError(f"bucket_elements must add up to the parameters' {before} elements, not to {sum(buckets)}")
    factor = 0
    for size in buckets:
        side = square_side(size)
        factor += side * min(side, matrix_approximation_rank)
    return PayloadElements(before, 0, factor, factor)
