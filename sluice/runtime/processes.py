"""Processes end with the one that started them, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when `parent` dies; exits if it is dead already.

    To be called at the start of a process. The order outlives `exec`, not `fork`: children of
    this process need one of their own. Elsewhere than on Linux there is no such thing.
    """
    if sys.platform != "linux":
        return
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the order was given
        sys.exit(1)


def _prctl(option: int, value: int) -> None:
    """Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")
