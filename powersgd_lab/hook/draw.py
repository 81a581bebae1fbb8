"""Where factor columns come from when they do not come from the step before: random draws, alike on all ranks.
Generators of our own are used throughout, so that no other random stream moves.
"""

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from powersgd_lab.hook.memory import BucketMemory
from powersgd_lab.hook.memory import Group
from powersgd_lab.hook.orthogonal import dead_rows
from powersgd_lab.hook.orthogonal import divide_rows_
from powersgd_lab.hook.orthogonal import orthonormalize_
from powersgd_lab.hook.orthogonal import rounding_of
from powersgd_lab.hook.orthogonal import row_norms
from powersgd_lab.hook.orthogonal import smallest_safe_norm


if TYPE_CHECKING:
    from powersgd_lab.hook.pipeline import Item
    from powersgd_lab.hook.pipeline import Step
    from powersgd_lab.hook.state import PowerSGDState


def begin_factors(step: "Step", item: "Item") -> None:
    """Fill ``q`` of every group in the bucket: committed columns where there are some, random ones elsewhere."""
    units = [unit for group in item.memory.groups for unit in group.units]
    if not units:
        return
    if not step.state.warm_start or all(unit.q is None for unit in units):
        _draw_bucket(step, item)
        for group in item.memory.groups:
            _settle(group, step.epsilon)
            if step.state.warm_start:
                _point(group)
        return
    for group in item.memory.groups:
        for index, unit in enumerate(group.units):
            q = group.members_q[index]
            if unit.q is q:
                continue
            kept = 0 if unit.q is None else min(unit.q.shape[0], q.shape[0])
            if kept:
                assert unit.q is not None
                q[:kept].copy_(unit.q[:kept])
            if kept < q.shape[0]:
                fresh = _noise(step.state, unit.number, q)[kept:]
                q[kept:].copy_(fresh)
                divide_rows_(q[kept:], row_norms(q[kept:]))
        _point(group)


def commit_factors(step: "Step", held: BucketMemory) -> None:
    """On the host, make the new Q of every group in a bucket the committed one: ``redraw_dead``, but in a few calls."""
    for group in held.groups:
        torch.linalg.vector_norm(group.q_next, dim=-1, keepdim=True, out=group.norms)
    values = held.norms.tolist()
    least, start = smallest_safe_norm(held.norms.dtype), 0
    for group in held.groups:
        end = start + group.count * group.rank
        norms = values[start:end]
        start = end
        # Certainly alive, even if all matrices of the group were one; and no square was out of range.
        alive = least < min(norms) and max(norms) < math.inf and min(norms) > max(norms) * rounding_of(group.q.dtype)
        if alive and not (step.epsilon and group.rank <= 2):
            torch.div(group.q_next, group.norms, out=group.q)
        else:
            group.q.copy_(group.q_next)
            redraw_dead(step, group)


def redraw_dead(step: "Step", group: Group) -> None:
    """Bring a newly committed Q to rows of norm one, with new random rows for those that carry nothing.

    A row dies when the gradient's rank falls below the approximation rank. Left alone it would stay zero for ever, or
    be completed by QR with a coordinate direction, which a gradient with zeros there (an unused token) never meets.
    """
    dead = dead_rows(group.q, row_norms(group.q))
    _settle(group, step.epsilon)
    if dead.device.type == "cpu":
        if not bool(dead.any()):
            return
        for index, unit in enumerate(group.units):
            rows = group.member(dead, index).squeeze(-1)
            if bool(rows.any()):
                fresh = _noise(step.state, unit.number, group.member(group.q, index))
                divide_rows_(fresh, row_norms(fresh))
                group.member(group.q, index)[rows] = fresh[rows]
        return
    # Without asking the device which rows are dead, draw for all of them: the factors are small.
    for index, unit in enumerate(group.units):
        q = group.member(group.q, index)
        fresh = _noise(step.state, unit.number, q)
        divide_rows_(fresh, row_norms(fresh))
        torch.where(group.member(dead, index), fresh, q, out=q)


def take_back(state: "PowerSGDState", finite: torch.Tensor | bool) -> None:
    """At a step's end: if it drew from the stream but was not finite, the stream goes back to where it was.

    With ``finite`` on a device the answer is looked at before the next draw, which is a step later or never.
    """
    if state._stream_undo is None:
        return
    before, _ = state._stream_undo
    if isinstance(finite, torch.Tensor):
        state._stream_undo = (before, finite)
        return
    if not finite:
        state.rng.set_state(before)
        for held in state._memories.values():
            for group in held.groups:
                for unit in group.units:
                    if unit.key in state._fresh:
                        unit.q = None
    state._fresh.clear()
    state._stream_undo = None


def _draw_bucket(step: "Step", item: "Item") -> None:
    """Standard normal factors in the order, batching and dtype of PyTorch's hook, which so draws the same numbers."""
    state = step.state
    if step.seed is None:
        if state._stream_undo is not None:
            before, finite = state._stream_undo
            if not bool(finite) and not state.warm_start:
                state.rng.set_state(before)
        state._stream_undo = (state.rng.get_state(), True)
        step.seed = int(state.rng.randint(1_000_000_000))
    # Buckets of one step draw from neighbouring seeds; the first bucket's is PyTorch's.
    generator = torch.Generator().manual_seed(step.seed + item.index)
    same_shape: dict[tuple[int, int], list[tuple[int, Group, int]]] = {}
    for group in item.memory.groups:
        for index, piece in enumerate(group.slices):
            same_shape.setdefault((group.rows, group.cols), []).append((piece.position, group, index))
    for members in same_shape.values():
        members.sort(key=lambda member: member[0])
        _, group, _ = members[0]
        shape = (group.cols, group.rank)
        if state.batch_tensors_with_same_shape:
            drawn = list(torch.randn(len(members), *shape, generator=generator, dtype=group.q.dtype))
        else:
            drawn = [torch.randn(shape, generator=generator, dtype=group.q.dtype) for _ in members]
        for (_, owner, index), columns in zip(members, drawn, strict=True):
            owner.member(owner.q, index).copy_(columns.mT)
    if state.warm_start:
        state._fresh.update(unit.key for group in item.memory.groups for unit in group.units)


def _settle(group: Group, epsilon: float) -> None:
    """Norm one for every row. The span is all that matters (P is orthonormalized), and this keeps P in range."""
    if epsilon and group.rank <= 2:
        # Here epsilon makes the length of Q's rows matter, as it does in PyTorch.
        orthonormalize_(group.q, epsilon)
        return
    norms = row_norms(group.q)
    divide_rows_(group.q, norms.masked_fill(norms == 0, 1))


def _point(group: Group) -> None:
    for index, unit in enumerate(group.units):
        unit.q = group.members_q[index]


def _noise(state: "PowerSGDState", number: int, like: torch.Tensor) -> torch.Tensor:
    """Random rows that depend on seed, step and matrix alone: nothing to remember, nothing to take back."""
    words = np.random.SeedSequence((state._random_seed, number, state.iter)).generate_state(2, np.uint32)
    seed = (int(words[0]) << 31) ^ int(words[1])
    generator = torch.Generator(device=like.device).manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)
