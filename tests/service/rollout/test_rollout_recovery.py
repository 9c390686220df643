"""Nothing is lost or done twice when a stream, a worker or an engine goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.rollout import process
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.client import (
    EngineClient,
    RemoteError,
    RolloutClient,
    error_from_status,
    typed_errors,
)
from sluice.samples.blob_store import BlobStore
from sluice.samples.blobs import BlobReference
from tests.patience import PATIENCE
from tests.service.rollout import talk
from tests.service.rollout.harness import (
    Models,
    Store,
    copy_rows,
    load_weights,
    rollout_request,
    running_episodes,
    running_rollout,
    running_router,
    wait_for_engines,
)
from tests.unit.rollout import grim

IN_PLACE = engine_pb.PauseRequest(mode=engine_pb.PAUSE_MODE_IN_PLACE)


def grim_rows(*deeds: str) -> list[dict[str, str]]:
    return [{"prompt": "12=", "deed": deed} for deed in deeds]


async def first_events(client: RolloutClient, request: pb.RolloutRequest, count: int) -> Any:
    """Listen to so many events, then go away."""
    stream = client.stub.Rollout(request)
    events = [await stream.read() for _ in range(count)]
    stream.cancel()
    return events


async def decoded(client: EngineClient) -> int:
    return (await client.get()).decoded_token_count


def untimed(group: pb.FinishedGroup) -> pb.FinishedGroup:
    """The group as it is announced again: the trace is told once."""
    assert group.HasField("trace")
    group.ClearField("trace")
    return group


async def test_a_stream_that_broke_is_told_everything_again(store: Store, models: Models) -> None:
    async with running_episodes(store, models.first) as episodes:
        request = rollout_request(copy_rows(6), settings={"reward": "position_match"})
        heard = await first_events(episodes.client, request, 2)
        finished = await episodes.finished(request)
        assert len(finished) == 6
        for group in finished.values():  # what broke off just then may be told with its trace
            group.ClearField("trace")
        for event in heard:
            assert finished[event.finished.group_id] == untimed(event.finished)
        before = await decoded(episodes.engine)
        assert await episodes.finished(request) == finished
        assert await decoded(episodes.engine) == before, "nothing is sampled again"
        request.sample_count = 5
        with pytest.raises(RemoteError) as caught:
            await episodes.finished(request)
        assert caught.value.reason == "REQUEST_ID_REUSED"


async def test_a_rollout_nobody_listens_to_is_stopped_and_can_go_on(
    store: Store, models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running_episodes(store, models.first, orphan_seconds=0.1) as episodes:
        request = rollout_request(grim_rows("smile", "stall"), environment="grim")
        (event,) = await first_events(episodes.client, request, 1)
        async with asyncio.timeout(PATIENCE):
            while "has no listener" not in caplog.text:
                await asyncio.sleep(0.02)
            while await episodes.client.list_waits():
                await asyncio.sleep(0.02)
        with pytest.raises(RemoteError) as caught:
            await episodes.client.cancel(request.request_id)
        assert caught.value.reason == "ROLLOUT_NOT_FOUND"
        stream = episodes.client.stub.Rollout(request)  # listened to until it is cancelled
        assert (await stream.read()).finished == untimed(event.finished)  # announced first
        assert await episodes.client.cancel(request.request_id) == ["g1"]


async def test_a_caller_that_leaves_while_its_rollout_begins_leaves_nothing_running(
    store: Store, models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    door = tmp_path / "door"
    async with running_episodes(store, models.first, orphan_seconds=0.1) as episodes:
        settings = {"door": str(door)}  # it begins for as long as the test wants it to
        stream = episodes.client.stub.Rollout(
            rollout_request(grim_rows("stall"), environment="grim", settings=settings)
        )
        async with asyncio.timeout(PATIENCE):
            while not [w for w in await episodes.client.list_waits() if "settings of" in w.what]:
                await asyncio.sleep(0.005)
            stream.cancel()
            door.touch()
            while "has no listener" not in caplog.text:
                await asyncio.sleep(0.02)
            while await episodes.client.list_waits():
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def episode_process(
    store: Store, model: Path, router: str, log: Path
) -> AsyncIterator[tuple[asyncio.subprocess.Process, RolloutClient]]:
    """An episode worker in a process of its own."""
    file = log.with_suffix(".json")
    environments = {"grim": grim.PATH, "strict": talk.STRICT}
    with log.open("w") as stderr:
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.rollout", "--roles", '["episodes"]'),
            *("--router", router, "--store", str(store.root), "--tokenizer", str(model)),
            *("--episodes.environments", json.dumps(environments)),
            *("--server.address_file", str(file), "--server.drain_seconds", "0.2"),
            stdout=stderr,
            stderr=stderr,
        )
    try:
        async with asyncio.timeout(PATIENCE):
            while not file.exists():
                assert worker.returncode is None, f"see {log}"
                await asyncio.sleep(0.02)
        address = json.loads(file.read_text())["address"]
        async with RolloutClient(address) as client:
            yield worker, client
    finally:
        if worker.returncode is None:
            worker.terminate()
            async with asyncio.timeout(PATIENCE):
                assert await worker.wait() == 0, f"see {log}"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_the_log_has_a_part_of_what_is_printed_in_the_worker_and_how_much_is_left_out(
    store: Store, models: Models, tmp_path: Path
) -> None:
    log = tmp_path / "worker.log"
    row = {"print": 1_000_000}
    async with running_router() as router, contextlib.AsyncExitStack() as stack:
        episodes = episode_process(store, models.first, router.server.address, log)
        _, client = await stack.enter_async_context(episodes)
        call = client.rollout(rollout_request([row] * 3, environment="strict"))
        assert [event.failed.error.code async for event in call] == [3] * 3
        await stack.aclose()
    text = log.read_text()
    assert len(text) < 200_000
    left_out = sum(map(int, re.findall(r" printed (\d+) bytes more", text)))
    assert 2_800_000 < left_out < 3_000_003
    assert "x" * 10_000 in text


async def test_a_worker_killed_in_the_middle_is_followed_by_another(
    store: Store, models: Models, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    rows = grim_rows("smile", "stall", "smile", "stall")
    request = rollout_request(rows, environment="grim", settings={"marks": str(marks)})
    async with contextlib.AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router())
        address = router.server.address
        engine_process = await stack.enter_async_context(
            running_rollout(store, roles=["engine"], router=address)
        )
        engine = await stack.enter_async_context(EngineClient(engine_process.server.address))
        await load_weights(engine, store.first)

        first = episode_process(store, models.first, address, tmp_path / "first.log")
        async with first as (worker, client):
            stream = client.stub.Rollout(request)
            announced = {(await stream.read()).finished.group_id for _ in range(2)}
            assert announced == {"g0", "g2"}
            worker.send_signal(signal.SIGKILL)
            await worker.wait()
            with pytest.raises(grpc.aio.AioRpcError):
                await stream.read()
        async with asyncio.timeout(PATIENCE):
            while any(is_alive(int(path.name.partition("-")[2])) for path in marks.iterdir()):
                await asyncio.sleep(0.02)  # judges do not outlive their worker

        before = await decoded(engine)
        second = episode_process(store, models.first, address, tmp_path / "second.log")
        async with second as (_, client):
            stream = client.stub.Rollout(request)
            repeated = [(await stream.read()).finished for _ in range(2)]
            assert {group.group_id for group in repeated} == announced
            for group in repeated:
                assert len(store.samples(group)) == 4
            async with asyncio.timeout(PATIENCE):
                while await decoded(engine) == before:
                    await asyncio.sleep(0.02)  # the other two are sampled again
            assert await client.cancel(request.request_id) == ["g1", "g3"]
            assert (await stream.read()).failed.group_id == "g1"

        third = episode_process(store, models.first, address, tmp_path / "third.log")
        async with third as (_, client):
            await check_settled(client, request)


async def check_settled(client: RolloutClient, request: pb.RolloutRequest) -> None:
    """The rollout is over: it is announced again as it ended, and its id is taken."""
    events = [event async for event in client.rollout(request)]
    kinds = [event.WhichOneof("event") for event in events]
    outcomes = {
        getattr(event, kind).group_id: kind for event, kind in zip(events, kinds, strict=True)
    }
    assert outcomes == {"g0": "finished", "g1": "failed", "g2": "finished", "g3": "failed"}
    request.sample_count = 3
    with pytest.raises(RemoteError) as caught:
        _ = [event async for event in client.rollout(request)]
    assert caught.value.reason == "REQUEST_ID_REUSED"


@pytest.mark.parametrize("takes_more", [True, False])
async def test_groups_that_are_there_come_in_one_message_to_who_takes_it(
    store: Store, models: Models, takes_more: bool
) -> None:
    request = rollout_request(copy_rows(3))
    request.takes_more = takes_more
    async with running_episodes(store, models.first) as episodes:
        finished = await episodes.finished(request)
        messages = [message async for message in episodes.client.stub.Rollout(request)]
    assert [len(message.more) for message in messages] == ([2] if takes_more else [0, 0, 0])
    named = [each.finished.group_id for m in messages for each in (m, *m.more)]
    assert sorted(named) == sorted(finished) == ["g0", "g1", "g2"]


async def test_a_damaged_blob_is_sampled_again(store: Store, models: Models) -> None:
    request = rollout_request(copy_rows(2))
    async with running_episodes(store, models.first) as episodes:
        finished = await episodes.finished(request)
    digest = finished["g1"].blob.digest
    path = store.root / "blobs" / digest
    content = bytes(BlobStore(store.root).get(BlobReference(digest, 0)))
    path.unlink()  # its file may be another's too
    path.write_bytes(content[:-3] + b"xyz")
    async with running_episodes(store, models.first) as episodes:
        again = await episodes.finished(request)
    assert again["g0"] == untimed(finished["g0"])
    assert store.samples(again["g1"])


async def test_old_rollouts_are_forgotten_and_their_blobs_let_go(
    store: Store, models: Models
) -> None:
    blobs = BlobStore(store.root, sync=False)
    async with running_episodes(store, models.first, kept_rollouts=2) as episodes:
        requests = [rollout_request(copy_rows(1)) for _ in range(4)]
        for request in requests:
            await episodes.finished(request)
    owners = {f"rollout/{request.request_id}" for request in requests[2:]}
    assert set(blobs.owners()) == owners
    assert len(list((store.root / "rollouts").iterdir())) == 2


async def test_a_lost_engine_is_replaced_by_another(store: Store, models: Models) -> None:
    """Half of the samples hang on an engine that goes away; they are drawn on the other."""
    async with running_episodes(store, models.first, split=True) as episodes:
        router = episodes.router.server.address
        async with contextlib.AsyncExitStack() as stack:
            lost = await stack.enter_async_context(
                running_rollout(store, roles=["engine"], engine_id="rollout-9", router=router)
            )
            async with EngineClient(lost.server.address) as client:
                await load_weights(client, store.first)
                await client.stub.Pause(IN_PLACE)
            await wait_for_engines(router, 2)
            request = rollout_request(copy_rows(4), sample_count=4)
            for group in request.groups:
                group.seeds.extend(range(4))
            running = asyncio.create_task(episodes.finished(request))
            async with asyncio.timeout(PATIENCE):
                while not _waits_on(await episodes.client.list_waits(), "rollout-9"):
                    await asyncio.sleep(0.02)
        finished = await running
        assert finished.keys() == {f"g{i}" for i in range(4)}
        request.request_id += "-again"
        again = await episodes.finished(request)
        for name, group in finished.items():
            drawn = [sample.token_ids.tolist() for sample in store.samples(group)]
            assert drawn == [s.token_ids.tolist() for s in store.samples(again[name])]


async def all_told(client: RolloutClient, request: pb.RolloutRequest) -> list[Any]:
    return [event async for event in client.rollout(request)]


def _waits_on(waits: Any, engine_id: str) -> bool:
    return any(engine_id in wait.on for wait in waits)


async def test_when_every_engine_is_lost_groups_fail_in_time(store: Store, models: Models) -> None:
    async with running_router() as router:
        common = {"router": router.server.address, "tokenizer": str(models.first)}
        async with (
            running_rollout(store, roles=["episodes"], engine_id="e", **common) as worker,
            RolloutClient(worker.server.address) as client,
        ):
            async with running_rollout(store, roles=["engine"], engine_id="x", **common) as engine:
                async with EngineClient(engine.server.address) as engine_client:
                    await load_weights(engine_client, store.first)
                    await wait_for_engines(router.server.address, 1)
                    await engine_client.stub.Pause(IN_PLACE)
                for seconds in (6, 60, 600):  # time enough to be seen at work
                    request = rollout_request(copy_rows(2))
                    request.group_timeout.FromSeconds(seconds)
                    ending, seen = asyncio.create_task(all_told(client, request)), False
                    while not (seen or ending.done()):
                        seen = _waits_on(await client.list_waits(), "x")
                        await asyncio.sleep(0.02)
                    if seen:
                        break
                assert seen
            events = await asyncio.wait_for(ending, 2 * PATIENCE)
        assert len(events) == 2
        for event in events:
            group = event.failed
            error = error_from_status(group.error)
            assert error.reason in ("GROUP_TIMED_OUT", "ENGINE_LOST"), error


async def test_a_router_that_refuses_for_good_is_no_bug_of_the_worker(
    store: Store, models: Models, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    security = {"security": {"token_file": str(token)}, "drain_seconds": 0.2}
    async with running_router(server=security) as router:
        common = {"router": router.server.address, "tokenizer": str(models.first)}
        async with (
            running_rollout(store, roles=["episodes"], **common) as worker,
            RolloutClient(worker.server.address) as client,
        ):
            (event,) = [event async for event in client.rollout(rollout_request(copy_rows(1)))]
    error = error_from_status(event.failed.error)
    expected = (grpc.StatusCode.UNAUTHENTICATED, "TOKEN_MISSING_OR_WRONG")
    assert (error.code, error.reason) == expected


async def test_a_worker_that_stops_sends_its_listeners_elsewhere(
    store: Store, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Told long before the server would cut them off, and without a long wait for the rest.
    monkeypatch.setattr(process, "DRAIN_SHARE", 0.5 / PATIENCE)
    request = rollout_request(grim_rows("smile", "stall"), environment="grim")
    server = {"drain_seconds": PATIENCE}
    async with running_episodes(store, models.first, server=server) as episodes:
        stream = episodes.client.stub.Rollout(request)
        finished = (await stream.read()).finished
        stopping = asyncio.create_task(episodes.worker.server.stop())
        with pytest.raises(RemoteError) as caught, typed_errors():
            await stream.read()
        expected = (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert (caught.value.code, caught.value.reason) == expected
        await stopping
    async with running_episodes(store, models.first) as episodes:
        (event,) = await first_events(episodes.client, request, 1)
        assert event.finished == untimed(finished)
        await episodes.client.cancel(request.request_id)
