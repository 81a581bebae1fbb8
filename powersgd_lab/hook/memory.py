"""The buffers of one bucket: errors, factors, and the two flat tensors that travel.
Built when DDP forms the bucket, filled from what its parameters already own, then reused every step without allocating.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from powersgd_lab.hook.layout import Slice
from powersgd_lab.hook.layout import equal_step_runs
from powersgd_lab.hook.layout import slices_of
from powersgd_lab.hook.layout import square_side


# Two MiB of 32-bit floats: of the sizes tried, from 128 KiB on, the one that gained most on matrices beyond the cache.
CACHED_ELEMENTS = 2**19
# Half a MiB of 32-bit floats fits into a core's own cache.
READ_AHEAD_ELEMENTS = 2**17


class Unit:
    """What is remembered of one compressed matrix: one parameter's, or under the batched hook a whole bucket's.

    Attributes:
        parameters: the parameters the matrix is made of.
        number: counts units in the order they were met; seeds the redrawing of dead columns.
        error: (rows, cols), what compression has lost so far; None without error feedback.
        q: (rank, cols), the committed factor with rows of norm one; None before the first step and without warm start.
    """

    __slots__ = ("_error", "_group", "number", "parameters", "q")

    def __init__(self, parameters: tuple[torch.Tensor, ...], number: int) -> None:
        self.parameters = parameters
        self.number = number
        self._error: torch.Tensor | None = None
        self._group: Group | None = None
        self.q: torch.Tensor | None = None

    @property
    def error(self) -> torch.Tensor | None:
        if self._group is not None:
            self._group.settle()
        return self._error

    def keep_error(self, error: torch.Tensor | None, group: "Group | None" = None) -> None:
        """Remember ``error``, whose last subtraction ``group`` may still owe."""
        self._error, self._group = error, group

    @property
    def key(self) -> tuple[int, ...]:
        return tuple(id(parameter) for parameter in self.parameters)


@dataclass(frozen=True)
class MemoryKey:
    """Everything the buffers' sizes and meaning depend on; another key means other buffers."""

    parameters: tuple[int, ...]
    elements: int
    dtype: torch.dtype
    device: torch.device
    rank: int
    min_compression_rate: float
    error_feedback: bool
    grouped: bool
    batched: bool


class Block:
    """Some rows of a group's matrices: ``p`` (…, rank, height), ``left`` its transpose, ``error`` (…, height, cols)."""

    __slots__ = ("error", "left", "p")

    def __init__(self, p: torch.Tensor, error: torch.Tensor | None) -> None:
        self.p, self.left, self.error = p, p.mT, error


