"""Requests of a Tinker client that come twice, late, out of order, malformed, or without a key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import psutil
import pytest

from examples.models.tiny_qwen3 import build_tiny_qwen3
from services.gateway.config import GatewayConfig
from services.gateway.journal import GatewayJournal
from services.gateway.process import GatewayProcess
from services.gateway.registry import SILENT_LOOKS
from services.gateway.trainer import AdapterTrainer
from sluice import faults
from sluice.algo.spec import AdvantageSpec, LossSpec
from sluice.api.common.v1.wait_service_pb2 import ListWaitsRequest, Wait
from sluice.config import ConfigError
from sluice.runtime.waits import listed_in
from sluice.runtime.wire import seconds_of
from sluice.weights.store import WeightStore
from tests.contract.training_backend.cases import build_model
from tests.patience import PATIENCE
from tests.service.gateway.conftest import Http, Place, RunningGateway, headers_of
from tests.service.trainer.harness import await_address, make_group, running_trainer


async def trained(place: Place) -> list[tuple[int, list[str]]]:
    """Step and parts of each adapter, as the trainer has them."""
    async with place.trainer.client() as client:
        return [(each.step, list(each.part_ids)) for each in (await client.get()).adapters]


async def test_a_request_that_comes_again_is_done_once(place: Place, http: Http) -> None:
    model = await http.begin()
    futures = [await http.pass_of(model, 1) for _ in range(3)]
    assert len({future["request_id"] for _, future in futures}) == 1
    answers = [await http.result(futures[0][1]["request_id"]) for _ in range(2)]
    assert answers[0] == answers[1]
    steps = await asyncio.gather(*(http.step(model, 2, learning_rate=1e-3) for _ in range(4)))
    (request_id,) = {future["request_id"] for _, future in steps}
    assert (await http.result(request_id))["metrics"]["step"] == 1
    assert await trained(place) == [(1, [])]
    status, refused = await http.step(model, 2, learning_rate=2e-3)
    assert status == 400
    assert "another request" in refused["error"]["message"]


async def test_requests_wait_for_their_place(place: Place, http: Http) -> None:
    model = await http.begin()
    later = [await http.step(model, 3), await http.pass_of(model, 2)]
    asked = {"request_id": later[0][1]["request_id"]}
    status, waiting = await http.post("retrieve_future", asked)
    assert (status, waiting["type"]) == (408, "try_again")
    await http.pass_of(model, 1)
    done = await http.result(later[0][1]["request_id"])
    assert done["metrics"]["step"] == 1


async def test_places_that_are_none(http: Http) -> None:
    model = await http.begin()
    for place in (-1, 0, 2**31, 2**63, 10**40):
        status, _ = await http.post("optim_step", {"model_id": model, "seq_id": place})
        assert status == 400
        status, _ = await http.post("retrieve_future", {"request_id": f"{model}:{2**31 + place}"})
        assert status in (400, 404)
    for no_number in (True, False, 1.0, "1", None):
        status, _ = await http.post("optim_step", {"model_id": model, "seq_id": no_number})
        assert status == 400
    _, passed = await http.pass_of(model, 1)
    assert await http.result(passed["request_id"])


async def test_a_wrong_request_keeps_its_place_and_no_more(place: Place, http: Http) -> None:
    model = await http.begin()
    body = {"model_id": model, "seq_id": 1, "adam_params": {"lr": 1}}
    _, future = await http.post("optim_step", body)
    answer = await http.result(future["request_id"])
    assert answer["category"] == "user"
    assert "lr" in answer["error"]
    await http.pass_of(model, 2)
    _, stepped = await http.step(model, 3)
    assert (await http.result(stepped["request_id"]))["metrics"]["step"] == 1


async def test_a_gateway_goes_on_where_another_ended(place: Place) -> None:
    first = RunningGateway(place)
    http = await first.start()
    model = await http.begin()
    await http.pass_of(model, 1)
    _, stepped = await http.step(model, 2)
    await http.result(stepped["request_id"])
    _, third = await http.pass_of(model, 3)
    _, fourth = await http.step(model, 4)
    await first.stop()  # with both under way, or not begun
    second = RunningGateway(place)
    http = await second.start()
    try:
        assert (await http.result(stepped["request_id"]))["metrics"]["step"] == 1
        assert (await http.result(fourth["request_id"]))["metrics"]["step"] == 2
        assert await http.result(third["request_id"])
        assert await trained(place) == [(2, [])]
    finally:
        await second.stop()


async def test_whoever_asks_while_a_gateway_starts_is_told_of_no_model_that_it_is_gone(
    place: Place,
) -> None:
    first = RunningGateway(place)
    http = await first.start()
    model = await http.begin()
    await first.stop()
    place.config = with_tinker(place, port=urlsplit(http.url).port)
    second = RunningGateway(place)
    with sqlite3.connect(place.config.journal, PATIENCE, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")  # the start takes its time
        with listed_in(second.process.server.waits):
            starting = asyncio.create_task(second.start())
        async with asyncio.timeout(PATIENCE), aiohttp.ClientSession() as session:
            asking = asyncio.create_task(first_answer(replace(http, session=session), model))
            while not await listed(second, str(place.config.journal)):
                await asyncio.sleep(0.01)
            other.execute("COMMIT")
            assert (await asking)[0] == 200
    await starting
    await second.stop()


async def first_answer(http: Http, model: str) -> tuple[int, Any]:
    """To a client that asks again and again, from before the port is open."""
    while True:
        with contextlib.suppress(aiohttp.ClientConnectionError):
            return await http.post("retrieve_future", {"request_id": f"{model}:0"})
        await asyncio.sleep(0.01)


async def test_what_the_trainer_lost_is_made_again(place: Place, http: Http) -> None:
    model, seq = await http.begin(), 0
    for _ in range(3):  # of which two are in a checkpoint
        await http.pass_of(model, seq := seq + 1)
        _, stepped = await http.step(model, seq := seq + 1)
        await http.result(stepped["request_id"])
    await http.pass_of(model, seq := seq + 1)
    async with place.trainer.client() as client:
        (adapter,) = (await client.get()).adapters
        before = (await client.publish_weights(adapter=adapter.adapter)).weights.digest
        await client.delete_adapter(adapter.adapter)
    _, passed = await http.pass_of(model, seq := seq + 1, forward_only=True)
    await http.result(passed["request_id"])
    assert await trained(place) == [(3, ["7"])]
    async with place.trainer.client() as client:
        after = (await client.publish_weights(adapter=adapter.adapter)).weights.digest
    assert after == before


async def test_another_gateway_on_the_journal_is_refused(place: Place, http: Http) -> None:
    with pytest.raises(Exception, match="stop it"):
        RunningGateway(place)


async def test_a_base_of_another_vocabulary_than_the_trainer_s_is_refused(
    place: Place, tmp_path: Path
) -> None:
    other = build_tiny_qwen3(tmp_path / "other", 0)
    document = json.loads((other / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["0"], vocabulary["1"] = vocabulary["1"], vocabulary["0"]
    (other / "tokenizer.json").write_text(json.dumps(document))
    gateway = GatewayProcess(place.config.model_copy(update={"model": other}))
    try:
        with pytest.raises(ConfigError, match="has another vocabulary than the trainer"):
            await gateway.start()
    finally:
        await gateway.close()


async def test_a_trainer_of_whole_models_is_refused(
    place: Place, model: Path, tmp_path: Path
) -> None:
    with running_trainer(tmp_path / "trainer", model) as whole:
        config = place.config.model_copy(update={"trainer": whole.address})
        gateway = GatewayProcess(config)
        try:
            with pytest.raises(ConfigError, match=r"trains the whole model.*set lora"):
                await gateway.start()
        finally:
            await gateway.close()


@pytest.mark.parametrize("mode", ["recorded", "rollout"])
async def test_a_trainer_that_takes_experts_again_is_refused(
    place: Place, tmp_path: Path, mode: str
) -> None:
    """Every pass would be: rows of Tinker's clients bring none, and no pass records them."""
    mixture = build_model(tmp_path / "mixture", "qwen3_moe").directory
    settings = {"lora": {"rank": 2, "targets": ["q_proj"]}, "reference": {"routing_replay": mode}}
    with running_trainer(tmp_path / "trainer", mixture, **settings) as told:
        config = place.config.model_copy(update={"trainer": told.address})
        gateway = GatewayProcess(config)
        try:
            with pytest.raises(ConfigError, match=r"set its reference\.routing_replay to off"):
                await gateway.start()
        finally:
            await gateway.close()


