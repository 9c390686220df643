"""Adapters of several users in one real SGLang, behind the API: mixed, and given back to it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from sluice.client import EngineClient
from sluice.runtime.security import SecurityConfig
from sluice.weights.adapter import DEFAULT_TARGETS
from sluice.weights.checkpoint import digest_base
from sluice.weights.store import StoredVersion, WeightStore
from tests.adapters import import_adapter, make_adapter, peft_logprobs
from tests.contract.engine.cases import Model
from tests.patience import PATIENCE
from tests.service.trainer.harness import poll
from tests.service.weights.harness import RunningEngine, running_engines, serves
from tests.service.weights.test_adapter_lines import refusal
from tests.service.weights.test_adapters import PROMPT, furthest, serve
from tests.sglang_servers import PYTHON, SharedServers

HELD, LONG = 4, 200
RANKS = [2, 4, 8, 2, 4, 8]
LORA = {
    "enable_lora": True,
    "lora_backend": "torch_native",
    "max_lora_rank": 8,
    "lora_target_modules": list(DEFAULT_TARGETS),
    "max_loras_per_batch": 6,  # the base is one of them
}


@pytest.fixture(scope="module")
def model(models: tuple[Model, Model]) -> Path:
    return models[0].directory


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[Path]:
    root = tmp_path_factory.mktemp("folders")
    return [
        make_adapter(model, root / str(index), 30 + index, rank=rank)
        for index, rank in enumerate(RANKS)
    ]


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "store" / "weights", durable=False)


@contextmanager
def running(root: Path, model: Path, sglang: dict[str, Any]) -> Iterator[RunningEngine]:
    """An engine that holds HELD adapters."""
    settings = {
        "backend": "sglang",
        "model": str(model),
        "max_running": 16,
        "max_model_length": 512,
        "max_cached_tokens": 8192,
        "max_adapters": HELD,
        "sglang": sglang,
    }
    security = SecurityConfig()
    with running_engines(root, model, root / "store", security, 1, engine=settings) as (engine,):
        yield engine


def publish(store: WeightStore, model: Path, folder: Path, line: str) -> StoredVersion:
    return import_adapter(store, folder, digest_base(model), line=line)


async def running_count(client: EngineClient) -> int:
    return sum(load.running_count for load in (await client.get()).rank_loads)


async def held(client: EngineClient) -> set[tuple[int, str]]:
    return {(each.version, each.adapter) for each in (await client.get()).adapters}


async def test_one_batch_mixes_lines_and_the_base(
    sglang_servers: SharedServers,
    store: WeightStore,
    folders: list[Path],
    model: Path,
    tmp_path: Path,
) -> None:
    url = sglang_servers.url(model, **LORA)
    with running(tmp_path, model, {"url": url}) as engine:
        async with engine.client() as client:
            await poll(partial(serves, client), PATIENCE)
            for folder, line in zip(folders, ["alice", "bob", "alice", ""], strict=False):
                await serve(client, publish(store, model, folder, line))
            wanted = {
                "alice@1": folders[0],
                "alice": folders[2],
                "alice@3": folders[2],
                "bob": folders[1],
                "policy@4": folders[3],
                "": folders[3],
                "base": None,
            }
            async with asyncio.TaskGroup() as group:
                asked = {
                    name: group.create_task(
                        client.generate(PROMPT, max_new_tokens=LONG, adapter=name)
                    )
                    for name in wanted
                }

                async def is_mixed() -> bool:
                    return await running_count(client) == len(wanted)

                await poll(is_mixed, PATIENCE)
                # one more line, while all of them are drawn under their own
                await serve(client, publish(store, model, folders[4], "carol"))
                assert await furthest(client, model, folders[4], "carol") < 1e-5
            versions = dict(zip(wanted, [1, 3, 3, 2, 4, 4, 0], strict=True))
            for name, task in asked.items():
                (found,) = task.result()
                assert [span.weights.version for span in found.spans] == [versions[name]]
                for other in {*wanted.values()}:
                    expected = peft_logprobs(model, other, PROMPT, found.token_ids)
                    pairs = zip(found.logprobs, expected, strict=True)
                    off = max(abs(a - b) for a, b in pairs)
                    assert off < 1e-4 if other == wanted[name] else off > 1e-2, (name, other)

            for name in ("alice@2", "bob@1", "policy@1", "policy@3", "dave", "dave@1", "alice@9"):
                assert await refusal(client, name) == "VERSION_UNAVAILABLE"
            await serve(client, publish(store, model, folders[5], "dave"))
            # what a newer one of its line replaced has gone, then the oldest, but what serves stays
            assert await held(client) == {(3, "alice"), (4, ""), (5, "carol"), (6, "dave")}
            for name, folder in (("alice", folders[2]), ("dave@6", folders[5]), ("", folders[3])):
                assert await furthest(client, model, folder, name) < 1e-5
            for name in ("alice@1", "bob", "bob@2"):
                assert await refusal(client, name) == "VERSION_UNAVAILABLE"


async def test_a_killed_server_gets_the_newest_of_every_line_back(
    store: WeightStore, folders: list[Path], model: Path, tmp_path: Path
) -> None:
    sglang = {"python": str(PYTHON), "lora": {"max_rank": 8}, "backoff_seconds": 0.1}
    with running(tmp_path, model, sglang) as engine:
        async with engine.client() as client:
            await poll(partial(serves, client), PATIENCE)
            for folder, line in zip(folders, ["alice", "bob", "alice", ""], strict=False):
                await serve(client, publish(store, model, folder, line))
            server = psutil.Process(engine.process.pid)
            for process in server.children(recursive=True):
                process.send_signal(signal.SIGKILL)

            async def is_lost() -> bool:
                return not await serves(client)

            async def is_back() -> bool:
                return await serves(client) and len(await held(client)) == 3

            await poll(is_lost, PATIENCE)
            await poll(is_back, 2 * PATIENCE)
            assert await held(client) == {(3, "alice"), (2, "bob"), (4, "")}
            wanted = {"alice": folders[2], "bob": folders[1], "": folders[3], "base": None}
            off = await asyncio.gather(*(furthest(client, model, f, n) for n, f in wanted.items()))
            assert max(off) < 1e-5, dict(zip(wanted, off, strict=True))
            assert await refusal(client, "alice@1") == "VERSION_UNAVAILABLE"
