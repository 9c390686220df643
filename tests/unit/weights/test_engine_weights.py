"""What an engine holds while it prepares: pins, directories of its host, transfer groups."""

from __future__ import annotations

import asyncio
import fcntl
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from services.rollout.engine.interface import EngineStatus, IncomingWeights, PauseMode
from services.rollout.engine.weights import EngineWeights, Transfer
from services.rollout.errors import DigestMismatchError, TransferGroupNotJoinedError
from sluice.weights.host_cache import CachedVersion, HostCache
from sluice.weights.manifest import Manifest, ShardFile
from sluice.weights.store import WeightStore
from sluice.weights.transfer.plan import Membership
from tests.patience import PATIENCE


class BareEngine:
    """Takes whatever comes, and notes over which group."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self.directories: dict[int, Path] = {}
        self.staged: list[str] = []
        self.group = ""
        self._prepared: list[int] = []
        self.serving: int | None = None
        self.restorable: int | None = None

    def status(self) -> EngineStatus:
        return EngineStatus(
            version=self.serving,
            digest="",
            prepared_versions=tuple(self._prepared),
            restorable_version=self.restorable,
            paused=False,
            rank_loads=(),
            max_running=1,
            max_model_length=1,
            transfer_ranks=1,
        )

    async def join_transfer(self, members: Sequence[Membership], seconds: float) -> None:
        self.group = members[0].group

    async def leave_transfer(self) -> None:
        self.group = ""

    async def prepare(self, version: int, digest: str, directory: Path) -> None:
        self.directories[version] = directory
        self._prepared.append(version)

    async def stage(self, path: Path, shard: ShardFile) -> None:
        self.staged.append(shard.file_name)

    def unstage(self) -> None:
        self.staged.clear()

    async def commit(self, version: int, mode: PauseMode) -> float:
        self._prepared.remove(version)
        self.serving = version
        return 0.0

    async def receive(self, incoming: IncomingWeights) -> None:
        self.received.append(self.group)
        self._prepared.append(incoming.manifest.version)


class Held:
    """A call that waits until it is let go, in whatever thread."""

    def __init__(self) -> None:
        self.begun, self._let_go = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.begun.set()
        assert self._let_go.wait(PATIENCE)

    def let_go(self) -> None:
        self._let_go.set()


def engine_weights(engine: Any, store: WeightStore, cache: HostCache) -> EngineWeights:
    async def announce() -> None:
        pass

    return EngineWeights(engine, store, "engine", announce, cache=cache, in_place=False)


async def happens(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, PATIENCE)


async def test_an_engine_that_stops_while_it_pins_leaves_no_pin(policy, store, tmp_path) -> None:
    held = Held()

    class Slow(WeightStore):
        """Somebody removes versions meanwhile."""

        def pin(self, version: int, owner: str) -> None:
            held.wait()
            super().pin(version, owner)

    record = policy.publish()
    shared = ThreadPoolExecutor(2)  # one may pin, the other does all else, in order
    asyncio.get_running_loop().set_default_executor(shared)
    slow = Slow(store.location, durable=False)
    weights = engine_weights(BareEngine(), slow, HostCache(tmp_path / "cache", slow))
    preparing = asyncio.create_task(weights.prepare(record.version, record.digest))
    await happens(held.begun)
    closing = asyncio.create_task(weights.close())
    for _ in range(10):  # as much is done of it as can be
        await asyncio.to_thread(int)
    held.let_go()
    await closing
    shared.shutdown()
    assert store.pins() == {}
    with pytest.raises(asyncio.CancelledError):
        await preparing


async def test_an_engine_that_stops_waits_for_no_other_engine(policy, store, tmp_path) -> None:
    begun, ended = threading.Event(), threading.Event()

    class Noting(HostCache):
        def take(self, version: int) -> CachedVersion:
            begun.set()
            try:
                return super().take(version)
            finally:
                ended.set()

    record = policy.publish()
    (tmp_path / "cache").mkdir()
    name = f"{record.version:08d}-{record.digest}.lock"
    weights = engine_weights(BareEngine(), store, Noting(tmp_path / "cache", store))
    with (tmp_path / "cache" / name).open("ab") as other:  # which makes the version
        fcntl.flock(other, fcntl.LOCK_EX)
        preparing = asyncio.create_task(weights.prepare(record.version, record.digest))
        await happens(begun)
        await weights.close()
        await happens(ended)
    with pytest.raises(asyncio.CancelledError):
        await preparing


async def test_a_transfer_comes_over_the_group_it_names_or_not_at_all(
    policy, store, tmp_path
) -> None:
    """The engine joins another one while the manifest is read for the first."""
    held = Held()

    class Slow(WeightStore):
        def manifest(self, version: int) -> Manifest:
            if asked.is_set():
                held.wait()
            asked.set()  # the first look is that of the check of the digest
            return super().manifest(version)

    asked = threading.Event()
    record = policy.publish()
    slow = Slow(store.location, durable=False)
    engine = BareEngine()
    weights = engine_weights(engine, slow, HostCache(tmp_path / "cache", slow))

    async def join(group: str) -> None:
        member = Membership(address="", group=group, rank=1, world_size=2, backend="gloo")
        await weights.transfers.join(group, [member], PATIENCE)

    def prepare(group: str) -> asyncio.Task[float]:
        files = [["model-0.safetensors", "model-1.safetensors"]]
        transfer = Transfer(group=group, files=files, bucket_bytes=1, seconds=PATIENCE)
        return asyncio.create_task(weights.prepare(record.version, record.digest, transfer))

    await join("first")
    first = prepare("first")
    await happens(held.begun)
    await join("second")
    second = prepare("second")
    held.let_go()
    with pytest.raises(TransferGroupNotJoinedError):
        await first
    await second
    assert engine.received == ["second"]
    await weights.close()


@pytest.mark.parametrize("damage", ["digest", "manifest"])
async def test_who_fails_before_a_byte_has_come_leaves_the_group(
    policy, store, tmp_path, damage: str
) -> None:
    """The others would wait for it until their deadline."""
    record = policy.publish()
    engine = BareEngine()
    weights = engine_weights(engine, store, HostCache(tmp_path / "cache", store))
    member = Membership(address="", group="one", rank=1, world_size=2, backend="gloo")
    await weights.transfers.join("one", [member], PATIENCE)
    assert engine.group == "one"
    digest = record.digest if damage == "manifest" else "0" * 32
    if damage == "manifest":
        path = record.directory / "manifest.json"
        path.write_bytes(path.read_bytes()[:-3])
    transfer = Transfer(
        group="one", files=[["model.safetensors"]], bucket_bytes=1, seconds=PATIENCE
    )
    with pytest.raises(DigestMismatchError):
        await weights.prepare(record.version, digest, transfer)
    assert engine.group == weights.transfers.group == ""
    await weights.close()


async def test_a_version_that_an_engine_may_go_back_to_stays_on_its_host(
    policy, store, tmp_path
) -> None:
    """A server that is started anew reads it there, though it has served others since."""
    engine = BareEngine()
    weights = engine_weights(engine, store, HostCache(tmp_path / "cache", store, keep=1))
    records = []
    for number in range(4):
        policy.change()
        record = policy.publish()
        records.append(record)
        await weights.prepare(record.version, record.digest)
        await weights.commit(record.version, record.digest, PauseMode.IN_PLACE)
        if number == 0:
            engine.restorable = record.version
    first, second, third, last = (record.version for record in records)
    here = {version for version, directory in engine.directories.items() if directory.is_dir()}
    assert here - {third} == {first, last} == set(store.pins())  # the third served until now
    engine.restorable = None
    await weights.prepare(second, records[1].digest)
    assert first not in store.pins()
    await weights.close()
