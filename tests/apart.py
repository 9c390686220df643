"""Runs a function in a process of its own.

For what is told of all the memory of a process: one that has run tests holds what they freed, and
lets go of more when its garbage is collected.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tests.patience import PATIENCE

CALL = "import pickle, sys; f, a = pickle.loads(bytes.fromhex(sys.argv[1])); f(*a)"


def apart(function: Callable[..., None], *arguments: Any) -> None:
    """Calls a function of a module. Raises AssertionError with what the process has printed where
    the call raises anything."""
    call = pickle.dumps((function, arguments)).hex()
    done = subprocess.run(
        [sys.executable, "-m", "tests.program", CALL, call],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout
