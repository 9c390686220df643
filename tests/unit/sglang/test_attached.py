"""An engine at a server that runs already. SGLang's answers are played back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from services.rollout.engine.config import EngineConfig, SglangConfig
from services.rollout.engine.interface import Generation, IncomingWeights, PauseMode, Sampling
from services.rollout.engine.sglang import replica
from services.rollout.engine.sglang.client import SglangClient
from services.rollout.engine.sglang.engine import SglangEngine
from services.rollout.errors import (
    DigestMismatchError,
    EngineFailedError,
    NoSleepError,
    NotQuietError,
    NoWeightsError,
    UnfitWeightsError,
)
from sluice.ports import free_port
from sluice.runtime.errors import InvalidFieldError
from sluice.weights.manifest import read_manifest
from sluice.weights.store import StoredVersion, WeightStore
from tests.imported import import_checkpoint
from tests.patience import PATIENCE
from tests.unit.sglang.test_handshake import SERVER, openapi
from tests.unit.sglang.test_weights import write_model


class Recorded:
    """Answers every POST with success, and keeps what was asked.

    Of /generate it streams `messages`, and keeps the bodies.
    """

    def __init__(self, **server: Any) -> None:
        self.asked: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.given: dict[str, bytes] = {}  # by path, the last
        self.messages: list[dict[str, Any]] = []
        self.goes_on = asyncio.Event()  # until when /generate says no more than its messages
        self.goes_on.set()
        self.holds = ""  # a path: it does what is asked there, and answers once it is let
        self.came, self.let = asyncio.Event(), asyncio.Event()
        self.answers = {
            "/server_info": {**SERVER, "dtype": "float32", **server},
            "/openapi.json": openapi(),
        }

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path = head.split()[:2]
        given = b""
        for line in head.splitlines():
            if line.lower().startswith("content-length:"):
                given = await reader.readexactly(int(line.partition(":")[2]))
        if method == "POST":
            self.asked.append(path)
            self.given[path] = given
        body = json.dumps(self.answers.get(path, {"success": True})).encode()
        if path == "/generate":
            self.bodies.append(json.loads(given))
            events = [*map(json.dumps, self.messages), "[DONE]"]
            body = "".join(f"data: {event}\n\n" for event in events).encode()
            await self.goes_on.wait()
        if path == self.holds:
            self.came.set()
            await self.let.wait()
        writer.write(
            b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await writer.drain()
        writer.close()


def engine_at(
    port: int, folder: Path, model: str, verify: Literal["checksum", "off"] = "off", **settings: Any
) -> SglangEngine:
    sglang = SglangConfig(
        url=f"http://127.0.0.1:{port}",
        verify=verify,
        backoff_seconds=0.2,  # then 0.4, 0.8, 1.6 and 3.2
    )
    return SglangEngine(EngineConfig(backend="sglang", model=model, sglang=sglang, **settings))


@asynccontextmanager
async def attached(
    folder: Path, recorded: Recorded, **settings: Any
) -> AsyncIterator[SglangEngine]:
    server = await asyncio.start_server(recorded.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    engine = engine_at(port, folder, str(folder / "model"), **settings)
    async with server:
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()


@pytest.fixture
def record(tmp_path: Path) -> StoredVersion:
    store = WeightStore(tmp_path / "store", durable=False)
    return import_checkpoint(store, write_model(tmp_path / "model"), None, 0)


async def ask(engine: SglangEngine) -> None:
    request = Generation(request_id="a", prompt_token_ids=[1], sampling=Sampling(max_new_tokens=1))
    async for _ in engine.generate(request):
        pass


async def begin(engine: SglangEngine, recorded: Recorded) -> asyncio.Task[None]:
    """Asks; returns once the server has the request. What was asked of it before is forgotten."""
    asking = asyncio.create_task(ask(engine))
    async with asyncio.timeout(PATIENCE):
        while not recorded.bodies:
            await asyncio.sleep(0.01)
    recorded.asked.clear()
    return asking


async def test_sleep_needs_a_pause_and_waking_needs_weights(
    record: StoredVersion, tmp_path: Path
) -> None:
    recorded = Recorded(enable_memory_saver=True)
    async with attached(tmp_path, recorded) as engine:
        with pytest.raises(NotQuietError):
            await engine.sleep()
        await engine.pause(PauseMode.ABORT)
        await engine.sleep()
        await engine.sleep()
        assert recorded.asked[-4:] == [  # what was given up has ended by then, and nothing began
            "/continue_generation",
            "/flush_cache?timeout=50",
            "/pause_generation",
            "/release_memory_occupation",
        ]
        assert recorded.asked.count("/release_memory_occupation") == 1
        assert engine.status().version is None
        with pytest.raises(NoWeightsError):
            await ask(engine)
        await engine.prepare(record.version, record.digest, record.directory)
        with pytest.raises(NotQuietError):
            await engine.commit(record.version, PauseMode.IN_PLACE)
        await engine.wake()
        assert engine.status().version is None
        await engine.commit(record.version, PauseMode.IN_PLACE)
        assert engine.status().version == record.version
        assert recorded.asked[-2:] == ["/resume_memory_occupation", "/update_weights_from_disk"]
        assert engine.status().paused
        await engine.resume()
        assert recorded.asked[-1] == "/continue_generation"


async def test_without_a_memory_saver_there_is_no_sleep(
    record: StoredVersion, tmp_path: Path
) -> None:
    async with attached(tmp_path, Recorded()) as engine:
        await engine.pause(PauseMode.WAIT)
        with pytest.raises(NoSleepError):
            await engine.sleep()
        assert engine.status().version == 0


async def test_an_attached_server_that_comes_back_before_any_weights_is_given_them(
    record: StoredVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "WATCH_SECONDS", 0.02)
    refused, answers = asyncio.Event(), SglangClient.answers

    async def answers_late(client: SglangClient) -> bool:
        await refused.wait()  # it is not missed before it has refused the weights
        return await answers(client)

    monkeypatch.setattr(SglangClient, "answers", answers_late)
    recorded = Recorded()
    port = free_port("127.0.0.1")  # taken twice, and nobody else is given it meanwhile
    server = await asyncio.start_server(recorded.serve, "127.0.0.1", port)
    engine = engine_at(port, tmp_path, "")
    await engine.start()
    manifest = read_manifest(record.directory)
    with pytest.raises(UnfitWeightsError):
        await engine.receive(IncomingWeights(manifest=manifest, buckets=[], seconds=1.0))
    server.close()
    await server.wait_closed()
    await engine.prepare(record.version, record.digest, record.directory)
    with pytest.raises(EngineFailedError):
        await engine.commit(record.version, PauseMode.ABORT)
    refused.set()
    async with asyncio.timeout(PATIENCE):
        while engine._replica.is_up:
            await asyncio.sleep(0.02)
    async with await asyncio.start_server(recorded.serve, "127.0.0.1", port):
        async with asyncio.timeout(PATIENCE):
            while not engine.status().restarts_total:
                await asyncio.sleep(0.02)
        await engine.commit(record.version, PauseMode.ABORT)
        assert (engine.status().version, engine.status().failure) == (record.version, "")
        await engine.close()


async def test_an_attached_server_that_comes_back_is_given_the_weights_it_had(
    record: StoredVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "WATCH_SECONDS", 0.02)
    recorded = Recorded()
    port = free_port("127.0.0.1")  # taken twice, and nobody else is given it meanwhile
    server = await asyncio.start_server(recorded.serve, "127.0.0.1", port)
    engine = engine_at(port, tmp_path, str(tmp_path / "model"))
    await engine.start()
    await engine.prepare(record.version, record.digest, record.directory)
    await engine.commit(record.version, PauseMode.IN_PLACE)
    server.close()
    await server.wait_closed()
    async with asyncio.timeout(PATIENCE):
        while engine.status().version is not None:
            await asyncio.sleep(0.02)
    recorded.asked.clear()
    async with await asyncio.start_server(recorded.serve, "127.0.0.1", port):
        async with asyncio.timeout(PATIENCE):
            while engine.status().version is None:
                await asyncio.sleep(0.02)
        assert (engine.status().version, engine.status().digest) == (record.version, record.digest)
        assert "/update_weights_from_disk" in recorded.asked
        await engine.close()


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"error": {"message": "cannot pad", "code": 400}}, InvalidFieldError),
        ({"error": {"message": "no memory", "code": 503}}, EngineFailedError),
        ({"error": {"message": "no code"}}, EngineFailedError),
        ({"index": 0, "unheard": "of"}, KeyError),
    ],
)
async def test_what_sglang_says_instead_of_an_answer_ends_the_request(
    tmp_path: Path, message: dict[str, Any], error: type[Exception]
) -> None:
    """It comes behind a status of 200; and the next request has the slot."""
    write_model(tmp_path / "model")
    recorded = Recorded(max_running_requests=1)
    recorded.messages = [message]
    async with attached(tmp_path, recorded, max_running=1) as engine:
        for _ in range(2):
            with pytest.raises(error):
                await asyncio.wait_for(ask(engine), PATIENCE)


@pytest.mark.parametrize(
    ("server", "waits"), [({}, True), ({"disable_overlap_schedule": True}, False)]
)
async def test_weights_wait_for_the_step_that_the_device_is_at(
    record: StoredVersion, tmp_path: Path, server: dict[str, Any], waits: bool
) -> None:
    """A server that overlaps says that it is paused while one runs, over the old weights."""
    recorded = Recorded(**server)
    recorded.goes_on.clear()
    async with attached(tmp_path, recorded) as engine:
        await engine.prepare(record.version, record.digest, record.directory)
        asking = await begin(engine, recorded)
        await engine.commit(record.version, PauseMode.IN_PLACE)
        asked = ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
        assert recorded.asked == [*asked[:1], *["/weights_checker"] * waits, *asked[1:]]
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_a_pipeline_is_changed_between_its_requests(
    record: StoredVersion, tmp_path: Path
) -> None:
    """SGLang's loop of pipeline stages knows no pause: one in place would hold nothing."""
    recorded = Recorded(pp_size=2)
    meta = {"output_token_logprobs": [[-1.0, 3, None]], "prompt_tokens": 1, "completion_tokens": 1}
    recorded.messages = [
        {"output_ids": [3], "meta_info": meta | {"finish_reason": {"type": "length"}}}
    ]
    recorded.goes_on.clear()
    async with attached(tmp_path, recorded) as engine:
        await engine.prepare(record.version, record.digest, record.directory)
        asking = await begin(engine, recorded)
        committing = asyncio.create_task(engine.commit(record.version, PauseMode.IN_PLACE))
        await asyncio.wait([committing], timeout=0.1)
        assert not recorded.asked
        recorded.goes_on.set()
        await asyncio.gather(asking, committing)
        assert recorded.asked[1] == "/update_weights_from_disk"
        assert engine.status().version == record.version


