"""Faults on demand: a test ends this process, or loses its answer, right after a durable write.

Off unless SLUICE_FAULT names a directory when the process starts; then nothing is looked at. A
fault is armed by a file of its name in that directory, which holds the number of the passing at
which it fires, and of the signal. It fires once: the process that takes the file away is the one
that fails.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from sluice.durable import locked

VARIABLE = "SLUICE_FAULT"

_directory = os.environ.get(VARIABLE, "")


def enabled() -> bool:
    """Whether this process looks for faults at all."""
    return bool(_directory)


def point(name: str) -> None:
    """A kill point, named after what is durable now; kills this process (-9) if it is due.

    Or stops it, until it is continued, where that was armed.
    """
    if _directory and (number := _fired(name)):
        # to this thread: others may take it later, and what comes next would be done
        signal.pthread_kill(threading.get_ident(), number)


def due(name: str) -> bool:
    """Count a passing of the fault `name`; whether it has to fire now."""
    return bool(_directory) and _fired(name) != 0


def _fired(name: str) -> int:
    """Count a passing; the signal that was armed if it has to fire now, else 0."""
    path = Path(_directory, name)
    if not path.exists():
        return 0
    with locked(_lock_of(path.parent)):
        try:
            passing, number = map(int, path.read_text().split())
        except FileNotFoundError:  # taken back, or another process was first
            return 0
        if passing > 1:
            path.write_text(f"{passing - 1} {number}")
            return 0
        path.unlink()
        return number


def arm(
    directory: Path, name: str, passing: int = 1, number: signal.Signals = signal.SIGKILL
) -> None:
    """Have the fault `name` fire at its `passing`-th passing in processes of this directory."""
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f".{name}"
    partial.write_text(f"{passing} {number.value}")
    partial.rename(directory / name)


def disarm(directory: Path) -> list[str]:
    """Take back what has not fired; returns the names."""
    if not directory.is_dir():
        return []
    with locked(_lock_of(directory)):
        names = [path.name for path in directory.iterdir()]
        for name in names:
            (directory / name).unlink()
    return names


def _lock_of(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.lock")
