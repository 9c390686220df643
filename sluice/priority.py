"""Threads beside the work of a process: how many, and that they let others go first."""

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


def usable_cores() -> int:
    """Counts the cores that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_beside() -> int:
    """Returns how many threads copy, digest, read or write shards of weights at a time.

    One fills no disk or memory bus. A quarter of the cores, as a host has other ranks and engines,
    but no fewer than 2 and no more than 8.
    """
    return min(8, max(2, usable_cores() // 4))
