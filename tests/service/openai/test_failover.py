"""Engines that let go of a sample in the middle: what was told stays, and goes on."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from services.rollout.engine.interface import Engine, PauseMode
from services.rollout.process import RolloutProcess
from sluice.client import EngineClient, RolloutClient, RouterClient
from tests.patience import PATIENCE
from tests.service.openai.conftest import client_of, running_openai
from tests.service.rollout.harness import (
    Store,
    load_weights,
    running_rollout,
    running_router,
    wait_for_engines,
)

REQUEST: dict[str, Any] = {"model": "policy", "prompt": "12=", "max_tokens": 40}


async def stream_of(process: RolloutProcess, **fields: Any) -> tuple[str, list[dict]]:
    """The text, and which weights sampled which tokens."""
    text, spans = "", []
    async with client_of(process) as client:
        async for chunk in await client.completions.create(**REQUEST, **fields, stream=True):
            text += chunk.choices[0].text
            spans += getattr(chunk.choices[0], "weight_spans", [])
    return text, spans


async def long_text(process: RolloutProcess) -> tuple[int, str]:
    """A seed that makes a long text, and the text."""
    for seed in range(100):
        text, _ = await stream_of(process, seed=seed)
        if len(text) > 20:
            return seed, text
    raise AssertionError("no seed makes a long text")


async def draw_some(engines: list[Engine], count: int) -> Engine:
    """The engine that was asked, held after a few tokens."""
    before = [engine.status().decode_tokens_total for engine in engines]
    async with asyncio.timeout(PATIENCE):
        while True:
            for engine, so_far in zip(engines, before, strict=True):
                await engine.resume()
                await engine.pause(PauseMode.IN_PLACE)
                if engine.status().decode_tokens_total >= so_far + count:
                    return engine
            await asyncio.sleep(0.01)


async def test_a_sample_that_the_engine_aborts_goes_on_with_the_same_tokens(
    store: Store, model: Path
) -> None:
    async with running_openai(store, model) as process:
        engine = process.engine
        assert engine is not None
        seed, whole = await long_text(process)
        stop = whole[-3:]
        expected, _ = await stream_of(process, seed=seed, stop=stop)
        await engine.pause(PauseMode.IN_PLACE)
        call = asyncio.create_task(stream_of(process, seed=seed, stop=stop))
        await draw_some([engine], 5)
        await engine.pause(PauseMode.ABORT)
        await engine.resume()
        text, spans = await call
    assert text == expected
    covered = [i for span in spans for i in range(span["first_token"], span["last_token"] + 1)]
    assert covered == list(range(len(covered)))
    assert len(covered) >= len(text)


async def test_a_stream_outlives_its_engine(store: Store, model: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router())
        common = {"router": router.server.address, "tokenizer": str(model)}
        engines = [
            await stack.enter_async_context(
                running_openai(store, model, openai=None, engine_id=f"engine-{number}", **common)
            )
            for number in range(2)
        ]
        worker = await stack.enter_async_context(
            running_rollout(store, roles=["episodes"], openai={}, engine_id="worker", **common)
        )
        await wait_for_engines(router.server.address, 2)
        seed, expected = await long_text(worker)
        backends = [process.engine for process in engines if process.engine is not None]
        for backend in backends:
            await backend.pause(PauseMode.IN_PLACE)
        call = asyncio.create_task(stream_of(worker, seed=seed))
        asked = await draw_some(backends, 5)
        (lost,) = [process for process in engines if process.engine is asked]
        await lost.server.stop()
        for backend in backends:
            if backend is not asked:
                await backend.resume()
        text, spans = await call
    assert text == expected
    covered = [i for span in spans for i in range(span["first_token"], span["last_token"] + 1)]
    assert covered == list(range(len(covered)))


async def test_a_chat_that_waits_for_weights_is_explained_by_the_router(
    store: Store, model: Path
) -> None:
    """As after a restart of everything, before a trainer has published again."""
    async with contextlib.AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router())
        address = router.server.address
        engine = await stack.enter_async_context(
            running_rollout(store, roles=["engine"], router=address, engine_id="empty")
        )
        worker = await stack.enter_async_context(
            running_rollout(
                store,
                roles=["episodes"],
                router=address,
                tokenizer=str(model),
                openai={},
                engine_id="worker",
            )
        )
        client = await stack.enter_async_context(client_of(worker))
        asked = asyncio.create_task(client.completions.create(**REQUEST))
        explanations = dict[str, str]()
        asking = await stack.enter_async_context(RouterClient(address))
        working = await stack.enter_async_context(RolloutClient(worker.server.address))
        async with asyncio.timeout(PATIENCE):
            while "empty has no weights" not in explanations.values():
                assert not asked.done()
                waits = await asking.list_waits()
                explanations = {wait.what: wait.explanation for wait in waits}
                await asyncio.sleep(0.02)
            own = [wait.explanation for wait in await working.list_waits()]
            assert any("no engine of pool policy" in each for each in own)
            direct = EngineClient(engine.server.address)
            await load_weights(await stack.enter_async_context(direct), store.first)
            assert (await asked).choices
