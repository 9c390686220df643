"""Full disks and killed writers: no half version, engines serve, and all catch up afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice import faults
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.client import EngineClient, RemoteError
from sluice.weights.store import WeightStore
from tests.patience import PATIENCE
from tests.service.trainer.harness import (
    ACTIVE,
    RESTART_SECONDS,
    RunningTrainer,
    full_disk,
    make_groups,
    running_trainer,
    train_step,
    until,
    upload,
)
from tests.service.weights.harness import RunningEngine, running_engines

SMALL_ROOM = 1_000  # too little for what changes in a step


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningTrainer]:
    settings = {
        "ranks": {"count": 1, "restart_backoff": RESTART_SECONDS},
        "publish": {"delta": True},
        "optim": {"learning_rate": 1e-5},
        "keep_versions": 0,  # all: old ones would go at a time of their own, in the background
    }
    with running_trainer(tmp_path_factory.mktemp("trainer"), model, **settings) as running:
        yield running


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, model: Path, trainer: RunningTrainer
) -> Iterator[list[RunningEngine]]:
    """Two, each on a host of its own."""
    root = tmp_path_factory.mktemp("engines")
    hosts = [{"weights_cache": str(root / f"host-{index}")} for index in range(2)]
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(
                running_engines(
                    root / str(index), model, trainer.store, trainer.security, 1, **settings
                )
            )[0]
            for index, settings in enumerate(hosts)
        ]
        yield running


async def score(client: EngineClient) -> list[float]:
    request = engine_pb.ScoreRequest(token_ids=[1, 2, 3, 4], prompt_length=1)
    return list((await client.stub.Score(request)).logprobs)


async def test_a_writer_whose_disk_is_full_publishes_nothing(client, trainer) -> None:
    batch = await upload(client, "changed", make_groups("changed"))
    await train_step(client, batch)  # what has not changed takes no room
    store = WeightStore(trainer.store / "weights", durable=False)
    before = list(store.versions())
    trainer_before = await client.get()
    rank = trainer_before.ranks[0]
    with full_disk(rank.process_id, SMALL_ROOM), pytest.raises(RemoteError, match="too large"):
        await client.publish_weights()
    assert list(store.versions()) == before
    assert not [path for path in (trainer.store / "weights" / "staging").iterdir() if path.is_dir()]
    published = await client.publish_weights()
    assert list(store.versions()) == [*before, published.weights.version]
    assert (await client.get()).restart_count == trainer_before.restart_count


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
async def test_a_version_whose_manifest_is_damaged_is_no_base(client, trainer, damage) -> None:
    """The publication after it was answered with INTERNAL: a run ended."""
    batch = await upload(client, damage, make_groups(damage))
    await train_step(client, batch)
    first = (await client.publish_weights()).weights
    manifest = trainer.store / "weights" / "versions" / f"{first.version:08}" / "manifest.json"
    whole = manifest.read_bytes()
    if damage == "gone":
        manifest.unlink()
    else:
        half = len(whole) // 2
        manifest.write_bytes(whole[:half] + b"?" + whole[half + 1 :] * (damage == "flipped"))
    second = (await client.publish_weights()).weights
    store = WeightStore(trainer.store / "weights", durable=False)
    assert store.get(second.version).base is None
    manifest.write_bytes(whole)
    third = (await client.publish_weights()).weights
    assert store.get(third.version).base == second.version


async def test_a_reader_whose_disk_is_full_goes_on_serving_and_catches_up(
    client, clients, engines
) -> None:
    first = (await client.publish_weights()).weights
    for served in clients:
        await served.prepare_weights(first)
        await served.commit_weights(first)
    old = await score(clients[0])
    batch = await upload(client, "room", make_groups("room"))
    await train_step(client, batch)
    second = (await client.publish_weights()).weights
    with full_disk(engines[0].process.pid):
        with pytest.raises(RemoteError) as refused:
            await clients[0].prepare_weights(second)
        assert refused.value.reason == "UNFIT_WEIGHTS"
        assert "too large" in str(refused.value)
        await clients[1].prepare_weights(second)
        await clients[1].commit_weights(second)
        assert await score(clients[0]) == old
    await clients[0].prepare_weights(second)
    await clients[0].commit_weights(second)
    assert await score(clients[0]) == await score(clients[1]) != old


async def test_a_reader_killed_while_it_fetches_leaves_no_half_version(
    client, clients, engines, trainer
) -> None:
    weights = (await client.publish_weights()).weights
    engines[1].kill_at("weights.building")
    with pytest.raises(RemoteError):
        await clients[1].prepare_weights(weights)
    assert engines[1].process.wait(PATIENCE) != 0
    root = engines[1].directory.parent.parent / "host-1"
    whole = [path.name for path in root.iterdir() if path.is_dir() and path.name[0] != "."]
    assert f"{weights.version:08d}-{weights.digest}" not in whole
    await clients[0].prepare_weights(weights)
    await clients[0].commit_weights(weights)


async def test_a_writer_killed_in_mid_publication_leaves_no_half_version(client, trainer) -> None:
    store = WeightStore(trainer.store / "weights", durable=False)
    before = list(store.versions())
    restarts = (await client.get()).restart_count
    faults.arm(trainer.store.parent / "faults", "rank0.publish")
    with pytest.raises(RemoteError) as lost:
        await client.publish_weights()
    assert lost.value.reason == "RANK_LOST"
    assert list(store.versions()) == before
    await until(client, lambda now: now.state == ACTIVE and now.restart_count == restarts + 1)
    published = await client.publish_weights()
    assert published.byte_count == published.full_byte_count  # the new rank kept nothing
    assert list(store.versions())[-1] == published.weights.version
    assert (await client.publish_weights()).byte_count < 0.2 * published.full_byte_count
