"""What the control plane of a fleet costs per step, up to a thousand accelerators.

    python -m benchmarks.fleet [--accelerators 16 128 1024] [--samples-each 16]

The router, the trainer's controller and the loop run as they do for users, each in its process.
This process plays everybody else over gRPC (benchmarks/fleet_members.py): for each accelerator a
data-parallel rank of an engine, eight to an engine with an episode worker beside it, and for four
of them a trainer rank. A step takes `--samples-each` samples for each accelerator, of 512 prompt
tokens and up to 8,192 drawn ones, and ends with new weights on every engine. Of 64 hosts one is
half a second late with everything, and another dies in the middle of its call and comes back a
second later. After the steps that are measured a trainer rank dies.

Processor seconds are those of the processes, by the kernel, from the end of the first step to the
end of the last one measured. `step_overhead_s`: wall seconds of a step in which no member was at
work of its own, such as writing samples. `peak_mib`: resident, of the three together.
`scaling_exponent`: slope of a line through log CPU of the three per step over log accelerators.
Exits with 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import uvloop
import yaml

from benchmarks.controller import MODEL
from benchmarks.fleet_members import DP_RANKS, LONGEST, RankStandIn, RolloutFleet, start_ranks
from sluice.ports import free_port
from sluice.samples.blob_store import BlobStore

SIZES = (16, 128, 1024)
SAMPLES_EACH, GROUP = 16, 16
START_SECONDS, STEP_SECONDS, END_SECONDS = 120.0, 600.0, 60.0
PARTS = ("router", "controller", "loop")
CPU_LIMIT, EXPONENT_LIMIT = 6.0, 1.1  # of a step at the largest size; of all sizes
STEPS_OF_SIZE = ((16, 20), (128, 8))  # measured, up to so many accelerators
STEPS_BEYOND = 4


@dataclass
class Reading:
    """Where the processes stand: at the end of a step, by `time.perf_counter` and the kernel."""

    seconds: float
    cpu: dict[str, float]
    work: float


@dataclass
class FleetMeasured:
    """A size: by part, processor seconds a step and MiB at the most."""

    accelerators: int
    steps: int
    cpu: dict[str, float]
    peak_mib: dict[str, float]
    step_seconds: float
    overhead_seconds: float
    members_cpu: float
    deaths: int
    lost_samples: int
    tokens: int
    recovery: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.cpu.values())

    def lines(self) -> list[str]:
        parts = " ".join(f"{name}={self.cpu[name]:.3f}" for name in PARTS)
        peaks = " ".join(f"{name}={self.peak_mib[name]:.0f}" for name in PARTS)
        again = " ".join(f"{name}={value:.2f}" for name, value in self.recovery.items())
        return [
            f"{self.accelerators} accelerators, {self.steps} steps: cpu_s {parts} "
            f"total={self.total:.3f} members={self.members_cpu:.2f}; "
            f"step_s={self.step_seconds:.2f} overhead_s={self.overhead_seconds:.2f}; "
            f"peak_mib {peaks}",
            f"    deaths={self.deaths} lost_samples={self.lost_samples} tokens={self.tokens}; "
            f"a rank's death: {again}",
        ]


class Process:
    """One of the three, with its log."""

    def __init__(self, directory: Path, name: str, *command: str) -> None:
        self._log = directory / f"{name}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self._log.open("wb") as log:
            self._process = psutil.Popen(
                [sys.executable, "-m", *command], env=environment, stdout=log, stderr=log
            )

    def check(self) -> None:
        """Raise RuntimeError with the end of its log if it has ended."""
        if (code := self._process.poll()) is not None:
            raise RuntimeError(f"ended with {code}: {self._log.read_text()[-3000:]}")

    def expect(self, line: str) -> None:
        """Raise RuntimeError unless its log says so."""
        if line not in self._log.read_text():
            raise RuntimeError(f"{self._log.name} does not say: {line}")

    def cpu_seconds(self) -> float:
        """Of all its threads, to the nanosecond."""
        tasks = Path(f"/proc/{self._process.pid}/task")
        fields = [(each / "schedstat").read_text().split() for each in tasks.iterdir()]
        times = self._process.cpu_times()  # threads that ended are in this one alone
        return max(sum(int(each[0]) for each in fields) / 1e9, times.user + times.system)

    def peak_mib(self) -> float:
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
        raise LookupError("VmHWM")

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(END_SECONDS)


async def address_in(file: Path, process: Process) -> str:
    """Where a service listens, once it does."""
    async with asyncio.timeout(START_SECONDS):
        while not (text := text_of(file)):
            process.check()
            await asyncio.sleep(0.02)
    return str(json.loads(text)["address"])


def text_of(file: Path) -> str:
    """Empty where there is no such file."""
    return file.read_text() if file.exists() else ""


def write(directory: Path, name: str, config: dict[str, Any]) -> str:
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


class Fleet:
    """Three processes, and the members that they work with."""

    def __init__(self, directory: Path, accelerators: int, samples_each: int, steps: int) -> None:
        self.directory, self.accelerators, self.steps = directory, accelerators, steps
        self.samples = accelerators * samples_each
        self.parts: dict[str, Process] = {}
        self.ranks: list[RankStandIn] = []
        self.rollouts: RolloutFleet | None = None
        self._metrics = directory / "run" / "metrics.jsonl"

    async def start(self, stack: AsyncExitStack) -> None:
        directory, store = self.directory, self.directory / "store"
        (directory / "model").mkdir()
        (directory / "model" / "config.json").write_text(json.dumps(MODEL))
        router = self._service(stack, "router", "services.router", {})
        rank_count, port = max(1, self.accelerators // 4), free_port("127.0.0.1")
        ranks = {
            "count": rank_count,
            "launch": "external",
            "listen_port": port,
            "restart_backoff": 0.1,
        }
        trainer = {"model": str(directory / "model"), "store": str(store), "ranks": ranks}
        controller = self._service(
            stack, "controller", "services.trainer", {**trainer, "durable": False}
        )
        addresses = {
            name: await address_in(directory / f"{name}.json", process)
            for name, process in (("router", router), ("controller", controller))
        }
        blobs = BlobStore(store, sync=False)
        self.rollouts = RolloutFleet(
            addresses["router"], blobs, max(1, self.accelerators // DP_RANKS)
        )
        stack.push_async_callback(self.rollouts.stop)
        await self.rollouts.start()
        self.ranks = start_ranks(f"127.0.0.1:{port}", rank_count)
        stack.push_async_callback(self._stop_ranks)
        run = {
            "run_dir": str(directory / "run"),
            "router": addresses["router"],
            "trainer": addresses["controller"],
            "store": str(store),
            "prompts": {"index_count": 1 << 20},
            "environment": {"name": "prompts"},
            "sampling": {"max_new_tokens": LONGEST},
            "algorithm": {
                "advantage": {"name": "grpo"},
                "loss": {"name": "ppo_clip", "clip_low": 0.2},
            },
            "groups_per_step": self.samples // GROUP,
            "samples_per_group": GROUP,
            "steps": 2 + self.steps,
            "checkpoint_every": 1 + self.steps,
            "service_timeout_seconds": 60,
            "trace": {"samples_every": 0},  # ranks here have no columns to show
        }
        path = write(directory, "run", run)
        loop = Process(directory, "loop", "sluice.cli", "train", path)
        self.parts["loop"] = loop
        stack.callback(loop.close)

    def _service(
        self, stack: AsyncExitStack, name: str, module: str, config: dict[str, Any]
    ) -> Process:
        file = self.directory / f"{name}.json"
        server = {"address_file": str(file), "drain_seconds": 1}
        path = write(self.directory, name, {**config, "server": server})
        process = Process(self.directory, name, module, "--config", path)
        self.parts[name] = process
        stack.callback(process.close)
        return process

    async def _stop_ranks(self) -> None:
        await asyncio.gather(*(rank.stop() for rank in self.ranks))

    def read(self) -> Reading:
        assert self.rollouts is not None
        cpu = {name: self.parts[name].cpu_seconds() for name in PARTS}
        return Reading(time.perf_counter(), cpu, self.rollouts.work.seconds)

    async def step(self, count: int) -> Reading:
        """Where all stand once the loop has reported so many steps."""
        await self._until(lambda: self._row_count() >= count)
        return self.read()

    async def saved(self, step: int) -> None:
        """Until the run can go back to a step."""
        await self._until((self.directory / "run" / "cuts" / f"{step:08d}.json").exists)

    def _row_count(self) -> int:
        return text_of(self._metrics).count("\n")

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(STEP_SECONDS):
            while not holds():
                for process in self.parts.values():
                    process.check()
                await asyncio.sleep(0.01)


async def measure(accelerators: int, samples_each: int, steps: int, root: Path) -> FleetMeasured:
    """Measure a fleet of one size."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=root)))
        fleet = Fleet(directory, accelerators, samples_each, steps)
        await fleet.start(stack)
        here = psutil.Process()
        readings = [await fleet.step(1)]
        members = here.cpu_times()
        for step in range(steps):
            readings.append(await fleet.step(2 + step))
        used = here.cpu_times()
        first, last = readings[0], readings[-1]
        rollouts = fleet.rollouts
        assert rollouts is not None
        deaths, lost = rollouts.deaths, rollouts.lost_samples
        peaks = {name: fleet.parts[name].peak_mib() for name in PARTS}
        seconds = [b.seconds - a.seconds for a, b in pairwise(readings)]
        overhead = [b.seconds - a.seconds - (b.work - a.work) for a, b in pairwise(readings)]
        await fleet.saved(1 + steps)
        killed = fleet.read()
        await fleet.ranks[0].stop()
        fleet.ranks[0].start()
        recovered = await fleet.step(2 + steps)
        fleet.parts["controller"].expect("the ranks are lost")
        members_cpu = used.user + used.system - members.user - members.system
        return FleetMeasured(
            accelerators=accelerators,
            steps=steps,
            cpu={name: (last.cpu[name] - first.cpu[name]) / steps for name in PARTS},
            peak_mib=peaks,
            step_seconds=statistics.median(seconds),
            overhead_seconds=statistics.median(overhead),
            members_cpu=members_cpu / steps,
            deaths=deaths,
            lost_samples=lost,
            tokens=token_count(directory / "run" / "metrics.jsonl", fleet.samples, steps),
            recovery={
                "wall_s": recovered.seconds - killed.seconds,
                **{name: recovered.cpu[name] - killed.cpu[name] for name in PARTS},
            },
        )


