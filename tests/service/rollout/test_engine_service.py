"""EngineService over the wire, on the reference engine."""

from __future__ import annotations

from tests.service.rollout.conftest import EngineUnderTest


async def test_generate(engine: EngineUnderTest) -> None:
    await engine.load(engine.store.first)
    completions = await engine.client.generate([1, 2, 3, 10], max_new_tokens=6, sample_count=3)
    assert [c.index for c in completions] == [0, 1, 2]
    print(completions[0])
    print(await engine.client.get())
