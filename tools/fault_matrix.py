"""Kills every process at every kind of durable write, loses answers, and looks at what came of it.

`python -m tools.fault_matrix [--directory DIR] [--only TEXT] [--seconds 240]`

Each case is a short run on one stack of real services: one router, a trainer of two ranks, two
engines, an episode worker, and the loop. It must end and have consumed every group once; a
synchronous one, which is deterministic, must have the weights of an undisturbed run to the bit
after every step, another one must keep its bound on staleness.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.fault_cases import KILLS, LOST_REPLIES, SCHEDULED, SCHEDULES, Fault
from tools.fault_stack import FaultRun, Outcome, Stack, save_first_checkpoint, wide_services

ALL_AT_CHECKPOINT = 2


class MatrixError(Exception):
    """There is nothing to compare with; the message says why."""


@dataclasses.dataclass
class Totals:
    """Of all cases. A run that ended in an error has lost its groups."""

    cases: int = 0
    lost: int = 0
    doubled: int = 0
    hung: int = 0

    def add(self, outcome: Outcome) -> None:
        self.cases += 1
        self.lost += outcome.lost
        self.doubled += outcome.doubled
        self.hung += outcome.hung

    @property
    def is_clean(self) -> bool:
        return self.cases > 0 and not (self.lost or self.doubled or self.hung)

    def __str__(self) -> str:
        return (
            f"faults: cases={self.cases} lost={self.lost} doubled={self.doubled} hung={self.hung}"
        )


@contextmanager
def running_stack(
    directory: Path, services: Callable[[Path], dict[str, Any]], seconds: float
) -> Iterator[tuple[Stack, Outcome]]:
    """A stack, and what an undisturbed run on it comes to. Raises MatrixError."""
    stack = Stack(directory, services)
    stack.prepare()
    try:
        stack.start(seconds)
        stack.initial_checkpoint = save_first_checkpoint(stack, seconds)
        reference = FaultRun(stack, "undisturbed", seconds).run()
        if reference.failure or reference.hung or reference.lost:
            raise MatrixError(f"an undisturbed run fails: {reference.failure or reference}")
        yield stack, reference
    finally:
        stack.stop()


def inject(stack: Stack, fault: Fault, reference: Outcome, seconds: float) -> Outcome:
    """One case, judged against the undisturbed run where that has one outcome."""
    name = f"{fault.process}-{fault.name}-{fault.passing}-{fault.schedule}"
    outcome = FaultRun(stack, name, seconds, SCHEDULES[fault.schedule]).run(fault)
    return against(reference, outcome) if fault.schedule == "sync" else outcome


def kill_all(stack: Stack, reference: Outcome, seconds: float) -> Outcome:
    """Every process at once, the loop and the supervisor too."""
    run = FaultRun(stack, "everything", seconds)
    return against(reference, run.run_killed(at_checkpoint=ALL_AT_CHECKPOINT))


def against(reference: Outcome, outcome: Outcome) -> Outcome:
    """Other weights mean gradients that were lost or added twice, whatever the ledger says."""
    if outcome.failure or outcome.hung or outcome.digests == reference.digests:
        return outcome
    pairs = zip(outcome.digests, reference.digests, strict=True)
    step = next(number for number, (own, other) in enumerate(pairs, 1) if own != other)
    return dataclasses.replace(
        outcome, doubled=outcome.doubled + 1, failure=f"other weights from step {step} on"
    )


def _print_row(process: str, fault: str, outcome: Outcome) -> None:
    result = "recovered"
    if outcome.hung:
        result = "HUNG"
    elif outcome.lost or outcome.doubled:
        result = f"FAILED lost={outcome.lost} doubled={outcome.doubled}"
    print(
        f"{process:<10} {fault:<32} {outcome.starts:>6} {outcome.returns:>7} "
        f"{outcome.seconds:>7.1f}  {result}",
        flush=True,
    )
    if outcome.failure:
        print("    " + outcome.failure.replace("\n", "\n    "), flush=True)


def _matrix(flags: argparse.Namespace, directory: Path) -> Totals:
    totals = Totals()
    print(
        f"{'process':<10} {'killed after':<32} {'starts':>6} {'returns':>7} {'seconds':>7}  result"
    )
    with running_stack(directory, wide_services, flags.seconds) as (stack, reference):
        _print_row("-", "undisturbed", reference)
        for fault in (*KILLS, *SCHEDULED, *LOST_REPLIES):
            if flags.only not in f"{fault.process}/{fault.name} {fault.schedule}":
                continue
            outcome = inject(stack, fault, reference, flags.seconds)
            totals.add(outcome)
            schedule = "" if fault.schedule == "sync" else f" {fault.schedule}"
            _print_row(fault.process, f"{fault.name} #{fault.passing}{schedule}", outcome)
        if flags.only in "everything":
            outcome = kill_all(stack, reference, flags.seconds)
            totals.add(outcome)
            _print_row("everything", f"run checkpoint of step {ALL_AT_CHECKPOINT}", outcome)
        print(f"processor time of the services: {stack.cpu_seconds():.0f} s")
    return totals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, help="kept; default: a temporary one")
    parser.add_argument("--only", default="", help="cases whose process/fault contains this")
    parser.add_argument("--seconds", type=float, default=300, help="until a case counts as hung")
    flags = parser.parse_args()
    began = time.monotonic()
    if flags.directory is not None:
        totals = _matrix(flags, flags.directory.absolute())
    else:
        with tempfile.TemporaryDirectory(prefix="sluice-faults-") as temporary:
            totals = _matrix(flags, Path(temporary))
    print(f"took {time.monotonic() - began:.0f} s")
    print(totals)
    return 0 if totals.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
