"""Tries hostile programs: `python -m tests.sandbox.trial jail|open FOLDER`, a JSON line a case.

A process of its own, so that the same trial is made by users of several rights.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from sluice.sandbox.programs import SandboxLimits, run_program
from tests.sandbox.hostile import CASES, Hostile

LIMITS: dict[str, Any] = {"seconds": 1.5, "cpu_seconds": 2, "memory_mib": 512, "processes": 8}
OUTPUT_BYTES = 1 << 20
HANGS = 60.0  # seconds from which a run of at most 1.5 hangs
FD = 300  # of a file that is held open


class Outside:
    """What must stay as it is: a file, a process, ports that nobody connects to."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.mark = folder, f"mark-{uuid.uuid4().hex}"
        self.file, self.target = folder / "secret.txt", folder / "target.txt"
        self.file.write_text("top secret")
        self.victim = _echo()
        self._port = socket.create_server(("127.0.0.1", 0))
        self._datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._datagrams.bind(("127.0.0.1", self._port.getsockname()[1]))
        self._named = socket.socket(socket.AF_UNIX)
        self._named.bind("\0" + self.mark)
        self._named.listen()
        for one in (self._port, self._datagrams, self._named):
            one.setblocking(False)
        os.dup2(os.open(self.file, os.O_RDONLY), FD, inheritable=True)
        self.held = [open(os.devnull) for _ in range(100)]  # noqa: SIM115 - many descriptors

    def facts(self) -> str:
        clone = 56 if platform.machine() == "x86_64" else 220
        return json.dumps(
            {"file": str(self.file), "folder": str(self._folder), "target": str(self.target)}
            | {"victim": self.victim.pid, "port": self._port.getsockname()[1], "name": self.mark}
            | {"mark": self.mark, "clone": clone}
        )

    def touched(self) -> list[str]:
        """What was reached, whatever the program said; restores it."""
        found = []
        if self.target.exists() or self.file.read_text() != "top secret":
            found.append("files")
            self.target.unlink(missing_ok=True)
        (self._folder / "secret.txt2").unlink(missing_ok=True)
        if not _answers(self.victim):
            found.append("a process")
            self.victim.wait()
            self.victim = _echo()
        for name, listener in (("network", self._port), ("socket", self._named)):
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                found.append(name)
        with contextlib.suppress(BlockingIOError):
            self._datagrams.recv(9)
            found.append("datagrams")
        if survivors := self._survivors():
            found.append("a daemon")
            for process in survivors:
                process.kill()
        return found

    def _survivors(self) -> list[psutil.Process]:
        """Processes of the program that are there a while after it has ended."""
        deadline = time.monotonic() + 10
        while found := [one for one in psutil.process_iter() if self.mark in _command(one)[3:]]:
            if time.monotonic() > deadline:
                return found
            time.sleep(0.05)
        return []

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()


def _echo() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)


def _answers(echo: subprocess.Popen[bytes]) -> bool:
    """One that was sent a deadly signal does not, however long it takes to die."""
    assert echo.stdin is not None
    assert echo.stdout is not None
    try:
        echo.stdin.write(b"?")
    except BrokenPipeError:
        return False
    return echo.stdout.read(1) == b"?"


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []


def _jailed(case: Hostile, facts: str) -> tuple[str, bytes]:
    limits = SandboxLimits(**{**LIMITS, **case.limits})
    outcome = run_program({"program.py": case.program}, ["program.py", facts], "input", limits)
    return f"{outcome.ending} {outcome.code}", outcome.output


def _open(case: Hostile, facts: str) -> tuple[str, bytes]:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        Path(folder, "program.py").write_text(case.program)
        command = [sys.executable, "-I", "-S", "-B", "program.py", facts]
        environment = {"SECRET": "top"}
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            pass_fds=(FD,),
            start_new_session=True,
        )
        process.wait(HANGS)
        output.seek(0)
        return f"exit {process.returncode}", output.read()


def trials(mode: str, folder: Path) -> Iterator[dict[str, Any]]:
    outside = Outside(folder)
    os.environ["SECRET"] = "top"
    for case in CASES:
        if mode == "open" and not case.open_too:
            continue
        started = time.monotonic()
        if mode == "jail":
            ending, output = _jailed(case, outside.facts())
        else:
            ending, output = _open(case, outside.facts())
        seconds = time.monotonic() - started
        escapes = [
            line for line in output.decode(errors="replace").split("\n") if "ESCAPED" in line
        ]
        if len(output) > OUTPUT_BYTES:
            escapes.append("output")
        escapes += outside.touched()
        yield {"case": case.name, "ending": ending, "escapes": escapes, "seconds": seconds}
    outside.close()


if __name__ == "__main__":
    for trial in trials(sys.argv[1], Path(sys.argv[2])):
        print(json.dumps(trial), flush=True)
