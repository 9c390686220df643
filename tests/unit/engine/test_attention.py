"""Architectures beyond the plain ones: windows are kept, what cannot be served is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from prometheus_client import REGISTRY
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import Delta, PauseMode
from services.rollout.engine.reference.attention import Heads, PromptBlock
from services.rollout.engine.reference.core import EngineCore
from services.rollout.engine.reference.engine import ReferenceEngine
from services.rollout.engine.reference.loading import open_model
from services.rollout.errors import UnfitWeightsError, UnsupportedModelError
from sluice.fused_operations import attention_kernel
from sluice.operations import OperationsConfig
from sluice.weights.store import WeightStore
from tests.contract.engine.cases import SIZES, Model, complete, request_of
from tests.fused_stand_ins import CALLS, place_all
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


@pytest.mark.parametrize("implementation", ["flash_attn", "flash_attn_3", "torch_varlen"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("start", [0, 7])
def test_a_kernel_attends_chunks_of_prompts_as_torch_does(
    monkeypatch: pytest.MonkeyPatch, implementation: str, window: int | None, start: int
) -> None:
    place_all(monkeypatch)
    torch.manual_seed(0)
    count, chunk, length = 3, 6, 16
    cache = torch.randn(2, 2, count, 2, length, 8, dtype=torch.bfloat16)
    heads = Heads(
        *(torch.randn(many, count * chunk, 8, dtype=torch.bfloat16) for many in (4, 2, 2))
    )
    plain, fused = (PromptBlock(count, chunk, start, cache.clone()) for _ in range(2))
    for layer in (0, 1):
        wanted = plain.attend(layer, heads, 0.3, window)
        assert CALLS[implementation] == layer
        found = fused.attend(layer, heads, 0.3, window, attention_kernel(implementation))
        torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)
    assert torch.equal(fused.kv, plain.kv)


def test_what_an_engine_is_asked_to_run_and_cannot_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save(MistralForCausalLM(MistralConfig(**SIZES)), tmp_path)
    for asked, reason in (
        ({"attention": "flash_attn"}, "it is for cuda, not cpu"),
        ({"experts": "loop"}, "experts: loop has no effect on this model"),
        ({"adamw": "torch_fused"}, "adamw: torch_fused has no effect on this model"),
    ):
        with pytest.raises(UnsupportedModelError, match=reason):
            open_model(tmp_path, torch.float32, torch.device("cpu"), OperationsConfig(**asked))
    asked = OperationsConfig(rms_norm="torch_rms_norm")
    model, _ = open_model(tmp_path, torch.float32, torch.device("cpu"), asked)
    assert model.operations["rms_norm"] == "torch_rms_norm"
    name = "sluice_rollout_operation_info"
    labels = {"operation": "rms_norm", "implementation": "torch_rms_norm"}
    assert REGISTRY.get_sample_value(name, labels) == 1
    with pytest.raises(ValueError, match="operations: has no effect with backend sglang"):
        EngineConfig(backend="sglang", operations=asked)