async def test_keys(place: Place, http: Http) -> None:
    for key in ("", "tml-other", "\xe9"):
        bad = Http(http.session, http.url, http.headers | {"X-API-Key": key})
        status, _ = await bad.post("create_session", {"tags": []})
        assert status == 401


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("create_session", b"\xff"),
        ("create_session", b"[" * 100_000),
        ("create_session", b'{"tags": [], "other": 1}'),
        ("create_model", {"session_id": "no", "model_seq_id": 0, "base_model": "x"}),
        ("create_model", {"session_id": "no\0", "model_seq_id": -1, "base_model": "x" * 5000}),
        ("optim_step", {"model_id": "no", "seq_id": 1}),
        ("optim_step", {"model_id": "no", "seq_id": "1"}),
        ("optim_step", {"model_id": "no", "seq_id": 0}),
        ("optim_step", {}),
        ("optim_step", []),
        ("load_weights", {"session_id": "no", "path": "x", "optimizer": True}),
        ("asample", {"sampling_session_id": "no", "seq_id": 0}),
        ("retrieve_future", {"request_id": "../x:0"}),
        ("retrieve_future", {"request_id": "no:1"}),
        ("retrieve_future", {"request_id": ":"}),
        ("retrieve_future", {"request_id": "x:\u0663"}),
        ("retrieve_future", {"request_id": "x:" + "9" * 30}),
        ("get_info", {"model_id": "x" * 100_000}),
        ("weights_info", {"tinker_path": "tinker://a/b/c"}),
        ("billing", {}),
    ],
)
async def test_what_makes_no_sense_is_final(http: Http, path: str, body: Any) -> None:
    status, answer = await http.post(path, body)
    assert 400 <= status < 500 and status not in (408, 409, 429), answer
    assert len(str(answer)) < 2000


