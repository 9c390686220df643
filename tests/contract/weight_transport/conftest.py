"""An engine, a trainer's ranks, and the ways in which weights get from these to that."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import Engine, PauseMode
from services.rollout.engine.reference.engine import ReferenceEngine
from services.rollout.engine.weights import EngineWeights, Transfer
from sluice import platform
from sluice.weights.checkpoint import parse_header
from sluice.weights.host_cache import HostCache
from sluice.weights.manifest import delta_name
from sluice.weights.store import StoredVersion, WeightStore
from sluice.weights.transfer.plan import HANDLES, Membership
from tests.contract.engine.cases import Model, build_model
from tests.contract.weight_transport.sender import Sender

SECONDS = 100.0  # of a transfer, unless a sender waits for the end of it
BUCKET_BYTES = 6000
FILES = (("model-0.safetensors",), ("model-1.safetensors",))
_names = itertools.count()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Model]:
    """The second differs from the first in a few elements of every matrix."""
    first = build_model(tmp_path_factory.mktemp("first"), "qwen3", seed=0)
    module = copy.deepcopy(first.module)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            moved = torch.rand(parameter.shape, generator=generator) < 0.05
            parameter[moved] *= 3.0
    directory = tmp_path_factory.mktemp("second")
    module.save_pretrained(directory)
    return [first, Model(module, directory)]


@pytest.fixture(scope="module")
def shared_sender(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sender]:
    sender = Sender(tmp_path_factory.mktemp("faults"))
    yield sender
    sender.close()


@dataclass
class Stage:
    """What a test acts on: versions 1 and 2 are in the store, the engine serves 1."""

    store: WeightStore
    engine: Engine
    weights: EngineWeights
    sender: Sender
    versions: list[StoredVersion]
    transport: str

    @property
    def is_sent(self) -> bool:
        """Whether it comes from the senders' memory, and not from the store."""
        return self.transport in ("collective", HANDLES)

    @property
    def backend(self) -> str:
        return HANDLES if self.transport == HANDLES else platform.CPU.collective

    async def deliver(
        self, record: StoredVersion, files: Sequence[tuple[str, ...]] | None = None
    ) -> float:
        """Bring a version to the engine over the transport under test.

        `files` are what the engine is told that each sender owns; by default what it does.
        Returns once the senders, too, have ended.
        """
        if not self.is_sent:
            return await self.weights.prepare(record.version, record.digest)
        name = f"group-{next(_names)}"
        addresses = self.sender.call("open", 2, SECONDS)
        members = [
            Membership(
                address=address,
                group=f"{name}-{rank}",
                rank=1,
                world_size=2,
                backend=self.backend,
            )
            for rank, address in enumerate(addresses)
        ]
        told = FILES if files is None else files
        transfer = Transfer(group=name, files=told, bucket_bytes=BUCKET_BYTES, seconds=SECONDS)
        send = ("send", record.version, name, BUCKET_BYTES, SECONDS, self.backend)
        sending = asyncio.create_task(asyncio.to_thread(self.sender.call, *send))
        try:
            await self.weights.transfers.join(name, members, SECONDS)
            return await self.weights.prepare(record.version, record.digest, transfer)
        finally:
            await asyncio.gather(sending, return_exceptions=True)

    def spoil(self, record: StoredVersion, tensor: str) -> None:
        """One bit of a tensor is another on the way to the engine."""
        if self.is_sent:
            self.sender.call("damage", tensor)
            return
        flip(self.store, record, tensor)

    def mend(self, record: StoredVersion, tensor: str) -> None:
        if self.is_sent:
            self.sender.call("damage", "")
        else:
            flip(self.store, record, tensor)


def flip(store: WeightStore, record: StoredVersion, tensor: str) -> None:
    """Flip the last bit of what the store holds of a tensor."""
    file_name = store.manifest(record.version).tensors[tensor].file
    path = record.directory / (delta_name(file_name) if record.base else file_name)
    data = bytearray(path.read_bytes())
    extent = parse_header(bytes(data), file_name=path.name)[tensor]
    data[extent.end - 1] ^= 1
    path.write_bytes(data)


@asynccontextmanager
async def started(
    store: WeightStore,
    root: Path,
    kind: type[ReferenceEngine] = ReferenceEngine,
    announced: list[int | None] | None = None,
) -> AsyncIterator[tuple[Engine, EngineWeights]]:
    """An engine that has no model yet; the versions it tells of go to `announced`."""

    async def announce() -> None:
        if announced is not None:
            announced.append(engine.status().version)

    engine = kind(EngineConfig(threads=1, max_running=8, max_model_length=512))
    await engine.start()
    cache = HostCache(root / "cache", store)
    weights = EngineWeights(engine, store, root.name, announce, cache=cache)
    try:
        yield engine, weights
    finally:
        await weights.close()
        await engine.close()


@pytest.fixture(params=["store", "delta", "collective", HANDLES])
async def stage(
    request: pytest.FixtureRequest, shared_sender: Sender, models: list[Model], tmp_path: Path
) -> AsyncIterator[Stage]:
    store = WeightStore(tmp_path / "store", durable=False)
    sender, transport = shared_sender, request.param
    first = sender.call("publish", store.location, models[0].directory, None)
    base = None if transport == "store" else first.version
    second = sender.call("publish", store.location, models[1].directory, base)
    assert second.base == base
    async with started(store, tmp_path) as (engine, weights):
        await weights.prepare(first.version, first.digest)
        await weights.commit(first.version, first.digest, PauseMode.IN_PLACE)
        yield Stage(store, engine, weights, sender, [first, second], transport)
        sender.call("damage", "")
