"""Faults on demand: a test ends this process, or loses its answer, right after a durable write.

Off unless SLUICE_FAULT names a directory when the process starts; then nothing is looked at. A
fault is armed by a file of its name in that directory, which holds the number of the passing at
which it fires. It fires once: the process that takes the file away is the one that fails.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from sluice.durable import locked

VARIABLE = "SLUICE_FAULT"

_directory = os.environ.get(VARIABLE, "")


def enabled() -> bool:
    """Whether this process looks for faults at all."""
    return bool(_directory)


def point(name: str) -> None:
    """A kill point, named after what is durable now; kills this process (-9) if it is due."""
    if _directory and due(name):
        os.kill(os.getpid(), signal.SIGKILL)


def due(name: str) -> bool:
    """Count a passing of the fault `name`; whether it has to fire now."""
    path = Path(_directory, name)
    if not path.exists():
        return False
    with locked(_lock_of(path.parent)):
        try:
            left = int(path.read_text()) - 1
        except FileNotFoundError:  # taken back, or another process was first
            return False
        if left > 0:
            path.write_text(str(left))
        else:
            path.unlink()
        return left <= 0


def arm(directory: Path, name: str, passing: int = 1) -> None:
    """Have the fault `name` fire at its `passing`-th passing in processes of this directory."""
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f".{name}"
    partial.write_text(str(passing))
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
