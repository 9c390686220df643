"""The experts that SGLang says it used, beside the router of transformers in float32."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from services.rollout.engine.interface import Delta, FinishReason, PauseMode
from sluice.weights.store import WeightStore
from tests.contract.engine.cases import SIZES, Model, complete, request_of, text_of, write_letters
from tests.imported import import_checkpoint
from tests.patience import PATIENCE
from tests.sglang.conftest import Start

CHOSEN, EXPERTS = 2, 8
PROMPTS = [[5], [1, 2, 3], [(7 * place) % 97 for place in range(90)]]


def build_mixture(directory: Path, seed: int) -> Model:
    """Every layer has experts: SGLang 0.5.23 takes all of a Qwen3-MoE's for such."""
    torch.manual_seed(seed)
    config: Any = Qwen3MoeConfig(
        **SIZES,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        mlp_only_layers=[],
    )
    module = Qwen3MoeForCausalLM(config).eval()
    module.save_pretrained(directory)
    return Model(module, directory)


@torch.no_grad()
def routed(model: Model, token_ids: list[int]) -> np.ndarray:
    """[tokens, layers, chosen] in ascending order, without the last token."""
    answer = model.module(torch.tensor([token_ids]), output_router_logits=True)
    chosen = [logits.topk(CHOSEN).indices for logits in answer.router_logits]
    return torch.stack(chosen, 1).sort().values[:-1].numpy()


def check(model: Model, prompt: list[int], sample: Delta, token_ids: tuple[int, ...]) -> None:
    assert sample.routed_experts is not None
    assert sample.routed_experts.dtype == np.int16
    expected = routed(model, [*prompt, *token_ids])
    np.testing.assert_array_equal(np.sort(sample.routed_experts), expected)


async def test_experts_are_those_of_the_models_own_router(launch: Start, tmp_path: Path) -> None:
    old, new = (build_mixture(tmp_path / name, seed) for seed, name in enumerate("ab"))
    store = WeightStore(tmp_path / "weights", durable=False)
    record = import_checkpoint(store, new.directory, None, 0)
    write_letters(old.directory)
    engine = await launch(model=str(old.directory), routed_experts=True)

    async def ask(model: Model, name: str) -> list[Delta]:
        requests = [
            request_of(f"{name}{number}", prompt, 3, temperature=0, max_new_tokens=20)
            for number, prompt in enumerate(PROMPTS)
        ]
        answers = await asyncio.gather(*[complete(engine, request) for request in requests])
        for prompt, samples in zip(PROMPTS, answers, strict=True):
            for sample in samples:
                assert sample.logprobs == pytest.approx(
                    model.logprobs(prompt, sample.token_ids), abs=1e-3
                )
                check(model, prompt, sample, sample.token_ids)
        return answers[-1]

    before = await ask(old, "old")
    with pytest.raises(AssertionError):
        check(new, PROMPTS[-1], before[0], before[0].token_ids)
    await engine.prepare(record.version, record.digest, record.directory)
    await engine.commit(record.version, PauseMode.IN_PLACE)
    await ask(new, "new")

    drawn: list[Delta] = []
    request = request_of("cut", [4, 2], temperature=0, max_new_tokens=3000, stream=True)
    async with asyncio.timeout(PATIENCE), aclosing(engine.generate(request)) as deltas:
        async for delta in deltas:
            drawn.append(delta)
            if len(drawn) == 5:
                await engine.abort(["cut"])
    assert all(delta.routed_experts is None for delta in drawn[:-1])
    assert drawn[-1].finish_reason is FinishReason.ABORTED
    tokens = tuple(token for delta in drawn for token in delta.token_ids)
    check(new, [4, 2], drawn[-1], tokens)

    (free,) = await complete(engine, request_of("free", [4], temperature=0, max_new_tokens=40))
    stop = text_of(old.directory, free.token_ids[9:12]).strip("\ufffd")
    request = request_of("stop", [4], temperature=0, max_new_tokens=40, stop=(stop,))
    (sample,) = await complete(engine, request)
    assert stop in text_of(old.directory, sample.token_ids)
    assert stop not in text_of(old.directory, sample.token_ids[:-1])
    assert sample.finish_reason is FinishReason.STOP
    check(new, [4], sample, tuple(sample.token_ids))
