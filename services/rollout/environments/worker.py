"""Runs one environment: `python -m services.rollout.environments.worker PATH`.

It reads a JSON call a line and answers a JSON line: `{"value": ...}`, or `{"error": ...}` with
what the caller can act on. An exception of the environment is answered as well and then ends
the process, whose state nobody can vouch for. It ends when its parent is gone.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any, TextIO

from services.rollout.environments.environment import (
    Environment,
    Response,
    SettingError,
    Task,
    TaskError,
    TaskRequest,
    Turn,
    answer_of,
)
from services.rollout.environments.registry import create_environment

KEPT = 8  # environments with different settings


class Worker:
    """Answers calls; keeps the environments it has built."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._environments: dict[str, Environment] = {}

    def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"value": self._run(call)}
        except SettingError as error:
            return {"error": "setting", "key": error.key, "message": str(error)}
        except TaskError as error:
            return {"error": "task", "key": error.key, "message": str(error)}

    def _run(self, call: Mapping[str, Any]) -> Any:
        environment = self._environment(call["settings"])
        if call["method"] == "open":
            return None
        if call["method"] == "make_task":
            return asdict(answer_of(environment.make_task(TaskRequest(**call["request"]))))
        task = Task(**call["task"])
        if call["method"] == "step":
            response = _response(call["response"])
            return asdict(answer_of(environment.step(task, call["state"], response)))
        assert call["method"] == "reward", call["method"]
        responses = [_response(values) for values in call["responses"]]
        rewards = answer_of(environment.reward(task, responses))
        return [asdict(reward) for reward in rewards]

    def _environment(self, settings: Mapping[str, Any]) -> Environment:
        key = json.dumps(settings, sort_keys=True)
        if key not in self._environments:
            while len(self._environments) >= KEPT:
                del self._environments[next(iter(self._environments))]
            self._environments[key] = create_environment(self._path, settings)
        return self._environments[key]


def _response(values: Mapping[str, Any]) -> Response:
    turns = tuple(Turn(**turn) for turn in values["turns"])
    return Response(**{**values, "turns": turns})


def _take_stdout() -> TextIO:
    """Returns the pipe to the parent; what libraries print goes to stderr from here on."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _read(lines: TextIO, calls: queue.SimpleQueue[str]) -> None:
    """Reads also while a grader computes: a parent that is gone must not leave it running."""
    for line in lines:
        calls.put(line)
    os._exit(0)


def _answer_crashes(replies: TextIO) -> None:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        print(json.dumps({"error": "crash", "message": f"{kind.__name__}: {error}"}), file=replies)
        replies.flush()
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook


def main() -> None:
    replies = _take_stdout()
    _answer_crashes(replies)
    worker, calls = Worker(sys.argv[1]), queue.SimpleQueue[str]()
    threading.Thread(target=_read, args=(sys.stdin, calls), daemon=True).start()
    while True:
        print(json.dumps(worker.answer(json.loads(calls.get()))), file=replies, flush=True)


if __name__ == "__main__":
    main()
