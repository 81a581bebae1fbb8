"""Experiments and hyperparameter search around PowerSGD gradient compression, and the hook itself.
The hook's names are PyTorch's, so that a script changes one import line."""

from powersgd_lab.hook import PowerSGDState
from powersgd_lab.hook import batched_powerSGD_hook
from powersgd_lab.hook import powerSGD_hook


__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]
