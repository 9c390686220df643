"""Runs tests many times, alone and beside a load, each time in another order.

`python -m tools.stress_tests [--rounds 1] [--load 0] [--seed 0] [--changed COMMIT] [PATH ...]`

Every round runs all tests once alone and, with `--load N`, once beside N others: further such runs
as far as memory allows, and busy loops. Rounds take turns in having all cores, one core, and
a low priority. Files, and the tests of a file, are shuffled by a seed that the output names;
`-p tools.stress_tests --order-seed SEED` repeats an order.

Nothing is tried again: a test that fails once has failed, and its report stays in `--directory`.
The last line is `stress: tests=<different ones> runs=<times one ran> failed=<times one failed>`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import psutil
import pytest

ROOT = Path(__file__).parent.parent
CONDITIONS = {
    "": (),
    "one core": ("taskset", "--cpu-list", "0"),
    "low priority": ("nice", "-n", "5"),
}
BUSY = "while True: pass"
INTERRUPTED = 2  # pytest's exit status where its time is over
RUN_BYTES = 4 << 30  # what the services of one run may take together
HUNG_SECONDS = 24 * 3600.0  # of one run; each of its tests has a limit of its own


# What pytest loads with `-p tools.stress_tests`


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--order-seed", type=int, default=None, help="Shuffle files, and tests of one."
    )
    parser.addoption(
        "--order-seconds", type=float, default=0.0, help="Then no further test begins."
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--order-seed")
    if seed is None:
        return
    rng = random.Random(seed)
    files = [list(group) for _, group in itertools.groupby(items, lambda item: item.path)]
    rng.shuffle(files)
    for file in files:
        rng.shuffle(file)
    items[:] = itertools.chain.from_iterable(files)


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_START] = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    seconds = item.config.getoption("--order-seconds")
    if seconds and time.monotonic() > item.config.stash[_START] + seconds:
        item.session.shouldstop = "the time for tests is over"


_START = pytest.StashKey[float]()


# The command


@dataclass(frozen=True)
class Run:
    """One pytest process over all paths."""

    number: int
    seed: int
    loaded: bool
    condition: str

    @property
    def name(self) -> str:
        beside = "loaded" if self.loaded else "alone"
        return f"{self.number:03}-{beside}-{self.condition.replace(' ', '-') or 'plain'}"


@dataclass
class Totals:
    tests: set[str] = field(default_factory=set)
    runs: int = 0
    failed: int = 0

    def __str__(self) -> str:
        return f"stress: tests={len(self.tests)} runs={self.runs} failed={self.failed}"


class Stress:
    """Carries out runs; several at a time where they are loaded."""

    def __init__(self, paths: Sequence[str], directory: Path, seconds: float) -> None:
        self._paths, self._directory, self._seconds = paths, directory, seconds
        self._lock = Lock()
        self.totals = Totals()

    def run(self, run: Run) -> None:
        """Raises TimeoutExpired where pytest itself hangs."""
        report, log = (self._directory / f"{run.name}.{kind}" for kind in ("xml", "log"))
        command = [
            *CONDITIONS[run.condition],
            *(sys.executable, "-m", "pytest", "-q", "-p", "tools.stress_tests"),
            *("-p", "no:cacheprovider", "--order-seed", str(run.seed)),
            *("--order-seconds", str(self._seconds), f"--junitxml={report}"),
            f"--basetemp={self._directory / run.name}",
            *self._paths,
        ]
        began = time.monotonic()
        with log.open("w") as output:
            status = subprocess.run(
                command, cwd=ROOT, stdout=output, stderr=output, timeout=HUNG_SECONDS, check=False
            ).returncode
        with self._lock:
            self._count(run, report, status)
            print(
                f"{run.name}: order seed {run.seed}, {time.monotonic() - began:.0f} s, "
                f"exit {status}; {self.totals}",
                flush=True,
            )

    def _count(self, run: Run, report: Path, status: int) -> None:
        failed = 0
        for case in ElementTree.parse(report).getroot().iter("testcase") if report.exists() else ():
            name = f"{case.get('classname')}::{case.get('name')}"
            self.totals.tests.add(name)
            self.totals.runs += 1
            if case.find("failure") is not None or case.find("error") is not None:
                failed += 1
                print(f"FAILED {name} in {run.name}, order seed {run.seed}", flush=True)
        over = bool(self._seconds) and status == INTERRUPTED
        if not failed and status and not over:
            failed = 1
            print(f"FAILED {run.name}: pytest ended with {status}, see its log", flush=True)
        self.totals.failed += failed

    def run_beside(self, runs: Sequence[Run], load: int) -> None:
        """All of them, as many at once as memory allows, each beside `load` other processes."""
        at_once = min(load + 1, len(runs), max(psutil.virtual_memory().available // RUN_BYTES, 1))
        with ThreadPoolExecutor(max(at_once, 1)) as threads, ExitStack() as loops:
            for _ in range(load + 1 - at_once):
                loops.enter_context(busy_loop())
            done = [threads.submit(self.run, run) for run in runs]
            for left, future in zip(range(len(runs) - 1, -1, -1), done, strict=True):
                future.result()
                if left < at_once - 1:  # its place stays empty
                    loops.enter_context(busy_loop())


@contextmanager
def busy_loop() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def changed_tests(base: str) -> list[str]:
    """Test files that differ from `base` and exist; none where git knows no such commit."""
    command = ["git", "diff", "--name-only", "--diff-filter=d", base, "--", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return [name for name in done.stdout.split() if Path(name).name.startswith("test_")]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run tests many times under changing conditions.")
    parser.add_argument("paths", nargs="*", default=["tests"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--load", type=int, default=0, help="Processes beside; 0 for none.")
    parser.add_argument("--seed", type=int, default=0, help="Of the first order.")
    parser.add_argument("--changed", metavar="COMMIT", help="Only test files changed since.")
    parser.add_argument("--seconds", type=float, default=0.0, help="Of a run; 0 for no limit.")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "stress")
    arguments = parser.parse_intermixed_args()
    paths = arguments.paths
    if arguments.changed is not None:
        paths = changed_tests(arguments.changed)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    arguments.directory.mkdir(parents=True, exist_ok=True)
    stress = Stress(paths, arguments.directory, arguments.seconds)
    runs = [
        Run(number, arguments.seed + number, number % 2 == 1, list(CONDITIONS)[number // 2 % 3])
        for number in range(2 * arguments.rounds if paths else 0)
    ]
    if arguments.load:
        stress.run_beside([run for run in runs if run.loaded], arguments.load)
    for run in runs:
        if not run.loaded:
            stress.run(run)
    print(stress.totals)
    return 1 if stress.totals.failed else 0


if __name__ == "__main__":
    sys.exit(main())
