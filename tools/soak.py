"""Does anything grow? Thousands of tiny steps over a whole stack, every process watched.

The last line holds the worst process: MiB of memory, descriptors, and files that no step's results
account for, per 1,000 steps after a warm-up. Counts by least squares; memory by what it grows from
one tenth of the steps to the next, the median of that, for an allocator takes a few MiB once in a
while and keeps them, which least squares call growth. Ends non-zero over the bars.

The warm-up is the first three tenths, 3,000 steps of 10,000: what remembers the latest of something
has filled up by then. In steps: weight versions 64, finished calls and operations 256, the markers
of versions 256, lengths of answers to the 4,096 prompts 1,024, groups of a minute at the router
some hundred, the pages of the ledger that SQLite keeps (2 MB) 2,500.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import yaml

from sluice.loop.report import read_metrics
from tools.fault_stack import Stack, small_services

GROUPS, SAMPLES = 4, 2
BARS = {"rss_mib": 0.5, "descriptors": 0.1, "threads": 0.1, "files": 1.0}  # per 1,000 steps
RESULTS = ("blobs", "rollouts", "versions", "checkpoints", "cuts", "traces")  # of steps
WARM_UP = 0.3  # share of the steps
TENTHS = 10  # parts of the others
START_SECONDS = 600.0
STALL_SECONDS = 600.0  # without a step
POLL_SECONDS = 0.05


class SoakError(Exception):
    """The run did not come to its end, or a process was replaced on the way."""


@dataclass
class Series:
    """What one process, or the directory, held after some steps."""

    steps: list[int] = field(default_factory=list)
    values: list[dict[str, float]] = field(default_factory=list)

    def add(self, step: int, values: dict[str, float]) -> None:
        self.steps.append(step)
        self.values.append(values)

    def slope(self, name: str, warm_up: int) -> float:
        """Growth per 1,000 steps after `warm_up` of them."""
        pairs = zip(self.steps, self.values, strict=True)
        points = [(step, values[name]) for step, values in pairs if step >= warm_up]
        if name == "rss_mib":
            return usual_growth(points)
        return slope([step for step, _ in points], [value for _, value in points])


Processes = dict[tuple[int, str], Series]  # by process id and name


def slope(steps: Sequence[float], values: Sequence[float]) -> float:
    """Growth of `values` per 1,000 steps by least squares; 0 where there is one point."""
    if len(set(steps)) < 2:
        return 0.0
    return 1000 * statistics.linear_regression(steps, values).slope


def usual_growth(points: Sequence[tuple[int, float]]) -> float:
    """The median growth from one tenth of the points to the next, per 1,000 steps; 0 for one."""
    count = min(TENTHS, len(points))
    tenths = [
        points[len(points) * n // count : len(points) * (n + 1) // count] for n in range(count)
    ]
    means = [[statistics.fmean(column) for column in zip(*tenth, strict=True)] for tenth in tenths]
    slopes = [slope(*zip(*two, strict=True)) for two in pairwise(means)]
    return statistics.median(slopes) if slopes else 0.0


def process_name(arguments: Sequence[str]) -> str:
    """Name a process of the stack by its command line: its module and its configuration."""
    modules = [second for first, second in pairwise(arguments) if first == "-m"]
    parts = [Path(part).stem for part in arguments if part.endswith((".yaml", ".json"))]
    verbs = [part for part in arguments if part in ("up", "train")]
    return " ".join([*(modules or [Path(arguments[0]).name]), *verbs, *parts[:1]])


def count_files(root: Path) -> Counter[str]:
    """Count files and folders below `root`: "results" are those of steps, "others" the rest."""
    found: Counter[str] = Counter()
    for directory, folders, names in os.walk(root):
        parts = Path(directory).relative_to(root).parts
        of_steps = set(parts) & set(RESULTS)
        found["results" if of_steps else "others"] += len(names) + len(folders)
    return found


def measure(root: psutil.Process) -> Iterator[tuple[tuple[int, str], dict[str, float]]]:
    """Yield what a process and each of its descendants hold now."""
    for process in (root, *root.children(recursive=True)):
        try:
            with process.oneshot():
                arguments = process.cmdline()
                values = {
                    "rss_mib": process.memory_info().rss / 2**20,
                    "descriptors": float(process.num_fds()),
                    "threads": float(process.num_threads()),
                }
        except psutil.Error:  # ended meanwhile
            continue
        if arguments:
            yield (process.pid, process_name(arguments)), values


def soaked_services(model: Path) -> dict[str, Any]:
    """One process of each kind, an engine of its own; tables small enough to fill up.

    None is given up where the machine is busy with others.
    """
    services = small_services(model)
    services["trainer"]["config"]["ranks"] = {"count": 1}
    services["router"]["config"] = {"default_pool": {"group_ttl": 60.0}}
    both = services.pop("rollout")["config"]
    engine = {**both.pop("engine"), "remembered_tokens": 20_000}
    services["engine"] = {"kind": "rollout", "config": {"roles": ["engine"], "engine": engine}}
    services["episodes"] = {"kind": "rollout", "config": {"roles": ["episodes"], **both}}
    return services


def run_config(stack: Stack, directory: Path, steps: int) -> dict[str, Any]:
    """Tiny steps that leave as little behind as a run may."""
    return {
        "run_dir": str(directory),
        "services": str(stack.directory / "services.json"),
        "prompts": {"file": str(stack.directory / "prompts.jsonl")},
        "environment": {"name": "prompts", "settings": {"reward": "position_match"}},
        "sampling": {"max_new_tokens": 5},
        "groups_per_step": GROUPS,
        "samples_per_group": SAMPLES,
        "steps": steps,
        "checkpoint_every": 25,
        "trace": {"steps": 20},
        "retention": {"cuts": 1, "blob_grace_seconds": 1.0},
    }


def soak(directory: Path, steps: int, every: int, warm_up: int) -> Processes:
    """Train and watch; what every process held, and under (0, "files") what lay on the disk.

    Says ten times how it goes. Raises SoakError, or NotUpError where the services do not start.
    """
    stack, run = Stack(directory / "stack", soaked_services), directory / "run"
    temporary = directory / "tmp"
    for folder in (run, temporary):
        folder.mkdir(parents=True, exist_ok=True)
    os.environ["TMPDIR"] = str(temporary)  # what they forget there is counted as well
    stack.prepare()
    _live_long(stack.directory / "services.yaml")
    path = run / "run.yaml"
    path.write_text(yaml.safe_dump(run_config(stack, run, steps)))
    series: Processes = {}
    tenth, began = 1, time.monotonic()
    try:
        stack.start(START_SECONDS)
        with (directory / "loop.log").open("wb") as log:
            loop = subprocess.Popen(
                [sys.executable, "-m", "sluice.cli", "train", str(path)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )
        try:
            assert stack.process is not None
            roots = [psutil.Process(stack.process.pid), psutil.Process(loop.pid)]
            for step in _steps(loop, run, every):
                for root in roots:
                    for key, values in measure(root):
                        series.setdefault(key, Series()).add(step, values)
                files = count_files(directory)
                held = {"files": float(files["others"]), "results": float(files["results"])}
                series.setdefault((0, "files"), Series()).add(step, held)
                if tenth * steps <= 10 * step < 10 * steps:
                    tenth += 1
                    print(f"step {step} after {time.monotonic() - began:.0f} s")
                    if step > warm_up:
                        judge(series, step, warm_up)
                    sys.stdout.flush()
        finally:
            if loop.poll() is None:
                loop.kill()
            loop.wait()
        if loop.returncode:
            raise SoakError((directory / "loop.log").read_text()[-2000:])
    finally:
        stack.stop()
    if gone := replaced(series):
        raise SoakError(f"ended on the way: {', '.join(gone)}")
    return series


def _live_long(services: Path) -> None:
    """Watch the services as everywhere else, not as fast as where they are killed on purpose."""
    config = yaml.safe_load(services.read_text())
    del config["liveness"]
    services.write_text(yaml.safe_dump(config))


def replaced(series: Processes) -> list[str]:
    """Names of processes that were there at the first look and are not at one of the last two."""
    looks = sorted({step for held in series.values() for step in held.steps})
    return [
        name
        for (_, name), held in series.items()
        if held.steps[0] == looks[0] and held.steps[-1] not in looks[-2:]
    ]


def _steps(loop: subprocess.Popen[bytes], run: Path, every: int) -> Iterator[int]:
    """Yield the step whenever `every` more are done, until the loop ends."""
    metrics, offset, step, due = run / "metrics.jsonl", 0, 0, every
    moved = time.monotonic()
    while loop.poll() is None:
        if metrics.exists():
            with metrics.open("rb") as file:
                file.seek(offset)
                data = file.read()
            offset += len(data)
            step += data.count(b"\n")
            moved = time.monotonic() if data else moved
        if step >= due:
            due = step - step % every + every
            yield step
        if time.monotonic() - moved > STALL_SECONDS:
            raise SoakError(f"no step within {STALL_SECONDS:.0f} s after step {step}")
        time.sleep(POLL_SECONDS)


def judge(series: Processes, steps: int, warm_up: int) -> tuple[str, bool]:
    """Print a row for each process, with its memory after the warm-up and now.

    Returns the last line, and whether all is below the bars.
    """
    worst = dict.fromkeys(BARS, 0.0)
    print(f"{'process':<34} {'MiB, from':>10} {'to':>10}" + "".join(f"{name:>13}" for name in BARS))
    for (_, name), held in sorted(series.items(), key=lambda item: item[0][1]):
        measured = [
            value for step, value in zip(held.steps, held.values, strict=True) if step >= warm_up
        ]
        if not measured or held.steps[-1] - held.steps[0] < (steps - warm_up) / 2:
            continue  # a short life, as a grader's
        slopes = {bar: held.slope(bar, warm_up) for bar in BARS if bar in held.values[0]}
        worst |= {bar: max(worst[bar], value) for bar, value in slopes.items()}
        cells = "".join(f"{slopes[bar]:>13.2f}" if bar in slopes else " " * 13 for bar in BARS)
        first, last = (value.get("rss_mib", 0) for value in (measured[0], measured[-1]))
        print(f"{name:<34} {first:>10.1f} {last:>10.1f}{cells}")
    line = (
        f"soak: steps={steps} rss_slope_mib_per_1000={worst['rss_mib']:.2f} "
        f"fds_slope={worst['descriptors']:.2f} files_slope={worst['files']:.2f}"
    )
    return line, all(worst[bar] <= limit for bar, limit in BARS.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=0, help="steps between looks; 0: 200 looks")
    parser.add_argument("--warm-up", type=int, default=-1, help="steps; default: three tenths")
    parser.add_argument("--directory", type=Path, help="kept; default: a temporary one")
    flags = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # the services too
    every = flags.every or max(1, flags.steps // 200)
    warm_up = int(WARM_UP * flags.steps) if flags.warm_up < 0 else flags.warm_up
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sluice-soak-") as temporary:
        directory = (flags.directory or Path(temporary)).absolute()
        series = soak(directory, flags.steps, every, warm_up)
        done = len(read_metrics(directory / "run"))
    if done < flags.steps:
        raise SoakError(f"{done} steps of {flags.steps} are done")
    line, fits = judge(series, flags.steps, warm_up)
    print(f"took {time.monotonic() - began:.0f} s, the slopes leave out {warm_up} steps of warm-up")
    print(line)
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
