"""The HTTP port: many callers at once, limits, refusals, hangs, and callers that go away."""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import REGISTRY
from safetensors.torch import load_file, save_file

from services.rollout.reward_model.process import RewardModelProcess
from sluice.client import Client
from sluice.config import ConfigError
from sluice.runtime.server import REWARD_MODEL
from tests.patience import PATIENCE
from tests.service.reward_model.conftest import oracle_of, random_texts, running

JSON = {"Content-Type": "application/json"}


def count(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"sluice_reward_model_{name}", labels) or 0.0


async def ask(process: RewardModelProcess, body: Any, **headers: str) -> tuple[int, Any]:
    """The status and the JSON of the answer; bytes are sent as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(process.classify.url, data=data, headers=JSON | headers) as answer,
    ):
        assert answer.status == 200 or (await answer.json())["error"]["message"]
        assert ("Retry-After" in answer.headers) is (answer.status == 503)
        return answer.status, await answer.json()


async def scored(process: RewardModelProcess, texts: list[str]) -> list[float]:
    status, found = await ask(process, {"model": "rm", "text": texts})
    assert status == 200, found
    return [each["embedding"][0] for each in found]


async def comes(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.02)


async def get_status(process: RewardModelProcess, path: str) -> int:
    url = process.classify.url.replace("/classify", path)
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status


async def test_everyone_gets_the_scores_of_their_own_texts(qwen3: Path) -> None:
    oracle = oracle_of(qwen3)
    async with running(qwen3, batch={"max_texts": 16, "max_tokens": 512}) as process:
        asked = [random_texts(seed, 1 + seed % 7) for seed in range(40)]
        batches, tokens = count("batch_size_texts_count"), count("tokens_total")
        found = await asyncio.gather(*(scored(process, texts) for texts in asked))
        for texts, scores in zip(asked, found, strict=True):
            assert scores == pytest.approx(oracle.scores(texts), abs=1e-5)
        total = sum(map(len, asked))
        assert count("batch_size_texts_count") - batches < total / 2  # they went together
        assert count("tokens_total") - tokens == sum(len(t) for texts in asked for t in texts)
        assert count("waiting_texts") == 0


async def test_it_answers_as_sglang_does_and_says_what_it_serves(qwen3: Path) -> None:
    async with running(qwen3) as process:
        url = process.classify.url.replace("/classify", "/model_info")
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            info = await answer.json()
        assert info.keys() == {"model", "digest", "max_length"} and info["model"] == "rm"
        (score,) = oracle_of(qwen3).scores(["12="])
        for name in ("rm", info["digest"], f"rm@{info['digest']}"):
            status, one = await ask(process, {"model": name, "text": "12="})
            assert status == 200 and one["meta_info"] == {"prompt_tokens": 3}
            assert one["embedding"] == pytest.approx([score], abs=1e-5)


REFUSED: dict[str, tuple[Any, int, str]] = {
    "no JSON": (b"[", 400, "invalid_json"),
    "a NaN": (b'{"model": "rm", "text": ["1"], "x": NaN}', 400, "invalid_json"),
    "broken UTF-8": (b'{"model": "rm", "text": ["\xff"]}', 400, "invalid_json"),
    "nested": (b"[" * 8000, 400, "invalid_json"),
    "half a character": (b'{"model": "rm", "text": ["\\ud800"]}', 400, "invalid_value"),
    "a list": ([], 400, "invalid_value"),
    "empty": (b"", 400, "invalid_json"),
    "no text": ({"model": "rm"}, 400, "invalid_value"),
    "no texts": ({"model": "rm", "text": []}, 400, "invalid_value"),
    "no token": ({"model": "rm", "text": ["1", ""]}, 400, "invalid_value"),
    "numbers": ({"model": "rm", "text": [1]}, 400, "invalid_value"),
    "true": ({"model": "rm", "text": True}, 400, "invalid_value"),
    "null": ({"model": "rm", "text": [None]}, 400, "invalid_value"),
    "an object": ({"model": "rm", "text": {"a": "1"}}, 400, "invalid_value"),
    "more": ({"model": "rm", "text": "1", "texts": []}, 400, "unknown_parameter"),
    "too many": ({"model": "rm", "text": ["1"] * 9}, 400, "invalid_value"),
    "too long": ({"model": "rm", "text": ["1", "1" * 65]}, 400, "context_length_exceeded"),
    "no model": ({"text": "1"}, 400, "invalid_value"),
    "another model": ({"model": "mr", "text": "1"}, 404, "model_not_found"),
    "another digest": ({"model": f"rm@{'0' * 32}", "text": "1"}, 404, "model_not_found"),
    "a long name": ({"model": "x" * 5000, "text": "1"}, 404, "model_not_found"),
    "a NUL": ({"model": "rm\0", "text": "1"}, 404, "model_not_found"),
    "a path": ({"model": "../rm", "text": "1"}, 404, "model_not_found"),
    "a large body": (b" " * 8193, 413, "request_entity_too_large"),
}  # fmt: skip


async def test_what_makes_no_sense_is_refused_by_name_and_hurts_nobody(qwen3: Path) -> None:
    limits = {"max_texts": 8, "max_body_bytes": 8192}
    async with running(qwen3, classify=limits) as process:
        wrong = []
        for what, (body, status, code) in REFUSED.items():
            found, answer = await ask(process, body)
            if (found, answer["error"]["code"]) != (status, code) or len(str(answer)) > 1000:
                wrong.append((what, found, answer))
        assert not wrong
        (alone,) = oracle_of(qwen3).scores(["1"])
        assert await scored(process, ["1"]) == pytest.approx([alone], abs=1e-5)
        assert count("refused_total", cause="model") >= 5


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "GZIP", "zstd"])
async def test_compressed_bodies_are_refused_unread(qwen3: Path, encoding: str) -> None:
    bomb = gzip.compress(b" " * (1 << 24))
    async with running(qwen3) as process:
        headers = {"Content-Encoding": encoding}
        status, answer = await ask(process, bomb, **headers)
        assert (status, answer["error"]["code"]) == (415, "unsupported_encoding")


async def test_the_token_of_the_stack_is_the_key(qwen3: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a secret\n")
    security = {"security": {"token_file": str(tmp_path / "token")}}
    async with running(qwen3, server=security) as process:
        body = {"model": "rm", "text": "1"}
        for given in ({}, {"Authorization": "Bearer other"}, {"Authorization": "a secret"}):
            status, answer = await ask(process, body, **given)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert (await ask(process, body, Authorization="Bearer a secret"))[0] == 200
        assert await get_status(process, "/health") == 200
        assert await get_status(process, "/model_info") == 401


class Held:
    """The thread of the model does nothing else until it is let go."""

    def __init__(self, process: RewardModelProcess) -> None:
        self._go = threading.Event()
        self._call = asyncio.ensure_future(process.thread.call(lambda: self._go.wait(PATIENCE)))

    async def end(self) -> None:
        self._go.set()
        await self._call


async def test_a_full_queue_says_when_to_come_back(qwen3: Path) -> None:
    limits = {"batch": {"max_waiting_texts": 4}, "classify": {"max_requests": 2}}
    async with running(qwen3, **limits) as process:
        assert (await ask(process, {"model": "rm", "text": ["1"] * 5}))[0] == 503
        held = Held(process)
        first = [asyncio.create_task(scored(process, [text])) for text in ("1", "2")]
        await comes(lambda: process.classify._running == 2)
        status, answer = await ask(process, {"model": "rm", "text": "3"})
        assert (status, answer["error"]["code"]) == (503, "busy")
        assert "classify.max_requests" in answer["error"]["message"]
        await held.end()
        both = [score for (score,) in await asyncio.gather(*first)]
        assert both == pytest.approx(oracle_of(qwen3).scores(["1", "2"]), abs=1e-5)


async def test_a_request_that_takes_too_long_ends_with_its_texts(qwen3: Path) -> None:
    limits = {"classify": {"request_seconds": 0.5}, "batch": {"max_texts": 1}}
    async with running(qwen3, **limits) as process:
        abandoned, tokens = count("abandoned_texts_total"), count("tokens_total")
        held = Held(process)
        status, answer = await ask(process, {"model": "rm", "text": ["1", "2", "3"]})
        assert (status, answer["error"]["code"]) == (504, "request_timed_out")
        await held.end()
        assert count("abandoned_texts_total") - abandoned == 2  # the first was taken before
        await comes(lambda: count("tokens_total") - tokens == 1)
        assert count("waiting_texts") == 0


async def test_who_goes_away_has_nothing_more_scored(qwen3: Path) -> None:
    async with running(qwen3, batch={"max_texts": 1}) as process:
        abandoned, held = count("abandoned_texts_total"), Held(process)
        gone = asyncio.create_task(scored(process, [*"123456789"]))
        await comes(lambda: count("waiting_texts") == 8)  # one is with the thread
        stays = asyncio.create_task(scored(process, ["7="]))
        await comes(lambda: count("waiting_texts") == 9)
        gone.cancel()
        await comes(lambda: count("waiting_texts") == 1)
        await held.end()
        assert await stays == pytest.approx(oracle_of(qwen3).scores(["7="]), abs=1e-5)
        assert count("abandoned_texts_total") - abandoned == 8


async def test_a_thread_that_hangs_makes_it_not_ready_until_it_moves(qwen3: Path) -> None:
    async with running(qwen3, stuck_seconds=10) as process, Client(process.server.address) as near:
        health = health_pb2_grpc.HealthStub(near.channel)

        async def readiness() -> tuple[bool, bool, bool]:
            """Of HTTP, of gRPC, and whether it is alive."""
            found = []
            for service in (REWARD_MODEL, ""):
                request = health_pb2.HealthCheckRequest(service=service)
                answer = await health.Check(request, timeout=PATIENCE)
                found.append(answer.status == health_pb2.HealthCheckResponse.SERVING)
            return await get_status(process, "/health") == 200, found[0], found[1]

        assert await readiness() == (True, True, True)
        held = Held(process)
        process.thread._since = (process.thread._since or 0) - 11  # as if it were 11 s ago
        async with asyncio.timeout(PATIENCE):
            while await readiness() != (False, False, True):
                await asyncio.sleep(0.05)
        assert (await ask(process, {"model": "rm", "text": "1"}))[0] == 503
        await held.end()
        async with asyncio.timeout(PATIENCE):
            while await readiness() != (True, True, True):
                await asyncio.sleep(0.05)
        assert len(await scored(process, ["1"])) == 1


async def test_a_thread_that_never_moves_ends_the_process(qwen3: Path) -> None:
    async with running(qwen3, stuck_seconds=0.2) as process:
        held = Held(process)
        async with asyncio.timeout(PATIENCE):
            await process.server.run_until_signal()
        assert "batch" in process.failure and f"{__name__}:" in process.failure, "where it is held"
        await held.end()


async def test_a_score_that_is_no_number_is_an_error(qwen3: Path, tmp_path: Path) -> None:
    """A model whose weights went bad: found at the start already."""
    directory = shutil.copytree(qwen3, tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    tensors["score.weight"][0, 0] = float("nan")
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="score nan"):
        async with running(directory):
            pass


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "/nowhere"), ("model", "x" * 5000), ("name", "a@b"), ("name", "x" * 300),
        ("digest", "xyz"), ("dtype", "float16"), ("max_length", -1), ("threads", -1),
        ("stuck_seconds", 0), ("stuck_seconds", float("nan")), ("batch.max_texts", 0),
        ("batch.max_tokens", 0), ("batch.max_waiting_texts", 0), ("classify.port", 70_000),
        ("classify.max_texts", 0), ("classify.max_body_bytes", 1), ("classify.max_requests", 0),
        ("classify.request_seconds", -1), ("classify.request_seconds", float("inf")),
        ("batch.nothing", 1), ("nothing", 1),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
async def test_settings_that_make_no_sense_are_refused_by_name(
    qwen3: Path, key: str, value: Any
) -> None:
    section, _, name = key.rpartition(".")
    values = {section: {name: value}} if section else {key: value}
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        async with running(values.pop("model", qwen3), **values):
            pass
