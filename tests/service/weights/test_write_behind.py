"""Weights that engines serve before the store has them: durable later, or lost and never again.

A trainer of two ranks and two engines. The tests share the processes, which each leaves serving.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import grpc
import psutil
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc

from services.trainer.config import TrainerConfig
from services.trainer.controller.checkpoint_record import RECORD
from sluice import faults
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.client import RemoteError, TrainerClient
from sluice.durable import locked
from sluice.weights.shards import load_verified
from sluice.weights.store import WeightStore
from tests import warm
from tests.patience import PATIENCE
from tests.service.trainer.harness import (
    ACTIVE,
    PPO,
    RESTART_SECONDS,
    RunningTrainer,
    make_groups,
    poll,
    running_trainer,
    until,
    upload,
)
from tests.service.weights.harness import RunningEngine, serves
from tests.service.weights.test_transfer import failures, score

SETTINGS = {
    "ranks": {"count": 2, "restart_backoff": RESTART_SECONDS, "max_restarts": 9},
    "transfer": {"enabled": True, "write_behind": True, "timeout_seconds": PATIENCE / 2},
    "keep_versions": 2,
}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningTrainer]:
    with running_trainer(tmp_path_factory.mktemp("trainer"), model, **SETTINGS) as running:
        yield running


@pytest.fixture
def store(trainer: RunningTrainer) -> WeightStore:
    return WeightStore(trainer.store / "weights")


def armed(trainer: RunningTrainer) -> Path:
    return trainer.store.parent / "faults"


@contextmanager
def held(trainer: RunningTrainer, point: str) -> Iterator[Callable[[], None]]:
    """Who passes there stops; yields what lets it go on."""
    stopped, is_over = list[psutil.Process](), list[bool]()
    root = psutil.Process(trainer.process.pid)
    family = [root, *root.children(recursive=True)]
    faults.arm(armed(trainer), point, number=signal.SIGSTOP)

    def go_on() -> None:
        if is_over:
            return
        is_over.append(True)
        has_fired = point not in faults.disarm(armed(trainer))
        deadline = time.monotonic() + PATIENCE
        while has_fired and not stopped:  # it stops itself a moment later
            assert time.monotonic() < deadline
            for process in family:
                assert process.is_running(), "it stood for so long that it was taken for lost"
                if process.status() == psutil.STATUS_STOPPED:
                    stopped.append(process)
                    process.send_signal(signal.SIGCONT)

    try:
        yield go_on
    finally:
        go_on()


def all_of(engines: list[RunningEngine]) -> list[pb.TransferTarget]:
    return [engine.target for engine in engines]


def names_in(directory: Path) -> set[str]:
    return set(os.listdir(directory))


async def take_step(client: TrainerClient, name: str) -> None:
    step = (await client.get()).step
    batch = await upload(client, name, make_groups(name))
    await client.forward_backward(batch, PPO, expected_step=step, part_id="whole")
    await client.step_optimizer(step, ["whole"])
    await client.delete_batch(batch)


async def durable(client: TrainerClient, store: WeightStore, version: int) -> None:
    await until(client, lambda now: now.promised_version != version)
    assert store.has(version)


def bytes_of(store: WeightStore, version: int) -> dict[str, list[float]]:
    record = store.get(version)
    assert record.directory is not None
    loaded = load_verified(record.directory, store.manifest(version))
    return {name: tensor.float().flatten().tolist() for name, tensor in loaded}


async def test_engines_serve_what_is_written_afterwards(
    trainer, client, clients, engines, store
) -> None:
    """A rank stands before it has written anything: engines serve, training goes on."""
    assert (await client.get()).write_behind
    await take_step(client, "one")
    with held(trainer, "weights.behind") as go_on:
        published = await client.publish_weights(all_of(engines))
        weights = published.weights
        assert (published.promised, failures(published)) == (True, {})
        before = await score(clients[0])
        for c in clients:
            assert await c.prepare_weights(weights) == 0.0
            await c.commit_weights(weights)
        assert await score(clients[0]) == await score(clients[1]) != before
        assert not store.has(weights.version)
        assert store.find(weights.version).digest == weights.digest
        described = await client.get()
        assert described.promised_version == weights.version
        async with trainer.client() as other:
            waits = {wait.what for wait in await other.list_waits()}
        assert any("write weights" in what or "write_weights" in what for what in waits), waits
        go_on()
        await durable(client, store, weights.version)
    assert store.get(weights.version).digest == weights.digest
    assert (await client.get()).promised_version == 0
    engines[0].signal(signal.SIGKILL)  # who comes later reads what the others were sent
    engines[0].process.wait(PATIENCE)
    engines[0].revive()
    async with engines[0].client() as late:
        await poll(lambda: serves(late))
        assert await late.prepare_weights(weights) > 0
        await late.commit_weights(weights)
        assert await score(late) == await score(clients[1])


async def test_who_comes_before_it_is_written_is_told_to_ask_again(
    trainer, client, clients, engines, store
) -> None:
    with held(trainer, "weights.behind") as go_on:
        weights = (await client.publish_weights([engines[0].target])).weights
        with pytest.raises(RemoteError) as early:
            await clients[1].prepare_weights(weights)
        assert early.value.reason == "WEIGHTS_PROMISED"
        go_on()
        await durable(client, store, weights.version)
    assert await clients[1].prepare_weights(weights) > 0


async def test_a_byte_that_flips_behind_is_refused_by_name(
    trainer, client, clients, engines, store
) -> None:
    """Whoever reads it; who was sent the version serves on."""
    with held(trainer, "weights.behind") as go_on:
        weights = (await client.publish_weights([engines[0].target])).weights
        await clients[0].commit_weights(weights)
        staging = Path(store.location, "staging")
        await poll(lambda: a_child_is_stopped(trainer), interval=0.02)
        path = min(staging.glob(f"{weights.version:08d}-*/*.safetensors"))  # noqa: ASYNC240
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
        go_on()
        await durable(client, store, weights.version)
    with pytest.raises(RemoteError) as refused:
        await clients[1].prepare_weights(weights)
    assert refused.value.code is grpc.StatusCode.DATA_LOSS
    assert refused.value.metadata["tensor"] in store.manifest(weights.version).tensors
    assert (await clients[0].get()).weights == weights
    assert len(await score(clients[0])) > 0


async def test_the_next_publication_and_checkpoints_wait_for_it(
    trainer, client, clients, engines, store
) -> None:
    with held(trainer, "weights.behind") as go_on:
        first = (await client.publish_weights(all_of(engines))).weights
        with locked(Path(store.location, "retain.lock")):  # nobody commits
            go_on()
            saved = asyncio.ensure_future(await client.begin_checkpoint("waits"))
            publishing = asyncio.create_task(client.publish_weights(all_of(engines)))
            async with trainer.client() as watching:

                async def both_wait() -> bool:
                    waits = [wait.what for wait in await watching.list_waits()]
                    return waits.count(f"weight version {first.version} to be written") == 2

                await poll(both_wait, interval=0.05)
            assert not saved.done()
            assert not names_in(trainer.store / "checkpoints") & {"waits"}
            assert not publishing.done()
        second = (await publishing).weights
        await saved
    assert store.has(first.version)
    assert second.version > first.version
    await durable(client, store, second.version)


async def test_a_publication_cancelled_while_it_waits_takes_no_number(
    trainer, client, clients, engines, store
) -> None:
    """What it waited for is written all the same, and the next one waits for that as it did."""
    with held(trainer, "weights.behind") as go_on:
        first = (await client.publish_weights(all_of(engines))).weights
        request = pb.PublishWeightsRequest(request_id="cancelled", engines=all_of(engines))
        operation = await client.stub.PublishWeights(request, timeout=PATIENCE)
        async with trainer.client() as watching:

            async def waiting(count: int) -> bool:
                waits = [wait.what for wait in await watching.list_waits()]
                return waits.count(f"weight version {first.version} to be written") == count

            await poll(partial(waiting, 1), interval=0.05)
            operations = operations_pb2_grpc.OperationsStub(watching.channel)
            cancel = operations_pb2.CancelOperationRequest(name=operation.name)
            await operations.CancelOperation(cancel, timeout=PATIENCE)
            await poll(partial(waiting, 0), interval=0.05)
            get = operations_pb2.GetOperationRequest(name=operation.name)
            ended = await operations.GetOperation(get, timeout=PATIENCE)
            assert ended.error.code == grpc.StatusCode.CANCELLED.value[0]
            assert (await watching.get()).promised_version == first.version
            publishing = asyncio.create_task(client.publish_weights(all_of(engines)))
            await poll(partial(waiting, 1), interval=0.05)
        assert not publishing.done()
        assert not store.has(first.version)
        go_on()
        second = (await publishing).weights
    assert store.has(first.version)
    assert second.version == first.version + 1
    await client.save_checkpoint("after-a-cancellation")
    record = json.loads((trainer.store / "checkpoints/after-a-cancellation" / RECORD).read_text())
    assert record["weights"] == {"version": second.version, "digest": second.digest}
    assert store.get(second.version).digest == second.digest


async def test_without_an_engine_that_has_it_a_version_is_durable_at_once(
    client, clients, engines, store
) -> None:
    published = await client.publish_weights()
    assert not published.promised
    assert store.has(published.weights.version)
    away = pb.TransferTarget(engine_id="away", address="127.0.0.1:1")
    published = await client.publish_weights([away])
    assert (published.promised, set(failures(published))) == (False, {"away"})
    assert store.has(published.weights.version)


async def test_a_rank_that_dies_while_it_writes_loses_the_version_for_good(
    trainer, client, clients, engines, store
) -> None:
    """The engines serve it until they are given another one; its number is not given again."""
    await client.save_checkpoint("before")
    held_before = bytes_of(store, (await client.publish_weights()).weights.version)
    restarts = (await client.get()).restart_count
    await take_step(client, "lost")
    ranks = warm.children(trainer.process.pid)
    faults.arm(armed(trainer), "weights.behind", number=signal.SIGSTOP)
    lost = (await client.publish_weights(all_of(engines))).weights
    for c in clients:
        await c.commit_weights(lost)

    async def stopped() -> list[psutil.Process]:
        return [rank for rank in ranks if rank.status() == psutil.STATUS_STOPPED]

    await poll(stopped, interval=0.05)
    for rank in await stopped():
        rank.kill()
    await until(client, lambda now: now.restart_count > restarts and now.state == ACTIVE)
    with pytest.raises(RemoteError) as told:  # never silent, whatever was asked for meanwhile
        await client.publish_weights(all_of(engines))
    assert told.value.reason == "RANK_LOST"
    assert not store.has(lost.version)
    assert not names_in(Path(store.location, "promised"))
    assert not names_in(Path(store.location, "staging"))
    assert {(await c.get()).weights.version for c in clients} == {lost.version}
    again = (await client.publish_weights(all_of(engines))).weights
    assert again.version > lost.version
    for c in clients:
        await c.commit_weights(again)
    await durable(client, store, again.version)
    assert bytes_of(store, again.version) == held_before  # the ranks went back to the checkpoint


async def test_a_full_disk_behind_is_told_once_and_then_work_goes_on(
    trainer, client, clients, engines, store
) -> None:
    ranks = warm.children(trainer.process.pid)
    with held(trainer, "weights.sent") as go_on:
        publishing = asyncio.create_task(client.publish_weights(all_of(engines)))
        root = psutil.Process(trainer.process.pid)
        await poll(lambda: is_stopped(root), interval=0.05)
        limits = [(rank, rank.rlimit(psutil.RLIMIT_FSIZE)) for rank in ranks]
        for rank in ranks:
            rank.rlimit(psutil.RLIMIT_FSIZE, (4096, limits[0][1][1]))
        go_on()
        lost = (await publishing).weights
        await until(client, lambda now: now.promised_version == 0)
    with pytest.raises(RemoteError) as refused:
        await client.save_checkpoint("names-it")
    assert refused.value.reason == "STORE_FAILED"
    for rank, limit in limits:
        rank.rlimit(psutil.RLIMIT_FSIZE, limit)
    with pytest.raises(RemoteError) as told:
        await client.publish_weights(all_of(engines))
    assert told.value.reason == "STORE_FAILED"
    assert "safetensors" in told.value.message
    assert not store.has(lost.version)
    assert "names-it" not in names_in(trainer.store / "checkpoints")
    again = (await client.publish_weights(all_of(engines))).weights
    assert again.version > lost.version
    assert again.digest == lost.digest  # the ranks are where they were
    await durable(client, store, again.version)


async def a_child_is_stopped(trainer: RunningTrainer) -> bool:
    ranks = warm.children(trainer.process.pid)
    return any([await is_stopped(rank) for rank in ranks])


async def is_stopped(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_STOPPED


@pytest.mark.parametrize("point", ["weights.promised", "weights.sent", "weights.written"])
async def test_a_controller_that_is_killed_leaves_no_promise(
    tmp_path, model, engines, clients, trainer, store, point
) -> None:
    """Another one in its place, on the same store."""
    settings = {**SETTINGS, "store": str(trainer.store)}
    with running_trainer(tmp_path / "one", model, **settings) as dying:
        async with TrainerClient(dying.address, dying.security) as client:
            await until(client, lambda now: now.state == ACTIVE)
            before = (await client.publish_weights()).weights.version
            faults.arm(tmp_path / "one" / "faults", point)
            with pytest.raises(RemoteError):  # or it was answered, and is lost
                await client.publish_weights(all_of(engines))
                await client.publish_weights(all_of(engines))
        assert dying.process.wait(PATIENCE) == -signal.SIGKILL
    assert names_in(Path(store.location, "promised")) == {f"{before + 1:08d}"}
    with running_trainer(tmp_path / "two", model, **settings) as next_one:
        async with TrainerClient(next_one.address, next_one.security) as client:
            await until(client, lambda now: now.state == ACTIVE)
            assert not names_in(Path(store.location, "promised"))
            assert store.versions()[-1] == before
            published = await client.publish_weights()
            assert published.weights.version == before + 2


def test_what_does_not_go_together_is_refused_by_name(tmp_path: Path, model: Path) -> None:
    def load(**settings: object) -> TrainerConfig:
        return TrainerConfig.model_validate(
            {"model": str(model), "store": str(tmp_path), **settings}
        )

    both = {"enabled": True, "write_behind": True}
    assert load(transfer=both).transfer.write_behind
    assert load(transfer=both, weights="s3://bucket/prefix").transfer.write_behind
    for settings, name in (
        ({"transfer": {"write_behind": True}}, "write_behind has no effect without enabled"),
        ({"transfer": both, "publish": {"delta": True}}, "publish.delta"),
        ({"transfer": both, "lora": {"rank": 2}}, "lora"),
    ):
        with pytest.raises(ValueError, match=name):
            load(**settings)
