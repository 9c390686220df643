"""Engines as real processes, to be killed and stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice import faults
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.client import EngineClient, RemoteError
from sluice.runtime.security import SecurityConfig
from tests.patience import PATIENCE
from tests.service.trainer.harness import (
    ACTIVE,
    await_address,
    make_groups,
    poll,
    running_trainer,
    train_step,
    until,
    upload,
)


@dataclass
class RunningEngine:
    """A rollout process of the engine role, with faults to be armed below its directory."""

    engine_id: str
    directory: Path
    process: subprocess.Popen[bytes]
    address: str
    security: SecurityConfig

    @property
    def target(self) -> trainer_pb.TransferTarget:
        return trainer_pb.TransferTarget(engine_id=self.engine_id, address=self.address)

    def client(self) -> EngineClient:
        return EngineClient(self.address, self.security)

    def kill_at(
        self, point: str, passing: int = 1, number: signal.Signals = signal.SIGKILL
    ) -> None:
        """It dies (-9), or gets another signal, at a kill point of `sluice.faults`."""
        faults.arm(self.directory / "faults", point, passing, number)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def revive(self) -> None:
        """Starts it again where it has died; it has another port then."""
        if self.process.poll() is not None:
            (self.directory / "address.json").unlink()
            self.process = _launch(self.directory)
            self.address = await_address(self.process, self.directory / "address.json")

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """It holds all its connections, and does nothing."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)


@contextlib.contextmanager
def running_engines(
    root: Path,
    model: Path,
    store: Path,
    security: SecurityConfig,
    count: int,
    each: Sequence[dict[str, Any]] = (),
    **settings: Any,
) -> Iterator[list[RunningEngine]]:
    """Engines that serve `model` as version 0; `each` is what only one of them is set to."""
    engines: list[RunningEngine] = []
    try:
        for index in range(count):
            directory = root / f"engine-{index}"
            values = {"engine_id": directory.name, **settings, **(each[index] if each else {})}
            _configure(directory, model, store, security, values)
            process = _launch(directory)
            engines.append(RunningEngine(values["engine_id"], directory, process, "", security))
        for engine in engines:
            engine.address = await_address(engine.process, engine.directory / "address.json")
        yield engines
    finally:
        for engine in engines:
            engine.process.kill()
        for engine in engines:
            engine.process.wait()


def _configure(
    directory: Path, model: Path, store: Path, security: SecurityConfig, settings: dict[str, Any]
) -> None:
    directory.mkdir(parents=True)
    values = {
        "roles": ["engine"],
        "store": str(store),
        "store_sync": False,
        "engine": {"model": str(model), "threads": 1, "max_running": 8, "max_model_length": 64},
        "server": {
            "address_file": str(directory / "address.json"),
            "drain_seconds": 0.2,
            "security": security.model_dump(mode="json"),
        },
        **settings,
    }
    (directory / "rollout.yaml").write_text(yaml.safe_dump(values))


def _launch(directory: Path) -> subprocess.Popen[bytes]:
    environment = {key: value for key, value in os.environ.items() if "SLUICE_" not in key}
    environment[faults.VARIABLE] = str(directory / "faults")
    return subprocess.Popen(
        [sys.executable, "-m", "services.rollout", "--config", str(directory / "rollout.yaml")],
        env={**environment, "SLUICE_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
    )


async def serves(client: EngineClient) -> bool:
    """Whether the engine answers, and has weights."""
    try:
        return (await client.get()).HasField("weights")
    except RemoteError:
        return False


async def check_delta(root: Path, settings: dict[str, Any]) -> None:
    """What the ranks of a trainer publish as a delta an engine gets from them, and serves."""
    model = build_tiny_qwen3(root / "model", 0)
    settings = settings | {
        "publish": {"delta": True},
        "transfer": {"enabled": True, "timeout_seconds": PATIENCE / 2},
        "optim": {"learning_rate": 1e-5},
    }
    with (
        running_trainer(root / "trainer", model, **settings) as trainer,
        running_engines(root, model, trainer.store, trainer.security, 1) as (engine,),
    ):
        async with trainer.client() as client, engine.client() as served:
            await until(client, lambda now: now.state == ACTIVE)
            await poll(lambda: serves(served))
            batch = await upload(client, "sent", make_groups("sent", seed=8))
            await train_step(client, batch)
            published = await client.publish_weights([engine.target])
            assert not published.engines[0].HasField("error"), published.engines[0].error
            assert published.byte_count < 0.2 * published.full_byte_count
            assert await served.prepare_weights(published.weights) == 0.0  # it has been
            await served.commit_weights(published.weights)
            assert (await served.get()).weights == published.weights
