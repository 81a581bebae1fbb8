"""Everything that can be wrong with a sweep, found before its first process starts, and what its trials need resolved.
A mistake is one line on the command line instead of a dead rank's traceback, sixteen times."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from powersgd_lab import settings
from powersgd_lab.datasets.base import Data
from powersgd_lab.network import links
from powersgd_lab.settings import Backend
from powersgd_lab.settings import Device
from powersgd_lab.settings import Hook
from powersgd_lab.settings import PowerSGD
from powersgd_lab.settings import Sweep
from powersgd_lab.settings import Trial
from powersgd_lab.settings import require
from powersgd_lab.training import assembly
from powersgd_lab.training import launch
from powersgd_lab.training import tasks
from powersgd_lab.training.slots import Slot
from powersgd_lab.training.slots import cores
from powersgd_lab.training.slots import local_ranks
from powersgd_lab.training.slots import slots


@dataclass(frozen=True)
class Prepared:
    """What the check of a sweep found out.

    metric: what judges, and its direction, `min` or `max`. data: the data set's record. parameters: elements that are
    trained. gradient_bytes: of one rank's uncompressed step. device, backend, slots: `auto` resolved.
    warnings: a line each."""

    steps: int
    steps_per_epoch: int
    warmup_steps: int
    metric: str
    direction: str
    data: Mapping[str, Any]
    parameters: int
    gradient_bytes: int
    device: str
    backend: str
    slots: list[Slot]
    warnings: list[str]


def prepare(sweep: Sweep) -> Prepared:
    """Check the sweep, preparing its data on the way. Raises ValueError, one line that names the key."""
    links.link(sweep.network.link)
    device, backend = assembly.device_and_backend(sweep.launcher)
    room = slots(sweep.launcher, device)
    if device is Device.cuda and backend is Backend.nccl:
        there = torch.cuda.device_count() // len(room)
        if local_ranks(sweep.launcher) > there:
            raise ValueError(
                f"launcher.world_size={sweep.launcher.world_size} is not allowed: NCCL needs a device for each rank, "
                f"it must be at most {there} (launcher.backend=gloo lets ranks share one)"
            )
    data = assembly.make_data(settings.component(sweep.dataset))
    task = tasks.task_of(data)
    metric = task.metric(sweep.trainer.metric)
    steps_per_epoch, steps = _steps(sweep, len(data.train))
    model = assembly.make_model(settings.component(sweep.model), data, sweep.seed)
    optimizer = settings.component(sweep.optimizer)
    assembly.make_optimizer(optimizer, model, sweep.trainer.decay_norms_and_biases)
    _try_step(sweep, data, model)
    return Prepared(
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        warmup_steps=sweep.trainer.warmup_steps,
        metric=metric,
        direction=task.metrics[metric],
        data=data.record,
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        gradient_bytes=assembly.gradient_bytes(model),
        device=device.name,
        backend=backend.name,
        slots=room,
        warnings=_warnings(sweep, device, backend, room),
    )


def make_trial(sweep: Sweep, prepared: Prepared, powersgd: PowerSGD, seed: int) -> Trial:
    """The trial of one setting and one seed, with steps, start, device and backend resolved.

    Raises ValueError for a start that no step of the run reaches, and for PowerSGD on a single rank."""
    if powersgd.hook.compresses and sweep.launcher.world_size == 1:
        raise ValueError(
            "launcher.world_size=1 is not allowed with PowerSGD: one rank sends nothing that could be compressed, "
            "it must be at least 2"
        )
    setting = settings.resolved(powersgd, prepared.steps, prepared.warmup_steps)
    check_start(setting, prepared.steps)
    launcher = replace(sweep.launcher, device=Device[prepared.device], backend=Backend[prepared.backend])
    return Trial(
        model=settings.component(sweep.model),
        dataset=settings.component(sweep.dataset),
        optimizer=settings.component(sweep.optimizer),
        powersgd=setting,
        trainer=replace(sweep.trainer, steps=prepared.steps, epochs=None),
        launcher=launcher,
        seed=seed,
        data_sha256=prepared.data.get("sha256"),
        kind=sweep.trial.kind,
    )


def check_start(powersgd: PowerSGD, steps: int) -> None:
    """Raises ValueError for a start (resolved) at or after the end of the run: nothing would be compressed."""
    start = powersgd.start_powerSGD_iter
    if powersgd.hook.compresses and start is not None and start >= steps:
        given = f" (start_fraction={powersgd.start_fraction:g})" if powersgd.start_fraction is not None else ""
        raise ValueError(
            f"powersgd.start_powerSGD_iter={start}{given} is not allowed: it must be before the end of the run's "
            f"{steps} steps"
        )


def start_warning(powersgd: PowerSGD, warmup_steps: int) -> str | None:
    """A line on a start in steps that lies inside the warm-up, where gradients change most; None if there is none."""
    start = powersgd.start_powerSGD_iter
    if not powersgd.hook.compresses or powersgd.start_fraction is not None or start is None or start >= warmup_steps:
        return None
    return (
        f"powersgd.start_powerSGD_iter={start} is before the end of the warm-up (trainer.warmup_steps={warmup_steps})"
    )


def _steps(sweep: Sweep, samples: int) -> tuple[int, int]:
    """Steps an epoch, and of the run."""
    trainer, world_size = sweep.trainer, sweep.launcher.world_size
    whole = world_size * trainer.batch_size * trainer.accumulation
    if samples < whole:
        raise ValueError(
            f"trainer.batch_size={trainer.batch_size} is not allowed: a step takes world_size * batch_size * "
            f"accumulation = {whole} samples, and there are {samples} to train on"
        )
    steps_per_epoch = samples // whole
    if trainer.steps is not None:
        steps, key = trainer.steps, "trainer.steps"
    else:
        assert trainer.epochs is not None, "a trainer has steps or epochs"
        steps, key = math.ceil(round(trainer.epochs * steps_per_epoch, 9)), "trainer.epochs"
        require(steps >= 2, key, trainer.epochs, f"enough for 2 steps (an epoch has {steps_per_epoch})")
    require(
        trainer.warmup_steps < steps, "trainer.warmup_steps", trainer.warmup_steps, f"less than the run's {steps} steps"
    )
    return steps_per_epoch, steps


def _try_step(sweep: Sweep, data: Data, model: nn.Module) -> None:
    """One forward and backward pass on a few samples, on CPU: shapes, classes, unused and sparse parameters."""
    target = settings.component(sweep.model)["_target_"]
    # batch norm needs two samples; a batch of one that cannot be trained is found out too
    samples = torch.arange(min(2, sweep.trainer.batch_size))
    inputs, targets = tasks.batch(data, data.train, samples, torch.device("cpu"))
    try:
        logits = model(inputs)
        _require_logits(target, logits, targets)
        torch.autograd.backward(tasks.mean_loss(logits, targets))
    except (RuntimeError, TypeError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"model._target_={target} fails on samples of this data set: {' '.join(str(error).split())}"
        ) from error
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    unused = [name for name, p in named if p.grad is None]
    if unused and not sweep.trainer.ddp.find_unused_parameters:
        raise ValueError(
            f"the loss does not depend on the parameter {unused[0]}: trainer.ddp.find_unused_parameters must be true"
        )
    sparse = [name for name, p in named if p.grad is not None and p.grad.is_sparse]
    if sparse:
        raise ValueError(f"the gradient of the parameter {sparse[0]} is sparse, which no low rank compresses")


def _require_logits(target: str, logits: object, targets: torch.Tensor) -> None:
    if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != targets.shape:
        found = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ValueError(f"logits of shape {(*targets.shape, 'classes')} are expected, not {found}")


def _warnings(sweep: Sweep, device: Device, backend: Backend, room: list[Slot]) -> list[str]:
    found = []
    ranks = local_ranks(sweep.launcher)
    units = len(room[0].cores or cores()) if device is Device.cpu else torch.cuda.device_count() // len(room)
    if ranks > units:
        found.append(
            f"a trial's {ranks} ranks share {units} {'cores' if device is Device.cpu else 'GPUs'}: bytes and metrics "
            "are right, seconds are not those of a rank with one of its own"
        )
    if sweep.powersgd.hook is Hook.torch and backend is Backend.gloo:
        found.append(
            "powersgd=torch on gloo trains with all gradients in one bucket: PyTorch's hook is not safe with several; "
            f"a trial is ended after {launch.SECONDS_WITH_PYTORCHS_HOOK:g} s unless trainer.timeout says otherwise"
        )
    return found
