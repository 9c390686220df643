"""Runs one environment: `python -m services.rollout.environments.worker PATH PARENT PROTOCOL`.

It reads a JSON call a line, `{"id": ..., "call": ...}`, and answers a JSON line with that id and
`value`, or `error` with what the caller can act on. An exception of the environment is answered
as well and then ends the process, whose state nobody can vouch for. Two processes: one that
computes, and its keeper, which ends it and all that it started when it is told to or the process
PARENT is gone. A service whose package was replaced under it speaks another PROTOCOL, or, before
there was one, names none: its first call is refused. What the environment reads and prints has
nothing to do with the calls.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from services.rollout.environments.environment import (
    PROTOCOL,
    Environment,
    InvalidRewardError,
    Response,
    SettingError,
    Step,
    Task,
    TaskError,
    TaskRequest,
    Turn,
    answer_of,
    fault_of,
    rewards_from,
    told,
)
from services.rollout.environments.registry import create_environment
from sluice.runtime.processes import keep_processes

MAX_ENVIRONMENTS = 8  # with different settings
NEARLY = 0.95  # of a call's time is over: stderr is told where it is, before it is ended


class InvalidAnswerError(Exception):
    """What an environment gave is no task or step; the message says why."""


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
        except (InvalidAnswerError, InvalidRewardError) as error:
            return {"error": "answer", "message": str(error)}

    def _run(self, call: Mapping[str, Any]) -> Any:
        environment = self._environment(call["settings"])
        if call["method"] == "open":
            return None
        if call["method"] == "make_task":
            found = answer_of(environment.make_task(TaskRequest(**call["request"])))
            return _values(found, Task)
        task = Task(**call["task"])
        if call["method"] == "step":
            response = _response(call["response"])
            return _values(answer_of(environment.step(task, call["state"], response)), Step)
        assert call["method"] == "reward", call["method"]
        responses = [_response(values) for values in call["responses"]]
        rewards = answer_of(environment.reward(task, responses))
        return [asdict(reward) for reward in rewards_from(rewards, len(responses))]

    def _environment(self, settings: Mapping[str, Any]) -> Environment:
        key = json.dumps(settings, sort_keys=True)
        if key not in self._environments:
            while len(self._environments) >= MAX_ENVIRONMENTS:
                del self._environments[next(iter(self._environments))]
            self._environments[key] = create_environment(self._path, settings)
        return self._environments[key]


def _values(found: Any, kind: type[Task | Step]) -> dict[str, Any]:
    """Raises InvalidAnswerError, also for what no line of JSON would hold."""
    if fault := fault_of(found, kind):
        raise InvalidAnswerError(fault)
    values: dict[str, Any] = asdict(found)
    return values


def _response(values: Mapping[str, Any]) -> Response:
    turns = tuple(Turn(**turn) for turn in values["turns"])
    return Response(**{**values, "turns": turns})


class Line:
    """Takes calls from the parent and answers them, each once, in the process it was made in."""

    def __init__(self) -> None:
        """Takes the pipes; the environment's own input is empty, its output goes to stderr."""
        self._own = os.getpid()
        self._input = os.fdopen(os.dup(0), "r", encoding="utf-8")
        self._output = os.fdopen(os.dup(1), "w", encoding="utf-8")
        with Path(os.devnull).open() as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        self._id = ""
        self._calls = queue.SimpleQueue[str]()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Reads also while a grader computes: a parent that is gone must not leave it running."""
        for line in self._input:
            self._calls.put(line)
        os._exit(0)

    def next_call(self) -> Mapping[str, Any]:
        """Waits for the next call."""
        values = json.loads(self._calls.get())
        self._id = values["id"]
        call: Mapping[str, Any] = values["call"]
        return call

    def answer(self, reply: Mapping[str, Any]) -> None:
        """Answers the call. A child that an environment forked and let return ends here."""
        if os.getpid() != self._own:
            print("a forked child returned from a call of its parent: it ends", file=sys.stderr)
            os._exit(1)
        print(json.dumps({"id": self._id, **reply}), file=self._output, flush=True)


def main() -> None:
    path, parent = sys.argv[1], int(sys.argv[2])
    protocol = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    keep_processes(parent)
    worker, line = Worker(path), Line()
    if protocol != PROTOCOL:
        line.next_call()
        message = (
            f"this service speaks version {protocol} of the protocol of graders, the package that "
            f"is installed now version {PROTOCOL}: it was replaced under the service; restart it"
        )
        line.answer({"error": "crash", "message": message})
        sys.exit(1)

    def answer_crash(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        sys.__excepthook__(kind, error, trace)
        line.answer({"error": "crash", "message": told(error)})

    sys.excepthook = answer_crash
    faulthandler.enable()
    while True:
        call = line.next_call()
        seconds = min(call["seconds"] * NEARLY, threading.TIMEOUT_MAX)
        faulthandler.dump_traceback_later(seconds)
        reply = worker.answer(call)
        faulthandler.cancel_dump_traceback_later()
        line.answer(reply)


if __name__ == "__main__":
    main()
