"""One compressed step, from the first bucket's call to the last's: which collective starts when, and what is committed.
The order is the calling thread's and never a callback's, so that all ranks agree on it on every backend.

The call for a bucket starts its first all-reduce (uncompressed slices and P) and then moves the bucket before it on to
its second (Q), which so overlap with the backward pass. The call for the last bucket finishes all of them, and only
there errors, factors and gradients are written: a step is either committed in every bucket or in none.
"""

import contextlib
import time
from collections.abc import Iterator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from powersgd_lab.hook import memory
from powersgd_lab.hook.draw import begin_factors
from powersgd_lab.hook.draw import commit_factors
from powersgd_lab.hook.draw import redraw_dead
from powersgd_lab.hook.draw import take_back
from powersgd_lab.hook.observer import UNCOMPRESSED
from powersgd_lab.hook.observer import P
from powersgd_lab.hook.observer import Q
from powersgd_lab.hook.orthogonal import orthonormalize_


if TYPE_CHECKING:
    from powersgd_lab.hook.state import PowerSGDState


class Item:
    """One bucket on its way: DDP's, or after loading a saved one (see ``regroup``)."""

    def __init__(
        self,
        index: int,
        gradient: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        result: torch.Tensor | None = None,
    ) -> None:
        self.index = index
        # What DDP gets back: the same memory, in the dtype that DDP gave it.
        self.result = gradient if result is None else result
        self.gradient = gradient
        self.parameters = parameters
        self.memory: memory.BucketMemory
        self.works: list[dist.Work] = []
        self.accumulated = False
        devices: list[int | str | torch.device] = [gradient.device] if gradient.device.type == "cuda" else []
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)


class Step:
    """What all buckets of one step share: read once, at its first bucket, so that no setting changes within a step."""

    def __init__(self, state: "PowerSGDState", group: dist.ProcessGroup, batched: bool) -> None:
        self.state = state
        self.group = group
        self.world_size = group.size()
        self.rank = state.matrix_approximation_rank
        self.epsilon = float(state.orthogonalization_epsilon)
        self.batched = batched
        self.seed: int | None = None
        self.items: list[Item] = []
        # The first step after loading is computed in the saved buckets, which are complete only when all are here.
        self.deferred = state._layout_plan is not None or state._restored is not None
        self._clock = Clock(state)

    def add(self, item: Item, last: bool) -> None:
        """Take the next bucket, and do everything that may be done by now."""
        self.items.append(item)
        with stream_of(self.state, item.gradient):
            if not self.deferred:
                self._start(item)
                if len(self.items) > 1:
                    self._advance(self.items[-2])
            if last:
                self._finish()

    def abandon(self) -> None:
        """Give a step up whose backward pass ended early: errors as before, no factor committed."""
        for item in self.items:
            for work in item.works:
                work.wait()
            if item.accumulated:
                for group in item.memory.groups:
                    group.restore(item.gradient)
        take_back(self.state, False)

    def _start(self, item: Item) -> None:
        """Compute P and start its all-reduce together with the uncompressed slices (algorithm 1, lines 3 and 4)."""
        with self._clock.computing():
            item.memory = held = bind(self, item)
            begin_factors(self, item)
            for group in held.groups:
                group.project(item.gradient)
            item.accumulated = True
            held.gather(item.gradient)
            # Dividing before the sum, so that 16-bit floats overflow no sooner than the mean does.
            held.first.div_(self.world_size)
        size = held.first.element_size()
        sent = {UNCOMPRESSED: held.uncompressed * size, P: (held.first.numel() - held.uncompressed) * size}
        self._all_reduce(item, held.first, sent)

    def _advance(self, item: Item) -> None:
        """Orthonormalize the mean P, compute Q and start its all-reduce (algorithm 1, lines 5 to 7)."""
        held = item.memory
        self._wait(item)
        if not held.groups:
            return
        with self._clock.computing():
            if held.first.device.type == "cpu" and not is_finite(held.first[held.uncompressed :]):
                # Nothing of this step will be used, but the other ranks wait for the all-reduce.
                held.second.fill_(float("nan"))
            else:
                # Backwards, since what was projected last is still in the cache.
                for group in reversed(held.groups):
                    orthonormalize_(group.p, self.epsilon / self.world_size)
                    group.project_back(item.gradient)
                held.second.div_(self.world_size)
        self._all_reduce(item, held.second, {Q: held.second.numel() * held.second.element_size()})

    def _finish(self) -> None:
        """Finish every bucket, then commit the step or take it back."""
        items = self.items
        plan = self.state._layout_plan
        if self.deferred:
            if plan is not None:
                items = plan.regroup(self.items)
            for position, item in enumerate(items):
                self._start(item)
                if position:
                    self._advance(items[position - 1])
        self._advance(items[-1])
        for item in items:
            self._wait(item)
        with self._clock.computing():
            self._commit(items)
            if plan is not None and items is not self.items:
                plan.hand_back(items)
        self.state._layout_plan = None
        self.state._buckets = {item.index: list(item.parameters) for item in items}
        for index in [index for index in self.state._memories if index >= len(items)]:
            del self.state._memories[index]
        for item in self.items:
            item.future.set_result(item.result)

    def _forget_paid(self, items: list[Item]) -> None:
        """Errors of slices that are no longer compressed have been handed on, and are kept no longer."""
        for item in items:
            for _, unit in item.memory.leftovers:
                self.state._units.pop(unit.key, None)
            item.memory.leftovers.clear()

    def _commit(self, items: list[Item]) -> None:
        parts = [part for item in items for part in (item.memory.first, item.memory.second)]
        if on_host(parts):
            finite = all(is_finite(part) for part in parts)
            for item in items:
                item.memory.scatter(item.gradient)
                for group in item.memory.groups:
                    if finite:
                        group.decompress(item.gradient)
                    else:
                        group.restore(item.gradient)
                        group.spoil(item.gradient)
                if finite and self.state.warm_start:
                    commit_factors(self, item.memory)
            take_back(self.state, finite)
            if finite:
                self._forget_paid(items)
            return
        # On an accelerator the answer stays there: asking for it would stop the host until the device is idle.
        device = parts[0].device
        flag = torch.stack([torch.isfinite(part).all().to(device, non_blocking=True) for part in parts]).all()
        for item in items:
            here = flag.to(item.gradient.device, non_blocking=True)
            item.memory.scatter(item.gradient)
            for group in item.memory.groups:
                group.decompress_if(here, item.gradient)
                if self.state.warm_start:
                    before = group.q.clone()
                    group.q.copy_(group.q_next)
                    redraw_dead(self, group)
                    torch.where(here, group.q, before, out=group.q)
        take_back(self.state, flag)
        self._forget_paid(items)

    def _all_reduce(self, item: Item, tensor: torch.Tensor, sent: dict[str, int]) -> None:
        # Whether there is anything to send is known from shapes, so all ranks skip alike.
        if tensor.numel() == 0:
            return
        if self.state.observer is not None:
            self.state.observer.issued({kind: size for kind, size in sent.items() if size})
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        item.works.append(work)

    def _wait(self, item: Item) -> None:
        with self._clock.waiting():
            for work in item.works:
                work.wait()
        item.works.clear()


