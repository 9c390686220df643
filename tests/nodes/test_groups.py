"""Engines over several nodes, and prefill and decode apart: real processes of a stand-in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from services.rollout.engine.interface import FinishReason, Generation, PauseMode, Sampling
from services.rollout.engine.sglang.engine import SglangEngine
from services.rollout.errors import EngineFailedError
from services.rollout.process import RolloutProcess
from sluice.client import EngineClient, RemoteError, RouterClient
from sluice.ports import free_port
from sluice.weights.store import StoredVersion, WeightStore
from tests.imported import import_checkpoint
from tests.patience import PATIENCE
from tests.service.rollout.harness import (
    Store,
    running_rollout,
    running_router,
    wait_for_engines,
)
from tests.sglang_stand_in import expected, write_program
from tests.unit.sglang.test_weights import write_model

PROMPT = [3, 1, 4, 1, 5]
SILENT = 5.0  # of a server that is stopped


@dataclass
class Parts:
    """What an engine over nodes is made of, in this process; its servers are real processes."""

    store: Store
    model: Path
    new: StoredVersion
    program: Path


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    model = write_model(tmp_path / "model")
    changed = {"model.embed_tokens.weight": np.full((70, 4), 2, np.float32)}
    other = write_model(tmp_path / "other", **changed)
    weights = WeightStore(tmp_path / "store" / "weights", durable=False)
    first = import_checkpoint(weights, model, None, 0)
    second = import_checkpoint(weights, other, None, 0)
    return Parts(
        Store(tmp_path / "store", weights, first, second), model, second, write_program(tmp_path)
    )


@contextlib.asynccontextmanager
async def running_nodes(
    parts: Parts, router: str = "", count: int = 2, stuck: float = 120.0, **sglang: Any
) -> AsyncIterator[list[RolloutProcess]]:
    """The processes of one engine; the first serves."""
    port = free_port("127.0.0.1")
    common = {
        "python": str(parts.program),
        "silent_seconds": PATIENCE,
        "stop_seconds": 0.5,
        "backoff_seconds": 0.1,
        "start_seconds": PATIENCE,
        **sglang,
    }
    async with contextlib.AsyncExitStack() as stack:

        async def start(rank: int) -> RolloutProcess:
            own = {"node_rank": rank, "leader": f"127.0.0.1:{port}"} if rank else {}
            return await stack.enter_async_context(
                running_rollout(
                    parts.store,
                    roles=["engine"],
                    router=router,
                    engine={
                        "backend": "sglang",
                        "model": str(parts.model),
                        "max_running": 8,
                        "max_model_length": 1024,
                        "stuck_seconds": stuck,
                        "sglang": {**common, **own},
                    },
                    server={"drain_seconds": 0.2, **({} if rank else {"port": port})},
                )
            )

        yield await asyncio.gather(*(start(rank) for rank in range(count)))


def engine_of(process: RolloutProcess) -> SglangEngine:
    assert isinstance(process.engine, SglangEngine)
    return process.engine


def servers() -> dict[int, psutil.Process]:
    """Processes of SGLang that are below this one, by node of their server."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            words = process.cmdline()
            if any(word.endswith("sglang_stand_in.py") for word in words):
                prefill = "prefill" in words
                rank = int(words[words.index("--node-rank") + 1]) if "--node-rank" in words else 0
                found[rank + 10 * prefill] = process
    return found


async def ask(engine: SglangEngine, name: str, tokens: int = 6, count: int = 1) -> list[list[int]]:
    request = Generation(
        request_id=name,
        prompt_token_ids=PROMPT,
        sampling=Sampling(max_new_tokens=tokens),
        sample_count=count,
    )
    found: dict[int, list[int]] = {}
    async for delta in engine.generate(request):
        found.setdefault(delta.index, []).extend(delta.token_ids)
        assert delta.finish_reason is not FinishReason.ABORTED
    return [found[index] for index in sorted(found)]


