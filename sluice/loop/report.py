"""What a run leaves behind: progress on the terminal, metrics.jsonl, reward.png."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sluice.durable import naming, replace_file

_LINE = "reward {reward_mean:.3f}  length {response_length_mean:.1f}  mismatch {mismatch:.1e}"
_DRAWN = {"step", "reward_mean", "response_length_mean"}
_SCORED = {"step", "score", "dataset"}


class RunReport:
    """Owns the progress display and the files in the run directory. Use as a context manager."""

    def __init__(
        self, run_dir: Path, steps: int, console: Console | None = None, line: str = _LINE
    ) -> None:
        """`line` is what the terminal shows of a row."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir
        self._path = run_dir / "metrics.jsonl"
        self._line = line
        self._scores: dict[tuple[str, str, int], float] = {}
        self._console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}"),
            TimeElapsedColumn(),
            console=self._console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("training", total=steps, line="starting")

    def __enter__(self) -> RunReport:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def step(self, row: dict[str, Any]) -> None:
        """One training step: a line of metrics.jsonl and a move of the bar."""
        self._append(row)
        line = self._line.format(mismatch=row.get("rollout_mismatch", math.nan), **row)
        self._progress.update(self._task, completed=row["step"], line=line)
        if not self._console.is_terminal and row["step"] % 10 == 1:
            self._console.print(f"step {row['step']:4}  {line}", highlight=False)
        for reason in row["skipped"]:
            self.note(f"step {row['step']}: optimizer step skipped: {reason}")

    def evaluation(self, row: dict[str, Any]) -> None:
        """Scores of one data set: a line of metrics.jsonl and of the terminal."""
        self._append(row)
        self._scores[_evaluation_of(row)] = row["score"]
        passes = "".join(f", {k} {v:.3f}" for k, v in row.items() if k.startswith("pass@"))
        error = row["score_error"]
        spread = "" if error is None else f" ± {error:.3f}"
        failed = f", {row['failed_groups']} tasks failed" if row["failed_groups"] else ""
        self.note(
            f"{row['dataset']}, {row['evaluation']} (step {row['step']}, weights "
            f"{_versions(row)}): {row['score']:.3f}{spread}{passes}{failed}"
        )

    def has_evaluation(self, when: str, dataset: str, step: int) -> bool:
        """Whether these scores were reported before."""
        return (when, dataset, step) in self._scores

    def last_score(self, dataset: str) -> float | None:
        """The latest on a data set, of this run or the one that it goes on from."""
        return next(
            (s for (_, name, _), s in reversed(self._scores.items()) if name == dataset), None
        )

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def truncate(self, step: int) -> list[float]:
        """Drop rows after `step`, whose work is done again; rewards of the rows that stay."""
        kept = [row for row in self._read() if row["step"] <= step]
        text = "".join(json.dumps(row) + "\n" for row in kept)
        replace_file(self._path, text.encode(), temporary=self._run_dir)
        evaluated = [row for row in kept if _SCORED | {"evaluation"} <= row.keys()]
        self._scores = {_evaluation_of(row): row["score"] for row in evaluated}
        return [row["reward_mean"] for row in kept if "reward_mean" in row]

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
        with naming(self._path), self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _read(self) -> list[dict[str, Any]]:
        rows, damaged = _parse(self._path)
        if damaged:
            self.note(f"{self._path}: {damaged} damaged lines are left out")
        return rows


def _evaluation_of(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["evaluation"], row["dataset"], row["step"]


def _versions(row: dict[str, Any]) -> str:
    first, last = row["version_min"], row["version_max"]
    return str(first) if first == last else f"{first}..{last}"


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl; damaged lines, such as a last one cut off by a crash, are left out."""
    rows, _ = _parse(run_dir / "metrics.jsonl")
    return rows


def _parse(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a file, and how many of its lines are none; a last one cut off is not counted."""
    if not path.exists():
        return [], 0
    *lines, last = path.read_bytes().split(b"\n")
    rows, damaged = [], 0
    for line in (*lines, last):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row["step"], int):
                raise ValueError("no row")
        except (ValueError, KeyError):
            damaged += line is not last
        else:
            rows.append(row)
    return rows, damaged


def draw(rows: list[dict[str, Any]], path: Path, scores: list[dict[str, Any]]) -> Path:
    """Three panels that share the step axis; scores on held-out tasks are in the first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [row["step"] for row in rows]
    figure, axes = pyplot.subplots(3, 1, sharex=True, figsize=(7, 7), layout="constrained")
    rewards = [row["reward_mean"] for row in rows]
    axes[0].plot(steps, rewards, color="0.75", linewidth=1, label="step")
    axes[0].plot(steps, _moving_mean(rewards, 10), color="C0", label="mean of 10 steps")
    for index, name in enumerate(dict.fromkeys(row["dataset"] for row in scores)):
        own = [(row["step"], row["score"]) for row in scores if row["dataset"] == name]
        style = {"marker": "o", "linestyle": "--", "markersize": 4, "color": f"C{3 + index}"}
        axes[0].plot(*zip(*own, strict=True), label=f"{name} (held out)", **style)
    axes[0].set(ylabel="mean reward", ylim=(0, max(1.0, *rewards) * 1.05))
    axes[0].legend(loc="lower right", frameon=False)
    axes[1].plot(steps, [row["response_length_mean"] for row in rows], color="C1")
    axes[1].set(ylabel="response length\n(tokens)", ylim=(0, None))
    axes[2].plot(steps, [row.get("rollout_mismatch", math.nan) for row in rows], color="C2")
    axes[2].set(ylabel="|train - rollout|\nlog-prob", xlabel="step", yscale="log")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _moving_mean(values: list[float], window: int) -> list[float]:
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means
