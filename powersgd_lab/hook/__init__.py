"""PowerSGD communication hooks for DDP, and the plain hooks they are compared with.
Needs torch and numpy only: this folder can be lifted out and used alone.
"""

from powersgd_lab.hook.hooks import batched_powerSGD_hook
from powersgd_lab.hook.hooks import powerSGD_hook
from powersgd_lab.hook.layout import PayloadElements
from powersgd_lab.hook.layout import payload_elements
from powersgd_lab.hook.observer import Observer
from powersgd_lab.hook.plain import AllReduceState
from powersgd_lab.hook.plain import allreduce_hook
from powersgd_lab.hook.state import PowerSGDState


__all__ = [
    "AllReduceState",
    "Observer",
    "PayloadElements",
    "PowerSGDState",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "payload_elements",
    "powerSGD_hook",
]
