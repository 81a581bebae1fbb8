"""Processes that must not outlive the one that started them: the kernel is asked to see to it.
A controller that is killed by -9 can clean up nothing itself."""

import ctypes
import os
import signal
import sys


PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent: int) -> None:
    """Let this process be killed when `parent` (a process id) ends; ends it at once if that has already happened.

    Linux only. Elsewhere the fork server notices the end of its controller by its socket, and ends its ranks."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)
