"""The training loop: steps, reports, evaluations, and the ways in which a run ends.
All ranks run it in lockstep; what they decide, they decide from numbers that they share."""

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_lab.datasets.base import Data
from powersgd_lab.settings import Trial
from powersgd_lab.training import schedule
from powersgd_lab.training import tasks
from powersgd_lab.training.agreement import Agreement
from powersgd_lab.training.journal import Journal
from powersgd_lab.training.meter import Meter
from powersgd_lab.training.sharding import Shards


DIVERGED = "diverged"
REPORT_STEPS = 20  # at most between two reports
REPORT_SECONDS = 1.0  # roughly at most between two reports


@dataclass(frozen=True)
class Ending:
    """How a run ended. steps: those that were trained. seconds: of the loop on this rank, without evaluation.
    values: the last evaluation's metrics, empty when the run did not get to its end."""

    state: str
    reason: str
    steps: int
    seconds: float
    values: dict[str, float]


class Loop:
    def __init__(
        self,
        trial: Trial,
        data: Data,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        shards: Shards,
        device: torch.device,
        agreement: Agreement,
        meter: Meter,
        journal: Journal,
    ) -> None:
        self._trial, self._data, self._model, self._optimizer = trial, data, model, optimizer
        self._shards, self._device, self._meter = shards, device, meter
        self._agreement, self._journal = agreement, journal
        self._highest = [group["lr"] for group in optimizer.param_groups]
        self._losses: list[torch.Tensor] = []  # of the passes since the last report
        self._evaluation_seconds = 0.0

    def run(self) -> Ending:
        """Train to the last step, or until the loss is not finite or someone asks to stop."""
        trial, steps = self._trial, self._trial.steps
        evaluate_every = schedule.evaluation_interval(trial.trainer, steps, self._shards.steps_per_epoch)
        self._began = time.perf_counter()
        report_at, reported = 1, 0  # the first step is reported at once, since it says how long the start took
        values: dict[str, float] = {}
        for done in range(1, steps + 1):
            self._step(done - 1)
            if done == 1:
                self._journal.first_step()
            evaluating = done % evaluate_every == 0 or done == steps
            if done < report_at and not evaluating:
                continue
            stop = self._journal.stop_asked()
            signals = self._agreement.report(self._losses, stop is not None, self._pace(done - reported))
            lr = self._optimizer.param_groups[0]["lr"]
            self._journal.write("train", step=done, loss=signals.loss, lr=lr, seconds=self._seconds())
            self._losses.clear()
            report_at, reported = done + signals.steps_to_next, done
            if not math.isfinite(signals.loss):
                return self._end("pruned", DIVERGED, done)
            if signals.stop:
                return self._end("pruned", f"stopped: {stop}" if stop else "stopped", done)
            if evaluating:
                values = self._evaluate(done, None if done == steps else trial.trainer.eval_samples)
        if not all(math.isfinite(value) for value in values.values()):
            return self._end("pruned", DIVERGED, steps)
        return self._end("complete", "", steps, values)

    def _step(self, step: int) -> None:
        """One synchronized optimizer step of `accumulation` passes; the last one's backward averages gradients."""
        trainer = self._trial.trainer
        self._meter.begin_step()
        factor = schedule.factor(step, self._trial.steps, trainer)
        for group, highest in zip(self._optimizer.param_groups, self._highest, strict=True):
            group["lr"] = highest * factor
        passes = self._shards.step(step)
        for number, samples in enumerate(passes):
            last = number == len(passes) - 1
            with nullcontext() if last else self._model.no_sync():
                loss = self._forward(samples)
                if last:
                    self._meter.begin_backward()
                torch.autograd.backward(loss / len(passes))
            self._losses.append(loss.detach())
        self._meter.end_backward()
        if trainer.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), trainer.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._meter.end_step()

    def _forward(self, samples: torch.Tensor) -> torch.Tensor:
        inputs, targets = tasks.batch(self._data, self._data.train, samples, self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._trial.trainer.autocast):
            return tasks.mean_loss(self._model(inputs), targets)

    def _evaluate(self, done: int, limit: int | None) -> dict[str, float]:
        began = time.perf_counter()
        trainer = self._trial.trainer
        model = self._model.module
        values = self._agreement.evaluate(model, self._data, trainer.eval_batch_size, trainer.autocast, limit)
        self._evaluation_seconds += time.perf_counter() - began
        self._journal.write("eval", step=done, **values)
        return values

    def _pace(self, steps: int) -> int:
        """Steps to the next report, by the last ones' time: ranks must report together, so rank 0 tells the others."""
        seconds = sum(time.step for time in self._meter.times[-steps:]) / steps
        return max(1, min(REPORT_STEPS, int(REPORT_SECONDS / seconds)))

    def _seconds(self) -> float:
        return time.perf_counter() - self._began - self._evaluation_seconds

    def _end(self, state: str, reason: str, steps: int, values: dict[str, float] | None = None) -> Ending:
        self._journal.write("end", step=steps, state=state, reason=reason)
        return Ending(state, reason, steps, self._seconds(), values or {})
