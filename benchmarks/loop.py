"""What the loop and an episode worker cost between engine and trainer, in processor time.

The loop: groups are answered by a stand-in for the workers, at once, so that its requests, its
ledger and its choices are what is measured. The worker: tokens from an engine's answer on the
wire to a group's file in memory, and groups from there to the disk. The least of some runs
counts, for neighbours only make it more. Starts: a process until it serves.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import psutil

from benchmarks.controller import wait_active
from examples.models.tiny_qwen3 import build_tiny_qwen3
from services.rollout.engine.interface import Delta, FinishReason, Numbers, Sampling
from services.rollout.engine.wire import VersionBounds, delta_from_proto, delta_to_proto
from services.rollout.environments.environment import Reward
from services.rollout.episodes.sampler import PartialSamples, SamplingPrompt
from services.rollout.episodes.spool import DirectoryJournals, Spool
from services.rollout.episodes.trajectory import Trajectory
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.client import TrainerClient
from sluice.loop.config import RunConfig
from sluice.loop.dispatcher import DispatcherConfig, RolloutDispatcher
from sluice.loop.ledger import Ledger, LedgerGroup
from sluice.loop.workers import build_request
from sluice.samples.arrow import encode_view
from sluice.samples.blob_store import BlobStore
from sluice.samples.sample import Sample, VersionSpan

CONFIG = RunConfig.model_validate(
    {
        "run_dir": "runs/bench",
        "router": "localhost:1",
        "trainer": "localhost:1",
        "store": "runs/bench",
        "prompts": {"index_count": 1 << 20},
        "environment": {"name": "prompts"},
        "sampling": {"max_new_tokens": 8192},
        "groups_per_step": 4,
        "samples_per_group": 16,
        "steps": 1,
    }
)


class InstantWorkers:
    """Answers every group, one in a turn of the event loop, as they come off a stream."""

    def __init__(self) -> None:
        self.version = 1
        self._digests = (f"{number:032x}" for number in itertools.count())

    def split(self, groups: Sequence[LedgerGroup]) -> list[Sequence[LedgerGroup]]:
        return [groups] if groups else []

    async def ask(self, request: pb.RolloutRequest) -> AsyncIterator[pb.RolloutResponse]:
        count = request.sample_count
        for group in request.groups:
            await asyncio.sleep(0)
            finished = pb.FinishedGroup(
                group_id=group.group_id,
                blob={"digest": next(self._digests), "size_bytes": 1},
                rewards=[1.0] * count,
                response_lengths=[8192] * count,
                min_version=self.version,
                max_version=self.version,
            )
            yield pb.RolloutResponse(finished=finished)

    async def cancel(self, request_id: str, group_ids: Sequence[str]) -> None: ...


def request_for(groups: Sequence[LedgerGroup], trial: int) -> pb.RolloutRequest:
    tasks = [(group.group_id, group.position) for group in groups]
    return build_request(CONFIG, CONFIG.shares[""], tasks, engine_pb.VersionBounds(), trial)


def drop_groups(ledger: Ledger, count: int) -> None:
    """Have a run behind it in which so many groups were dropped."""
    names = [(position, f"g{position:07}") for position in range(count)]
    with ledger.transaction():
        ledger.issue(names, 0)
        for _, name in names:
            ledger.drop(name, "stale")


async def run_steps(ledger: Ledger, *, size: int, staleness: int, steps: int) -> float:
    """Milliseconds of processor time per group that a step took."""
    ledger.record_version(1, "d", 0)
    workers = InstantWorkers()
    config = DispatcherConfig(
        groups_per_step=size, max_staleness=staleness, attempts=3, steps=steps
    )
    dispatcher = RolloutDispatcher(config, ledger, workers, request_for)  # type: ignore[arg-type]
    before = time.process_time()
    for step in range(steps):
        await dispatcher.fill(step)
        groups = await dispatcher.take(step)
        ledger.consume([group.group_id for group in groups], step + 1)
        workers.version += 1
        ledger.record_version(workers.version, "d", step + 1)
        dispatcher.version_recorded()
    seconds = time.process_time() - before
    await dispatcher.close()
    return seconds / (steps * size) * 1000


async def per_group(*, dropped: int = 0, size: int, staleness: int = 0, steps: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        ledger = Ledger(Path(directory, "ledger.sqlite"))
        drop_groups(ledger, dropped)
        cost = await run_steps(ledger, size=size, staleness=staleness, steps=steps)
        ledger.close()
    print(f"size={size} staleness={staleness} dropped={dropped} ms_per_group={cost:.3f}")
    return cost


START_SECONDS = 600.0  # a start on a host that is very busy
ROWS, PROMPT, LENGTH = 16, 512, 8192
VOCABULARY = 151936
SPOOL_TRIALS = 8


def answer_of(length: int) -> bytes:
    """An engine's answer for one group."""
    random = np.random.default_rng(0)
    span = VersionSpan(version=1, digest="0" * 32, first_token=0, last_token=length - 1)
    deltas = [
        Delta(
            index=index,
            token_ids=Numbers(random.integers(0, VOCABULARY, length, dtype=np.int32)),
            logprobs=Numbers(-random.random(length, dtype=np.float32)),
            logprobs_t1=(),
            spans=(span,),
            finish_reason=FinishReason.STOP,
        )
        for index in range(ROWS)
    ]
    completions = [delta_to_proto(each, temperature=1.0, takes_columns=True) for each in deltas]
    return engine_pb.GenerateResponse(completions=completions).SerializeToString()


