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
import torch

from services.rollout.engine.interface import EngineStatus, IncomingWeights, PauseMode
from services.rollout.engine.weights import EngineWeights, Transfer
from services.rollout.errors import (
    DigestMismatchError,
    NotQuietError,
    NoTransferError,
    TransferGroupNotJoinedError,
)
from sluice.weights.checkpoint import checked_shard
from sluice.weights.host_cache import CachedVersion, HostCache
from sluice.weights.manifest import Manifest, ShardFile
from sluice.weights.shards import load_verified
from sluice.weights.store import StoredVersion, WeightStore
from sluice.weights.transfer.plan import Membership
from tests.contract.weight_store.policy import Policy, Publication
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
        self.transfer_ranks = 1
        self.restorable: int | None = None
        self.asleep = False

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
            transfer_ranks=self.transfer_ranks,
        )

    async def join_transfer(self, members: Sequence[Membership], seconds: float) -> None:
        self.group = members[0].group

    async def leave_transfer(self) -> None:
        self.group = ""

    async def prepare(self, version: int, digest: str, directory: Path) -> None:
        self.directories[version] = directory
        self._prepared.append(version)

    async def stage(self, path: Path, shard: ShardFile) -> None:
        if self.asleep:
            raise NotQuietError("the engine sleeps")
        for _ in checked_shard(path, shard):
            pass
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


async def test_pins_of_all_engines_are_listed_once_and_not_at_every_commit(
    policy, store, tmp_path
) -> None:
    """With many engines each would read what all of them pin. What a former process left goes."""

    class Watched(WeightStore):
        lists = 0

        def pins(self) -> dict[int, set[str]]:
            self.lists += 1
            return super().pins()

    records = [policy.publish() for _ in range(4)]
    store.pin(records[0].version, "engine")  # of a former process
    for record in records:
        store.pin(record.version, "another")
    watched = Watched(store.location, durable=False)
    weights = engine_weights(BareEngine(), watched, HostCache(tmp_path / "cache", watched))
    for record in records[1:]:
        await weights.prepare(record.version, record.digest)
        await weights.commit(record.version, record.digest, PauseMode.WAIT)
    held = {version for version, owners in store.pins().items() if "engine" in owners}
    assert held == {records[-1].version}
    assert all("another" in owners for owners in store.pins().values())
    assert watched.lists == 1
    await weights.close()


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


@pytest.mark.parametrize(
    ("serving", "message"),
    [(None, "no weights yet: it reads its first from the store"), (1, "from the store only")],
)
async def test_who_takes_no_part_yet_is_told_from_who_never_does(
    policy, store, tmp_path, serving: int | None, message: str
) -> None:
    """SGLang is started with its first version, and takes later ones over a group."""
    record = policy.publish()
    engine = BareEngine()
    engine.serving, engine.transfer_ranks = serving, 0
    weights = engine_weights(engine, store, HostCache(tmp_path / "cache", store))
    with pytest.raises(NoTransferError, match=message):
        await weights.check_transfer(record.version, record.digest)
    with pytest.raises(NoTransferError, match=message):
        await weights.transfers.join("one", [], PATIENCE)
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


async def published_ahead(
    weights: EngineWeights, engine: BareEngine, policy: Policy, base: int | None
) -> tuple[StoredVersion, tuple[int, int], list[str]]:
    """A version that is staged while it is published; what was, and what the engine has of it."""
    policy.change()
    publication = Publication(policy, base)
    following = asyncio.create_task(weights.stage(publication.version, PATIENCE))
    for part in range(2):
        publication.announce(await asyncio.to_thread(publication.write, part))
    while base is not None and not engine.asleep and len(engine.staged) < 2:
        await asyncio.sleep(0.01)
    record = await asyncio.to_thread(publication.commit)
    found = await following
    return record, found, sorted(engine.staged)


@pytest.mark.parametrize("asleep", [False, True])
async def test_deltas_are_staged_while_they_are_published(
    policy, store, tmp_path, asleep: bool
) -> None:
    """An engine that sleeps has no room for them; its host has, and goes on."""
    engine = BareEngine()
    cache = HostCache(tmp_path / "cache", store)
    weights = engine_weights(engine, store, cache)
    base = None
    for _ in range(4):
        record, found, staged = await published_ahead(weights, engine, policy, base)
        await weights.prepare(record.version, record.digest)
        await weights.commit(record.version, record.digest, PauseMode.IN_PLACE)
        loaded = dict(
            load_verified(engine.directories[record.version], store.manifest(record.version))
        )
        assert all(torch.equal(loaded[n], t) for n, t in policy.history[record.version].items())
        base, engine.asleep = record.version, asleep
    names = [] if asleep else ["model-0.safetensors", "model-1.safetensors"]
    assert (staged, found[0]) == (names, len(names))
    await weights.close()


async def test_a_publication_of_deltas_that_ends_is_forgotten(policy, store, tmp_path) -> None:
    engine = BareEngine()
    weights = engine_weights(engine, store, HostCache(tmp_path / "cache", store))
    record = policy.publish()
    await weights.prepare(record.version, record.digest)
    await weights.commit(record.version, record.digest, PauseMode.IN_PLACE)
    policy.change()
    publication = Publication(policy, record.version)
    following = asyncio.create_task(weights.stage(publication.version, PATIENCE))
    publication.announce(await asyncio.to_thread(publication.write, 0))
    while not engine.staged:
        await asyncio.sleep(0.01)
    store.abort(publication.staging)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    here = [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert here == [engine.directories[record.version].name]
    assert not engine.staged
    await weights.close()
