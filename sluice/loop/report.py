"""What a run shows and leaves behind: its progress, metrics.jsonl, the journal, reward.png."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from sluice.durable import ROW_SEAL, encode_row, naming, replace_file, unseal_row
from sluice.logs import printable, printable_lines
from sluice.loop import metrics
from sluice.loop.journal import BACK, END, NOTE, RunJournal, without_secrets
from sluice.loop.plot import draw
from sluice.loop.tracker_settings import TrackersConfig
from sluice.loop.tracking import Tracking
from sluice.runtime import waits
from sluice.runtime.errors import text_of

_LINE = "reward {reward_mean:.3f}  length {response_length_mean:.1f}"
_OF_ACTOR = "  mismatch {rollout_mismatch:.1e}"  # of steps that trained it, not the critic alone
_DRAWN = {"step", "reward_mean", "response_length_mean"}
_SCORED = {"step", "score", "dataset"}
_KINDS = {
    "step": int,
    **dict.fromkeys(
        ("reward_mean", "response_length_mean", "rollout_mismatch", "score"), int | float
    ),
    **dict.fromkeys(("evaluation", "dataset"), str),
}
RECENT = 20  # steps that a rate is taken from
QUIET_SECONDS = 60.0  # without a step; then a log says what the run waits for, and again after 2x
SHOWN_WAIT_SECONDS = 2.0
LINE_STEPS, LINE_SECONDS = 10, 15.0  # a log has a line after so many steps, and after so long


def tokens_per_second(row: Mapping[str, Any]) -> float | None:
    """Tokens trained on over the time of the whole step; None where a row does not tell."""
    tokens, seconds = row.get("tokens"), row.get("step_seconds")
    if not isinstance(tokens, int | float) or not isinstance(seconds, int | float) or seconds <= 0:
        return None
    return tokens / seconds


def seconds_left(recent: Iterable[Mapping[str, Any]], step: int, steps: int) -> float | None:
    """Until `steps`, at the pace of recent rows; None before there is one. A run may end before."""
    taken = [s for row in recent if isinstance(s := row.get("step_seconds"), int | float)]
    return max(0, steps - step) * sum(taken) / len(taken) if taken else None


def duration_text(seconds: float) -> str:
    """45s, 3m05s, 2h07m, 3d04h: two units, without blanks."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    for size, name, part, below in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size}{name}{whole % size // part:02}{below}"
    raise AssertionError


