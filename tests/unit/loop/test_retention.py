"""What a run holds of the store, and what it lets go."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sluice.config import ConfigError
from sluice.loop.config import RetentionConfig
from sluice.loop.ledger import Ledger, LedgerGroup
from sluice.loop.retention import Retention
from sluice.loop.run_directory import RunCheckpoint, list_run_checkpoints
from sluice.samples.blob_store import BlobStore
from sluice.samples.blobs import BlobReference
from sluice.weights.shards import write_shard
from sluice.weights.store import WeightStore
from tests.patience import PATIENCE


class World:
    """A run directory and a store, with the moves of a loop."""

    def __init__(self, directory) -> None:
        self.store, self.run_dir = directory / "store", directory / "my run"
        self.store.mkdir()
        self.blobs = BlobStore(self.store, sync=False)
        self.weights = WeightStore(self.store / "weights", durable=False)
        self.ledger = Ledger(self.run_dir / "ledger.sqlite")
        config = RetentionConfig(cuts=2, blob_grace_seconds=1e-9)
        self.retention = Retention(config, self.store, self.run_dir, self.ledger)
        self.checkpoints = self.store / "checkpoints"

    def generate(self, position: int, media: Sequence[str] = ()) -> BlobReference:
        blob = self.blobs.put(f"group {position}".encode())
        group_id = f"g{position}"
        self.ledger.issue([(position, group_id)], 0)
        group = LedgerGroup(
            position=position,
            group_id=group_id,
            state="generated",
            issue_step=0,
            blob=blob,
            media=tuple(media),
        )
        assert self.ledger.generated(group)
        return blob

    async def publish(self, *, is_served: bool = True) -> int:
        staging = self.weights.allocate(None)
        shard = write_shard(staging.directory, "a.safetensors", {"w": torch.zeros(2)})
        version = self.weights.commit(staging, [shard], [], step=0).version
        await self.retention.hold_weights(version)
        if is_served:
            await self.retention.release_weights(version)
        return version

    async def run_checkpoint(self, step: int, version: int) -> str:
        run_checkpoint = await self.begin_run_checkpoint(step, version)
        await self.retention.record(run_checkpoint)
        return Path(run_checkpoint.checkpoint).name

    async def begin_run_checkpoint(self, step: int, version: int) -> RunCheckpoint:
        await self.retention.settle()
        name = self.retention.new_checkpoint_id(step)
        (self.checkpoints / name).mkdir(parents=True)
        (self.checkpoints / name / "checkpoint.json").touch()
        run_checkpoint = RunCheckpoint(
            step=step,
            optimizer_step=step,
            checkpoint=f"checkpoints/{name}",
            weight_version=version,
            weight_digest="",
            position=0,
            seed=0,
        )
        self.retention.expect(run_checkpoint)
        return run_checkpoint


@pytest.fixture
async def world(tmp_path):
    world = World(tmp_path)
    yield world
    await world.retention.close()
    world.ledger.close()


def kept(world: World) -> set[str]:
    return {path.name for path in (world.store / "blobs").glob("?" * 32)}


async def test_blobs_stay_until_no_kept_run_checkpoint_needs_them(world):
    version = await world.publish()
    blobs = [world.generate(position) for position in range(4)]
    for blob in blobs:
        world.retention.hold(blob.digest)
    world.ledger.consume(["g0"], 1)
    await world.run_checkpoint(1, version)
    await world.retention.settle()
    assert kept(world) >= {blob.digest for blob in blobs[1:]}
    world.ledger.consume(["g1"], 2)
    await world.run_checkpoint(2, version)  # 1 and 2 are kept: going back to 1 needs g1
    await world.retention.settle()
    assert kept(world) == {blob.digest for blob in blobs[1:]}
    world.ledger.consume(["g2"], 3)
    await world.run_checkpoint(3, version)
    await world.retention.settle()
    assert kept(world) == {blobs[2].digest, blobs[3].digest}


async def test_an_image_stays_as_long_as_a_group_that_shows_it(world):
    version = await world.publish()
    shared, alone = (world.blobs.put(name.encode()).digest for name in ("shared", "alone"))
    shown = [[shared, alone], [shared], []]
    blobs = [world.generate(position, media) for position, media in enumerate(shown)]
    for blob, media in zip(blobs, shown, strict=True):
        world.retention.hold(blob.digest, *media)
    world.ledger.consume(["g0"], 1)
    await world.run_checkpoint(1, version)
    await world.retention.settle()
    assert kept(world) >= {shared, blobs[1].digest}
    world.ledger.consume(["g1"], 2)
    await world.run_checkpoint(2, version)
    await world.retention.settle()
    assert kept(world) == {shared, blobs[1].digest, blobs[2].digest}  # going back to 1 needs g1
    await world.run_checkpoint(3, version)
    await world.retention.settle()
    assert kept(world) == {blobs[2].digest}


async def test_what_another_run_holds_is_left_alone(world, tmp_path):
    other = world.blobs.put(b"another run's")
    world.blobs.pin("run/another", [other.digest])
    (world.checkpoints / "another-1").mkdir(parents=True)
    version = await world.publish()
    world.weights.pin(version, "engine-0")
    for step in range(1, 4):
        await world.run_checkpoint(step, version)
    await world.retention.settle()
    assert world.blobs.exists(other)
    assert (world.checkpoints / "another-1").is_dir()
    await world.publish()
    await world.run_checkpoint(4, 2)
    await world.run_checkpoint(5, 2)
    await world.retention.settle()
    assert world.weights.pins()[version] == {"engine-0"}


async def test_superseded_checkpoints_go_with_what_crashes_left(world):
    version = await world.publish()
    first = await world.run_checkpoint(1, version)
    second = await world.run_checkpoint(2, version)
    (world.checkpoints / f".{second}-0123abcd").mkdir()  # a save that a crash ended
    (world.checkpoints / f".removed-{first}x").mkdir()  # a removal that a crash ended
    third = await world.run_checkpoint(3, version)
    await world.retention.settle()
    assert {path.name for path in world.checkpoints.iterdir()} == {second, third}
    assert [kept.step for kept in list_run_checkpoints(world.run_dir / "cuts")] == [2, 3]


async def test_weights_are_held_for_a_run_checkpoint_that_is_being_written(world):
    first = await world.publish()
    run_checkpoint = await world.begin_run_checkpoint(1, first)
    second = await world.publish()  # the run goes on, and engines no longer serve the first
    assert set(world.weights.pins()) == {first, second}
    on_the_way = await world.publish(is_served=False)
    await world.retention.record(run_checkpoint)
    assert set(world.weights.pins()) == {first, second, on_the_way}
    await world.retention.release_weights(on_the_way)
    assert set(world.weights.pins()) == {first, on_the_way}


async def test_weights_of_a_run_checkpoint_that_came_to_nothing_are_let_go(world):
    first = await world.publish()
    await world.begin_run_checkpoint(1, first)
    await world.retention.resume()  # the run went back: it will not be recorded
    second = await world.publish()
    assert set(world.weights.pins()) == {second}


async def test_weights_of_run_checkpoint_and_of_engines_are_pinned(world):
    versions = [await world.publish()]
    await world.run_checkpoint(1, versions[0])
    versions += [await world.publish() for _ in range(3)]
    owner = f"run/{world.ledger.run_id}"
    assert world.weights.pins() == {versions[0]: {owner}, versions[3]: {owner}}
    world.weights.retain(1)
    assert list(world.weights.versions()) == [versions[0], versions[3]]


@pytest.fixture
def slow_disk(monkeypatch):
    """Checkpoints go when this is set."""
    door, remove = threading.Event(), shutil.rmtree

    def wait_and_remove(path, **named):
        assert ".removed-" not in path.name or door.wait(PATIENCE)
        remove(path, **named)

    monkeypatch.setattr(shutil, "rmtree", wait_and_remove)
    yield door
    door.set()


async def test_the_reference_of_the_run_and_of_run_checkpoints_is_pinned(world):
    reference = await world.publish()
    world.retention.hold_reference(reference)
    newer = await world.publish()
    named = await world.begin_run_checkpoint(1, newer)
    await world.retention.record(replace(named, reference_version=reference, reference_step=0))
    for _ in range(2):
        served = await world.publish()
    assert reference in world.weights.pins()
    world.retention.hold_reference(served)  # one run checkpoint names the other yet
    await world.publish()
    assert {reference, served} <= world.weights.pins().keys()
    for step in (2, 3):
        await world.run_checkpoint(step, await world.publish())
    await world.publish()
    assert reference not in world.weights.pins() and served in world.weights.pins()


async def test_a_version_published_while_old_run_checkpoint_go_stays_pinned(world, slow_disk):
    first = await world.publish()
    for step in range(3):
        await world.run_checkpoint(step, first)  # the last one is still at it
    newest = await world.publish()
    slow_disk.set()
    await world.retention.settle()
    assert set(world.weights.pins()) == {first, newest}


async def test_a_run_stopped_while_it_waits_for_a_removal_still_closes(world, slow_disk):
    version = await world.publish()
    first = await world.run_checkpoint(0, version)
    for step in (1, 2):
        await world.run_checkpoint(step, version)
    waiting = asyncio.create_task(world.retention.settle())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    slow_disk.set()
    await world.retention.close()
    assert not list(world.checkpoints.glob(f"*{first}*"))


async def test_a_resumed_run_holds_again_and_tells_what_is_gone(world):
    blobs = [world.generate(position) for position in range(3)]
    await world.retention.resume()
    owner = f"run/{world.ledger.run_id}"
    assert world.blobs.pinned(owner) == {blob.digest for blob in blobs}
    (world.store / "blobs" / blobs[1].digest).unlink()
    await world.retention.resume()
    assert [group.group_id for group in world.ledger.groups("issued")] == ["g1"]
    assert [group.group_id for group in world.ledger.groups("generated")] == ["g0", "g2"]


async def test_a_store_that_is_not_the_services_is_refused(world, tmp_path):
    with pytest.raises(ConfigError, match="has no weight version 7"):
        await world.retention.hold_weights(7)
    with pytest.raises(ConfigError, match="does not exist"):
        Retention(RetentionConfig(), tmp_path / "nowhere", world.run_dir, world.ledger)
