"""The meter of one rank: which bytes it hands to all-reduces, and where the time of a step goes.
It is the hooks' observer; the loop tells it where steps begin and end. It costs a few microseconds a step."""

import statistics
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on one rank. compute is what is left of the step beside compressing and waiting."""

    step: float
    compress: float
    communicate: float


class Meter:
    """Counts from the first step to the last.

    communicate is time in which the calling thread is blocked: waits inside a hook, and from the last hook call's
    return to the end of the backward pass, where DDP waits for all-reduces that are still under way. On CUDA a step
    ends when the device has finished it, but compress and communicate are the host's time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.payload: Counter[str] = Counter()  # bytes by kind, over the run
        self.control_bytes = 0  # evaluation and agreement among ranks, over the run
        self.step_payload = 0  # the latest step's
        self.step_allreduces = 0
        self.times: list[StepTime] = []
        self.in_backward = False
        self._began = self._hook_returned = self._compress = self._blocked = 0.0

    @property
    def step(self) -> int:
        """The step under way, or the next one."""
        return len(self.times)

    def state_dict(self) -> dict[str, Any]:
        """What is counted so far, as plain tensors and numbers."""
        times = torch.tensor([[t.step, t.compress, t.communicate] for t in self.times], dtype=torch.float64)
        return {"payload": dict(self.payload), "control_bytes": self.control_bytes, "times": times.view(-1, 3)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.payload, self.control_bytes = Counter(state["payload"]), state["control_bytes"]
        self.times = [StepTime(*times) for times in state["times"].tolist()]

    # What hooks tell (hook.observer.Observer)

    def issued(self, payload: Mapping[str, int]) -> None:
        self.payload.update(payload)
        self.step_payload += sum(payload.values())
        self.step_allreduces += 1

    def compressed(self, seconds: float) -> None:
        self._compress += seconds

    def waited(self, seconds: float) -> None:
        self._blocked += seconds

    # What the loop tells

    def begin_step(self) -> None:
        self.step_payload = self.step_allreduces = 0
        self._compress = self._blocked = 0.0
        self._began = time.perf_counter()

    def begin_backward(self) -> None:
        """The pass that ends in all-reduces begins its backward half."""
        self.in_backward = True

    def hook_returned(self) -> None:
        self._hook_returned = time.perf_counter()

    def end_backward(self) -> None:
        self._blocked += time.perf_counter() - self._hook_returned
        self.in_backward = False

    def end_step(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - self._began
        self.times.append(StepTime(seconds, self._compress, self._blocked))

    def control(self, tensor: torch.Tensor) -> None:
        """`tensor` is handed to a collective that carries no gradient."""
        self.control_bytes += tensor.numel() * tensor.element_size()


UNSETTLED_STEPS = 2  # the first of a phase, in which DDP forms its buckets and hooks allocate


def typical(times: list[StepTime], start: int) -> StepTime:
    """Medians over the settled steps of the last phase that a run reached: from step `start`, when compression began,
    or of the whole run when it did not get there."""
    phase = times[start:] or times
    settled = phase[UNSETTLED_STEPS:] or phase
    return StepTime(
        statistics.median(time.step for time in settled),
        statistics.median(time.compress for time in settled),
        statistics.median(time.communicate for time in settled),
    )
