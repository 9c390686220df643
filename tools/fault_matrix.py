"""Does to a stack of real services what can happen to one, and looks at what came of it.

`python -m tools.fault_matrix [--directory DIR] [--only TEXT ...] [--at-once 2] [--seconds 300]`

Processes are killed at every kind of durable write and anywhere, stopped, and stopped for a while;
answers are lost; files are damaged, disks full or read-only; connections stall and break. Each case
is a short run on a router, a trainer of two ranks, two engines, an episode worker, and the loop.
It must end and have consumed every group once; one that is told in a line what is wrong goes on
once that is put right. A synchronous one, which is deterministic, must have the weights of an
undisturbed run to the bit after every step, another one must keep its bound on staleness. No
process may be left without a parent. Read-only directories need a mount namespace, stalled ranks
a network of their own: in those it starts itself again where the system allows that.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tools.fault_cases import (
    BEHIND,
    BEHIND_DISTURBANCES,
    COLOCATED,
    DISTURBANCES,
    HANDED_OVER,
    HANDOVERS,
    KILLS,
    LOST_REPLIES,
    PARTITIONS,
    SCHEDULED,
    SCHEDULES,
    SGLANG,
    SGLANG_HANDOVERS,
    Disturbance,
    Fault,
)
from tools.fault_damage import NothingToDisturbError
from tools.fault_network import Network
from tools.fault_run import FaultRun, Outcome, save_first_checkpoint
from tools.fault_stack import (
    BACKENDS,
    PARTED,
    SGLANG_PYTHON,
    Stack,
    backend_services,
    behind_services,
    sglang_services,
    wide_services,
)

ALL_AT_CHECKPOINT = 2
DISTURBED_STEPS = 4  # of a run; no disturbance begins later than in the third
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
DAMAGE = ("flip", "truncate")  # after which other weights are data that was used unseen


class MatrixError(Exception):
    """There is nothing to compare with; the message says why."""


@dataclasses.dataclass
class Totals:
    """Of all cases. A run that ended in an error has lost its groups."""

    cases: int = 0
    lost: int = 0
    doubled: int = 0
    hung: int = 0
    silent: int = 0
    orphans: int = 0

    def add(self, outcome: Outcome) -> None:
        self.cases += 1
        self.lost += outcome.lost
        self.doubled += outcome.doubled
        self.hung += outcome.hung
        self.silent += outcome.silent
        self.orphans += outcome.orphans

    def __add__(self, other: Totals) -> Totals:
        mine, others = dataclasses.astuple(self), dataclasses.astuple(other)
        return Totals(*map(sum, zip(mine, others, strict=True)))

    @property
    def is_clean(self) -> bool:
        wrong = self.lost or self.doubled or self.hung or self.silent or self.orphans
        return self.cases > 0 and not wrong

    def __str__(self) -> str:
        return (
            f"faults: cases={self.cases} lost={self.lost} doubled={self.doubled} hung={self.hung} "
            f"silent={self.silent} orphans={self.orphans}"
        )


@contextmanager
def running_stack(
    directory: Path,
    services: Callable[[Path], dict[str, Any]],
    seconds: float,
    network: Network | None = None,
    schedule: str = "sync",
) -> Iterator[tuple[Stack, Outcome]]:
    """A stack, and what an undisturbed run on it comes to. Raises MatrixError."""
    stack = Stack(directory, services, network)
    stack.prepare()
    try:
        stack.start(seconds)
        stack.initial_checkpoint = save_first_checkpoint(stack, seconds)
        reference = FaultRun(stack, "undisturbed", seconds, SCHEDULES[schedule]).run()
        if reference.failure or reference.hung or reference.lost:
            raise MatrixError(f"an undisturbed run fails: {reference.failure or reference}")
        yield stack, reference
    finally:
        stack.stop()


def inject(stack: Stack, fault: Fault, reference: Outcome, seconds: float) -> Outcome:
    """One case, judged against the undisturbed run where that has one outcome."""
    name = f"{fault.process}-{fault.name}-{fault.passing}-{fault.schedule}"
    name += "-stopped" if fault.stops else ""
    outcome = FaultRun(stack, name, seconds, SCHEDULES[fault.schedule]).run(fault)
    return against(reference, outcome) if fault.is_comparable else outcome


def disturb(
    stack: Stack,
    disturbance: Disturbance,
    reference: Outcome,
    seconds: float,
) -> Outcome:
    """One case, judged against the undisturbed run: other weights are damaged data that was used.

    A case with nothing to disturb shows nothing, and counts as lost.
    """
    changes: dict[str, Any] = {
        **SCHEDULES[disturbance.schedule],
        "steps": DISTURBED_STEPS,
        "retention": {"cuts": 2, "blob_grace_seconds": 0.001},
    }
    if disturbance.timeout is not None:
        changes["service_timeout_seconds"] = disturbance.timeout
    name = "-".join(re.findall(r"[a-z0-9]+", f"{disturbance} {disturbance.restart}".lower()))
    run = FaultRun(stack, name, seconds, changes)
    try:
        outcome = run.run_disturbed(disturbance)
        if SCHEDULES[disturbance.schedule].get("deterministic", True):
            outcome = against(reference, outcome, disturbance.kind)
    except NothingToDisturbError as error:
        outcome = Outcome(0.0, lost=1, failure=str(error))
    if stack.process is None or stack.process.poll() is not None:
        stack.start(seconds)
        outcome = dataclasses.replace(outcome, lost=outcome.lost + 1, failure="sluice up ended")
    if left := stack.orphans():
        outcome = dataclasses.replace(
            outcome, orphans=len(left), failure=f"{outcome.failure} left behind: {left}".strip()
        )
    return outcome


def kill_all(stack: Stack, reference: Outcome, seconds: float) -> Outcome:
    """Every process at once, the loop and the supervisor too."""
    run = FaultRun(stack, "everything", seconds)
    return against(reference, run.run_killed(at_checkpoint=ALL_AT_CHECKPOINT))


def against(reference: Outcome, outcome: Outcome, kind: str = "kill") -> Outcome:
    """Other weights mean gradients that were lost or added twice, whatever the ledger says.

    After damage to files they mean that it was not noticed.
    """
    expected = reference.digests[: len(outcome.digests)]  # a run may have fewer steps
    if outcome.failure or outcome.hung or (outcome.digests and outcome.digests == expected):
        return outcome
    if outcome.told and not outcome.digests:
        return outcome
    pairs = zip(outcome.digests, expected, strict=True)
    step = next(number for number, (own, other) in enumerate(pairs, 1) if own != other)
    failure = f"other weights from step {step} on"
    if kind in DAMAGE:
        return dataclasses.replace(outcome, silent=outcome.silent + 1, failure=failure)
    return dataclasses.replace(outcome, doubled=outcome.doubled + 1, failure=failure)


def _print_row(process: str, fault: str, outcome: Outcome) -> None:
    result = "recovered"
    if outcome.dropped:
        result = f"recovered, {outcome.dropped} dropped"
    if outcome.told:
        result = "told, recovered" if outcome.digests else "told"
    wrong = {name: getattr(outcome, name) for name in ("lost", "doubled", "silent", "orphans")}
    if outcome.hung:
        result = "HUNG"
    elif any(wrong.values()):
        result = "FAILED " + " ".join(f"{name}={count}" for name, count in wrong.items() if count)
    print(
        f"{process:<10} {fault:<50} {outcome.starts:>6} {outcome.returns:>7} "
        f"{outcome.seconds:>7.1f}  {result}",
        flush=True,
    )
    if outcome.failure:
        print("    " + outcome.failure.replace("\n", "\n    "), flush=True)


def _matrix(flags: argparse.Namespace, directory: Path, number: int) -> Totals:
    """The share with that number of all cases, one after the other on stacks of their own."""
    totals = Totals()
    share = slice(number, None, flags.at_once)

    def inject_each(cases: Iterable[Fault], stack: Stack, reference: Outcome) -> None:
        for fault in cases:
            outcome = inject(stack, fault, reference, flags.seconds)
            totals.add(outcome)
            schedule = "" if fault.schedule == "sync" else f" {fault.schedule}"
            _print_row(fault.process, f"{fault.name} #{fault.passing}{schedule}", outcome)

    def disturb_each(cases: Iterable[Disturbance], stack: Stack, reference: Outcome) -> None:
        for case in cases:
            outcome = disturb(stack, case, reference, flags.seconds)
            totals.add(outcome)
            _print_row(case.kind, str(case).removeprefix(f"{case.kind} "), outcome)

    def is_wanted(name: str) -> bool:
        return any(text in name for text in flags.only)

    def chosen(cases: Iterable[Disturbance], of: str = "") -> list[Disturbance]:
        able = [case for case in cases if flags.unshared or not case.needs_namespaces]
        return [case for case in able if is_wanted(f"{of}{case}")][share]

    def wanted(cases: Iterable[Fault], of: str = "") -> list[Fault]:
        return [
            fault
            for fault in cases
            if is_wanted(f"{of}{fault.process}/{fault.name} {fault.schedule}")
        ][share]

    faults, behind = wanted((*KILLS, *SCHEDULED, *COLOCATED, *LOST_REPLIES)), wanted(BEHIND)
    disturbances, partitions = chosen(DISTURBANCES), chosen(PARTITIONS)
    kills_all = is_wanted("everything") and not number
    if faults or disturbances or kills_all:
        with running_stack(directory, wide_services, flags.seconds) as (stack, reference):
            _print_row("-", "undisturbed", reference)
            inject_each(faults, stack, reference)
            if kills_all:
                outcome = kill_all(stack, reference, flags.seconds)
                totals.add(outcome)
                _print_row("everything", f"run checkpoint of step {ALL_AT_CHECKPOINT}", outcome)
            disturb_each(disturbances, stack, reference)
            print(f"processor time of the services: {stack.cpu_seconds():.0f} s")
        totals.orphans += len(stack.orphans())
    disturbances = chosen(BEHIND_DISTURBANCES)
    if behind or disturbances:
        sending = directory / "behind"
        with running_stack(sending, behind_services, flags.seconds) as (stack, reference):
            inject_each(behind, stack, reference)
            disturb_each(disturbances, stack, reference)
        totals.orphans += len(stack.orphans())
    for backend in BACKENDS:
        faults = wanted(HANDED_OVER, f"{backend} ")
        disturbances = chosen(HANDOVERS, f"{backend} ")
        if faults or disturbances:
            services, place = partial(backend_services, backend), directory / backend
            with running_stack(place, services, flags.seconds) as (stack, reference):
                _print_row(backend, "undisturbed", reference)
                inject_each(faults, stack, reference)
                disturb_each(disturbances, stack, reference)
            totals.orphans += len(stack.orphans())
    faults, disturbances = wanted(SGLANG, "sglang "), chosen(SGLANG_HANDOVERS, "sglang ")
    if (faults or disturbances) and not SGLANG_PYTHON.exists():
        print(f"no cases of SGLang, which is not in {SGLANG_PYTHON}: make sglang-cpu", flush=True)
    elif faults or disturbances:
        sampling = running_stack(
            directory / "sglang", sglang_services, flags.seconds, schedule="colocated-sampled"
        )
        with sampling as (stack, reference):
            _print_row("sglang", "undisturbed", reference)
            inject_each(faults, stack, reference)
            disturb_each(disturbances, stack, reference)
        totals.orphans += len(stack.orphans())
    if partitions:
        network = Network(list(PARTED))
        parted = directory / "parted"
        with running_stack(parted, wide_services, flags.seconds, network) as (stack, reference):
            disturb_each(partitions, stack, reference)
        totals.orphans += len(stack.orphans())
        network.close()
    return totals


def _matrices(flags: argparse.Namespace, directory: Path) -> Totals:
    """All cases, so many at once."""
    print(
        f"{'process':<10} {'fault':<50} {'starts':>6} {'returns':>7} {'seconds':>7}  result",
        flush=True,
    )
    with ProcessPoolExecutor(flags.at_once, get_context("spawn")) as pool:
        shares = [
            pool.submit(_matrix, flags, directory / f"share-{number}", number)
            for number in range(flags.at_once)
        ]
        totals = Totals()
        for share in shares:
            totals += share.result()
    return totals


def _raise_loopback() -> None:
    """In a network of its own, which begins without."""
    flags = struct.pack("16sH22x", b"lo", IFF_UP)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, flags)


_OWN_NAMESPACES = ("unshare", "--mount", "--net", "--map-root-user")


def _may_unshare() -> bool:
    try:
        return subprocess.run([*_OWN_NAMESPACES, "true"], check=False, timeout=60).returncode == 0
    except OSError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, help="kept; default: a temporary one")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="cases whose process/fault contains one"
    )
    parser.add_argument("--at-once", type=int, default=2, help="cases, each on its own stack")
    parser.add_argument("--seconds", type=float, default=300, help="until a case counts as hung")
    parser.add_argument("--unshared", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if not flags.unshared and _may_unshare():
        command = [*_OWN_NAMESPACES, sys.executable, "-m", "tools.fault_matrix", *sys.argv[1:]]
        os.execvp(command[0], [*command, "--unshared"])
    if flags.unshared:
        _raise_loopback()
    began = time.monotonic()
    if flags.directory is not None:
        totals = _matrices(flags, flags.directory.absolute())
    else:
        with tempfile.TemporaryDirectory(prefix="sluice-faults-") as temporary:
            totals = _matrices(flags, Path(temporary))
    print(f"took {time.monotonic() - began:.0f} s")
    print(totals)
    return 0 if totals.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