@pytest.mark.parametrize("quantization", [None, "fp8"])
async def test_small_changes_may_be_lost_where_a_server_narrows_weights_itself(
    record: StoredVersion, tmp_path: Path, quantization: str | None
) -> None:
    """Then no parameter need change with its tensor; a server that narrows none has lost it."""
    changed = {"model.embed_tokens.weight": np.full((70, 4), 1.0001, np.float32)}
    new = import_checkpoint(
        WeightStore(tmp_path / "store", durable=False),
        write_model(tmp_path / "changed", **changed),
        None,
        0,
    )
    recorded = Recorded(quantization=quantization)
    place = {"dp_rank": 0, "pp_rank": 0, "tp_rank": 0}
    sums = {"checksums": {"model.embed_tokens.weight": "1"}, "parallelism_info": place}
    recorded.answers["/weights_checker"] = {"success": True, "ranks": [sums]}
    async with attached(tmp_path, recorded, verify="checksum") as engine:
        await engine.prepare(new.version, new.digest, new.directory)
        if quantization is None:
            with pytest.raises(DigestMismatchError, match=r"embed_tokens\.weight"):
                await engine.commit(new.version, PauseMode.WAIT)
        else:
            await engine.commit(new.version, PauseMode.WAIT)
            assert engine.status().version == new.version


