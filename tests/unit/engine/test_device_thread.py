"""A bug in a step: everyone hears of it, nobody hangs."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import PauseMode
from services.rollout.engine.reference.engine import ReferenceEngine
from services.rollout.errors import EngineFailedError
from tests.contract.engine.cases import Model, complete, request_of
from tests.patience import PATIENCE


async def test_a_step_that_raises_reaches_everyone_and_the_engine_says_so(qwen3: Model) -> None:
    engine = ReferenceEngine(EngineConfig(model=str(qwen3.directory), threads=1))
    await engine.start()
    requests = [
        asyncio.create_task(complete(engine, request_of(str(i), [i], max_new_tokens=4000)))
        for i in range(3)
    ]
    while engine.status().rank_loads[0].running_count < 3:
        await asyncio.sleep(0)
    pause = asyncio.create_task(engine.pause(PauseMode.WAIT))
    assert engine._versions.model is not None
    engine._versions.model.module.lm_head = torch.nn.Linear(1, 1)
    outcomes = await asyncio.wait_for(
        asyncio.gather(*requests, pause, return_exceptions=True), PATIENCE
    )
    assert [type(outcome) for outcome in outcomes] == [EngineFailedError] * 4
    assert "a step raised" in engine.status().failure
    for call in (
        complete(engine, request_of("late", [1])),
        engine.score([1, 2], 1),
        engine.abort(["0"]),
        engine.resume(),
    ):
        with pytest.raises(EngineFailedError):
            await asyncio.wait_for(call, PATIENCE)
    await asyncio.wait_for(engine.close(), PATIENCE)


async def test_an_engine_without_memory_says_which_setting_takes_it(qwen3: Model) -> None:
    """Keys and values of the tiny model: 2 x layers x heads x 16 numbers of 4 bytes a token."""
    config = EngineConfig(model=str(qwen3.directory), threads=1, max_cached_tokens=1 << 20)
    engine = ReferenceEngine(config)
    await engine.start()
    assert engine._versions.model is not None
    engine._versions.model.module.lm_head = Greedy()
    with pytest.raises(EngineFailedError, match="out of memory") as caught:
        await asyncio.wait_for(complete(engine, request_of("a", [1])), PATIENCE)
    document = json.loads((qwen3.directory / "config.json").read_text())
    numbers = 2 * document["num_hidden_layers"] * document["num_key_value_heads"]
    size = (1 << 20) * numbers * document["head_dim"] * 4 / 2**30
    assert f"may keep {size:.1f} GiB of keys and values (max_cached_tokens 1048576)" in str(
        caught.value
    )
    await asyncio.wait_for(engine.close(), PATIENCE)


class Greedy(torch.nn.Module):
    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return torch.empty(1 << 60)


async def test_a_commit_that_waits_can_be_given_up_and_requests_go_on(
    qwen3: Model, tmp_path
) -> None:
    from sluice.weights.store import WeightStore
    from tests.imported import import_checkpoint

    record = import_checkpoint(WeightStore(tmp_path, durable=False), qwen3.directory, None, 0)
    engine = ReferenceEngine(EngineConfig(model=str(qwen3.directory), threads=1))
    await engine.start()
    try:
        await engine.prepare(record.version, record.digest, record.directory)
        running = asyncio.create_task(complete(engine, request_of("a", [1], max_new_tokens=4000)))
        while engine.status().rank_loads[0].running_count < 1:
            await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.commit(record.version, PauseMode.WAIT), 0.05)
        late = await asyncio.wait_for(complete(engine, request_of("b", [2])), PATIENCE)
        assert [span.version for span in late[0].spans] == [0]
        assert not running.done()
        await engine.abort(["a"])
        await running
        await asyncio.wait_for(engine.commit(record.version, PauseMode.WAIT), PATIENCE)
        assert engine.status().version == record.version
    finally:
        await engine.close()
