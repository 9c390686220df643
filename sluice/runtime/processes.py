"""Processes end with the one that started them, and with all that they started themselves."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import psutil

from sluice.host_memory import lines_of, memory_groups

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MOST_FILES = 65_536
MARKED_SECONDS = 5.0  # for processes that start others faster than they are killed
POLL_SECONDS = 0.1


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


def own_identity() -> dict[str, Any]:
    """By which others find out whether this process is at work: its number may be used again."""
    return {
        "pid": os.getpid(),
        "process_time": psutil.Process().create_time(),
        "host": socket.gethostname(),
    }


def is_at_work(identity: Mapping[str, Any]) -> bool | None:
    """Whether the process of an `own_identity` runs; None for one of another host."""
    if identity.get("host") != socket.gethostname():
        return None
    try:
        pid = identity["pid"]
        began = psutil.Process(pid).create_time() if isinstance(pid, int) else math.inf
        return abs(began - identity["process_time"]) < 1
    except (psutil.Error, ValueError, TypeError, LookupError, OverflowError):
        return False


def ending_signals() -> list[signal.Signals]:
    """Those that end a process in order: Ctrl-C, SIGTERM, and that its terminal was closed.

    Under `nohup` the last one is ignored, and stays so.
    """
    found = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        found.append(signal.SIGHUP)
    return found


def allow_open_files() -> None:
    """Let this process open as many files as it may at all: every connection is one.

    Systems begin with 1,024, which one caller that opens connections and says nothing can take.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def memory_kills(root: Path = Path("/")) -> int:
    """How many processes the kernel has killed so far for want of memory; 0 where it does not say.

    Of the control group of this process, such as a container; where that is not counted, of the
    host.
    """
    counted = [root / "proc/vmstat"]
    for group, is_unified in memory_groups(root):
        counted.insert(0, group / ("memory.events" if is_unified else "memory.oom_control"))
    for file in counted:
        for line in lines_of(file):
            name, _, number = line.partition(" ")
            if name == "oom_kill" and number.isdecimal():
                return int(number)
    return 0


def describe_end(code: int, kills: int) -> tuple[str, bool]:
    """Say how a process ended, and whether the kernel did it for want of memory.

    `kills` is what `memory_kills` said when it was started.
    """
    if code >= 0:
        return f"exited with {code}", False
    name = name_of_signal(-code)
    if -code == signal.SIGKILL and memory_kills() > kills:
        return f"was killed by {name}: the kernel had no memory left", True
    return f"was killed by {name}", False


def name_of_signal(number: int) -> str:
    """Its name; of one of the many real-time ones that have none, which it is."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def keep_processes(parent: int) -> None:
    """Return in a child, of which the calling process becomes the keeper.

    The keeper kills whatever descends from it, processes in sessions of their own too, when the
    child ends, when it is sent SIGTERM, and when `parent` dies; it ends as the child did. To be
    called before there are threads. Elsewhere than on Linux it does nothing.
    """
    if sys.platform != "linux":
        return
    awaited = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    end_with_parent(parent, signal.SIGTERM)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process
    keeper = os.getpid()
    child = os.fork()
    if not child:
        end_with_parent(keeper)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # pipes whose other end must see those of the child close
        os.dup2(nothing, descriptor)
    ended: dict[int, int] = {}
    while child not in ended and signal.sigwait(awaited) == signal.SIGCHLD:
        ended |= _reap()
    ended |= _kill_children()
    _end_as(ended[child])


def end_marked(variable: str, value: str) -> None:
    """Kill all processes whose environment has this value of `variable`, and what they start.

    For what a keeper that was killed itself has left behind.
    """
    deadline = time.monotonic() + MARKED_SECONDS
    while (found := _marked(variable, value)) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(psutil.Error):  # it has ended
                process.kill()
        psutil.wait_procs(found, timeout=POLL_SECONDS)


def _marked(variable: str, value: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            if process.environ().get(variable) == value:
                found.append(process)
    return found


def _reap() -> dict[int, int]:
    """Returns the statuses of children that have ended, by their ids."""
    statuses: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):  # there are none
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[found[0]] = found[1]
    return statuses


def _kill_children() -> dict[int, int]:
    """Kills children until none is left, their orphans come here too; returns their statuses."""
    statuses: dict[int, int] = {}
    while True:
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
                process.kill()
        try:
            child, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return statuses
        statuses[child] = status


def _end_as(status: int) -> NoReturn:
    """Ends this process with the status of another one."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


def _prctl(option: int, value: int) -> None:
    """Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")