def bind(step: Step, item: Item) -> memory.BucketMemory:
    """The bucket's buffers: those of the last step, or new ones if the bucket or a setting is another."""
    state, gradient = step.state, item.gradient
    key = memory.MemoryKey(
        parameters=tuple(id(parameter) for parameter in item.parameters),
        elements=gradient.numel(),
        dtype=gradient.dtype,
        device=gradient.device,
        rank=step.rank,
        min_compression_rate=state.min_compression_rate,
        error_feedback=bool(state.use_error_feedback),
        grouped=bool(state.batch_tensors_with_same_shape) or gradient.device.type == "cuda",
        batched=step.batched,
    )
    held = state._memories.get(item.index)
    if held is None or held.key != key:
        build = memory.squared if step.batched else memory.layerwise
        held = build(key, item.parameters, memory.UnitTable(state._units))
        state._memories[item.index] = held
    return held


def on_host(parts: list[torch.Tensor]) -> bool:
    """Whether all are on the CPU, where looking at a value costs no synchronization."""
    return all(part.device.type == "cpu" for part in parts)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether every element is finite; on CPU only, since it asks."""
    # One sum is several times cheaper than a mask; only if finite values overflow it, look at each.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


@contextlib.contextmanager
def stream_of(state: "PowerSGDState", gradient: torch.Tensor) -> Iterator[None]:
    """Run on a stream of our own on CUDA, so that waiting for a collective does not hold the backward pass up."""
    if gradient.device.type != "cuda":
        yield
        return
    if gradient.device not in state._streams:
        state._streams[gradient.device] = torch.cuda.Stream(gradient.device)  # type: ignore[no-untyped-call]
    stream = state._streams[gradient.device]
    stream.wait_stream(torch.cuda.current_stream(gradient.device))
    gradient.record_stream(stream)
    with torch.cuda.stream(stream):
        yield


class Clock:
    """Tells the observer where time goes; without an observer it reads no clock."""

    def __init__(self, state: "PowerSGDState") -> None:
        self._state = state

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        observer = self._state.observer
        started = time.perf_counter() if observer is not None else 0.0
        yield
        if observer is not None:
            observer.compressed(time.perf_counter() - started)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        observer = self._state.observer
        started = time.perf_counter() if observer is not None else 0.0
        yield
        if observer is not None:
            observer.waited(time.perf_counter() - started)
