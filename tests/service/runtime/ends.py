"""Services as processes that end by themselves."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.patience import PATIENCE

_RUN = """
import runpy, sys
sys.argv.pop(0)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def run_service(module: str, *arguments: str, before: str) -> tuple[int, str]:
    """The exit status and the log of a service; `before` is code that its process runs first."""
    done = subprocess.run(
        [sys.executable, "-c", before + _RUN, module, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stderr