async def given_up(recorded: Recorded, path: str, work: Coroutine[Any, Any, object]) -> None:
    """Has the caller go away once the server is at what it was asked for, which it then ends."""
    recorded.holds = path
    recorded.came.clear()
    recorded.let.clear()
    task = asyncio.create_task(work)
    async with asyncio.timeout(PATIENCE):
        await recorded.came.wait()
        task.cancel()
        await asyncio.sleep(0)
        recorded.let.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    recorded.holds = ""


async def test_a_commit_whose_caller_goes_away_is_one_all_the_same(
    record: StoredVersion, tmp_path: Path
) -> None:
    """The server has the weights: under the number before they would be told, and share prompts."""
    recorded = Recorded()
    async with attached(tmp_path, recorded) as engine:
        await engine.prepare(record.version, record.digest, record.directory)
        commit = engine.commit(record.version, PauseMode.IN_PLACE)
        await given_up(recorded, "/update_weights_from_disk", commit)
        assert engine.status().version == record.version
        assert recorded.asked[-1] == "/continue_generation"
        assert engine.status().restorable_version == record.version
        await ask_once(engine, recorded)
        assert recorded.bodies[-1]["extra_key"] == f"{record.version}:{record.digest}"


async def ask_once(engine: SglangEngine, recorded: Recorded) -> None:
    meta = {"output_token_logprobs": [[-1.0, 3, None]], "prompt_tokens": 1, "completion_tokens": 1}
    recorded.messages = [
        {"output_ids": [3], "meta_info": meta | {"finish_reason": {"type": "length"}}}
    ]
    await asyncio.wait_for(ask(engine), PATIENCE)


async def test_pauses_and_sleep_whose_caller_goes_away_are_known(
    record: StoredVersion, tmp_path: Path
) -> None:
    """What the server does of them is done here too, or it would be left asleep, or paused."""
    recorded = Recorded(enable_memory_saver=True)
    async with attached(tmp_path, recorded) as engine:
        await engine.prepare(record.version, record.digest, record.directory)
        await given_up(recorded, "/pause_generation", engine.pause(PauseMode.WAIT))
        await given_up(recorded, "/continue_generation", engine.resume())
        await ask_once(engine, recorded)
        await engine.pause(PauseMode.WAIT)
        assert recorded.asked[-1] == "/pause_generation"
        await given_up(recorded, "/release_memory_occupation", engine.sleep())
        assert engine.status().asleep
        await given_up(recorded, "/resume_memory_occupation", engine.wake())
        await engine.wake()
        assert recorded.asked.count("/resume_memory_occupation") == 1
        await engine.commit(record.version, PauseMode.IN_PLACE)
        await engine.resume()
        await ask_once(engine, recorded)
