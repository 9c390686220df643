"""A trainer's log-probs are those of an engine that serves its version in INT4, where it is asked
to compute by that, and only there."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.client import EngineClient
from sluice.samples.sample import Sample
from tests.models.families import CASES, build
from tests.service.trainer.harness import (
    ACTIVE,
    make_groups,
    poll,
    running_trainer,
    train_step,
    until,
    upload,
)
from tests.service.weights.harness import running_engines, serves

AWARE = {"quantization": "int4_32", "quantization_aware": True}
UNAWARE = {"quantization": "int4_32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = next(case for case in CASES if case.name == "qwen3_moe")
    return build(case, tmp_path_factory.mktemp("mixture") / "model").directory


async def sampled(engine: EngineClient) -> list[Sample]:
    """Samples of random tokens, with the engine's log-probs of them."""
    generator = np.random.default_rng(3)
    samples = []
    for index in range(4):
        token_ids = generator.integers(0, 53, size=20).astype(np.int32)
        request = engine_pb.ScoreRequest(token_ids=token_ids.tolist(), prompt_length=2)
        logprobs = np.array((await engine.stub.Score(request)).logprobs, dtype=np.float32)
        columns = {"rollout_logprobs": logprobs, "reward": float(index)}
        samples.append(
            Sample(
                sample_id=f"g/{index}",
                group_id="g",
                token_ids=token_ids,
                prompt_length=2,
                finish_reason="stop",
                columns=columns,
            )
        )
    return samples


FSDP = {"backend": "fsdp", "ranks": {"count": 2}}
MEGATRON = {"backend": "megatron", "ranks": {"count": 2}}
BFLOAT16 = 0.03  # twice what it is without any quantisation


@pytest.mark.parametrize(
    ("publish", "settings", "dtype", "least", "most"),
    [
        pytest.param(AWARE, {}, "float32", 0, 1e-5, id="reference"),
        pytest.param(AWARE, {**FSDP, "fsdp": {"dtype": "float32"}}, "float32", 0, 1e-5, id="fsdp"),
        pytest.param(
            AWARE,
            {**MEGATRON, "megatron": {"expert": 2, "dtype": "float32"}},
            "float32",
            0,
            1e-5,
            id="megatron",
        ),
        pytest.param(AWARE, FSDP, "bfloat16", 0, BFLOAT16, id="fsdp-bfloat16"),
        pytest.param(AWARE, MEGATRON, "bfloat16", 0, BFLOAT16, id="megatron-bfloat16"),
        pytest.param(UNAWARE, {}, "float32", 3 * BFLOAT16, 1, id="unaware"),
    ],
)
async def test_mismatch_with_an_engine_of_int4(
    publish: dict[str, Any],
    settings: dict[str, Any],
    dtype: str,
    least: float,
    most: float,
    model: Path,
    tmp_path: Path,
) -> None:
    values = {"publish": publish, **settings}
    served = {"model": str(model), "threads": 1, "max_model_length": 64, "dtype": dtype}
    async with contextlib.AsyncExitStack() as stack:
        running = stack.enter_context(running_trainer(tmp_path / "trainer", model, **values))
        arguments: Any = (tmp_path / "engines", model, running.store, running.security, 1)
        (launched,) = stack.enter_context(running_engines(*arguments, engine=served))
        client = await stack.enter_async_context(running.client())
        engine = await stack.enter_async_context(launched.client())
        await until(client, lambda now: now.state == ACTIVE)
        await train_step(client, await upload(client, "one", make_groups("one")))
        published = await client.publish_weights()

        async def is_serving() -> bool:
            return await serves(engine)

        await poll(is_serving)
        await engine.prepare_weights(published.weights)
        await engine.commit_weights(published.weights)
        batch = await upload(client, "sampled", await sampled(engine))
        found = (await client.compute_logprobs(batch)).rollout_mismatch_mean
    assert least <= found <= most
