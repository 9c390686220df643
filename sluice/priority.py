"""Threads that let others go first."""

from __future__ import annotations

import os
import sys
import threading

NICENESS = 5


def lower_priority() -> None:
    """Give the calling thread, and those it starts, a low priority."""
    if sys.platform == "linux":  # elsewhere priorities are of processes only
        thread = threading.get_native_id()
        current = os.getpriority(os.PRIO_PROCESS, thread)  # going back from it needs a privilege
        os.setpriority(os.PRIO_PROCESS, thread, max(current, NICENESS))
