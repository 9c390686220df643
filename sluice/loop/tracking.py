"""Keeps trackers beside a run: each a process that follows metrics.jsonl, and never stops the run.

`python -m sluice.loop.tracking` is that process. Its first line of input says what to do; the end
of the run is a second one, or the end of the input where the run was killed. It answers with a
line for each thing to tell. Which rows a tracker has is in RUN_DIR/trackers/<name>.json, so that a
run that is resumed appends, and a step that is repeated is shown once, as it was first. A copy of a
run has runs of its own there, with all of its rows (`part_trackers`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from sluice.config import ConfigError
from sluice.durable import replace_file, unseal_row
from sluice.logs import printable_lines
from sluice.loop import metrics
from sluice.loop.tracker_settings import SENT_SPANS, TrackersConfig
from sluice.loop.trackers import IN_RUN_DIR, TRACKERS, Tracker, values_of

DIRECTORY = "trackers"
METRICS = "metrics.jsonl"
POLL_SECONDS = 0.5
TRIALS = 5  # of one row, before it is left out
PAUSES = (1.0, 2.0, 5.0, 15.0, 60.0)  # seconds after failures in a row
QUIET_SECONDS = 120.0  # without a word about a row that is there; then it is told that it hangs


def chosen(config: TrackersConfig) -> list[str]:
    """The trackers of a run. Raises ConfigError for one whose package is not installed."""
    names = [name for name in TRACKERS if getattr(config, name) is not None]
    for name in names:
        if not _is_installed(TRACKERS[name].package):
            raise ConfigError(
                f"trackers.{name}: {TRACKERS[name].package} is not installed; "
                f"pip install 'sluice[{name}]'"
            )
    return names


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a name with dots: what is above it
        return False


class Tracking:
    """The tracker processes of a run. `start`, then `close`; neither raises for what they do."""

    def __init__(
        self,
        run_dir: Path,
        config: TrackersConfig,
        run_config: Mapping[str, Any],
        tell: Callable[[str], None],
    ) -> None:
        """Raises ConfigError where a package is missing. `tell` hears of failures, from threads."""
        self._tell, self._seconds = tell, config.finish_seconds
        self._followers = [
            _Follower(name, run_dir, getattr(config, name).model_dump(mode="json"), run_config)
            for name in chosen(config)
        ]

    def start(self) -> None:
        for follower in self._followers:
            follower.start(self._tell)

    def close(self, outcome: str) -> None:
        """Gives all of them `finish_seconds` together; who is not done then is ended, and told."""
        deadline = time.monotonic() + self._seconds
        for follower in self._followers:
            follower.say_end(outcome, self._seconds)
        for follower in self._followers:
            follower.close(deadline, self._tell)


class _Follower:
    """One tracker process, seen from the run."""

    def __init__(
        self, name: str, run_dir: Path, settings: dict[str, Any], run_config: Mapping[str, Any]
    ) -> None:
        self._name, self._run_dir = name, run_dir
        self._order = {
            "tracker": name,
            "run_dir": str(run_dir),
            "settings": settings,
            "config": run_config,
        }
        self._process: subprocess.Popen[str] | None = None
        self._heard: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self._has_died = False  # before the run
        self._log = run_dir / DIRECTORY / f"{name}.log"

    def start(self, tell: Callable[[str], None]) -> None:
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "sluice.loop.tracking"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,  # Ctrl-C is for the run, which ends it in order
                )
        except OSError as error:
            self._fail(tell, f"does not start: {error}")
            return
        self._say(self._order)
        for work in (self._listen, lambda: self._watch(tell)):
            thread = threading.Thread(target=work, name=f"tracker {self._name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def say_end(self, outcome: str, seconds: float) -> None:
        self._closing.set()
        self._say({"outcome": outcome, "seconds": seconds})

    def close(self, deadline: float, tell: Callable[[str], None]) -> None:
        if self._process is None:
            return
        try:
            code = self._process.wait(max(0.1, deadline - time.monotonic()))
            if code and not self._has_died:
                self._fail(tell, f"ended with {code}; see {self._log}")
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._fail(
                tell,
                "did not end in time and was ended; what it does not have yet it gets when the "
                "run is resumed",
            )
        for thread in self._threads:
            thread.join(timeout=5)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _say(self, what: Mapping[str, Any]) -> None:
        """A line; small enough for the pipe, or written by a thread of its own."""
        process = self._process
        if process is None or process.stdin is None:
            return
        pipe, text = process.stdin, json.dumps(what, default=str) + "\n"

        def write() -> None:
            with contextlib.suppress(OSError, ValueError):  # it has ended: told by `_watch`
                pipe.write(text)
                pipe.flush()

        writing = threading.Thread(target=write, name=f"to tracker {self._name}", daemon=True)
        writing.start()
        writing.join(timeout=1.0)

    def _listen(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stdout:
                with contextlib.suppress(ValueError):
                    if isinstance(heard := json.loads(line), dict):
                        self._heard.put(heard)
        self._heard.put(None)

    def _watch(self, tell: Callable[[str], None]) -> None:
        """Tells failures, and once that nothing has been heard for long although rows are there."""
        told = False
        seen = 0
        while True:
            try:
                heard = self._heard.get(timeout=QUIET_SECONDS)
            except queue.Empty:
                size = _size(self._run_dir / METRICS)
                if size > seen and not told and not self._closing.is_set():
                    told = True
                    self._fail(tell, f"has not answered for {QUIET_SECONDS:.0f} s; the run goes on")
                continue
            if heard is None:
                break
            told, seen = False, int(heard.get("size", seen))
            if "problem" in heard:
                self._fail(tell, str(heard["problem"])[:500])
        if not self._closing.is_set():
            self._has_died = True
            self._fail(tell, f"ended early; see {self._log}")

    def _fail(self, tell: Callable[[str], None], what: str) -> None:
        metrics.TRACKER_FAILURES.labels(self._name).inc()
        tell(f"trackers.{self._name}: {what}")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class TrackedRows:
    """Which rows a tracker has: all training steps up to one, and these evaluations.

    Evaluations lie in a file of their own, line by line: there may be one for each step.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lines = path, path.with_suffix(".evaluations.jsonl")
        self.run_id, self.copy, self._step = "", "", 0
        self._evaluations: set[tuple[str, str, int]] = set()
        self._former = list[Any]()  # evaluations that an earlier release kept
        try:
            state = json.loads(path.read_text())
            former = state.get("evaluations", [])
            evaluations = {(str(a), str(b), int(c)) for a, b, c in former}
            self.run_id, self._step = str(state["run_id"]), int(state["step"])
            self.copy = str(state.get("copy", ""))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._lines.unlink(missing_ok=True)  # of a tracker that has nothing of this run
            return
        self._former, self._evaluations = former, evaluations
        with contextlib.suppress(OSError):
            self._read_lines()

    def has(self, row: Mapping[str, Any]) -> bool:
        key = _evaluation_of(row)
        return row["step"] <= self._step if key is None else key in self._evaluations

    def add(self, row: Mapping[str, Any]) -> None:
        key = _evaluation_of(row)
        if key is None:
            self._step = max(self._step, row["step"])
            self.save()
        else:
            self._evaluations.add(key)
            with self._lines.open("a") as file:
                file.write(f"\n{json.dumps(key)}")  # on a line of its own, whatever was cut off

    def save(self) -> None:
        state: dict[str, Any] = {"run_id": self.run_id, "step": self._step}
        state |= {"evaluations": self._former, "copy": self.copy}
        data = json.dumps(state).encode()
        replace_file(self._path, data, temporary=self._path.parent, sync=False)

    def part(self) -> None:
        """Have a run of its own, which has no row yet, for a copy of what it was of."""
        self.run_id, self.copy, self._step = "", secrets.token_hex(3), 0
        self._evaluations, self._former = set(), []
        self._lines.unlink(missing_ok=True)
        self.save()

    def _read_lines(self) -> None:
        for line in self._lines.read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError, TypeError):
                when, dataset, step = json.loads(line)
                self._evaluations.add((str(when), str(dataset), int(step)))


