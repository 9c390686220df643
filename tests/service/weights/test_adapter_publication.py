"""A trainer publishes adapters, and its rank, its controller and engines are killed and stopped.

The tests share the processes, which each leaves serving.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from sluice import faults
from sluice.client import EngineClient, RemoteError, TrainerClient
from sluice.weights.checkpoint import digest_base, verify_files
from sluice.weights.store import WeightStore
from tests.adapters import peft_logprobs
from tests.imported import import_checkpoint
from tests.patience import PATIENCE
from tests.service.trainer.harness import (
    ACTIVE,
    RESTART_SECONDS,
    RunningTrainer,
    make_groups,
    poll,
    running_trainer,
    train_step,
    until,
    upload,
)
from tests.service.weights.harness import RunningEngine, serves

PROMPT = [1, 2, 3, 10]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningTrainer]:
    settings = {
        "lora": {"rank": 4, "alpha": 16},
        "ranks": {"count": 2, "restart_backoff": RESTART_SECONDS},
        "optim": {"learning_rate": 0.05},
        "transfer": {"enabled": True, "timeout_seconds": PATIENCE / 2},
        "keep_versions": 0,
    }
    with running_trainer(tmp_path_factory.mktemp("trainer"), model, **settings) as running:
        yield running


async def step(client: TrainerClient, name: str) -> None:
    await train_step(client, await upload(client, name, make_groups(name)))


def store_of(trainer: RunningTrainer) -> WeightStore:
    """The store, every version of which is whole."""
    store = WeightStore(trainer.store / "weights", durable=False)
    for record in store.list():
        assert record.directory is not None
        verify_files(record.directory, store.manifest(record.version))
    return store


async def furthest(client: EngineClient, model: Path, folder: Path | None) -> float:
    (found,) = await client.generate(PROMPT, max_new_tokens=6)
    expected = peft_logprobs(model, folder, PROMPT, found.token_ids)
    return max(abs(a - b) for a, b in zip(found.logprobs, expected, strict=True))


async def test_adapters_travel_over_the_store_and_over_collectives(
    client: TrainerClient,
    clients: list[EngineClient],
    engines: list[RunningEngine],
    trainer: RunningTrainer,
    model: Path,
) -> None:
    await step(client, "travel")
    published = await client.publish_weights([engines[0].target])
    assert published.adapter.rank == 4
    assert published.adapter.base_digest == digest_base(model)
    assert published.byte_count < (model / "model.safetensors").stat().st_size
    assert not any(outcome.HasField("error") for outcome in published.engines)
    await clients[1].prepare_weights(published.weights)
    directory = store_of(trainer).get(published.weights.version).directory
    for each in clients:
        await each.commit_weights(published.weights)
        assert await furthest(each, model, directory) < 1e-5
        assert await furthest(each, model, None) > 1e-4
        (found,) = await each.generate(PROMPT, max_new_tokens=2)
        assert [span.base_digest for span in found.spans] == [digest_base(model)]


@pytest.mark.parametrize("point", ["rank0.publish", "weights.announced"])
async def test_a_rank_killed_while_it_publishes_leaves_nothing(
    client: TrainerClient, trainer: RunningTrainer, point: str
) -> None:
    before = list(store_of(trainer).versions())
    restarts = (await client.get()).restart_count
    faults.arm(trainer.store.parent / "faults", point)
    with pytest.raises(RemoteError) as lost:
        await client.publish_weights()
    assert lost.value.reason == "RANK_LOST"
    assert list(store_of(trainer).versions()) == before
    await until(client, lambda now: now.state == ACTIVE and now.restart_count == restarts + 1)
    published = await client.publish_weights()
    assert list(store_of(trainer).versions()) == [*before, published.weights.version]


@pytest.mark.parametrize("point", ["engine.prepared", "engine.swapped"])
async def test_an_engine_killed_on_the_way_catches_up_from_its_base(
    client: TrainerClient,
    clients: list[EngineClient],
    engines: list[RunningEngine],
    trainer: RunningTrainer,
    model: Path,
    point: str,
) -> None:
    await step(client, f"engine-{point}")
    published = await client.publish_weights()
    directory = store_of(trainer).get(published.weights.version).directory
    engines[0].kill_at(point)
    with pytest.raises(RemoteError):
        await clients[0].prepare_weights(published.weights)
        await clients[0].commit_weights(published.weights)
    engines[0].process.wait(PATIENCE)
    await clients[1].prepare_weights(published.weights)
    await clients[1].commit_weights(published.weights)
    assert await furthest(clients[1], model, directory) < 1e-5
    engines[0].revive()
    async with engines[0].client() as again:
        await poll(partial(serves, again))
        assert (await again.get()).weights.version == 0
        await again.prepare_weights(published.weights)
        await again.commit_weights(published.weights)
        assert await furthest(again, model, directory) < 1e-5


async def test_a_stopped_engine_holds_up_nobody_but_itself(
    client: TrainerClient,
    clients: list[EngineClient],
    engines: list[RunningEngine],
    trainer: RunningTrainer,
    model: Path,
) -> None:
    await step(client, "stopped")
    published = await client.publish_weights()
    directory = store_of(trainer).get(published.weights.version).directory
    with engines[1].stopped():
        late = asyncio.create_task(clients[1].prepare_weights(published.weights))
        await clients[0].prepare_weights(published.weights)
        await clients[0].commit_weights(published.weights)
        assert await furthest(clients[0], model, directory) < 1e-5
        assert not late.done()
    await asyncio.wait_for(late, PATIENCE)
    await clients[1].commit_weights(published.weights)
    assert await furthest(clients[1], model, directory) < 1e-5


@pytest.mark.parametrize("point", ["weights.allocated", "weights.manifest", "weights.renamed"])
async def test_a_controller_killed_while_it_publishes_leaves_a_whole_version_or_none(
    tmp_path: Path, model: Path, point: str
) -> None:
    settings = {"lora": {"rank": 4}, "ranks": {"count": 1}}
    with running_trainer(tmp_path, model, **settings) as trainer:
        async with trainer.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            first = await client.publish_weights()
            faults.arm(trainer.store.parent / "faults", point)
            with pytest.raises(RemoteError):
                await client.publish_weights()
        trainer.process.wait(PATIENCE)
        versions = list(store_of(trainer).versions())
        whole = [first.weights.version, first.weights.version + 1]
        assert versions == whole[: 1 + (point == "weights.renamed")]


async def test_a_run_does_not_mix_adapters_and_whole_weights(tmp_path: Path, model: Path) -> None:
    with running_trainer(tmp_path, model, lora={"rank": 4}, ranks={"count": 1}) as trainer:
        import_checkpoint(WeightStore(trainer.store / "weights", durable=False), model, None, 0)
        async with trainer.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            with pytest.raises(RemoteError) as mixed:
                await client.publish_weights()
        assert mixed.value.reason == "MIXED_WEIGHTS"
        assert list(store_of(trainer).versions()) == [1]