def samples_of(answer: bytes, prompt: SamplingPrompt) -> list[Sample]:
    """What an episode worker makes of it."""
    partial = PartialSamples(prompt, chunk_tokens=0)
    for completion in engine_pb.GenerateResponse.FromString(answer).completions:
        delta = delta_from_proto(completion, temperature=1.0)
        partial.add(delta.index, delta)
    return [
        Trajectory.of(prompt.token_ids, delta, prompt.sampling).to_sample(
            prompt.group_id, delta.index, Reward(reward=1.0), None
        )
        for delta in partial.ended()
    ]


def prompt_of(group_id: str, length: int) -> SamplingPrompt:
    return SamplingPrompt(
        group_id=group_id,
        token_ids=tuple(range(PROMPT)),
        sample_count=ROWS,
        sampling=Sampling(max_new_tokens=length),
        bounds=VersionBounds(),
        pool="policy",
    )


def token_path() -> float:
    """Nanoseconds of a response token, from the wire to the bytes of the group's file."""
    answer, prompt = answer_of(LENGTH), prompt_of("g", LENGTH)
    costs = []
    for _ in range(8):
        before = time.process_time()
        for _ in range(16):
            encode_view(samples_of(answer, prompt))
        costs.append((time.process_time() - before) / (16 * ROWS * LENGTH) * 1e9)
    print(f"ns_per_token: least={min(costs):.1f} mean={sum(costs) / len(costs):.1f}")
    return min(costs)


async def spool_groups(count: int = 256, length: int = 256) -> float:
    """Milliseconds of a group that is stored with those that end when it does.

    As in a worker's store, folders are there from the second trial on, and no trial's files are
    removed before the next: on ext4 a file is dear that is made soon after thousands were removed
    beside it, whoever did it.
    """
    answer, costs = answer_of(length), list[float]()
    with tempfile.TemporaryDirectory() as directory:
        blobs = BlobStore(directory)
        spool = Spool(blobs, DirectoryJournals(Path(directory), blobs, sync=True))
        await spool.open("request", "body")
        for trial in range(SPOOL_TRIALS):
            prompts = [prompt_of(f"g{trial}-{number}", length) for number in range(count)]
            groups = [samples_of(answer, prompt) for prompt in prompts]
            before = time.process_time()
            await asyncio.gather(*(spool.put("request", group, {}) for group in groups))
            costs.append((time.process_time() - before) / count * 1000)
        await spool.close()
    print(f"spool_cpu_ms: least={min(costs):.2f} mean={sum(costs) / len(costs):.2f}")
    return min(costs)


class Started:
    """A service that has been started, until it serves."""

    def __init__(self, module: str, directory: Path, **settings: object) -> None:
        directory = Path(tempfile.mkdtemp(dir=directory))
        self._file = directory / "address.json"
        settings["server"] = {"address_file": str(self._file)}
        config = directory / "config.json"
        config.write_text(json.dumps({"store": str(directory / "store"), **settings}))
        self.process = psutil.Popen(
            [sys.executable, "-m", module, "--config", str(config)], stdin=subprocess.DEVNULL
        )

    async def address(self) -> str:
        async with asyncio.timeout(START_SECONDS):
            while True:
                if self._file.exists():
                    return str(json.loads(self._file.read_text())["address"])
                await asyncio.sleep(0.05)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(START_SECONDS)


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def start_rollout(directory: Path, role: str) -> float:
    """A worker of episodes, which runs no model, or an engine that waits for its first weights."""
    settings = {"roles": [role], "tokenizer": str(directory / "model"), "router": "localhost:1"}
    started = Started("services.rollout", directory, **settings)
    try:
        await started.address()
        return cpu_seconds(started.process)
    finally:
        started.close()


async def start_rank(directory: Path) -> float:
    """A rank whose model is next to nothing."""
    started = Started("services.trainer", directory, model=str(directory / "model"))
    try:
        async with TrainerClient(await started.address()) as client:
            await wait_active(client)
        (rank,) = started.process.children()
        return cpu_seconds(rank)
    finally:
        started.close()


async def measure() -> str:
    at_0, _, at_256k = [
        await per_group(dropped=dropped, size=64, steps=8) for dropped in (0, 32 << 10, 256 << 10)
    ]
    await per_group(size=512, steps=4)
    sync = await per_group(size=4096, steps=2)
    asynchronous = await per_group(size=4096, staleness=4, steps=6)
    spool, tokens = await spool_groups(), token_path()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        build_tiny_qwen3(directory / "model")
        rollout, rank = await start_rollout(directory, "episodes"), await start_rank(directory)
        print(f"start_engine: {await start_rollout(directory, 'engine'):.2f}")
    return (
        f"loop: ms_per_group_at_0={at_0:.3f} ms_per_group_at_256k={at_256k:.3f} "
        f"g4096_sync={sync:.3f} g4096_async={asynchronous:.3f} spool_cpu_ms={spool:.2f} "
        f"ns_per_token={tokens:.1f} start_rollout={rollout:.2f} start_rank={rank:.2f}"
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(asyncio.run(measure()))


if __name__ == "__main__":
    main()
