"""Commands whose output goes nowhere: a full disk, files that are closed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE

SLUICE = f"{sys.executable} -m sluice"


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["--help", "train --help", "completion bash", "logs HERE"])
def test_a_full_disk_is_said_in_a_line_and_by_the_exit_code(
    command: str, unbuffered: str, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "router.log").write_text("a line\n" * 10)
    command = f"{SLUICE} {command.replace('HERE', str(tmp_path))} > /dev/full"
    done = shell(command, PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (
        2,
        "sluice: standard output: No space left on device\n",
    )


def test_a_progress_that_nobody_can_be_told_ends_nothing() -> None:
    """As of a run whose log is on a disk that has become full."""
    program = "import sys; from sluice.output import guard_output; guard_output()\n"
    program += "print('progress', file=sys.stderr, flush=True); print('done', flush=True)"
    done = shell(f'{sys.executable} -c "{program}" 2> /dev/full')
    assert (done.returncode, done.stdout) == (0, "done\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_files_that_are_closed_are_taken_for_no_others(closed: str, tmp_path: Path) -> None:
    """The event loop would have had them, and ended the process."""
    (tmp_path / "services.json").write_text("{}")
    done = shell(f"{SLUICE} status {tmp_path} {closed}")
    assert (done.returncode, done.stderr) == (0, "")
