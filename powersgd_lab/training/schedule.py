"""The learning rate, step by step, as a part of its highest value: a pure function.
PyTorch's schedulers carry state and epochs; this needs neither, and a resumed run needs only its step."""

import math

from powersgd_lab.settings import Schedule
from powersgd_lab.settings import Trainer


def factor(step: int, steps: int, trainer: Trainer) -> float:
    """The part of the highest learning rate at `step` (from 0) of `steps`.

    Rises in equal parts over `warmup_steps`, the first step being 1 / warmup_steps; then stays, falls by `gamma` at
    each milestone, or follows half a cosine that would reach `final_fraction` after the last step."""
    if step < trainer.warmup_steps:
        return (step + 1) / trainer.warmup_steps
    match trainer.schedule:
        case Schedule.constant:
            return 1.0
        case Schedule.step:
            return trainer.gamma ** sum(step >= milestone * steps for milestone in trainer.milestones)
        case Schedule.cosine:
            progress = (step - trainer.warmup_steps) / (steps - trainer.warmup_steps)
            return trainer.final_fraction + (1 - trainer.final_fraction) * (1 + math.cos(math.pi * progress)) / 2


def evaluation_interval(trainer: Trainer, steps: int, steps_per_epoch: int) -> int:
    """Steps from one evaluation to the next; a tenth of the run when nothing is asked for."""
    if trainer.eval_steps is not None:
        return trainer.eval_steps
    if trainer.eval_epochs is not None:
        return max(1, round(trainer.eval_epochs * steps_per_epoch))
    return max(1, math.ceil(steps / 10))