def part_trackers(run_dir: Path) -> None:
    """Have the trackers of a copy of a run begin runs of their own, with its rows from the first.

    Event files in the run directory are the copy's own already.
    """
    for name in TRACKERS:
        path = run_dir / DIRECTORY / f"{name}.json"
        if path.is_file() and (rows := TrackedRows(path)).run_id != IN_RUN_DIR:
            rows.part()
    (run_dir / DIRECTORY / SENT_SPANS).unlink(missing_ok=True)


def _evaluation_of(row: Mapping[str, Any]) -> tuple[str, str, int] | None:
    if "evaluation" not in row:
        return None
    return str(row["evaluation"]), str(row.get("dataset")), row["step"]


class RowFollower:
    """Reads the rows that come to a file, and all again where the file is another."""

    def __init__(self, path: Path) -> None:
        self._path, self._inode, self._offset = path, 0, 0

    def new(self) -> list[dict[str, Any]]:
        """Whole lines since the last call; damaged ones are left out."""
        try:
            with self._path.open("rb") as file:
                now = os.fstat(file.fileno())
                if now.st_ino != self._inode or now.st_size < self._offset:
                    self._inode, self._offset = now.st_ino, 0
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [row for line in whole.split(b"\n") if (row := _row(line)) is not None]

    @property
    def offset(self) -> int:
        return self._offset


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(unseal_row(line))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


