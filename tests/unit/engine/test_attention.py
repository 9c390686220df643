"""Architectures beyond the plain ones: windows are kept, what cannot be served is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import Delta, PauseMode
from services.rollout.engine.reference.core import EngineCore
from services.rollout.engine.reference.engine import ReferenceEngine
from services.rollout.errors import UnfitWeightsError
from sluice.weights.store import WeightStore
from tests.contract.engine.cases import SIZES, Model, complete, request_of
from tests.imported import import_checkpoint
from tests.patience import PATIENCE


def save(module: torch.nn.Module, directory: Path) -> Model:
    module.eval().save_pretrained(directory)
    return Model(module, directory)


def test_a_sliding_window_is_kept_in_prompts_chunks_and_decoding(
    tmp_path: Path, create_core: Callable[..., EngineCore]
) -> None:
    torch.manual_seed(0)
    model = save(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=9)), tmp_path)
    wide = save(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)), tmp_path / "w")
    wide.module.load_state_dict(model.module.state_dict())
    for chunk in (512, 6):
        core = create_core(tmp_path, prefill_chunk_tokens=chunk)
        prompts = {1: [3, 4], 2: list(range(30)), 3: list(range(40, 55))}
        for key, prompt in prompts.items():
            core.submit(key, request_of(str(key), prompt, max_new_tokens=20))
        while core.has_work:
            core.step()
        for key, delta in core.take_outbox():
            assert isinstance(delta, Delta)
            expected = model.logprobs(prompts[key], delta.token_ids)
            assert delta.logprobs == pytest.approx(expected, abs=1e-4)
            without = wide.logprobs(prompts[key], delta.token_ids)
            assert delta.logprobs != pytest.approx(without, abs=1e-3)


def test_a_directory_without_a_model_is_refused(
    tmp_path: Path, create_core: Callable[..., EngineCore]
) -> None:
    with pytest.raises(UnfitWeightsError):
        create_core(tmp_path / "nowhere")


async def test_a_mixture_of_experts_takes_new_versions_though_its_checkpoint_is_cut_otherwise(
    tmp_path: Path,
) -> None:
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = Qwen3MoeConfig(
            **SIZES, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2
        )
        models.append(save(Qwen3MoeForCausalLM(config), tmp_path / str(seed)))
    store = WeightStore(tmp_path / "store", durable=False)
    record = import_checkpoint(store, models[1].directory, None, 0)
    engine = ReferenceEngine(EngineConfig(model=str(models[0].directory), threads=1))
    await engine.start()
    try:
        await engine.prepare(record.version, record.digest, record.directory)
        for model in models:
            (sample,) = await complete(engine, request_of("a", [1, 2, 3]))
            expected = model.logprobs([1, 2, 3], sample.token_ids)
            assert sample.logprobs == pytest.approx(expected, abs=1e-4)
            if engine.status().version == 0:
                await asyncio.wait_for(engine.commit(record.version, PauseMode.WAIT), PATIENCE)
    finally:
        await engine.close()
