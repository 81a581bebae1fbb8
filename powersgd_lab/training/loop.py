"""The training loop: steps, reports, evaluations, and the ways in which a run ends.
All ranks run it in lockstep; what they decide, they decide from numbers that they share."""

import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_lab.datasets.base import Data
from powersgd_lab.settings import Hook
from powersgd_lab.settings import Trial
from powersgd_lab.training import schedule
from powersgd_lab.training import tasks
from powersgd_lab.training.agreement import Agreement
from powersgd_lab.training.checkpoint import Checkpoints
from powersgd_lab.training.journal import Journal
from powersgd_lab.training.meter import Meter
from powersgd_lab.training.sharding import Shards


DIVERGED = "diverged"
REPORT_STEPS = 20  # at most between two reports
REPORT_SECONDS = 1.0  # roughly at most between two reports


@dataclass(frozen=True)
class Ending:
    """How a run ended. steps: those that were trained. seconds: of the loop on this rank, without evaluations and
    checkpoints, which evaluation_seconds has. values: the last evaluation's metrics, empty when the run did not get to
    its end."""

    state: str
    reason: str
    steps: int
    seconds: float
    evaluation_seconds: float
    values: dict[str, float]


class Loop:
    def __init__(
        self,
        trial: Trial,
        data: Data,
        model: DistributedDataParallel,
        hook_state: Any,
        optimizer: torch.optim.Optimizer,
        shards: Shards,
        device: torch.device,
        agreement: Agreement,
        meter: Meter,
        journal: Journal,
        checkpoints: Checkpoints,
    ) -> None:
        self._trial, self._data, self._model, self._optimizer = trial, data, model, optimizer
        self._shards, self._device, self._meter = shards, device, meter
        self._agreement, self._journal, self._checkpoints = agreement, journal, checkpoints
        self._hook_state = hook_state
        self._highest = [group["lr"] for group in optimizer.param_groups]
        self._losses: list[torch.Tensor] = []  # of the passes since the last report
        self._other_seconds = 0.0  # of evaluations and checkpoints

    def run(self, saved: Mapping[str, Any] | None) -> Ending:
        """Train to the last step, or until the loss is not finite or someone asks to stop.

        saved: this rank's part of a checkpoint to go on from."""
        trial, steps = self._trial, self._trial.steps
        evaluate_every = schedule.evaluation_interval(trial.trainer, steps, self._shards.steps_per_epoch)
        self._began = self._saved_at = time.perf_counter()
        before = 0 if saved is None else self._restore(saved)
        report_at, reported = before + 1, before  # the first step is reported at once: it says how long the start took
        values: dict[str, float] = {}
        for done in range(before + 1, steps + 1):
            self._step(done - 1)
            if done == before + 1:
                self._journal.first_step()
            evaluating = done % evaluate_every == 0 or done == steps
            if done < report_at and not evaluating:
                continue
            stop = self._journal.stop_asked()
            pace = self._pace(done - reported)
            signals = self._agreement.report(self._losses, stop is not None, self._save_due(), pace)
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
            if signals.save and done < steps:
                self._save(done)
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
        self._journal.write("evaluating", step=done)
        trainer = self._trial.trainer
        model = self._model.module
        values = self._agreement.evaluate(model, self._data, trainer.eval_batch_size, trainer.autocast, limit)
        self._other_seconds += time.perf_counter() - began
        self._journal.write("eval", step=done, **values)
        return values

    def _save_due(self) -> bool:
        pause = self._trial.trainer.checkpoint_seconds
        return (
            pause is not None
            and self._trial.powersgd.hook is not Hook.torch  # whose state knows no names: it begins anew
            and time.perf_counter() - self._saved_at >= pause
        )

    def _save(self, done: int) -> None:
        """The schedule and the place in the data follow from the number of steps."""
        state = {
            "steps": done,
            "seconds": self._seconds(),
            "other_seconds": self._other_seconds,
            "model": self._model.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "hook": self._hook_state.state_dict(self._model) if self._trial.powersgd.hook.compresses else {},
            "meter": self._meter.state_dict(),
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None,
        }
        began = time.perf_counter()
        self._checkpoints.save(done, state)
        self._saved_at = time.perf_counter()
        self._other_seconds += self._saved_at - began

    def _restore(self, saved: Mapping[str, Any]) -> int:
        """Go on from a checkpoint; returns the steps that were trained before it."""
        self._model.module.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(dict(saved["optimizer"]))
        if self._trial.powersgd.hook.compresses:
            self._hook_state.load_state_dict(saved["hook"], self._model)
        self._meter.load_state_dict(saved["meter"])
        torch.set_rng_state(saved["random"])
        if saved["cuda_random"] is not None:
            torch.cuda.set_rng_state(saved["cuda_random"], self._device)
        self._other_seconds = saved["other_seconds"]
        self._began = time.perf_counter() - saved["seconds"] - self._other_seconds
        return int(saved["steps"])

    def _pace(self, steps: int) -> int:
        """Steps to the next report, by the last ones' time: ranks must report together, so rank 0 tells the others."""
        seconds = sum(time.step for time in self._meter.times[-steps:]) / steps
        return max(1, min(REPORT_STEPS, int(REPORT_SECONDS / seconds)))

    def _seconds(self) -> float:
        return time.perf_counter() - self._began - self._other_seconds

    def _end(self, state: str, reason: str, steps: int, values: dict[str, float] | None = None) -> Ending:
        self._journal.write("end", step=steps, state=state, reason=reason)
        return Ending(state, reason, steps, self._seconds(), self._other_seconds, values or {})