def silence_of(number: int) -> float:
    """After how many seconds a process is taken for lost that does not end by this signal."""
    return SILENT if number == signal.SIGSTOP else PATIENCE


async def until_served(engine: SglangEngine, incarnation: int) -> None:
    """Waits for a later group than that."""
    async with asyncio.timeout(PATIENCE):
        while (
            engine.status().version is None or engine._replica._servers.incarnation == incarnation
        ):
            await asyncio.sleep(0.05)


async def test_an_update_that_takes_too_long_is_given_up(parts: Parts) -> None:
    bounds = {"update_seconds": 0.3, "silent_seconds": SILENT}
    async with running_nodes(parts, count=1, **bounds) as (first,):
        engine = engine_of(first)
        await engine.prepare(parts.new.version, parts.new.digest, parts.new.directory)
        (server,) = servers().values()
        server.suspend()
        with pytest.raises(EngineFailedError):
            async with asyncio.timeout(PATIENCE):
                await engine.commit(parts.new.version, PauseMode.WAIT)


@pytest.mark.fast
async def test_one_process_a_node_and_only_the_first_serves(parts: Parts) -> None:
    arguments = {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}
    async with running_nodes(parts, nnodes=2, server_args=arguments) as (first, _):
        engine = engine_of(first)
        assert await ask(engine, "a") == [expected(PROMPT, 6, parts.model)]
        status = engine.status()
        read, cached = status.prefill_tokens_total, status.prefix_hit_tokens_total
        assert (read, cached) == (len(PROMPT) - 1, 1)
        found = servers()
        assert sorted(found) == [0, 1]
        assert [len(engine.status().rank_loads)] == [2]
        commands = [" ".join(found[rank].cmdline()) for rank in (0, 1)]
        meeting = {c.split("--dist-init-addr ")[1].split()[0] for c in commands}
        assert len(meeting) == 1 and all("--nnodes 2 " in c for c in commands)
        await engine.prepare(parts.new.version, parts.new.digest, parts.new.directory)
        await engine.commit(parts.new.version, PauseMode.WAIT)
        assert await ask(engine, "b") == [expected(PROMPT, 6, parts.new.directory)]
    assert not servers()


@pytest.mark.parametrize(
    ("node", "number"),
    [
        (0, signal.SIGKILL),
        (0, signal.SIGSTOP),
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.fast),
        (1, signal.SIGSTOP),
    ],
)
async def test_a_server_lost_on_any_node_ends_the_group_whole(
    parts: Parts, node: int, number: int
) -> None:
    """Nothing of the old group is left when the new one begins, and what was asked fails typed.

    A process that is stopped is found by its silence; on a further node, where it serves nobody,
    by requests that get no token.
    """
    pace = {"STAND_IN_SECONDS": "0.2"}
    arguments = {"tp_size": 2}
    async with running_nodes(
        parts, nnodes=2, server_args=arguments, environment=pace, silent_seconds=silence_of(number)
    ) as (first, _):
        engine = engine_of(first)
        before, incarnation = servers(), engine._replica._servers.incarnation
        asked = asyncio.create_task(ask(engine, "a", 900))
        async with asyncio.timeout(PATIENCE):
            while not engine.status().rank_loads[0].running_count:
                await asyncio.sleep(0.05)
            os.kill(before[node].pid, number)
            with pytest.raises(EngineFailedError):
                await asked
        await until_served(engine, incarnation)
        for process in before.values():
            assert not process.is_running()
        after = servers()
        assert sorted(after) == [0, 1]
        assert await ask(engine, "b") == [expected(PROMPT, 6, parts.model)]