class TrackerLoop:
    """Follows a run on behalf of one tracker, until told that it has ended."""

    def __init__(
        self,
        tracker: Tracker,
        config: Mapping[str, Any],
        rows: TrackedRows,
        follower: RowFollower,
        say: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._tracker, self._config, self._rows = tracker, config, rows
        self._follower, self._say = follower, say
        self._outcome: str | None = None
        self._ended = threading.Event()

    def end(self, outcome: str) -> None:
        """No row comes after those that are there."""
        self._outcome = outcome
        self._ended.set()

    def run(self) -> None:
        """Returns once all rows are shown, or given up. A start that fails is tried again."""
        if not self._again(self._start, "start", 1_000_000):
            return
        while True:
            is_last = self._ended.is_set()
            for row in self._follower.new():
                if not self._rows.has(row):
                    self._show(row)
            if is_last:
                break
            self._ended.wait(POLL_SECONDS)
        self._again(lambda: self._tracker.finish(self._outcome or "stopped"), "finish", 1)

    def _start(self) -> None:
        self._rows.run_id = self._tracker.start(self._rows.run_id, self._config)
        self._rows.save()

    def _show(self, row: dict[str, Any]) -> None:
        values = values_of(row)
        if self._again(
            lambda: self._tracker.log(row["step"], values), f"step {row['step']}", TRIALS
        ):
            self._rows.add(row)
            self._say({"size": self._follower.offset})

    def _again(self, work: Callable[[], None], what: str, trials: int) -> bool:
        """Whether it was done within so many trials; at the end of a run it is tried once."""
        for trial in range(trials):
            try:
                work()
                return True
            except Exception as error:  # noqa: BLE001  a tracker raises what its package likes
                problem = f"{what}: {type(error).__name__}: {error}"
                if trial in (0, trials - 1):
                    self._say({"problem": problem})
                print(printable_lines(problem), file=sys.stderr, flush=True)
            if self._ended.is_set() or trial + 1 == trials:
                break
            self._ended.wait(PAUSES[min(trial, len(PAUSES) - 1)])
        return False


def main(lines: Iterable[str] | None = None) -> int:
    """Follow the run that the first line names until another says that it has ended."""
    answers = os.fdopen(os.dup(1), "w")  # packages print where they like
    os.dup2(2, 1)
    given = iter(sys.stdin if lines is None else lines)
    order = json.loads(next(given))
    name, run_dir = order["tracker"], Path(order["run_dir"])
    kind = TRACKERS[name]

    def say(what: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody listens any more
            answers.write(json.dumps(what) + "\n")
            answers.flush()

    rows = TrackedRows(run_dir / DIRECTORY / f"{name}.json")
    following = TrackerLoop(
        kind(run_dir, kind.config.model_validate(order["settings"]), rows.copy),
        order["config"],
        rows,
        RowFollower(run_dir / METRICS),
        say,
    )

    def wait_for_end() -> None:
        said = next(given, "")
        end: dict[str, Any] = json.loads(said or '{"outcome": "failed", "seconds": 30}')
        following.end(end["outcome"])
        time.sleep(end["seconds"] + 5)  # who started this is gone, or ends it before
        os._exit(1)

    threading.Thread(target=wait_for_end, name="end of the run", daemon=True).start()
    following.run()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # what a package does at the end of a process has no limit
