"""A server of two data-parallel ranks: every request runs where its lease says."""

from __future__ import annotations

import asyncio

import pytest

from services.rollout.engine.interface import Generation, PauseMode, Sampling
from services.rollout.engine.sglang.engine import SglangEngine
from sluice.runtime.errors import InvalidFieldError
from sluice.weights.store import StoredVersion
from tests.contract.engine.cases import Model, complete
from tests.patience import PATIENCE
from tests.sglang.conftest import Start


def request_at(rank: int, name: str, length: int) -> Generation:
    return Generation(
        request_id=name,
        prompt_token_ids=[1 + rank, 2, 3],
        sampling=Sampling(max_new_tokens=length),
        sample_count=2,
        dp_rank=rank,
    )


async def test_both_ranks_are_used_evenly_and_take_new_weights(
    models: tuple[Model, Model], versions: list[StoredVersion], launch: Start
) -> None:
    engine = await launch(
        model=str(models[0].directory), sglang={"server_args": {"dp_size": 2}}, max_running=8
    )
    assert len(engine.status().rank_loads) == 2
    assert engine.status().transfer_ranks == 0  # SGLang takes transfers on one rank alone
    seen = await watch(engine)
    tasks = [
        asyncio.create_task(complete(engine, request_at(number % 2, str(number), 800)))
        for number in range(8)
    ]
    async with asyncio.timeout(PATIENCE):
        while any(load.running_count < 8 for load in engine.status().rank_loads):
            await asyncio.sleep(0.02)
        while await server_loads(engine) != [8, 8]:
            await asyncio.sleep(0.02)
        new = versions[1]
        await engine.prepare(new.version, new.digest, new.directory)
        await engine.commit(new.version, PauseMode.IN_PLACE)
        answers = await asyncio.gather(*tasks)
    for number, samples in enumerate(answers):
        for sample in samples:
            assert [span.version for span in sample.spans] == [0, new.version]
            cut = sample.spans[1].first_token
            expected = models[0].logprobs([1 + number % 2, 2, 3], sample.token_ids[:cut])
            assert sample.logprobs[:cut] == pytest.approx(expected, abs=1e-3)
    assert seen == {0: 8, 1: 8}
    await asyncio.gather(*[complete(engine, request_at(1, f"one-{n}", 4)) for n in range(4)])
    assert seen == {0: 8, 1: 16}  # the lease chooses, not SGLang's own balancing
    for rank in (0, 1):
        (fresh, _) = await complete(engine, request_at(rank, "fresh", 8))
        expected = models[1].logprobs([1 + rank, 2, 3], fresh.token_ids)
        assert fresh.logprobs == pytest.approx(expected, abs=1e-3)
    with pytest.raises(InvalidFieldError, match="dp_rank"):
        await complete(engine, request_at(2, "nowhere", 8))


async def server_loads(engine: SglangEngine) -> list[int]:
    """Running requests by rank, as SGLang says."""
    answer = await engine._replica.handle.client.get("/v1/loads")
    return [load["num_running_reqs"] for load in answer["loads"]]


async def watch(engine: SglangEngine) -> dict[int, int]:  # type: ignore[no-untyped-def]
    """Samples by the rank that SGLang says it ran them on."""
    found: dict[int, int] = {}
    stream = engine._replica.handle.client.stream

    async def watched(body):  # type: ignore[no-untyped-def]
        async for message in stream(body):
            if message["meta_info"]["finish_reason"]:
                rank = message["meta_info"]["dp_rank"]
                found[rank] = found.get(rank, 0) + 1
            yield message

    engine._replica.handle.client.stream = watched  # type: ignore[method-assign]
    return found
