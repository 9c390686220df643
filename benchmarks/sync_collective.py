"""From the call to publish to the commit in the engine, by collective: written first, or behind.

A trainer with one rank and an engine, as real processes, share a store that is synced. Versions of
a whole model are published ROUNDS times and committed; nothing is trained in between, nothing is
sampled. The least of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.client import EngineClient, TrainerClient
from sluice.loop.training import wait_for_trainer
from sluice.runtime.recovery import NotReadyError, wait_until_ready
from sluice.weights.store import WeightStore

ROUNDS = 5
SECONDS = 600.0  # to start, and for anything else


@contextlib.contextmanager
def running(module: str, directory: Path, settings: dict[str, Any]) -> Iterator[str]:
    """A service; yields its address."""
    directory.mkdir()
    file, found = directory / "config.yaml", directory / "address.json"
    file.write_text(yaml.safe_dump({**settings, "server": {"address_file": str(found)}}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SLUICE_DEVICE": "cpu"}
    command = [sys.executable, "-m", module, "--config", str(file)]
    process = subprocess.Popen(command, env=environment)
    try:
        deadline = time.monotonic() + SECONDS
        while not found.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{module} did not start")
            time.sleep(0.05)
        yield str(json.loads(found.read_text())["address"])
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def cpu_seconds() -> float:
    """Of all processes that this one has started."""
    times = [each.cpu_times() for each in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


async def publish(trainer: str, engine: str, store: WeightStore) -> dict[str, float]:
    """Publish and commit again and again; least seconds."""
    rows = []
    async with TrainerClient(trainer) as publisher, EngineClient(engine) as client:
        await wait_for_trainer(publisher, SECONDS)

        async def serves() -> None:
            if not (await client.get()).HasField("weights"):
                raise NotReadyError("it has no weights")

        await wait_until_ready("engine", serves, SECONDS, RuntimeError)
        target = pb.TransferTarget(engine_id="engine", address=engine)
        for _ in range(ROUNDS + 2):  # two fill memory that is used again later
            began, cpu = time.perf_counter(), cpu_seconds()
            published = await publisher.publish_weights([target])
            assert not published.engines[0].HasField("error"), published.engines[0].error.message
            free = time.perf_counter()
            await client.commit_weights(published.weights)
            serving = time.perf_counter()
            while not store.has(published.weights.version):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            durable = time.perf_counter()
            rows.append(
                {
                    "wait": free - began,
                    "serving": serving - began,
                    "durable": durable - began,
                    "cpu": cpu_seconds() - cpu,
                }
            )
    return {name: min(row[name] for row in rows[2:]) for name in rows[0]}


def measure_collective(root: Path, model: Path) -> dict[str, dict[str, float]]:
    """Figures by how versions are written: `first`, `behind`."""
    found = {}
    for name, is_behind in (("first", False), ("behind", True)):
        own = root / name
        own.mkdir(parents=True)
        store = own / "store"
        transfer = {"enabled": True, "write_behind": is_behind, "timeout_seconds": 300.0}
        trainer = {
            "model": str(model),
            "store": str(store),
            "publish_dtype": "bfloat16",
            "transfer": transfer,
            "keep_versions": 1,
            "log_level": "WARNING",
        }
        engine = {
            "engine_id": "engine",
            "roles": ["engine"],
            "store": str(store),
            "engine": {
                "model": str(model),
                "threads": 1,
                "dtype": "bfloat16",
                "max_model_length": 128,
            },
        }
        with (
            running("services.trainer", own / "trainer", trainer) as trainer_address,
            running("services.rollout", own / "engine", engine) as engine_address,
        ):
            weights = WeightStore(store / "weights")
            found[name] = asyncio.run(publish(trainer_address, engine_address, weights))
    return found


def report_collective(found: dict[str, dict[str, float]]) -> None:
    first, behind = found["first"], found["behind"]
    print(
        f"by collective: written first, serving {first['serving'] * 1e3:.0f} ms "
        f"({first['cpu']:.2f} processor seconds); written behind, serving "
        f"{behind['serving'] * 1e3:.0f} ms, durable {behind['durable'] * 1e3:.0f} ms "
        f"({behind['cpu']:.2f}); behind/first={behind['serving'] / first['serving']:.2f}, the "
        f"trainer is held {first['wait'] * 1e3:.0f} and {behind['wait'] * 1e3:.0f} ms",
        flush=True,
    )