class _TrainingProgress(Progress):
    """A bar, and below it what the run waits for."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(wait_text(SHOWN_WAIT_SECONDS), style="dim", no_wrap=True, overflow="ellipsis")


def wait_text(least_seconds: float = 0.0) -> str:
    """What this process waits for since longest, empty if that is less than `least_seconds`."""
    wait = waits.oldest()
    if wait is None or (age := time.monotonic() - wait.began) < least_seconds:
        return ""
    proto = wait.to_proto()
    whom = f" on {', '.join(proto.on)}" if proto.on else ""
    why = f": {proto.explanation}" if proto.explanation else ""
    return printable(f"waits for {proto.what}{whom} since {duration_text(age)}{why}")


class RunReport:
    """Owns the progress display and the files in the run directory. Use as a context manager."""

    def __init__(
        self, run_dir: Path, steps: int, console: Console | None = None, line: str = _LINE
    ) -> None:
        """`line` is what the terminal shows of a row."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir
        self.path = run_dir / "metrics.jsonl"
        self._line = line
        self._scores: dict[tuple[str, str, int], float] = {}
        self._steps, self._step = steps, 0
        self._kept: int | None = None  # step of the last run checkpoint
        metrics.PLANNED_STEPS.set(steps)
        self._recent = deque[Mapping[str, Any]](maxlen=RECENT)
        self._last: Mapping[str, Any] = {}
        self._lined = -math.inf  # when a log got its last line of a step
        self._is_silent = False  # the last step had no advantage to learn from
        self.journal = RunJournal(run_dir)
        self._kind = ""  # of the run, once it has begun
        self._tracking: Tracking | None = None
        self._stepped, self._over = threading.Event(), False
        self._telling: threading.Thread | None = None
        self._console = console or Console(stderr=True)
        self._is_terminal = self._console.is_terminal  # which looks at the environment each time
        self._progress = _TrainingProgress(
            TextColumn("step {task.completed} of {task.total}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[line]}"),
            TextColumn("{task.fields[pace]}"),
            TimeElapsedColumn(),
            console=self._console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("training", total=steps, line="starting", pace="")

    def __enter__(self) -> RunReport:
        if self._is_terminal:
            self._progress.start()
        else:
            self._telling = threading.Thread(
                target=self._tell_waits, name="what the run waits for", daemon=True
            )
            self._telling.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if self._is_terminal:
            self._progress.stop()
        self._over = True
        self._stepped.set()
        if self._telling is not None:
            self._telling.join()
        stopped = kind is not None and not issubclass(kind, Exception)
        outcome = "done" if kind is None else "stopped" if stopped else "failed"
        if self._tracking is not None:
            self._tracking.close(outcome)
        if self._kind:
            why = "" if error is None or stopped else f"{type(error).__name__}: {text_of(error)}"
            self.journal.write(END, outcome=outcome, step=self._step, text=why)
            if stopped:
                self.note(self._stopped_text(), is_kept=False)

    def _stopped_text(self) -> str:
        told = f"stopped at step {self._step} of {self._steps}"
        if self._kept is None:
            return told
        if self._kept == self._step:
            return f"{told}; `--resume` goes on from there"
        return (
            f"{told}; `--resume` goes on after step {self._kept}, the last run checkpoint "
            "(`checkpoint_every`)"
        )

    def begin(self, kind: str, config: Mapping[str, Any]) -> None:
        """Record that a process begins to train, with the settings of its run."""
        self._kind = kind
        self.journal.start(kind, self._steps, config)

    def keep(self, step: int) -> None:
        """A run checkpoint of this step is there."""
        self._kept = step

    def track(self, trackers: TrackersConfig, config: Mapping[str, Any]) -> None:
        """Have trackers to show the run to. Raises ConfigError."""
        self._tracking = Tracking(
            self._run_dir, trackers, without_secrets(config), lambda text: self.note(text)
        )

    def start_trackers(self) -> None:
        """Show the run to them, from its first row on, once it is known which run it is."""
        if self._tracking is not None:
            self._tracking.start()

    def step(self, row: dict[str, Any]) -> None:
        """One training step: a line of metrics.jsonl and a move of the bar."""
        self._append({**row, "time": round(time.time(), 3)})
        self._step = row["step"]
        metrics.show_step(row)
        self._recent.append(row)
        self._last = row
        self._stepped.set()
        has_actor = "rollout_mismatch" in row and self._line is _LINE
        line = (self._line + _OF_ACTOR * has_actor).format(**row)
        rate, left = tokens_per_second(row), seconds_left(self._recent, self._step, self._steps)
        pace = f"tokens/s {rate:.0f}" if rate is not None else ""
        pace += f"  left {duration_text(left)}" if left is not None else ""
        self._progress.update(self._task, completed=self._step, line=line, pace=pace)
        now = time.monotonic()
        is_due = self._step % LINE_STEPS == 1 or now - self._lined >= LINE_SECONDS
        if not self._is_terminal and is_due:
            self._lined = now
            told = f"step {self._step:4}  {line}  of {self._steps}  {pace}".rstrip()
            self._console.print(told, highlight=False, soft_wrap=True)
        for reason in row["skipped"]:
            self.note(f"step {row['step']}: optimizer step skipped: {reason}")
        self._tell_silence(row)

    def _tell_silence(self, row: Mapping[str, Any]) -> None:
        """Say once, of steps in a row, that there was nothing to learn from."""
        was_silent, self._is_silent = self._is_silent, row.get("advantage_abs_mean") == 0
        if self._is_silent and not was_silent:
            self.note(
                f"step {row['step']}: nothing to learn from: every advantage is 0, as where all "
                f"answers to a prompt get one reward (the mean is {row['reward_mean']:g}); see "
                f"`sluice samples {self._run_dir}`"
            )

    def evaluation(self, row: dict[str, Any]) -> None:
        """Scores of one data set: a line of metrics.jsonl and of the terminal."""
        self._append({**row, "time": round(time.time(), 3)})
        self._scores[_evaluation_of(row)] = _score_of_all(row)
        metrics.SCORE.labels(row["dataset"]).set(row["score"])
        passes = "".join(f", {k} {v:.3f}" for k, v in row.items() if k.startswith("pass@"))
        error = row["score_error"]
        spread = "" if error is None else f" ± {error:.3f}"
        failed = f", {row['failed_groups']} tasks failed" if row["failed_groups"] else ""
        self.note(
            f"{row['dataset']}, {row['evaluation']} (step {row['step']}, weights "
            f"{_versions(row)}): {row['score']:.3f}{spread}{passes}{failed}",
            is_kept=False,
        )

    def has_evaluation(self, when: str, dataset: str, step: int) -> bool:
        """Whether these scores were reported before."""
        return (when, dataset, step) in self._scores

    def last_score(self, dataset: str) -> float | None:
        """The latest on a data set, of this run or the one that it goes on from.

        Tasks that failed count as 0, unless the score is below.
        """
        return next(
            (s for (_, name, _), s in reversed(self._scores.items()) if name == dataset), None
        )

    def has_row(self, step: int) -> bool:
        """Whether the file has the row of a training step."""
        return any(row["step"] == step for row in _parse(self.path)[0] if "reward_mean" in row)

    def last_scalars(self) -> dict[str, float]:
        """The numbers of the last step; none before the first."""
        return {
            name: value
            for name, value in self._last.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }

    def note(self, text: str, *, is_kept: bool = True) -> None:
        """Say something, for the journal too."""
        self._console.print(printable_lines(text), highlight=False, markup=False, soft_wrap=True)
        if is_kept and self._kind:
            self.journal.write(NOTE, step=self._step, text=text)

    def _tell_waits(self) -> None:
        """In a log: what the run waits for, where it has made no step for long."""
        quiet = QUIET_SECONDS
        since = time.monotonic()
        while not self._over:
            if self._stepped.wait(quiet):
                self._stepped.clear()
                quiet, since = QUIET_SECONDS, time.monotonic()
                continue
            text = wait_text() or "waits for nothing that it knows of"
            told = f"no step for {duration_text(time.monotonic() - since)}: {text}"
            self._console.print(told, highlight=False, markup=False, soft_wrap=True)
            quiet *= 2

    def truncate(self, step: int) -> list[float]:
        """Drop rows after `step`, whose work is done again; rewards of the rows that stay."""
        rows = self._read()
        kept = [row for row in rows if row["step"] <= step]
        if (again := max((row["step"] for row in rows), default=step) - step) > 0:
            self.note(
                f"goes on after step {step}, the last run checkpoint; later steps, made again: "
                f"{again}",
                is_kept=False,
            )
        if (gone := step - len({row["step"] for row in kept if "skipped" in row})) > 0:
            self.note(f"{self.path}: rows of {gone} of the steps up to {step} are gone")
        data = b"".join(encode_row(row) + b"\n" for row in kept)
        replace_file(self.path, data, temporary=self._run_dir)
        evaluated = [row for row in kept if _SCORED | {"evaluation"} <= row.keys()]
        self._scores = {_evaluation_of(row): _score_of_all(row) for row in evaluated}
        trained = [row for row in kept if "reward_mean" in row]
        self._step, self._last = step, trained[-1] if trained else {}
        self._kept = step
        metrics.STEP.set(step)
        self._progress.update(self._task, completed=step)
        if self._kind:
            self.journal.write(BACK, step=step)
        return [row["reward_mean"] for row in trained]

    def plot(self) -> Path | None:
        """Reward, response length and log-prob mismatch over steps, as reward.png.

        None before the first step, and where matplotlib is not installed, which is said.
        """
        if importlib.util.find_spec("matplotlib") is None:
            self.note("no reward.png: matplotlib is not installed")
            return None
        rows = self._read()
        steps = [row for row in rows if row.keys() >= _DRAWN]
        scores = [row for row in rows if row.keys() >= _SCORED]
        path = self._run_dir / "reward.png"
        try:
            return draw(steps, path, scores) if steps else None
        except OSError as error:
            path.unlink(missing_ok=True)
            self.note(f"no {path}: {error.strerror or error}")
            return None

    def _append(self, row: dict[str, Any]) -> None:
        with naming(self.path), self.path.open("ab") as file:
            file.write(encode_row(row) + b"\n")

    def _read(self) -> list[dict[str, Any]]:
        rows, damaged = _parse(self.path)
        if damaged:
            self.note(f"{self.path}: {damaged} damaged lines are left out")
        return rows


def _score_of_all(row: dict[str, Any]) -> float:
    score, failed = float(row["score"]), row.get("failed_groups", 0)
    return min(score, score * row["groups"] / (row["groups"] + failed)) if failed else score


def _evaluation_of(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["evaluation"], row["dataset"], row["step"]


def _versions(row: dict[str, Any]) -> str:
    first, last = row["version_min"], row["version_max"]
    return str(first) if first == last else f"{first}..{last}"


def read_metrics(run_dir: Path, recent: int | None = None) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl; damaged lines, such as a last one cut off by a crash, are left out.

    Of the steps before so many `recent` ones, those alone that were skipped.
    """
    rows, _ = _parse(run_dir / "metrics.jsonl", recent)
    return rows


def _parse(path: Path, recent: int | None = None) -> tuple[list[dict[str, Any]], int]:
    """The rows of a file, and how many of its lines are none; a last one cut off is not counted.

    What follows a row with a digest has one too.
    """
    if not path.exists():
        return [], 0
    data = path.read_bytes()
    sealed = data.find(ROW_SEAL)
    first_sealed = data.count(b"\n", 0, sealed) if sealed >= 0 else len(data)
    lines = data.split(b"\n")
    rows, damaged, steps = [], 0, 0
    for index in reversed(range(len(lines))):
        line = lines[index]
        is_old = recent is not None and steps >= recent
        if is_old and b'"skipped": []' in line and b'"score"' not in line:
            continue
        try:
            row = json.loads(unseal_row(line, has_digest=index > first_sealed), parse_int=_whole)
            if not isinstance(row, dict) or "step" not in row:
                raise ValueError("no row")
            if any(key in row and not isinstance(row[key], kind) for key, kind in _KINDS.items()):
                raise ValueError("no number, or no name")
        except (ValueError, RecursionError):
            damaged += index < len(lines) - 1
        else:
            rows.append(row)
            steps += "score" not in row
    rows.reverse()
    return rows, damaged


def _whole(text: str) -> int:
    """Raises ValueError for one that no float is near: nothing could be drawn of it."""
    number = int(text)
    if abs(number) > sys.float_info.max:
        raise ValueError("a number without end")
    return number
