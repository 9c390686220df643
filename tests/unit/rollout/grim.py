"""An environment whose grader does what its task tells it to."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from services.rollout.environments.environment import (
    Environment,
    Placement,
    Response,
    Reward,
    SettingError,
    Task,
    TaskRequest,
    TextTokenizer,
)
from sluice.config import Config

SILLY: dict[str, Any] = {"nan": float("nan"), "text": "1", "long": 10**400, "truth": True}
GIVEN: dict[str, Any] = {
    "nothing": None,
    "object": {"prompt": "x"},
    "set": Task(prompt="x", state={"seen": {1}}),
    "bytes": Task(messages=({"role": "user", "content": b"x"},)),
}
PATH = "tests.unit.rollout.grim:GrimEnvironment"


class GrimSettings(Config):
    """`marks` is a directory: each reward call leaves a file there, named by its process.

    `door` is a file without which nothing opens.
    """

    marks: str = ""
    door: str = ""
    flavour: str = "bitter"


class GrimEnvironment(Environment):
    name = "grim"
    settings_type = GrimSettings
    placement = Placement.PROCESS

    def __init__(self, settings: GrimSettings, tokenizer: TextTokenizer | None = None) -> None:
        if settings.flavour == "poison":
            raise SettingError("flavour", "is not served here")
        while settings.door and not Path(settings.door).exists():
            time.sleep(0.02)
        self._settings = settings

    @classmethod
    def check(cls, settings: Any, request: TaskRequest) -> None:
        pass

    def make_task(self, request: TaskRequest) -> Task:
        assert request.row is not None
        if (given := str(request.row["deed"])) in GIVEN:
            return GIVEN[given]  # type: ignore[no-any-return]
        return Task(prompt=str(request.row["prompt"]), state={"deed": request.row["deed"]})

    def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        calls = self._mark()
        deed = task.state["deed"]
        if deed == "die" or (deed == "die_once" and calls == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if deed == "raise":
            raise ZeroDivisionError("no mercy")
        if deed == "chatter":
            _chatter()
        if deed == "print":
            print("x" * (task.state["size"] - 4), "end", sep="", flush=True)
        if deed == "backtrack":
            re.match(r"(a+)+$", "a" * 64 + "b")  # holds the interpreter lock for ever
        if deed == "fork":
            os.fork()  # both return
        if deed.endswith("litter"):
            self._litter()
        if deed.startswith("stall"):
            threading.Event().wait(600)
        if deed == "die_with_litter":
            os.kill(os.getpid(), signal.SIGKILL)
        if deed == "forge":
            _forge(task.state["line"])
        if deed == "forge_later" and not os.fork():
            while not (Path(self._settings.marks) / "later").exists():
                time.sleep(0.01)
            _forge(task.state["line"])
            os._exit(0)
        value = SILLY.get(deed, task.state.get("value", 1.0))
        return [Reward(reward=value, raw_reward=value) for _ in responses]

    def _mark(self) -> int:
        """How many reward calls there were, this one included."""
        if not self._settings.marks:
            return 0
        marks = Path(self._settings.marks)
        (marks / f"{len(list(marks.iterdir())):04d}-{os.getpid()}").touch()
        return len(list(marks.iterdir()))

    def _litter(self) -> None:
        """Leaves a folder, and processes: a child, an orphaned daemon, one that is stopped."""
        folder = tempfile.mkdtemp(prefix="litter-")
        for line in ("sleep 600", "setsid sleep 600 &", "sleep 600 & kill -STOP $$"):
            subprocess.Popen(["sh", "-c", line])
        family = psutil.Process(os.getppid())  # an orphan comes to the keeper
        while sum(child.name() == "sleep" for child in family.children(recursive=True)) < 3:
            time.sleep(0.01)
        for child in family.children(recursive=True):
            (Path(self._settings.marks) / f"litter-{child.pid}").write_text(folder)


def _chatter() -> None:
    """Writes to stdout, and reads stdin, in every way that a library may."""
    print('{"value": [{"reward": 7.0}]}', flush=True)
    os.write(1, b'{"value": [{"reward": 7.0}]}\n')
    libc = ctypes.CDLL(None)
    libc.puts(b"a library in C")
    libc.fflush(None)
    subprocess.run(["sh", "-c", "cat; echo a program"], check=True)
    assert sys.stdin.read() == ""


def _forge(line: str) -> None:
    """Writes a line to every pipe that may be the one to the parent."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.stat(entry).st_mode) or stat.S_ISSOCK(os.stat(entry).st_mode):
                os.write(int(entry.name), line.encode())
