"""Aborts, pauses, refusals and the end of an engine."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import aclosing

import pytest

from services.rollout.engine.interface import Delta, Engine, FinishReason, PauseMode
from services.rollout.errors import (
    DuplicateRequestError,
    EngineFailedError,
    NoWeightsError,
    PromptTooLongError,
)
from sluice.runtime.errors import InvalidFieldError, QueueFullError
from tests.contract.engine.cases import Model, StartEngine, complete, gather, request_of
from tests.patience import PATIENCE


async def started(
    engine: Engine, name: str, count: int = 1, length: int = 4000
) -> asyncio.Task[list[list[Delta]]]:
    """A long request of which every sample has begun."""
    seen: set[int] = set()
    ready = asyncio.Event()

    async def follow() -> list[list[Delta]]:
        deltas: list[list[Delta]] = [[] for _ in range(count)]
        request = request_of(name, [1, 2], count, max_new_tokens=length, stream=True)
        async for delta in engine.generate(request):
            deltas[delta.index].append(delta)
            seen.add(delta.index)
            if len(seen) == count:
                ready.set()
        return deltas

    task = asyncio.create_task(follow())
    await asyncio.wait_for(ready.wait(), PATIENCE)
    return task


def tokens(deltas: list[Delta]) -> tuple[int, ...]:
    return sum((delta.token_ids for delta in deltas), ())


async def test_abort_keeps_what_was_drawn(qwen3: Model, start_engine: StartEngine) -> None:
    engine = await start_engine(model=str(qwen3.directory))
    task = await started(engine, "a", 3)
    assert await engine.abort(["a", "unknown"]) == ["a"]
    for deltas in await asyncio.wait_for(task, PATIENCE):
        assert deltas[-1].finish_reason is FinishReason.ABORTED
        drawn = tokens(deltas)
        assert 1 <= len(drawn) < 4000
        logprobs = sum((delta.logprobs for delta in deltas), ())
        assert logprobs == pytest.approx(qwen3.logprobs([1, 2], drawn), abs=1e-4)
    assert await engine.abort(["a"]) == []


async def test_abort_of_a_waiting_request_ends_every_sample_empty(
    qwen3: Model, start_engine: StartEngine
) -> None:
    engine = await start_engine(model=str(qwen3.directory), max_running=2)
    running = await started(engine, "a", 2)
    waiting = asyncio.create_task(complete(engine, request_of("b", [1], 3)))
    while engine.status().rank_loads[0].waiting_count < 3:
        await asyncio.sleep(0)
    assert await engine.abort(["b"]) == ["b"]
    samples = await asyncio.wait_for(waiting, PATIENCE)
    assert [s.finish_reason for s in samples] == [FinishReason.ABORTED] * 3
    assert [s.token_ids for s in samples] == [()] * 3
    await engine.abort(["a"])
    await running


async def test_closing_the_iterator_ends_the_request(
    qwen3: Model, start_engine: StartEngine
) -> None:
    engine = await start_engine(model=str(qwen3.directory))
    request = request_of("a", [1], 2, max_new_tokens=4000, stream=True)
    async with aclosing(engine.generate(request)) as deltas:
        await anext(deltas)
    await engine.abort([])  # a command after the one that ends it
    assert engine.status().rank_loads[0].running_count == 0
    await complete(engine, request_of("a", [1]))  # the name is free again


async def test_pause_wait_lets_running_end_and_holds_new_ones(
    qwen3: Model, start_engine: StartEngine
) -> None:
    engine = await start_engine(model=str(qwen3.directory))
    running = await started(engine, "a", length=500)
    pause = asyncio.create_task(engine.pause(PauseMode.WAIT))
    late = asyncio.create_task(complete(engine, request_of("b", [1])))
    await pause
    (deltas,) = await running
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert engine.status().paused
    assert not late.done()
    await engine.resume()
    assert (await asyncio.wait_for(late, PATIENCE))[0].finish_reason is FinishReason.LENGTH


async def test_pause_abort_ends_running_with_what_they_have(
    qwen3: Model, start_engine: StartEngine
) -> None:
    engine = await start_engine(model=str(qwen3.directory))
    running = await started(engine, "a", 2)
    await engine.pause(PauseMode.ABORT)
    for deltas in await asyncio.wait_for(running, PATIENCE):
        assert deltas[-1].finish_reason is FinishReason.ABORTED
        assert tokens(deltas)
    late = asyncio.create_task(complete(engine, request_of("b", [1])))
    await engine.abort([])
    assert not late.done()
    await engine.resume()
    await asyncio.wait_for(late, PATIENCE)


async def test_pause_in_place_holds_running_and_loses_nothing(
    qwen3: Model, start_engine: StartEngine
) -> None:
    engine = await start_engine(model=str(qwen3.directory))
    # Long enough for the pause to come before its end, however late; cut off once that was seen.
    request = request_of("a", [1, 2], temperature=0, max_new_tokens=4000, stream=True)
    task = asyncio.create_task(gather(engine, request))
    while engine.status().rank_loads[0].running_count == 0:
        await asyncio.sleep(0)
    await engine.pause(PauseMode.IN_PLACE)
    drawn = engine.status().decode_tokens_total
    await engine.abort([])
    assert engine.status().decode_tokens_total == drawn
    assert not task.done()
    await engine.resume()
    while engine.status().decode_tokens_total < drawn + 50:
        await asyncio.sleep(0)
    await engine.abort(["a"])
    (held,) = await asyncio.wait_for(task, PATIENCE)
    assert len(tokens(held)) >= drawn + 50
    whole = request_of("b", [1, 2], temperature=0, max_new_tokens=len(tokens(held)))
    (free,) = await complete(engine, whole)
    assert tokens(held) == free.token_ids


async def test_an_engine_without_weights_refuses(start_engine: StartEngine) -> None:
    engine = await start_engine()
    assert engine.status().version is None
    with pytest.raises(NoWeightsError):
        await complete(engine, request_of("a", [1]))
    with pytest.raises(NoWeightsError):
        await engine.score([1, 2], 1)


@pytest.mark.parametrize(
    ("field", "prompt", "settings"),
    [
        ("prompt_token_ids", [], {}),
        ("prompt_token_ids", [97], {}),
        ("prompt_token_ids", [-1], {}),
        ("sampling.max_new_tokens", [1], {"max_new_tokens": 0}),
        ("sampling.min_new_tokens", [1], {"min_new_tokens": -1}),
        ("sampling.min_new_tokens", [1], {"max_new_tokens": 4, "min_new_tokens": 5}),
        ("sampling.temperature", [1], {"temperature": -0.1}),
        ("sampling.temperature", [1], {"temperature": float("nan")}),
        ("sampling.temperature", [1], {"temperature": 1e-40}),  # a quotient would be infinite
        ("sampling.temperature", [1], {"temperature": 1e38}),
        ("sampling.top_k", [1], {"top_k": -1}),
        ("sampling.top_p", [1], {"top_p": 0.0}),
        ("sampling.top_p", [1], {"top_p": 1.5}),
        ("sampling.seeds", [1], {"seeds": (1, 2)}),
    ],
)
async def test_bad_fields_are_named(
    qwen3: Model, start_engine: StartEngine, field: str, prompt: list[int], settings: dict
) -> None:
    engine = await start_engine(model=str(qwen3.directory))
    with pytest.raises(InvalidFieldError) as raised:
        await complete(engine, request_of("a", prompt, **settings))
    assert raised.value.metadata["field"] == field
    await complete(engine, request_of("a", [1]))  # and the engine goes on


async def test_no_samples_and_ranks_that_are_not_there_are_refused(
    qwen3: Model, start_engine: StartEngine
) -> None:
    engine = await start_engine(model=str(qwen3.directory))
    with pytest.raises(InvalidFieldError, match="sample_count"):
        await asyncio.wait_for(complete(engine, request_of("a", [1], 0)), PATIENCE)
    elsewhere = dataclasses.replace(request_of("a", [1]), dp_rank=3)
    with pytest.raises(InvalidFieldError, match="dp_rank"):
        await asyncio.wait_for(complete(engine, elsewhere), PATIENCE)


async def test_too_long_too_many_and_twice_are_refused(
    qwen3: Model, start_engine: StartEngine
) -> None:
    engine = await start_engine(
        model=str(qwen3.directory), max_model_length=3000, max_running=1, waiting_limit=4
    )
    with pytest.raises(PromptTooLongError) as raised:
        await complete(engine, request_of("a", [1] * 3000))
    assert raised.value.metadata == {"length": "3000", "limit": "2999"}
    running = await started(engine, "a")
    with pytest.raises(DuplicateRequestError):
        await complete(engine, request_of("a", [1]))
    waiting = asyncio.create_task(complete(engine, request_of("b", [1], 4)))
    while engine.status().rank_loads[0].waiting_count < 4:
        await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match="4 samples wait already, and 1 more"):
        await complete(engine, request_of("c", [1]))
    with pytest.raises(QueueFullError, match="5 samples in one request are more than"):
        await complete(engine, request_of("d", [1], 5))
    await engine.abort(["a"])
    await asyncio.gather(running, waiting)


async def test_close_ends_running_requests_with_an_error(
    qwen3: Model, start_engine: StartEngine
) -> None:
    engine = await start_engine(model=str(qwen3.directory))
    running = await started(engine, "a")
    await engine.close()
    with pytest.raises(EngineFailedError):
        await asyncio.wait_for(running, PATIENCE)
    with pytest.raises(EngineFailedError):
        await complete(engine, request_of("b", [1]))
    assert engine.status().failure
