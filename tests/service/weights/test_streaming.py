"""Engines read a version while it is written: what is not as announced, or never committed, is
never served.

The tests share two engines; the writer is a rank's, in this process.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import psutil
import pytest
import torch
from safetensors.torch import load_file

from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.client import EngineClient, RemoteError
from sluice.runtime.security import SecurityConfig
from sluice.weights.checkpoint import companion_files, parse_header
from sluice.weights.errors import MissingFileError, WeightStoreError
from sluice.weights.manifest import ShardFile
from sluice.weights.shards import PublishedShards
from sluice.weights.staging import Staging
from sluice.weights.store import StoredVersion, WeightStore
from tests.patience import PATIENCE
from tests.service.trainer.harness import poll
from tests.service.weights.harness import RunningEngine, running_engines, serves

SECURITY = SecurityConfig()
DAMAGED = "model.layers.0.mlp.up_proj.weight"


@dataclass
class Writer:
    """A trainer that writes shard by shard, as slowly as a test likes."""

    store: WeightStore
    model: Path
    tensors: dict[str, torch.Tensor]
    shards: PublishedShards = field(default_factory=lambda: PublishedShards(keep=False, sync=False))
    written: list[ShardFile] = field(default_factory=list)
    base: int | None = None

    def begin(self, base: int | None = None) -> Staging:
        """Allocates a version of weights that no version had."""
        for tensor in self.tensors.values():
            (tensor if base is None else tensor.view(-1)[:9]).mul_(1.01)
        self.shards.begin(base)
        self.written, self.base = [], base
        return self.store.allocate(None)

    def write(self, staging: Staging, part: int, parts: int = 3) -> ShardFile:
        """Writes and announces one of the files."""
        names = sorted(self.tensors)[part::parts]
        announce = partial(
            self.store.announce, staging.version, directory=staging.directory, base=self.base
        )
        submitted = self.shards.submit(
            staging.directory,
            f"model-{part}.safetensors",
            {name: self.tensors[name] for name in names},
            {},
            announce,
        )
        self.written.append(submitted())
        return self.written[-1]

    def commit(self, staging: Staging) -> StoredVersion:
        self.shards.finish(staging.version)
        companions = companion_files(self.model)
        return self.store.commit(staging, self.written, companions, 0, base=self.base)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, model: Path, root: Path
) -> Iterator[list[RunningEngine]]:
    with running_engines(
        tmp_path_factory.mktemp("engines"),
        model,
        root,
        SECURITY,
        2,
    ) as running:
        yield running


@pytest.fixture
async def client(engines: list[RunningEngine]) -> AsyncIterator[EngineClient]:
    client = engines[0].client()
    await poll(partial(serves, client))
    yield client
    await client.close()


@pytest.fixture
def writer(root: Path, model: Path) -> Writer:
    tensors = load_file(model / "model.safetensors")
    store = WeightStore(root / "weights", durable=False)
    return Writer(store, model, {name: tensor.clone() for name, tensor in tensors.items()})


async def reads_ahead(client: EngineClient, version: int) -> None:
    """Returns once the engine reads ahead of this version."""

    async def does() -> bool:
        waits = await client.list_waits()
        return any(f"StageWeights of version {version}" in wait.what for wait in waits)

    await poll(does)


def weights_of(record: StoredVersion) -> sample_pb2.WeightVersion:
    return sample_pb2.WeightVersion(version=record.version, digest=record.digest)


async def serve(client: EngineClient, record: StoredVersion) -> list[float]:
    """Swaps the version in; log-probs of some tokens under it."""
    await client.prepare_weights(weights_of(record))
    await client.commit_weights(weights_of(record))
    assert (await client.get()).weights == weights_of(record)
    request = engine_pb.ScoreRequest(token_ids=[1, 2, 3, 4, 5], prompt_length=1)
    return list((await client.stub.Score(request, timeout=PATIENCE)).logprobs)


async def test_files_are_there_when_their_version_is_committed(
    writer: Writer, client: EngineClient
) -> None:
    staging = writer.begin()
    following = asyncio.create_task(client.stage_weights(staging.version, PATIENCE))
    for part in range(3):
        writer.write(staging, part)
    sizes = sum(shard.size for shard in writer.written)
    record = writer.commit(staging)
    assert await following <= sizes  # what was not announced before is read as ever
    found = await serve(client, record)
    writer.tensors = {name: tensor.clone() for name, tensor in writer.tensors.items()}
    plain = await serve(client, republished(writer))
    assert found == pytest.approx(plain, abs=1e-5)


def republished(writer: Writer) -> StoredVersion:
    """The same weights again, which no engine has read ahead."""
    staging = writer.store.allocate(None)
    writer.shards.begin(None)
    writer.written, writer.base = [], None
    for part in range(3):
        writer.write(staging, part)
    return writer.commit(staging)


def flip(path: Path) -> None:
    """Flips a bit in the middle of the tensor DAMAGED."""
    extent = parse_header(path.read_bytes(), file_name=path.name)[DAMAGED]
    with path.open("r+b") as file:
        file.seek((extent.begin + extent.end) // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


@pytest.mark.parametrize("damage", [flip, cut])
async def test_a_file_that_is_not_as_announced_is_named_and_never_served(
    writer: Writer, client: EngineClient, damage: Callable[[Path], None]
) -> None:
    before = (await client.get()).weights
    staging = writer.begin()
    (part,) = (p for p in range(3) if DAMAGED in sorted(writer.tensors)[p::3])
    with_damage = partial(damage, staging.directory / f"model-{part}.safetensors")
    announce = writer.store.announce
    writer.store.announce = lambda *a, **k: (with_damage(), announce(*a, **k))  # type: ignore
    following = asyncio.create_task(client.stage_weights(staging.version, PATIENCE))
    writer.write(staging, part)
    writer.store.announce = announce  # type: ignore[method-assign]
    with pytest.raises(RemoteError) as refused:
        await following
    assert refused.value.code is grpc.StatusCode.DATA_LOSS
    named = refused.value.metadata.get("tensor") or refused.value.metadata["file"]
    assert named == (DAMAGED if damage is flip else f"model-{part}.safetensors")
    for other in {0, 1, 2} - {part}:
        writer.write(staging, other)
    if damage is flip:  # what is cut is refused by the commit already
        record = writer.commit(staging)
        with pytest.raises(RemoteError) as refused:
            await client.prepare_weights(weights_of(record))
        assert refused.value.code is grpc.StatusCode.DATA_LOSS
        assert refused.value.metadata["tensor"] == DAMAGED
    else:
        with pytest.raises(WeightStoreError):
            writer.commit(staging)
        writer.store.abort(staging)
    described = await client.get()
    assert described.weights == before
    assert staging.version not in described.prepared_versions
    following = asyncio.create_task(client.stage_weights(staging.version + 1, PATIENCE))
    staging = writer.begin()
    for other in range(3):
        writer.write(staging, other)
    await serve(client, writer.commit(staging))
    await following


async def test_a_version_that_is_never_committed_leaves_nothing(
    writer: Writer, client: EngineClient
) -> None:
    before = (await client.get()).weights
    staging = writer.begin()
    following = asyncio.create_task(client.stage_weights(staging.version, PATIENCE))
    await reads_ahead(client, staging.version)
    shard = writer.write(staging, 0)
    writer.write(staging, 1)
    writer.store.abort(staging)
    following.cancel()  # as a loop does whose trainer fails, and as one that dies
    await asyncio.gather(following, return_exceptions=True)
    assert not writer.store.announced(staging.version)
    with pytest.raises(RemoteError) as missing:
        await client.prepare_weights(
            sample_pb2.WeightVersion(version=staging.version, digest=shard.digest)
        )
    assert missing.value.code is grpc.StatusCode.NOT_FOUND
    described = await client.get()
    assert (described.weights, list(described.prepared_versions)) == (before, [])
    later = writer.begin()
    assert later.version > staging.version
    for part in range(3):
        writer.write(later, part)
    await serve(client, writer.commit(later))


async def test_a_writer_that_stands_still_costs_the_deadline_alone(
    writer: Writer, client: EngineClient
) -> None:
    staging = writer.begin()
    writer.write(staging, 0)
    with pytest.raises(RemoteError) as late:
        await client.stage_weights(staging.version, 0.3)
    assert (late.value.code, late.value.reason) == (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "VERSION_NOT_COMMITTED",
    )
    for part in (1, 2):  # it goes on: nothing is lost but the head start
        writer.write(staging, part)
    await serve(client, writer.commit(staging))


@pytest.mark.parametrize(
    ("version", "seconds"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, -1.0), (1, 1e9)]
)
async def test_requests_out_of_bounds_are_refused_by_field(
    engines: list[RunningEngine], version: int, seconds: float
) -> None:
    client = engines[0].client()
    try:
        with pytest.raises(RemoteError) as refused:
            await client.stage_weights(version, seconds)
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    finally:
        await client.close()


@pytest.mark.parametrize("point", ["engine.found", "engine.staged"])
async def test_an_engine_stopped_and_one_killed_while_they_read_ahead(
    engines: list[RunningEngine], writer: Writer, point: str
) -> None:
    """Where one stops before it opens a file, the commit moves the file meanwhile."""
    stopped, killed = engines
    clients = [engine.client() for engine in engines]
    stopped.kill_at(point, 2, signal.SIGSTOP)
    killed.kill_at(point, 2)
    staging = writer.begin()
    following = [
        asyncio.create_task(client.stage_weights(staging.version, PATIENCE)) for client in clients
    ]
    for client in clients:
        await reads_ahead(client, staging.version)
    for part in range(3):
        writer.write(staging, part)
    await asyncio.to_thread(killed.process.wait, PATIENCE)
    await poll(partial(is_stopped, stopped))
    record = writer.commit(staging)
    with pytest.raises(RemoteError):
        await following[1]
    stopped.signal(signal.SIGCONT)
    sizes = [shard.size for shard in writer.written]
    # a file that it had not seen announced before it was stopped is read at the swap
    assert await following[0] in (sum(sizes), sum(sizes[:2]))
    await serve(clients[0], record)
    killed.revive()
    await clients[1].close()
    client = killed.client()
    await poll(partial(serves, client))
    await serve(client, record)
    for each in (clients[0], client):
        await each.close()


async def test_deltas_are_made_ahead_by_whichever_engine_of_the_host_lives(
    engines: list[RunningEngine], writer: Writer
) -> None:
    clients = [engine.client() for engine in engines]
    writer.shards = PublishedShards(keep=True, sync=False)
    base = None
    for killed in (False, False, False, True):
        staging = writer.begin(base)
        if killed:
            engines[0].kill_at("weights.building", 2)
        following = [asyncio.create_task(clients[0].stage_weights(staging.version, PATIENCE))]
        await reads_ahead(clients[0], staging.version)
        writer.write(staging, 0)
        if killed:
            await asyncio.to_thread(engines[0].process.wait, PATIENCE)
        following.append(asyncio.create_task(clients[1].stage_weights(staging.version, PATIENCE)))
        for part in (1, 2):
            writer.write(staging, part)
        record = writer.commit(staging)
        assert record.base == base
        await asyncio.gather(*following, return_exceptions=True)
        found = [await serve(client, record) for client in clients[killed:]]
        base = record.version
    engines[0].revive()
    await clients[0].close()
    clients[0] = engines[0].client()
    await poll(partial(serves, clients[0]))
    found.append(await serve(clients[0], record))
    plain = await serve(clients[1], republished(writer))
    assert found == [pytest.approx(plain, abs=1e-5)] * 2
    for client in clients:
        await client.close()


async def is_stopped(engine: RunningEngine) -> bool:
    return psutil.Process(engine.process.pid).status() == psutil.STATUS_STOPPED


WRITER = """
import sys
from pathlib import Path
import torch
from sluice.weights.shards import PublishedShards
from sluice.weights.store import WeightStore
store = WeightStore(sys.argv[1], durable=False)
staging = store.allocate(None)
shards = PublishedShards(keep=False, sync=False)
shards.begin(None)
announce = lambda shard: store.announce(staging.version, shard, staging.directory)
shards.submit(staging.directory, "a.safetensors", {"w": torch.ones(9)}, {}, announce)()
print(staging.version, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_writer_announced_goes_and_its_number_is_not_used_again(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "tests.program", WRITER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        version = int(writer.stdout.readline())
        store = WeightStore(tmp_path, durable=False)
        (announced,) = store.announced(version)
        assert store.announced_file(announced, tmp_path).is_file()
        writer.kill()
    writer = Writer(store, tmp_path, {"w": torch.ones(9)})
    staging = writer.begin()
    assert staging.version > version
    with pytest.raises(MissingFileError):  # the directory went with its owner
        store.announced_file(announced, tmp_path)
    writer.write(staging, 0, 1)
    record = writer.commit(staging)
    store.retain(1)
    assert not store.announced(version)
    assert store.versions() == [record.version]
