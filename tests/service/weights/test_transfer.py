"""A trainer of two ranks sends weights to three engines, some of which stop or die.

The tests share the processes, which each leaves serving.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice import faults, platform
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.client import EngineClient, RemoteError
from tests.patience import PATIENCE
from tests.service.trainer.harness import (
    ACTIVE,
    RunningTrainer,
    make_groups,
    poll,
    running_trainer,
    train_step,
    until,
    upload,
)
from tests.service.weights.harness import RunningEngine, running_engines

SECONDS = PATIENCE / 2  # of a transfer; no test waits for it
ANSWER_SECONDS = 10  # two tests wait for it
TOKENS = [1, 2, 3, 4, 5, 6]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningTrainer]:
    root = tmp_path_factory.mktemp("trainer")
    settings = {
        "ranks": {"count": 2, "command_timeout": 10 * SECONDS},
        "publish": {"delta": True, "chain": 3},
        "transfer": {
            "enabled": True,
            "timeout_seconds": SECONDS,
            "answer_seconds": ANSWER_SECONDS,
            "bucket_bytes": 40_000,
        },
    }
    with running_trainer(root, model, **settings) as running:
        yield running


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, model: Path, trainer: RunningTrainer
) -> Iterator[list[RunningEngine]]:
    root = tmp_path_factory.mktemp("engines")
    with running_engines(root, model, trainer.store, trainer.security, 3) as running:
        yield running


async def score(client: EngineClient) -> list[float]:
    request = engine_pb.ScoreRequest(token_ids=TOKENS, prompt_length=1)
    return list((await client.stub.Score(request)).logprobs)


def failures(response) -> dict[str, str]:
    return {
        outcome.engine_id: outcome.error.message
        for outcome in response.engines
        if outcome.HasField("error")
    }


async def test_all_engines_receive_what_the_store_has(client, clients, engines) -> None:
    before = await score(clients[0])
    batch = await upload(client, "one", make_groups("one"))
    await train_step(client, batch)
    published = await client.publish_weights([engine.target for engine in engines])
    assert failures(published) == {}
    assert len(published.engines) == 3
    weights = published.weights
    states = [await c.get() for c in clients]
    assert all(weights.version in state.prepared_versions for state in states)
    assert len({state.transfer_group for state in states}) == 1
    assert [await c.prepare_weights(weights) for c in clients] == [0.0] * 3  # it is there already
    for c in clients[:2]:
        await c.commit_weights(weights)
    received = await score(clients[0])
    assert received != before
    assert received == await score(clients[1])


async def test_what_came_over_a_transfer_is_what_the_store_gives(client, clients, engines) -> None:
    """The third engine reads from the store what the others received: a version of deltas."""
    published = await client.publish_weights([engine.target for engine in engines[:2]])
    if published.byte_count == published.full_byte_count:  # the first version of a chain is whole
        published = await client.publish_weights([engine.target for engine in engines[:2]])
    assert failures(published) == {}
    assert published.byte_count < 0.2 * published.full_byte_count  # nothing has changed
    assert await clients[2].prepare_weights(published.weights) > 0
    for c in clients:
        await c.commit_weights(published.weights)
    scores = [await score(c) for c in clients]
    assert scores[0] == scores[1] == scores[2]


async def test_a_group_lasts_while_its_members_do(client, clients, engines) -> None:
    targets = [engine.target for engine in engines]
    groups = []
    for _ in range(2):
        published = await client.publish_weights(targets)
        assert failures(published) == {}
        groups.append({(await c.get()).transfer_group for c in clients})
    assert groups[0] == groups[1]
    assert len(groups[0]) == 1


async def test_an_engine_that_is_not_there_is_named_and_the_others_go_on(
    client, clients, engines
) -> None:
    away = engines[0].target
    away.engine_id, away.address = "away", "127.0.0.1:1"
    published = await client.publish_weights([away, engines[0].target])
    assert set(failures(published)) == {"away"}
    assert published.weights.version in (await clients[0].get()).prepared_versions


async def test_a_stopped_engine_holds_nobody_up_and_catches_up_alone(
    client, clients, engines
) -> None:
    stuck, *others = engines
    with stuck.stopped():
        async with asyncio.timeout(SECONDS):  # nobody waits for the deadline
            published = await client.publish_weights([engine.target for engine in engines])
        assert set(failures(published)) == {stuck.engine_id}
        for c in clients[1:]:
            assert published.weights.version in (await c.get()).prepared_versions
            await c.commit_weights(published.weights)
    await clients[0].prepare_weights(published.weights)
    await clients[0].commit_weights(published.weights)
    scores = [await score(c) for c in clients]
    assert scores[0] == scores[1] == scores[2]
    assert len(others) == 2


async def test_waits_name_the_transfer_and_who_is_late(trainer, client, clients, engines) -> None:
    victim = engines[1]
    targets = [engine.target for engine in (engines[0], victim)]
    async with trainer.client() as watching:

        async def is_named() -> bool:
            waits = await watching.list_waits()
            found = [wait for wait in waits if wait.what.startswith("transfer of weight version")]
            return bool(found) and victim.engine_id in found[0].on

        with victim.stopped():
            publishing = asyncio.create_task(client.publish_weights(targets))
            await poll(is_named, interval=0.05)
            published = await publishing
    assert set(failures(published)) == {victim.engine_id}
    assert published.weights.version in (await clients[0].get()).prepared_versions


async def test_members_that_do_not_come_are_named_until_the_deadline(clients, engines) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        request = engine_pb.JoinTransferGroupRequest(
            transfer_group="nobody",
            senders=[engine_pb.TransferSender(address=address, group="nobody-0")],
            first_rank=1,
            world_size=2,
            backend=platform.CPU.collective,
        )

        async def is_named() -> bool:
            waits = await clients[0].list_waits()
            found = [wait for wait in waits if wait.what == "members of transfer group nobody"]
            return bool(found) and list(found[0].on) == [address]

        named = False
        for seconds in (5, 50, 500):  # in which they have to be seen
            request.timeout.FromSeconds(seconds)
            joining = asyncio.create_task(clients[0].join_transfer_group(request))
            while not (named or joining.done()):
                named = await is_named()
                await asyncio.sleep(0.05)
            with pytest.raises(RemoteError) as refused:
                await asyncio.wait_for(joining, PATIENCE)
            assert refused.value.reason == "TRANSFER_BROKEN"
            if named:
                break
        assert named
    assert (await clients[0].get()).transfer_group == ""


async def test_weights_of_a_group_that_was_not_joined_are_refused(client, clients) -> None:
    weights = (await client.publish_weights()).weights
    transfer = engine_pb.WeightTransfer(transfer_group="another")
    with pytest.raises(RemoteError) as refused:
        await clients[0].prepare_weights(weights, transfer)
    assert refused.value.reason == "TRANSFER_GROUP_NOT_JOINED"


async def test_one_engine_of_three_killed_in_mid_transfer(client, clients, engines) -> None:
    victim = engines[1]
    targets = [engine.target for engine in engines]
    restarts = (await client.get()).restart_count
    await client.publish_weights(targets)  # all are in one group again
    victim.kill_at("transfer.received", passing=3)
    async with asyncio.timeout(SECONDS):  # nobody waits for the deadline
        published = await client.publish_weights(targets)
    assert victim.process.wait(PATIENCE) == -signal.SIGKILL
    assert set(failures(published)) == {victim.engine_id}
    for c in (clients[0], clients[2]):
        assert published.weights.version in (await c.get()).prepared_versions
        await c.commit_weights(published.weights)
    assert await score(clients[0]) == await score(clients[2])
    trainer = await client.get()
    assert (trainer.state, trainer.restart_count) == (ACTIVE, restarts)


async def test_a_rank_killed_in_mid_transfer_leaves_the_engines_serving(
    trainer, client, clients, engines
) -> None:
    left = [engines[0], engines[2]]
    before = [(await c.get()).weights for c in (clients[0], clients[2])]
    restarts = (await client.get()).restart_count
    # Both ranks pass there at once: at the first passing one takes the fault, nobody counts on.
    faults.arm(trainer.store.parent / "faults", "transfer.sent")
    with pytest.raises(RemoteError) as lost:
        await client.publish_weights([engine.target for engine in left])
    assert lost.value.reason == "RANK_LOST"
    assert [(await c.get()).weights for c in (clients[0], clients[2])] == before
    await until(client, lambda now: now.state == ACTIVE and now.restart_count == restarts + 1)
    published = await client.publish_weights([engine.target for engine in left])
    assert failures(published) == {}
    for c in (clients[0], clients[2]):
        assert await c.prepare_weights(published.weights) == 0.0