class Group:
    """Matrices of one shape that lie at equal distances in the bucket, multiplied in one call.

    Tensors have shape (count, …), or without the first dimension if there is only one matrix:
    ``p`` (rank, rows), ``q`` and ``q_next`` (rank, cols), ``error`` (rows, cols). For complex gradients ``q`` is the
    conjugate transpose of the paper's Q, so that the large matrix never needs conjugating.
    """

    def __init__(self, slices: Sequence[Slice], units: Sequence[Unit]) -> None:
        self.slices = list(slices)
        self.units = list(units)
        one = slices[0]
        self.rows, self.cols, self.rank, self.count = one.rows, one.cols, one.rank, len(slices)
        self.offset = one.offset
        self.step = slices[1].offset - one.offset if len(slices) > 1 else 0
        # Whether the error still lacks the subtraction of the last PQᵀ, see ``decompress``.
        self._owes = False
        # At rank 1 the product needs no sum, and this is twice as fast as asking for one.
        self._multiply = torch.mul if self.rank == 1 else torch.matmul

    def attach(
        self, p: torch.Tensor, q: torch.Tensor, q_next: torch.Tensor, error: torch.Tensor | None, norms: torch.Tensor
    ) -> None:
        """Take the buffers, flat, and make all views into them once: many small matrices cost mostly their views."""
        self.p: torch.Tensor = self._shaped(p, self.rank, self.rows)
        self.q: torch.Tensor = self._shaped(q, self.rank, self.cols)
        self.q_next: torch.Tensor = self._shaped(q_next, self.rank, self.cols)
        self.error: torch.Tensor | None = None if error is None else self._shaped(error, self.rows, self.cols)
        self.norms: torch.Tensor = self._shaped(norms, self.rank, 1)
        self.conjugates = self.p.conj(), self.q.conj()
        self.members_q = [self.member(self.q, index) for index in range(self.count)]
        self.height = self._block_height()
        self.blocks = [
            Block(self.p[..., start : start + self.height], self._rows_of_error(start))
            for start in range(0, self.rows, self.height)
        ]

    def _shaped(self, flat: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
        return flat.view(rows, cols) if self.count == 1 else flat.view(self.count, rows, cols)

    def _rows_of_error(self, start: int) -> torch.Tensor | None:
        return None if self.error is None else self.error[..., start : start + self.height, :]

    def _block_height(self) -> int:
        """Rows to work on together: on CPU a block that stays in the cache between two operations on it."""
        height = max(1, CACHED_ELEMENTS // self.cols)
        return self.rows if self.count > 1 or self.p.device.type != "cpu" or self.rows < 2 * height else height

    def member(self, stacked: torch.Tensor, index: int) -> torch.Tensor:
        return stacked if self.count == 1 else stacked[index]

    def gradient(self, bucket: torch.Tensor) -> torch.Tensor:
        """The matrices in the bucket's flat gradient, without copying."""
        start = bucket.storage_offset() + self.offset
        if self.count == 1:
            return bucket.as_strided((self.rows, self.cols), (self.cols, 1), start)
        return bucket.as_strided((self.count, self.rows, self.cols), (self.step, self.cols, 1), start)

    def _gradient_blocks(self, bucket: torch.Tensor) -> Sequence[torch.Tensor]:
        blocks: Sequence[torch.Tensor] = torch.split(self.gradient(bucket), self.height, -2)
        return blocks

    def project(self, bucket: torch.Tensor) -> None:
        """P = MQ."""
        q = self.conjugates[1]
        for gradient, block in zip(self._gradient_blocks(bucket), self.blocks, strict=True):
            if block.error is None:
                torch.matmul(q, gradient.mT, out=block.p)
            else:
                if self._owes:
                    block.error.addcmul_(block.left, self.q_next, value=-1)
                block.error.add_(gradient)
                torch.matmul(q, block.error.mT, out=block.p)
        self._owes = False

    def matrix(self, bucket: torch.Tensor) -> torch.Tensor:
        """M again, after ``project``."""
        return self.gradient(bucket) if self.error is None else self.error

    def project_back(self, bucket: torch.Tensor) -> None:
        """Q = MᵀP, with P orthonormal."""
        p, matrix = self.conjugates[0], self.matrix(bucket)
        if self.count > 1 or matrix.device.type != "cpu" or matrix.element_size() < 4:
            torch.matmul(p, matrix, out=self.q_next)
            return
        self.q_next.zero_()
        height = max(1, READ_AHEAD_ELEMENTS // self.cols)
        for columns, rows in zip(torch.split(p, height, -1), torch.split(matrix, height, -2), strict=True):
            # Only to read the block in order: the product jumps between rows, and would wait for memory at each jump.
            rows.sum()
            self.q_next.addmm_(columns, rows)

    def decompress(self, bucket: torch.Tensor) -> None:
        """Write PQᵀ over the gradient, and keep what it lacks of M as the error.

        At rank 1 the subtraction waits for the next ``project``, which has the error in the cache anyway: P and Q stay
        in their buffers until then, and a pass over the whole error is saved. In 16 bit it does not wait, because what
        must be subtracted there is the rounded product.
        """
        self._owes = self.error is not None and self.rank == 1 and self.error.element_size() >= 4
        for gradient, block in zip(self._gradient_blocks(bucket), self.blocks, strict=True):
            self._multiply(block.left, self.q_next, out=gradient)
            if block.error is not None and not self._owes:
                block.error.sub_(gradient)

    def settle(self) -> None:
        """Subtract now what ``decompress`` left to the next ``project``: somebody wants to see the error."""
        if self._owes:
            assert self.error is not None
            self.error.addcmul_(self.p.mT, self.q_next, value=-1)
            self._owes = False

    def restore(self, bucket: torch.Tensor) -> None:
        """Take the gradient out of the error again; what cannot be told from an infinite gradient restarts at 0."""
        if self.error is not None:
            self.error.sub_(self.gradient(bucket))
            torch.nan_to_num_(self.error, nan=0.0, posinf=0.0, neginf=0.0)

    def spoil(self, bucket: torch.Tensor) -> None:
        """Hand a gradient on that no optimizer guarded by a loss scaler will apply."""
        self.gradient(bucket).fill_(float("nan"))

    def decompress_if(self, finite: torch.Tensor, bucket: torch.Tensor) -> None:
        """``decompress``, or ``restore`` and ``spoil``, as ``finite`` says on the device, without asking it."""
        gradient = self.gradient(bucket)
        approximation = torch.matmul(self.p.mT, self.q_next)
        if self.error is not None:
            self.error.sub_(torch.where(finite, approximation, gradient))
            torch.nan_to_num_(self.error, nan=0.0, posinf=0.0, neginf=0.0)
        gradient.copy_(torch.where(finite, approximation, float("nan")))


class Square(Group):
    """The batched hook's single matrix: the whole bucket, padded with zeros to a square.

    The padding lives in this buffer and not in DDP's, and collects error like every other element (as in PyTorch).
    """

    def __init__(self, elements: int, rank: int, unit: Unit) -> None:
        side = square_side(elements)
        super().__init__([Slice(0, 0, elements, side, side, min(side, rank))], [unit])
        self.elements = elements
        self.workspace: torch.Tensor | None = None

    def project(self, bucket: torch.Tensor) -> None:
        if self.error is not None:
            self.error.view(-1)[: self.elements].add_(bucket)
        else:
            if self.workspace is None:
                self.workspace = bucket.new_zeros(self.rows, self.cols)
            self.workspace.view(-1)[: self.elements].copy_(bucket)
        torch.matmul(self.conjugates[1], self.matrix(bucket).mT, out=self.p)

    def matrix(self, bucket: torch.Tensor) -> torch.Tensor:
        matrix = self.error if self.error is not None else self.workspace
        assert matrix is not None, "project comes first"
        return matrix

    def gradient(self, bucket: torch.Tensor) -> torch.Tensor:
        return bucket

    def decompress(self, bucket: torch.Tensor) -> None:
        # The square does not fit into the bucket: its whole rows do, and the last, cut row is computed by itself.
        whole = self.elements // self.cols
        left = self.p.mT
        torch.matmul(left[:whole], self.q_next, out=bucket[: whole * self.cols].view(whole, self.cols))
        rest = self.elements - whole * self.cols
        if rest:
            torch.matmul(left[whole : whole + 1], self.q_next[:, :rest], out=bucket[whole * self.cols :].view(1, rest))
        if self.error is not None:
            self.error.addmm_(left, self.q_next, alpha=-1)

    def restore(self, bucket: torch.Tensor) -> None:
        if self.error is not None:
            self.error.view(-1)[: self.elements].sub_(bucket)
            torch.nan_to_num_(self.error, nan=0.0, posinf=0.0, neginf=0.0)

    def decompress_if(self, finite: torch.Tensor, bucket: torch.Tensor) -> None:
        approximation = torch.matmul(self.p.mT, self.q_next)
        flat = approximation.view(-1)
        if self.error is not None:
            error = self.error.view(-1)
            error[self.elements :].sub_(torch.where(finite, flat[self.elements :], 0))
            error[: self.elements].sub_(torch.where(finite, flat[: self.elements], bucket))
            torch.nan_to_num_(self.error, nan=0.0, posinf=0.0, neginf=0.0)
        bucket.copy_(torch.where(finite, flat[: self.elements], float("nan")))


class BucketMemory:
    """All buffers of one bucket.

    Attributes:
        groups: the compressed matrices.
        runs: (offset in the bucket, offset in ``first``, elements) of adjoining uncompressed slices.
        first: what the first all-reduce carries: uncompressed slices, then P.
        second: what the second carries: the new Q. ``q`` of the groups are the committed ones.
    """

    def __init__(
        self, key: MemoryKey, groups: list[Group], runs: list[tuple[int, int, int]], uncompressed: int
    ) -> None:
        self.key = key
        self.groups = groups
        self.runs = runs
        self.uncompressed = uncompressed
        self.leftovers: list[tuple[int, Unit]] = []
        options = {"dtype": key.dtype, "device": key.device}
        p_elements = sum(g.count * g.rank * g.rows for g in groups)
        q_elements = sum(g.count * g.rank * g.cols for g in groups)
        self.first: torch.Tensor = torch.empty(uncompressed + p_elements, **options)  # type: ignore[call-overload]
        # Norms of all new factor rows, of use to ``draw.commit_factors`` only.
        self.norms: torch.Tensor = torch.empty(
            sum(g.count * g.rank for g in groups), dtype=key.dtype.to_real(), device=key.device
        )
        self._packed = self.first[:uncompressed]
        self._pieces = self._packed.split([elements for _, _, elements in runs])
        self.second: torch.Tensor = torch.empty(q_elements, **options)  # type: ignore[call-overload]
        committed = torch.empty_like(self.second)
        errors = self.second.new_zeros(sum(g.count * g.rows * g.cols for g in groups) if key.error_feedback else 0)
        at_p, at_q, at_error, at_norm = uncompressed, 0, 0, 0
        for group in groups:
            end_p = at_p + group.count * group.rank * group.rows
            end_q = at_q + group.count * group.rank * group.cols
            end_error = at_error + group.count * group.rows * group.cols
            end_norm = at_norm + group.count * group.rank
            group.attach(
                self.first[at_p:end_p],
                committed[at_q:end_q],
                self.second[at_q:end_q],
                errors[at_error:end_error] if key.error_feedback else None,
                self.norms[at_norm:end_norm],
            )
            at_norm = end_norm
            at_p, at_q, at_error = end_p, end_q, end_error
        self._adopt()

    def _adopt(self) -> None:
        """Move what the units remember into these buffers, and let the units point here."""
        for group in self.groups:
            for index, unit in enumerate(group.units):
                if group.error is None:
                    unit.keep_error(None)
                    continue
                error = group.member(group.error, index)
                before = unit.error
                if before is not None:
                    error.copy_(before)
                unit.keep_error(error, group)

    @property
    def after(self) -> int:
        """Elements of the two all-reduces."""
        return self.first.numel() + self.second.numel()

    def gather(self, bucket: torch.Tensor) -> None:
        """Collect the uncompressed slices, paying out the errors of those that were compressed until now."""
        for offset, unit in self.leftovers:
            error = unit.error
            assert error is not None
            bucket[offset : offset + error.numel()].add_(error.reshape(-1))
        if self.runs:
            pieces = [bucket.narrow(0, source, elements) for source, _, elements in self.runs]
            torch.cat(pieces, out=self._packed)

    def scatter(self, bucket: torch.Tensor) -> None:
        for (target, _, elements), piece in zip(self.runs, self._pieces, strict=True):
            bucket.narrow(0, target, elements).copy_(piece)


def layerwise(key: MemoryKey, parameters: Sequence[torch.Tensor], units: "UnitTable") -> BucketMemory:
    """Buffers of ``powerSGD_hook`` for a bucket of ``parameters``."""
    shapes = [parameter.shape for parameter in parameters]
    strides = [parameter.stride() for parameter in parameters]
    slices = slices_of(shapes, strides, key.rank, key.min_compression_rate)
    by_shape: dict[tuple[int, int], list[Slice]] = {}
    runs: list[tuple[int, int, int]] = []
    packed = 0
    for piece in slices:
        if piece.rank:
            by_shape.setdefault((piece.rows, piece.cols), []).append(piece)
        elif piece.elements:
            if runs and runs[-1][0] + runs[-1][2] == piece.offset:
                runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + piece.elements)
            else:
                runs.append((piece.offset, packed, piece.elements))
            packed += piece.elements
    groups = []
    for same in by_shape.values():
        split = equal_step_runs([piece.offset for piece in same]) if key.grouped else [[i] for i in range(len(same))]
        for run in split:
            members = [same[i] for i in run]
            groups.append(Group(members, [units.of((parameters[piece.position],)) for piece in members]))
    held = BucketMemory(key, groups, runs, packed)
    if key.error_feedback:
        for piece in slices:
            unit = units.units.get((id(parameters[piece.position]),))
            if not piece.rank and unit is not None and unit.error is not None:
                held.leftovers.append((piece.offset, unit))
    return held


def squared(key: MemoryKey, parameters: Sequence[torch.Tensor], units: "UnitTable") -> BucketMemory:
    """Buffers of ``batched_powerSGD_hook`` for a bucket of ``parameters``."""
    groups: list[Group] = [Square(key.elements, key.rank, units.of(tuple(parameters)))] if key.elements else []
    return BucketMemory(key, groups, [], 0)


class UnitTable:
    """Finds or makes the unit of a matrix by the identity of its parameters."""

    def __init__(self, units: dict[tuple[int, ...], Unit]) -> None:
        self.units = units

    def of(self, parameters: tuple[torch.Tensor, ...]) -> Unit:
        key = tuple(id(parameter) for parameter in parameters)
        if key not in self.units:
            number = 1 + max((unit.number for unit in self.units.values()), default=-1)
            self.units[key] = Unit(parameters, number)
        return self.units[key]