def token_count(metrics: Path, samples: int, steps: int) -> int:
    """Response tokens of a step, on average."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    mean = statistics.mean(row["response_length_mean"] for row in rows[1 : 1 + steps])
    return round(mean * samples)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the least-squares line through the logarithms."""
    if len(points) < 2:
        return math.nan
    logs = [(math.log(x), math.log(y)) for x, y in points]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


def report(sizes: Sequence[FleetMeasured]) -> int:
    """Print the last line; 1 when a target is missed."""
    exponent = slope([(each.accelerators, each.total) for each in sizes])
    for a, b in pairwise(sizes):
        own = slope([(each.accelerators, each.total) for each in (a, b)])
        parts = " ".join(
            f"{name}={slope([(e.accelerators, e.cpu[name]) for e in (a, b)]):.2f}" for name in PARTS
        )
        print(f"{a.accelerators} to {b.accelerators}: exponent {own:.2f} ({parts})")
    last = sizes[-1]
    print(
        f"fleet: accelerators={last.accelerators} step_overhead_s={last.overhead_seconds:.2f} "
        f"router_cpu_s={last.cpu['router']:.2f} controller_cpu_s={last.cpu['controller']:.2f} "
        f"loop_cpu_s={last.cpu['loop']:.2f} peak_mib={sum(last.peak_mib.values()):.0f} "
        f"scaling_exponent={exponent:.2f}"
    )
    reached = last.total <= CPU_LIMIT and not exponent > EXPONENT_LIMIT
    return 0 if reached else 1


async def run(options: argparse.Namespace) -> int:
    sizes = []
    for accelerators in options.accelerators:
        steps = options.steps or next(
            (count for size, count in STEPS_OF_SIZE if accelerators <= size), STEPS_BEYOND
        )
        measured = await measure(accelerators, options.samples_each, steps, options.directory)
        sizes.append(measured)
        print("\n".join(measured.lines()), flush=True)
    return report(sizes)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--accelerators", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--samples-each", type=int, default=SAMPLES_EACH)
    parser.add_argument("--steps", type=int, default=0, help="measured at each size; 0: by size")
    parser.add_argument("--directory", type=Path, help="of the stores; 2 GiB at 1,024")
    return uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