async def test_bytes_that_are_no_pass(http: Http) -> None:
    kind = {"Content-Type": "application/x-protobuf"}
    for body in (b"", b"\xff" * 100, b"\x0a\x05ab"):
        status, _ = await http.post("forward_backward", body, **kind)
        assert status in (400, 404)
    status, _ = await http.post("forward_backward", b"{}")
    assert status == 415


async def test_callers_that_break_off_are_no_failures_of_the_gateway(
    http: Http, caplog: pytest.LogCaptureFixture
) -> None:
    where = urlsplit(http.url)
    key = (
        f"POST /api/v1/telemetry HTTP/1.1\r\nHost: x\r\nX-API-Key: {http.headers['X-API-Key']}\r\n"
    )
    for more in (
        "Content-Length: 9\r\n\r\n{",
        "Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    ):
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write((key + more).encode())
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
        writer.close()
    assert (await http.post("telemetry", {}))[0] == 200
    assert [each.getMessage() for each in caplog.records if each.levelname == "ERROR"] == []


async def test_a_silent_session_gives_its_models_up_and_what_expires_goes(place: Place) -> None:
    running = RunningGateway(place)
    http = await running.start()
    registry, store = running.process.registry, place.trainer.store / "checkpoints"
    try:
        model, seq, before = await http.begin(), 0, set(store.glob("*"))
        for _ in range(2):
            await http.pass_of(model, seq := seq + 1)
            await http.step(model, seq := seq + 1)
        body = {"model_id": model, "seq_id": seq + 1, "path": "kept", "ttl_seconds": 3600}
        _, saved = await http.post("save_weights", body)
        path = (await http.result(saved["request_id"]))["path"]
        async with asyncio.timeout(PATIENCE):
            while len(left := set(store.glob("*")) - before) > 1:  # what it replaced goes
                await asyncio.sleep(0.01)
        (kept,) = left
        await registry.look()
        assert await trained(place)
        await expire(registry.journal, path)
        await registry.look()
        assert kept.is_dir()  # the model would go back to it
        running.process.journal._db.execute("UPDATE sessions SET seen = 1")
        await registry.look()
        assert await trained(place) == []
        assert set(store.glob("*")) == before
        status, answer = await http.pass_of(model, seq + 2)
        assert status == 404
        assert "no sign of life" in answer["error"]["message"]
    finally:
        await running.stop()


async def test_what_cannot_be_removed_is_known_until_it_is(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    running = RunningGateway(place)
    http = await running.start()
    registry, store = running.process.registry, place.trainer.store / "checkpoints"
    try:
        model, before, paths, saved = await http.begin(), set(store.glob("*")), [], list[Any]()
        for seq, name in enumerate(("first", "second"), 1):
            body = {"model_id": model, "seq_id": seq, "path": name, "ttl_seconds": 3600}
            _, future = await http.post("save_weights", body)
            paths.append((await http.result(future["request_id"]))["path"])
            saved += set(store.glob("*")) - before - set(saved)
        stuck = saved[0]
        away = break_directory(stuck)
        for path in paths:
            await expire(registry.journal, path)
        await registry.look()
        assert f"{paths[0]} is not removed yet" in caplog.text
        left = [checkpoint.path for checkpoint in registry.journal.expired_checkpoints()]
        assert left == paths[:1]  # the other one does not wait for it
        stuck.unlink()
        away.rename(stuck)
        await registry.look()
        assert not registry.journal.expired_checkpoints()
        assert not stuck.exists()
    finally:
        await running.stop()


async def expire(journal: GatewayJournal, path: str) -> None:
    found = journal.checkpoint(path)
    assert found is not None
    await journal.set_expiry(found, 1.0)


def break_directory(directory: Path) -> Path:
    """Put a file in its place; returns where it is."""
    away = directory.parent.parent / f"away-{directory.name}"
    directory.rename(away)
    directory.write_bytes(b"no directory")
    return away


async def test_models_outlive_a_checkpoint_that_cannot_be_removed(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    running = RunningGateway(place)
    http = await running.start()
    registry, store = running.process.registry, place.trainer.store / "checkpoints"
    try:
        model, seq, before = await http.begin(), 0, set(store.glob("*"))

        async def take_steps(count: int) -> None:
            nonlocal seq
            for _ in range(count):
                await http.pass_of(model, seq := seq + 1)
                _, stepped = await http.step(model, seq := seq + 1)
                await http.result(stepped["request_id"])

        await take_steps(3)  # behind the second one it saved where to go back to
        (first,) = set(store.glob("*")) - before
        aways = {first: break_directory(first)}
        await take_steps(2)
        assert f"checkpoint checkpoints/{first.name} stays in the store" in caplog.text
        (second,) = set(store.glob("*")) - before - {first}
        aways[second] = break_directory(second)
        running.process.journal._db.execute("UPDATE sessions SET seen = 1")
        await registry.look()
        for broken, away in aways.items():
            assert f"model {model} is not unloaded yet" in caplog.text
            assert registry.journal.loaded_models()
            broken.unlink()
            away.rename(broken)
            await registry.look()
            assert not broken.exists()
        assert not registry.journal.loaded_models()
    finally:
        await running.stop()


async def test_a_journal_that_takes_nothing_for_a_while_costs_no_model_and_no_session(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    running = RunningGateway(place)
    http = await running.start()
    registry, database = running.process.registry, running.process.journal._db
    try:
        model = await http.begin()
        session = {"session_id": registry.journal.sessions()[0].id}
        with stopped(psutil.Process(place.trainer.process.pid).children()):
            _, future = await http.pass_of(model, 1)
            database.execute("PRAGMA query_only = ON")  # as a disk that is full or read-only
        async with asyncio.timeout(PATIENCE):
            while "journal.sqlite: attempt to write" not in caplog.text:
                await asyncio.sleep(0.01)
        running.process.tinker._seen.clear()  # it was heard long ago
        create = {"tags": [], "type": "create_session"}
        for path, body in (("session_heartbeat", session), ("create_session", create)):
            status, answer = await http.post(path, body)
            assert (status, answer["error"]["code"]) == (503, "journal_failed")
        status, answer = await http.step(model, 2, learning_rate=1e-3)
        assert status == 503
        assert "readonly" in answer["error"]["message"]
        database.execute("PRAGMA query_only = OFF")
        database.execute("UPDATE sessions SET seen = 1")  # so long it took
        await registry.look()
        await http.result(future["request_id"])
        _, stepped = await http.step(model, 2, learning_rate=1e-3)
        assert (await http.result(stepped["request_id"]))["metrics"]["step"] == 1
        assert await trained(place) == [(1, [])]
    finally:
        await running.stop()


@pytest.mark.parametrize("damage", ["cut", "flipped", "other"])
async def test_a_damaged_journal_is_refused_by_name(place: Place, damage: str) -> None:
    first = RunningGateway(place)
    http = await first.start()
    model = await http.begin()
    for seq in range(1, 6):
        await http.pass_of(model, seq, rows=200)
    await first.stop()
    file = place.config.journal
    data = bytearray(file.read_bytes())
    if damage == "cut":
        del data[len(data) // 2 :]
    elif damage == "flipped":
        for place_of in range(8192, len(data), 4096):
            data[place_of] ^= 0xFF
    else:
        data[:] = b"no database at all " * 100
    file.write_bytes(data)
    with pytest.raises(ConfigError, match="journal"):
        RunningGateway(place)


async def test_a_request_that_is_damaged_in_the_journal_is_never_trained_on(place: Place) -> None:
    first = RunningGateway(place)
    http = await first.start()
    model = await http.begin()
    _, future = await http.pass_of(model, 1)
    await http.result(future["request_id"])
    database = first.process.journal._db
    (body,) = database.execute("SELECT body FROM requests WHERE seq = 1").fetchone()
    database.execute("UPDATE requests SET body = ? WHERE seq = 1", (body[:-1] + b"?",))
    await first.stop()
    async with place.trainer.client() as client:  # it loses what the requests made
        await client.delete_adapter((await client.get()).adapters[0].adapter)
    second = RunningGateway(place)
    http = await second.start()
    try:
        _, stepped = await http.step(model, 2, learning_rate=1e-3)
        answer = await http.result(stepped["request_id"])
        assert answer["category"] == "server"
        assert f"{place.config.journal} is damaged: request 1 of {model}" in answer["error"]
        assert all(step == 0 for step, _ in await trained(place))
    finally:
        await second.stop()


async def test_numbers_beyond_any_meaning_are_refused_and_cost_no_model(http: Http) -> None:
    _, session = await http.post("create_session", {"tags": [], "type": "create_session"})
    body = {
        "session_id": session["session_id"],
        "model_seq_id": 0,
        "base_model": http.headers["model"],
        "lora_config": {"rank": 10**12},
    }
    status, answer = await http.post("create_model", body)
    assert (status, answer["error"]["param"]) == (400, "lora_config.rank")
    model = await http.begin()
    for seq, seconds in enumerate((10**12, 10**400), 1):
        body = {"model_id": model, "seq_id": seq, "path": str(seq), "ttl_seconds": seconds}
        _, future = await http.post("save_weights", body)
        answer = await http.result(future["request_id"])
        assert ("ttl_seconds" in answer["error"], answer["category"]) == (True, "user")
    body = {"model_id": model, "seq_id": 3, "path": "kept", "ttl_seconds": 10**9}
    _, future = await http.post("save_weights", body)
    assert (await http.result(future["request_id"]))["path"].endswith("kept")
    status, _ = await http.post("weights_info", {"tinker_path": f"tinker://{model}/weights/kept"})
    assert status == 200
    async with http.session.get(f"{http.url}/api/v1/checkpoints", headers=http.headers) as listed:
        assert [each["checkpoint_id"] for each in (await listed.json())["checkpoints"]] == [
            "weights/kept"
        ]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"topk_prompt_logprobs": 10**10}, "topk_prompt_logprobs"),
        ({"topk_sample_logprobs": 10**10}, "topk_sample_logprobs"),
        ({"sampling_params": {"stop": [10**12]}}, "stop has a number"),
        ({"sampling_params": {"stop": [-1]}}, "stop has a number"),
        ({"sampling_params": {"stop": ["a" * 5000]}}, "stop: a text has 1 to 1,024"),
        ({"sampling_params": {"stop": ""}}, "stop: a text has 1 to 1,024"),
        ({"num_samples": 10**12}, "num_samples"),
    ],
)
async def test_sampling_beyond_any_room_is_refused_before_any_is_taken(
    http: Http, wrong: dict[str, Any], why: str
) -> None:
    _, session = await http.post("create_session", {"tags": [], "type": "create_session"})
    of = {"session_id": session["session_id"], "sampling_session_seq_id": 0}
    _, sampler = await http.post(
        "create_sampling_session", {**of, "base_model": http.headers["model"]}
    )
    body = {
        "sampling_session_id": sampler["sampling_session_id"],
        "seq_id": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {},
    }
    status, answer = await http.post("asample", body | wrong)
    if status == 200:
        answer = await http.result(answer["request_id"])
        assert answer["category"] == "user"
    assert why in str(answer["error"])


async def test_a_sampler_keeps_the_weights_that_it_was_made_of(http: Http) -> None:
    model = await http.begin()
    of = {"session_id": model.split(":")[0], "sampling_session_seq_id": 0}
    base = {**of, "base_model": http.headers["model"]}
    _, named = await http.post(
        "save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "x"}
    )
    path = (await http.result(named["request_id"]))["path"]
    answers = [await http.post("create_sampling_session", base) for _ in range(2)]
    assert answers[0] == answers[1]
    status, answer = await http.post("create_sampling_session", {**of, "model_path": path})
    assert (status, answer["error"]["code"]) == (400, "refused")
    body = {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 0}
    _, saved = await http.post("save_weights_for_sampler", body)
    told = await http.result(saved["request_id"])
    assert told["category"] == "user"
    assert "sampling_session_seq_id 0 was that of another" in told["error"]
    sampler = answers[0][1]["sampling_session_id"]
    async with http.session.get(
        f"{http.url}/api/v1/samplers/{sampler}", headers=http.headers
    ) as found:
        assert (await found.json())["model_path"] is None


async def test_names_may_be_as_long_as_is_said(place: Place, http: Http) -> None:
    model = await http.begin()
    store = WeightStore(place.config.weights_location)
    before = store.pins()
    for seq, name in enumerate(("x" * 256, "é" * 256), 1):
        body = {"model_id": model, "seq_id": seq, "path": name}
        _, future = await http.post("save_weights_for_sampler", body)
        assert (await http.result(future["request_id"]))["path"].endswith(name)
        async with http.session.delete(
            f"{http.url}/api/v1/training_runs/{model}/checkpoints/sampler_weights/{name}",
            headers=http.headers,
        ) as removed:
            assert removed.status == 200
    for version, owners in store.pins().items():
        new = owners - before.get(version, set())
        assert not [each for each in new if "tinker" in each]


async def test_log_probs_of_a_pass_are_there_for_a_batch_that_comes_anew(place: Place) -> None:
    samples = [replace(row, sample_id=str(i)) for i, row in enumerate(make_group("one", seed=3))]
    loss, request_id = LossSpec(name="ppo_clip", clip_low=0.2), str(uuid.uuid4())
    async with AdapterTrainer(place.trainer.address, place.trainer.security) as trainer:
        await trainer.create_adapter("a", rank=2)
        answers = []
        for _ in range(2):  # the first answer is lost on its way
            batch = await trainer.upload("a-1", samples, "a")
            await trainer.compute_advantages(batch, AdvantageSpec(name="grpo"))
            total = await trainer.add_gradients(batch, loss, 0, "1", "a", request_id)
            answers.append((total, await trainer.passed_logprobs(batch, len(samples), "a")))
        scored = await trainer.logprobs(batch, len(samples), "a")
    assert await trained(place) == [(0, ["1"])]
    assert answers[0][0] == answers[1][0]
    for _, logprobs in answers:
        for kept, expected in zip(logprobs, scored, strict=True):
            np.testing.assert_allclose(kept, expected, atol=1e-6)


async def test_a_model_goes_back_to_a_state_that_was_saved(place: Place, http: Http) -> None:
    model = await http.begin()
    await http.pass_of(model, 1)
    await http.step(model, 2)
    _, saved = await http.post("save_weights", {"model_id": model, "seq_id": 3, "path": "here"})
    path = (await http.result(saved["request_id"]))["path"]
    await http.pass_of(model, 4)
    await http.step(model, 5)
    body = {"model_id": model, "seq_id": 6, "path": path, "optimizer": True}
    status, loaded = await http.post("load_weights", body)
    assert status == 200, loaded
    assert await http.result(loaded["request_id"])
    assert await trained(place) == [(1, [])]


async def listed(running: RunningGateway, what: str) -> list[Wait]:
    """What the gateway tells that it waits for, of this."""
    found = await running.process.server.waits.ListWaits(ListWaitsRequest(), None)
    return [wait for wait in found.waits if what in wait.what]


async def test_requests_behind_one_that_never_comes_are_told_so(place: Place) -> None:
    """All of them are there when the time begins that they wait for."""
    patient = RunningGateway(place)
    with listed_in(patient.process.server.waits):
        http = await patient.start()
    try:
        model = await http.begin()
        futures = [await http.pass_of(model, 2), await http.step(model, 3, learning_rate=1e-3)]
        futures.append(await http.pass_of(model, 5))
        async with asyncio.timeout(PATIENCE):
            while not (waits := await listed(patient, "to send request 1")):
                await asyncio.sleep(0.01)
        (wait,) = waits
        assert seconds_of(wait.deadline_time) > seconds_of(wait.start_time)
    finally:
        await patient.stop()
    place.config = with_tinker(place, order_seconds=0.2)
    running = RunningGateway(place)
    http = await running.start()
    try:
        for missing, (_, future) in zip((1, 1, 4), futures, strict=True):
            answer = await http.result(future["request_id"])
            assert answer["category"] == "user"
            assert f"request {missing} of {model} did not come in 0.2 s" in answer["error"]
        for late in (1, 4):
            status, answer = await http.pass_of(model, late)
            assert status == 404
            assert "comes too late" in answer["error"]["message"]
        await http.pass_of(model, 6)
        _, stepped = await http.step(model, 7, learning_rate=1e-3)
        assert (await http.result(stepped["request_id"]))["metrics"]["step"] == 1
        assert await trained(place) == [(1, [])]
    finally:
        await running.stop()


def with_tinker(place: Place, **settings: Any) -> GatewayConfig:
    tinker = place.config.tinker.model_copy(update=settings)
    return place.config.model_copy(update={"tinker": tinker})


async def test_the_request_that_others_wait_for_always_has_room(place: Place) -> None:
    place.config = with_tinker(place, max_waiting=2)
    running = RunningGateway(place)
    http = await running.start()
    try:
        model = await http.begin()
        _, stepped = await http.step(model, 3, learning_rate=1e-3)
        await http.pass_of(model, 2)
        status, _ = await http.pass_of(model, 4)
        assert status == 429
        status, _ = await http.pass_of(model, 1)
        assert status == 200
        assert (await http.result(stepped["request_id"]))["metrics"]["step"] == 1
    finally:
        await running.stop()


async def test_who_waits_for_an_answer_is_told_when_the_session_ends(http: Http) -> None:
    model = await http.begin()
    _, future = await http.step(model, 2)
    asking = asyncio.create_task(http.result(future["request_id"]))
    for _ in range(3):  # behind it
        await http.post("telemetry", {})
    session = model.partition(":")[0]
    await http.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    with pytest.raises(AssertionError, match="unloaded"):
        await asyncio.wait_for(asking, PATIENCE)


async def test_a_slow_disk_of_the_journal_holds_up_its_own_requests_alone(place: Place) -> None:
    server = place.config.server.model_copy(update={"max_held_bytes": 2000})
    place.config = place.config.model_copy(update={"server": server})
    running = RunningGateway(place)
    with listed_in(running.process.server.waits):
        http = await running.start()
    model = await http.begin()
    _, passed = await http.pass_of(model, 1)
    answer = await http.result(passed["request_id"])
    try:
        journal = sqlite3.connect(place.config.journal, PATIENCE, isolation_level=None)
        with journal as other:
            other.execute("BEGIN IMMEDIATE")
            stepping = asyncio.create_task(http.step(model, 2, learning_rate=1e-3))
            async with asyncio.timeout(PATIENCE):
                while not await listed(running, str(place.config.journal)):
                    assert not stepping.done()
                    assert await http.result(passed["request_id"]) == answer
            assert await http.result(passed["request_id"]) == answer
            assert not stepping.done()
            status, told = await http.pass_of(model, 3, rows=40)
            assert (status, told["error"]["code"]) == (429, "too_many_requests")
            other.execute("COMMIT")
        status, future = await stepping
        assert status == 200
        assert (await http.result(future["request_id"]))["metrics"]["step"] == 1
        status, _ = await http.pass_of(model, 3, rows=40)
        assert status == 200
    finally:
        await running.stop()


@pytest.mark.parametrize("column", ["state", "about"])
async def test_a_model_that_is_damaged_in_the_journal_costs_no_other(
    place: Place, column: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = RunningGateway(place)
    http = await first.start()
    models = [await http.begin() for _ in range(2)]
    for model in models:
        await http.pass_of(model, 1)
        _, stepped = await http.step(model, 2, learning_rate=1e-3)
        await http.result(stepped["request_id"])
    await first.stop()
    with sqlite3.connect(place.config.journal) as database:
        change = f"UPDATE models SET {column} = replace({column}, ?, ?) WHERE id = ?"
        for was, now in (('"step": 1', '"step": 0'), ('"alpha": 32', '"alpha": 34')):
            database.execute(change, (was, now, models[0]))
    second = RunningGateway(place)
    http = await second.start()
    try:
        status, answer = await http.step(models[0], 3)
        assert (status, answer["error"]["code"]) == (410, "journal_damaged")
        assert models[0] in answer["error"]["message"]
        assert f"{place.config.journal} is damaged" in caplog.text
        await second.process.registry.look()
        await http.pass_of(models[1], 3)
        _, stepped = await http.step(models[1], 4, learning_rate=1e-3)
        assert (await http.result(stepped["request_id"]))["metrics"]["step"] == 2
    finally:
        await second.stop()


async def test_whoever_asks_for_a_damaged_row_is_told_so_for_good(place: Place, http: Http) -> None:
    model = await http.begin()
    session = model.split(":")[0]
    sampler = {"session_id": session, "sampling_session_seq_id": 0}
    _, made = await http.post(
        "create_sampling_session", {**sampler, "base_model": http.headers["model"]}
    )
    saved = {"model_id": model, "seq_id": 1, "path": "kept", "ttl_seconds": 3600}
    _, future = await http.post("save_weights", saved)
    path = (await http.result(future["request_id"]))["path"]
    with sqlite3.connect(place.config.journal, PATIENCE) as database:
        database.execute("UPDATE checkpoints SET expires = 1")  # it was not to go by now
        database.execute("UPDATE samplers SET about = replace(about, 'seal', 'seam')")
        database.execute("UPDATE sessions SET about = '[]'")
    lora = {"base_model": http.headers["model"], "lora_config": {"rank": 2}}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("weights_info", {"tinker_path": path}),
        ("create_sampling_session", {**sampler, "model_path": path}),
        ("create_model", {"session_id": session, "model_seq_id": 1, **lora}),
        ("join_sampling_session", {"sampling_session_id": made["sampling_session_id"]}),
    ]
    for call, body in asked:
        status, answer = await http.post(call, body)
        assert (status, answer["error"]["code"]) == (410, "journal_damaged"), call
    run = f"{http.url}/api/v1/training_runs/{model}"
    async with http.session.delete(f"{run}/checkpoints/weights/kept", headers=http.headers) as told:
        assert told.status == 410


async def test_a_session_that_is_damaged_in_the_journal_is_heard_and_ends(place: Place) -> None:
    running = RunningGateway(place)
    http = await running.start()
    registry = running.process.registry
    try:
        models = [await http.begin() for _ in range(2)]
        with sqlite3.connect(place.config.journal, PATIENCE) as database:
            database.execute("UPDATE sessions SET about = '[]'")
            change = "UPDATE models SET state = '[]' WHERE id = ?"
            database.execute(change, (models[1],))
        for model in models:
            status, _ = await http.post("session_heartbeat", {"session_id": model.split(":")[0]})
            assert status == 200
        await registry.look()
        await http.pass_of(models[0], 1)
        _, stepped = await http.step(models[0], 2, learning_rate=1e-3)
        assert (await http.result(stepped["request_id"]))["metrics"]["step"] == 1
        status, _ = await http.post(f"sessions/{models[0].split(':')[0]}/finish", {})
        assert status == 200
        assert len(await trained(place)) == 1
        running.process.journal._db.execute("UPDATE sessions SET seen = 1")
        await registry.look()
        assert await trained(place) == []
        assert not registry.journal.loaded_models()
        status, _ = await http.post("session_heartbeat", {"session_id": models[1].split(":")[0]})
        assert status == 410
    finally:
        await running.stop()


@contextlib.contextmanager
def gateway_process(config: Path, armed: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "services.gateway", "--config", str(config)],
        env={**os.environ, faults.VARIABLE: str(armed)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_a_checkpoint_is_known_of_wherever_a_gateway_is_killed(
    place: Place, tmp_path: Path
) -> None:
    store, file = place.trainer.store / "checkpoints", tmp_path / "gateway.yaml"
    address, armed = tmp_path / "address.json", tmp_path / "faults"
    values = place.config.model_dump(mode="json")
    values["server"]["address_file"] = str(address)
    file.write_text(json.dumps(values))
    faults.arm(armed, "gateway.saved")
    before = set(store.glob("*"))
    with gateway_process(file, armed) as doomed:
        await asyncio.to_thread(await_address, doomed, address)
        url = json.loads(address.read_text())["tinker_url"]
        async with aiohttp.ClientSession() as session:
            http = Http(session, url, headers_of(place))
            model = await http.begin()
            saving = {"model_id": model, "seq_id": 1, "path": "kept"}
            _, saved = await http.post("save_weights", saving)
        assert await asyncio.to_thread(doomed.wait, PATIENCE) == -signal.SIGKILL
    assert len(set(store.glob("*")) - before) == 1
    running = RunningGateway(place)
    http = await running.start()
    try:
        path = (await http.result(saved["request_id"]))["path"]
        async with asyncio.timeout(PATIENCE):
            while len(left := set(store.glob("*")) - before) > 1:
                await asyncio.sleep(0.01)
        found = running.process.journal.checkpoint(path)
        assert found is not None
        assert [f"checkpoints/{each.name}" for each in left] == [found.checkpoint]
    finally:
        await running.stop()


async def sampler_of(http: Http) -> str:
    """A sampler of the base, of a session of its own."""
    _, session = await http.post("create_session", {"tags": [], "type": "create_session"})
    of = {"session_id": session["session_id"], "sampling_session_seq_id": 0}
    _, sampler = await http.post(
        "create_sampling_session", {**of, "base_model": http.headers["model"]}
    )
    return str(sampler["sampling_session_id"])


def sample_body(sampler: str) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
    return {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "sampling_params": {}}


@pytest.mark.parametrize("leaves", ["says so", "is silent"])
async def test_a_client_that_has_left_holds_no_place_of_others(place: Place, leaves: str) -> None:
    place.config = with_tinker(place, max_running=1)
    running = RunningGateway(place)
    http = await running.start()  # no engine answers: samples run until they are ended
    try:
        first, second = [await sampler_of(http) for _ in range(2)]
        _, future = await http.post("asample", sample_body(first))
        status, _ = await http.post("asample", sample_body(second))
        assert status == 429
        session = first.split(":")[0]
        await running.process.registry.look()
        status, _ = await http.post("retrieve_future", {"request_id": future["request_id"]})
        assert status == 408  # it is heard, and its sample goes on
        if leaves == "says so":
            await http.post(f"sessions/{session}/finish", {})
        else:
            for _ in range(SILENT_LOOKS):
                await running.process.registry.look()
        status, _ = await http.post("retrieve_future", {"request_id": future["request_id"]})
        assert status == 410  # a client that comes back asks for it again
        status, _ = await http.post("asample", sample_body(second))
        assert status == 200
    finally:
        await running.stop()


async def test_pages_are_so_long_at_most(place: Place, http: Http) -> None:
    for what in ("training_runs", "checkpoints"):
        url = f"{http.url}/api/v1/{what}?limit=5000&offset=3"
        async with http.session.get(url, headers=http.headers) as told:
            cursor = (await told.json())["cursor"]
        assert cursor == {"offset": 3, "limit": 1000, "total_count": 0}


async def test_an_answer_that_is_damaged_in_the_journal_is_not_given(
    place: Place, http: Http
) -> None:
    model = await http.begin()
    _, passed = await http.pass_of(model, 1)
    await http.result(passed["request_id"])
    with sqlite3.connect(place.config.journal, PATIENCE) as database:
        (answer,) = database.execute("SELECT answer FROM requests WHERE seq = 1").fetchone()
        database.execute("UPDATE requests SET answer = ? WHERE seq = 1", (answer[:-1] + b"?",))
    told = await http.result(passed["request_id"])
    assert told["category"] == "server"
    assert f"is damaged: request 1 of {model}" in told["error"]


async def test_a_path_that_is_deleted_while_its_model_is_trained_leaves_nothing(
    place: Place, http: Http
) -> None:
    store = place.trainer.store / "checkpoints"
    model, seq, before = await http.begin(), 0, set(store.glob("*"))

    async def steps(count: int) -> None:
        nonlocal seq
        for _ in range(count):
            await http.pass_of(model, seq := seq + 1)
            _, stepped = await http.step(model, seq := seq + 1, learning_rate=1e-3)
            await http.result(stepped["request_id"])

    await steps(1)
    body = {"model_id": model, "seq_id": (seq := seq + 1), "path": "named"}
    _, saved = await http.post("save_weights", body)
    await http.result(saved["request_id"])
    (named,) = set(store.glob("*")) - before
    with stopped(psutil.Process(place.trainer.process.pid).children()):
        _, passed = await http.pass_of(model, seq := seq + 1)
        status, _ = await http.post("retrieve_future", {"request_id": passed["request_id"]})
        assert status == 408  # it is under way
        url = f"{http.url}/api/v1/training_runs/{model}/checkpoints/weights/named"
        async with http.session.delete(url, headers=http.headers) as removed:
            assert removed.status == 200
    assert named.is_dir()  # the model would go back to it
    await http.result(passed["request_id"])
    await steps(4)
    assert not named.exists()


@contextlib.contextmanager
def stopped(processes: list[psutil.Process]) -> Iterator[None]:
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()