async def test_the_router_leases_no_group_that_is_broken(parts: Parts) -> None:
    async with running_router() as router:
        address = router.server.address
        async with running_nodes(parts, router=address, nnodes=2, server_args={"tp_size": 2}) as (
            first,
            further,
        ):
            (engine,) = await wait_for_engines(address, 1)
            assert engine.weights.version == 0 and engine.HasField("weights")
            incarnation = engine_of(first)._replica._servers.incarnation
            await further.close()  # the node goes for good: there is no group without it
            async with asyncio.timeout(PATIENCE), RouterClient(address) as client:
                while (await client.list_engines())[0].HasField("weights"):
                    await asyncio.sleep(0.05)
            async with EngineClient(first.server.address) as client:
                with pytest.raises(RemoteError) as refused:
                    await client.generate(PROMPT, max_new_tokens=2)
            assert refused.value.reason == "ENGINE_FAILED"
            assert not servers()
            assert engine_of(first)._replica._servers.incarnation == incarnation


@pytest.mark.fast
async def test_prefill_and_decode_each_get_the_request_and_the_weights(parts: Parts) -> None:
    async with running_nodes(parts, prefill={"server_args": {"tp_size": 2}}) as (first, _):
        engine = engine_of(first)
        assert sorted(servers()) == [0, 10]
        found = await ask(engine, "a", count=4)
        assert found == [expected(PROMPT, 6, parts.model)] * 4
        client = engine._replica.handle.client
        seen = [(await each.get("/server_info"))["seen"] for each in (client, client._prefill)]
        assert seen == [4, 4]
        given = await engine.score([*PROMPT, 7, 8], len(PROMPT))
        assert given == [-1.0, -2.0]  # of prefill: decode says nothing of the prompt
        await engine.prepare(parts.new.version, parts.new.digest, parts.new.directory)
        await engine.commit(parts.new.version, PauseMode.IN_PLACE)
        assert await ask(engine, "b") == [expected(PROMPT, 6, parts.new.directory)]
        assert engine.status().version == parts.new.version
    assert not servers()


@pytest.mark.parametrize("leg", [0, 10])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("moment", ["reading", "decoding"])
async def test_a_leg_that_is_lost_fails_the_request(
    parts: Parts, leg: int, number: int, moment: str
) -> None:
    """Also while the prompt is read, of which the other leg would wait for ever."""
    slow = {"STAND_IN_PROMPT_SECONDS": "600"} if moment == "reading" else {"STAND_IN_SECONDS": "1"}
    async with running_nodes(
        parts, stuck=600, prefill={}, environment=slow, silent_seconds=silence_of(number)
    ) as (first, _):
        engine = engine_of(first)
        before, incarnation = servers(), engine._replica._servers.incarnation
        asked = asyncio.create_task(ask(engine, "a", 900))
        async with asyncio.timeout(PATIENCE):
            if moment == "reading":
                client = engine._replica.handle.client
                while (await client._prefill.get("/server_info"))["seen"] < 1:
                    await asyncio.sleep(0.05)
            else:
                while not engine.status().rank_loads[0].running_count:
                    await asyncio.sleep(0.05)
            os.kill(before[leg].pid, number)
            with pytest.raises(EngineFailedError):
                await asked
        await until_served(engine, incarnation)
        assert not any(process.is_running() for process in before.values())
        assert sorted(servers()) == [0, 10]


@pytest.mark.fast
async def test_an_abort_ends_both_legs(parts: Parts) -> None:
    pace = {"STAND_IN_SECONDS": "0.1", "STAND_IN_PROMPT_SECONDS": "0.5"}
    async with running_nodes(parts, prefill={}, environment=pace) as (first, _):
        engine = engine_of(first)
        asked = asyncio.create_task(ask(engine, "a", 900))
        client = engine._replica.handle.client
        async with asyncio.timeout(PATIENCE):
            while (await client.get("/server_info"))["seen"] < 1:
                await asyncio.sleep(0.05)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            for leg in (client, client._prefill):
                assert (await leg.get("/server_info"))["aborted"] == 1
        assert engine.status().rank_loads[0].waiting_count == 0
        assert await ask(engine, "b", 2) == [expected(PROMPT, 2, parts.model)]
