"""An environment whose grader does what its task tells it to."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
        return Task(prompt=str(request.row["prompt"]), state={"deed": request.row["deed"]})

    def reward(self, task: Task, responses: Sequence[Response]) -> list[Reward]:
        calls = self._mark()
        deed = task.state["deed"]
        if deed == "die" or (deed == "die_once" and calls == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if deed == "raise":
            raise ZeroDivisionError("no mercy")
        if deed == "stall":
            threading.Event().wait(600)
        if deed == "chatter":
            print("a library that prints to stdout")
        value = float("nan") if deed == "nan" else 1.0
        return [Reward(reward=value, raw_reward=value) for _ in responses]

    def _mark(self) -> int:
        """How many reward calls there were, this one included."""
        if not self._settings.marks:
            return 0
        marks = Path(self._settings.marks)
        (marks / f"{len(list(marks.iterdir())):04d}-{os.getpid()}").touch()
        return len(list(marks.iterdir()))
