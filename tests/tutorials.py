"""What a reader of a tutorial does: its files are written, its commands run, in order."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests import warm
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("tutorial-*.md"))
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
FILE = re.compile(r"(?:#|//) ([\w.]+)\n")  # the first line of what is no command


def write_files(name: str, folder: Path) -> list[str]:
    """Write the files of a page; its commands."""
    commands = []
    for language, text in BLOCK.findall((ROOT / "docs" / f"tutorial-{name}.md").read_text()):
        if language == "bash":
            commands.append(text)
        elif (first := FILE.match(text)) is not None:
            (folder / first[1]).write_text(text[first.end() :])
    return commands


def follow(name: str, folder: Path, seconds: float = PATIENCE) -> str:
    """What a reader of the page does in an empty folder; what it printed."""
    script = ["set -euo pipefail", *write_files(name, folder)]
    commands = folder / "bin"
    commands.mkdir()
    # the command as it is installed: without the folder on Python's path
    entry = f"import sys; sys.path[0] = {str(ROOT)!r}; "
    if warm.has_begun():  # what it starts loads its libraries once
        entry += "from tests import warm; warm.begin(); "
    entry += "from sluice.cli import main; sys.exit(main())"
    (commands / "sluice").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{entry}" "$@"\n')
    (commands / "sluice").chmod(0o755)
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    process = subprocess.Popen(
        ["bash", "-c", "\n".join(script)],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):  # all of it has ended, as it should
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    return output
