"""A version of weights from a trainer's tensors to an engine that generates: GB/s and the pause.

Publish, prepare and commit run one after the other, as for a job that waits for its weights;
the collective path past the store is measured by two processes that share the device.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import Engine, Generation, PauseMode, Sampling, create_engine
from sluice import platform
from sluice.weights.checkpoint import companion_files
from sluice.weights.shards import PublishedShards
from sluice.weights.store import StoredVersion, WeightStore
from tools.accelerator_check.collective import broadcast
from tools.accelerator_check.models import random_model
from tools.accelerator_check.peaks import copy_peaks
from tools.accelerator_check.work import StepWork

SHARD_BYTES = 64 << 20  # of a file, as ranks write them
MAX_LENGTH = 128


def run(work: StepWork) -> None:
    """Through the store, then over a collective."""
    peaks = copy_peaks((16 << 20) if work.small else (2 << 30))
    work.record(**peaks)
    broadcast(work, asyncio.run(_through_store(work, peaks["host_copy_gbs"])))


async def _through_store(work: StepWork, host_peak: float) -> Path:
    model = random_model(work, "1.5b")
    device = platform.current().device()
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        tensors |= load_file(file, device=str(device))
    root = work.directory / "store"
    shutil.rmtree(root, ignore_errors=True)
    store = WeightStore(root, durable=False)
    engine = create_engine("reference", EngineConfig.model_validate(_settings(model)))
    await engine.start()
    rounds = 2 if work.small else 3
    try:
        async with _generating(engine):
            found = []
            for _ in range(rounds):  # the first warms up
                next(iter(tensors.values())).add_(0.01)  # or the version would be as before
                began = time.perf_counter()
                record = await asyncio.to_thread(_publish, store, tensors, model)
                published = time.perf_counter()
                await engine.prepare(record.version, record.digest, _directory(record))
                prepared = time.perf_counter()
                pause = await engine.commit(record.version, PauseMode.IN_PLACE)
                ended = time.perf_counter()
                found.append((ended - began, published - began, prepared - published, pause))
                store.retain(1)
            if engine.status().version != record.version:
                work.fail(f"version {engine.status().version} serves, not {record.version}")
    finally:
        await engine.close()
    size = sum(tensor.nbytes for tensor in tensors.values())
    whole, publish, prepare, pause = (
        statistics.median(values) for values in zip(*found[1:], strict=True)
    )
    work.record(
        gb=size / 1e9,
        gbs=size / whole / 1e9,
        vs_copy=size / whole / 1e9 / host_peak,
        publish_gbs=size / publish / 1e9,
        prepare_gbs=size / prepare / 1e9,
        pause_ms=pause * 1e3,
    )
    return _directory(record)


def _directory(record: StoredVersion) -> Path:
    assert record.directory is not None, "the store is a directory"
    return record.directory


def _settings(model: Path) -> dict[str, object]:
    return {
        "model": str(model),
        "dtype": "bfloat16",
        "max_running": 8,
        "max_model_length": MAX_LENGTH,
    }


def _publish(store: WeightStore, tensors: dict[str, torch.Tensor], model: Path) -> StoredVersion:
    """As a rank and its front do, without what crosses the wire between them."""
    shards = PublishedShards(keep=False, sync=False)
    staging = store.allocate(None)
    shards.begin(None)
    writing = [
        shards.submit(staging.directory, f"model-{number:05d}.safetensors", part)
        for number, part in enumerate(_parts(tensors))
    ]
    written = [wait() for wait in writing]
    shards.finish(staging.version)
    return store.commit(staging, written, companion_files(model), 0)


def _parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    part: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        part[name] = tensor
        if sum(each.nbytes for each in part.values()) >= SHARD_BYTES:
            yield part
            part = {}
    if part:
        yield part


@contextlib.asynccontextmanager
async def _generating(engine: Engine) -> AsyncIterator[None]:
    """Eight samples decode meanwhile, one behind the other."""

    async def lane(number: int) -> None:
        for turn in range(1_000_000):
            request = Generation(
                request_id=f"{number}-{turn}",
                prompt_token_ids=[1, 2, 3],
                sampling=Sampling(max_new_tokens=MAX_LENGTH - 8),
            )
            async for _ in engine.generate(request):
                pass

    lanes = [asyncio.create_task(lane(number)) for number in range(8)]
    try:
        yield
        for task in lanes:
            if task.done():
                await task  # raises what ended it
    finally:
        for task in lanes:
            task.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
