"""Temporary directories end with their process, however that one ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from sluice.durable import scratch
from tests.patience import PATIENCE

CODE = """
import os, signal, sys
from pathlib import Path
from sluice.durable import scratch
with scratch("made-", Path(sys.argv[1])) as folder:
    (folder / "data").write_text("x")
    print(folder, flush=True)
    sys.stdin.read(1)
"""


def start(directory: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_left_is_cleared_and_what_a_living_one_has_is_not(tmp_path: Path):
    (tmp_path / "made-by-hand").mkdir()  # has no lock: not ours
    killed, left = start(tmp_path)
    living, held = start(tmp_path)
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait(PATIENCE)
        assert (left / "data").exists()
        with scratch("made-", tmp_path) as own:
            there = {path.name for path in tmp_path.iterdir()}
            assert there == {"made-by-hand", held.name, own.name}
    finally:
        living.communicate("x", timeout=PATIENCE)
    assert {path.name for path in tmp_path.iterdir()} == {"made-by-hand"}
