"""Completions name the experts that transformers' own routers choose for their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import Delta, Engine, FinishReason, PauseMode
from services.rollout.engine.reference.core import EngineCore
from services.rollout.engine.reference.engine import ReferenceEngine
from services.rollout.engine.reference.loading import open_model
from services.rollout.engine.wire import join_deltas
from services.rollout.errors import UnsupportedModelError
from sluice.routers import Routers
from sluice.weights.store import WeightStore
from tests.contract.engine.cases import SIZES, Model, complete, request_of
from tests.imported import import_checkpoint

EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
}
LAYERS = 2  # that are mixtures


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.manual_seed(0)
    module: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, **EXPERTS}))
    directory = tmp_path_factory.mktemp("mixture")
    module.eval().save_pretrained(directory)
    return Model(module, directory)


@torch.no_grad()
def chosen_by(model: Model, tokens: list[int]) -> np.ndarray:
    """int16[tokens - 1, layers, chosen], sorted by expert."""
    logits = model.module(torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits
    chosen = torch.stack([layer.topk(2).indices for layer in logits], dim=1)
    return chosen.sort(-1).values.to(torch.int16).numpy()


def assert_told(model: Model, prompt: list[int], delta: Delta) -> None:
    experts = delta.routed_experts
    assert experts is not None and experts.dtype == np.int16
    np.testing.assert_array_equal(
        np.sort(experts, axis=-1), chosen_by(model, [*prompt, *delta.token_ids])
    )


def core_of(directory: Path, **settings: Any) -> EngineCore:
    core = EngineCore(EngineConfig(max_running=8, max_model_length=256, **settings))
    model, weights = open_model(directory, torch.float32, torch.device("cpu"))
    model.watch_routers()
    core.serve(model, weights)
    return core


def ended(core: EngineCore) -> dict[int, list[Delta]]:
    """Whole samples by key."""
    found: dict[int, list[Delta]] = {}
    for _ in range(1000):
        if not core.has_work:
            break
        core.step()
    for key, outcome in core.take_outbox():
        assert isinstance(outcome, Delta)
        assert (outcome.routed_experts is None) is (outcome.finish_reason is None)
        found.setdefault(key, []).append(outcome)
    return {key: join_deltas(deltas) for key, deltas in found.items()}


@pytest.mark.parametrize("deterministic", [False, True])
def test_experts_are_the_routers_whoever_runs_beside(mixture: Model, deterministic: bool) -> None:
    """Groups, chunked prompts, samples that stream and samples of other lengths in one batch."""
    core = core_of(mixture.directory, prefill_chunk_tokens=8, deterministic=deterministic)
    prompts = {1: [5, 6, 7], 2: list(range(30)), 3: [9]}
    core.submit(1, request_of("a", prompts[1], 3, max_new_tokens=12))
    core.submit(2, request_of("b", prompts[2], 2, max_new_tokens=5, stream=True))
    core.step()
    core.submit(3, request_of("c", prompts[3], 1, max_new_tokens=1))
    found = ended(core)
    assert [len(found[key]) for key in (1, 2, 3)] == [3, 2, 1]
    for key, deltas in found.items():
        for delta in deltas:
            assert_told(mixture, prompts[key], delta)


def test_a_first_token_that_ends_the_first_sample_has_those_of_the_prompt(mixture: Model) -> None:
    core = core_of(mixture.directory)
    core.submit(1, request_of("a", [4, 5, 6], max_new_tokens=1))
    (delta,) = ended(core)[1]
    assert_told(mixture, [4, 5, 6], delta)


def test_experts_of_a_cached_prefix_are_remembered(mixture: Model) -> None:
    core = core_of(mixture.directory)
    first, longer = list(range(40)), [*range(40), 7, 8]
    core.submit(1, request_of("a", first, max_new_tokens=2))
    (one,) = ended(core)[1]
    core.submit(2, request_of("b", longer, max_new_tokens=2))
    (two,) = ended(core)[2]
    assert core.prefix_hit_tokens
    assert_told(mixture, first, one)
    assert_told(mixture, longer, two)


def test_what_was_cut_off_tells_what_it_has(mixture: Model) -> None:
    core = core_of(mixture.directory)
    core.submit(1, request_of("a", [1, 2], max_new_tokens=50))
    for _ in range(6):
        core.step()
    core.abort(["a"])
    (delta,) = [outcome for _, outcome in core.take_outbox()]
    assert isinstance(delta, Delta) and delta.finish_reason is FinishReason.ABORTED
    assert len(delta.token_ids) == 6
    assert_told(mixture, [1, 2], delta)


def test_a_pass_nobody_asked_about_leaves_nothing_to_the_next(mixture: Model) -> None:
    tap = Routers(mixture.module)
    tap.record(on=True)
    tokens = [1, 2, 3, 4]
    for heard in ([4, 3, 2, 1], tokens):
        mixture.module(torch.tensor([heard]))
    found = tap.take()[:-1].sort(-1).values.numpy()
    np.testing.assert_array_equal(found, chosen_by(mixture, tokens))


async def test_only_who_asks_is_told(mixture: Model) -> None:
    for asked in (True, False):
        engine: Engine = ReferenceEngine(
            EngineConfig(model=str(mixture.directory), routed_experts=asked)
        )
        await engine.start()
        deltas = [delta async for delta in engine.generate(request_of("a", [1], max_new_tokens=3))]
        await engine.close()
        assert (deltas[-1].routed_experts is not None) is asked


async def test_a_model_without_experts_is_refused(qwen3: Model) -> None:
    engine = ReferenceEngine(EngineConfig(model=str(qwen3.directory), routed_experts=True))
    with pytest.raises(UnsupportedModelError, match="routed_experts"):
        await engine.start()
    await engine.close()


async def test_a_version_that_is_refused_is_refused_again(qwen3: Model, tmp_path: Path) -> None:
    """A loop asks every second: an engine that then served would not do what it was told to."""
    record = import_checkpoint(WeightStore(tmp_path, durable=False), qwen3.directory, None, 0)
    engine = ReferenceEngine(EngineConfig(threads=1, routed_experts=True))
    await engine.start()
    try:
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match="routed_experts"):
                await engine.prepare(record.version, record.digest, record.directory)
    finally:
        await engine.close()


async def test_an_engine_without_a_model_tells_of_its_first_version(
    mixture: Model, tmp_path: Path
) -> None:
    record = import_checkpoint(WeightStore(tmp_path, durable=False), mixture.directory, None, 0)
    engine = ReferenceEngine(EngineConfig(threads=1, routed_experts=True))
    await engine.start()
    await engine.prepare(record.version, record.digest, record.directory)
    await engine.commit(record.version, PauseMode.WAIT)
    (sample,) = await complete(engine, request_of("a", [1, 2]))
    assert_told(mixture, [1, 2], sample)
    await engine.close()
