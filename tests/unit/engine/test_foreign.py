"""Models whose attention is not the engine's are served all the same, and by the same rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.rollout.engine.interface import Delta, TokenScores
from services.rollout.engine.reference.core import EngineCore
from services.rollout.engine.reference.foreign import foreign_reason
from services.rollout.engine.reference.loading import open_model
from tests.contract.engine.cases import Model, request_of
from tests.models.families import CASES, build

CPU = torch.device("cpu")
SHARED = [*range(3, 25)]  # more than a block of the prefix cache
PROMPTS = {1: [3, 4], 2: [*range(30)], 3: [*SHARED, 7], 4: [*SHARED, 9, 11, 2]}
REASONS = {
    "gemma2": "attn_logit_softcapping",
    "gemma4_text-shared": "num_kv_shared_layers",
    "gemma4_text": "layers of several sizes",
    "gpt_oss": "attention sinks",
    "nemotron_h": "layer_types linear_attention",
    "lfm2": "layer_types conv",
    "qwen3_next": "layer_types linear_attention",
    "deepseek_v3": "kv_lora_rank",
    "glm_moe_dsa": "kv_lora_rank",
    "bloom": "attention of its own",
}


def make(family: str, directory: Path) -> Model:
    case = next(case for case in CASES if case.name == family)
    return Model(build(case, directory).load(), directory)


def run(core: EngineCore) -> dict[int, list[Delta]]:
    while core.has_work:
        core.step()
    found: dict[int, list[Delta]] = {}
    for key, outcome in core.take_outbox():
        assert isinstance(outcome, Delta)
        found.setdefault(key, []).append(outcome)
    return found


@pytest.mark.parametrize("family", REASONS)
def test_what_is_drawn_has_the_log_probs_of_transformers(
    family: str, tmp_path: Path, create_core: Callable[..., EngineCore]
) -> None:
    model = make(family, tmp_path)
    assert foreign_reason(model.module.config) == REASONS[family]
    for chunk in (512, 6):
        core = create_core(tmp_path, prefill_chunk_tokens=chunk)
        for key, prompt in PROMPTS.items():
            length = 5 * key  # samples end one after another, and rows move
            core.submit(key, request_of(str(key), prompt, 2, max_new_tokens=length))
        for key, deltas in run(core).items():
            assert len(deltas) == 2
            for delta in deltas:
                assert len(delta.token_ids) == 5 * key
                expected = model.logprobs(PROMPTS[key], delta.token_ids)
                assert delta.logprobs == pytest.approx(expected, abs=1e-4)
        core.submit(9, request_of("again", PROMPTS[4], max_new_tokens=3, temperature=0))
        assert core.prefix_hit_tokens > 0 or chunk == 512
        (answer,) = run(core)[9]
        tokens = torch.tensor([PROMPTS[4]])
        options = {"do_sample": False, "attention_mask": torch.ones_like(tokens)}
        expected_tokens = model.module.generate(tokens, max_new_tokens=3, **options)
        assert [*answer.token_ids] == expected_tokens[0, len(PROMPTS[4]) :].tolist()


def test_scores_and_new_weights(tmp_path: Path, create_core: Callable[..., EngineCore]) -> None:
    first, text = make("gpt_oss", tmp_path / "first"), [*range(40)]
    core = create_core(first.directory, prefill_chunk_tokens=7)
    other = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(first.directory)).eval()
    other.save_pretrained(tmp_path / "other")
    second = Model(other, tmp_path / "other")
    for model in (first, second):
        if model is second:
            core.serve(
                core.model, open_model(second.directory, torch.float32, torch.device("cpu"))[1]
            )
        core.submit_score(1, text, 5)
        while core.has_work:
            core.step()
        ((_, scores),) = core.take_outbox()
        assert isinstance(scores, TokenScores)
        expected = model.logprobs(text[:5], tuple(text[5:]))
        assert scores.logprobs == pytest.approx(expected, abs=1e-4)
