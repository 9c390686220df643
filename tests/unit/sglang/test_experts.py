"""Experts that tokens were sent to, from SGLang's messages. They are played back."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.engine.interface import Delta, FinishReason, Generation, Sampling
from services.rollout.engine.sglang.client import MissingFeatureError
from services.rollout.engine.sglang.jobs import WARM_TOKENS
from services.rollout.engine.sglang.samples import (
    PendingSample,
    Routing,
    parse_experts,
    read_routing,
)
from services.rollout.engine.sglang.weights import read_model, read_version
from services.rollout.errors import EngineFailedError, UnfitWeightsError
from sluice.weights.store import WeightStore
from tests.imported import import_checkpoint
from tests.patience import PATIENCE
from tests.unit.sglang.test_attached import Recorded, attached
from tests.unit.sglang.test_weights import write_model

MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 70,
    "intermediate_size": 8,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
}
ROUTING = Routing(layers=3, mixtures=(0, 2), experts=4, chosen=2)
SIGHT: dict[str, Any] = {
    **dict.fromkeys(("depth", "hidden_size", "intermediate_size", "num_heads"), 8),
    **dict.fromkeys(("out_hidden_size", "patch_size", "spatial_merge_size"), 8),
    "num_position_embeddings": 8,
    "deepstack_visual_indexes": [8, 16, 24],
}
LENGTH = {"type": "length", "length": 2}


def table(tokens: int, seed: int = 0, *, dense: bool = True) -> np.ndarray:
    """What SGLang keeps: the dense layer's rows hold what lay there."""
    found = np.random.default_rng(seed).integers(0, 4, (tokens, 3, 2), dtype=np.int32)
    if dense:
        found[:, 1] = -7
    return found


def packed(found: np.ndarray) -> str:
    return base64.b64encode(found.astype("<i4").tobytes()).decode()


def message(ids: list[int], reason: dict[str, Any] | None, **meta: Any) -> dict[str, Any]:
    own = {
        "output_token_logprobs": [[-1.0, token, None] for token in ids],
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "finish_reason": reason,
    }
    return {"output_ids": ids, "meta_info": own | meta}


def take(*messages: dict[str, Any], routing: Routing | None = ROUTING) -> list[Delta | None]:
    sample = PendingSample(
        index=0, rid="r", follows=True, temperature=1.0, arrived=0.0, routing=routing
    )
    deltas = []
    for one in messages:
        sample.take(one, (0, "ab"), is_delta=True)
        deltas.append(sample.delta())
    return deltas


@settings(max_examples=30)
@given(st.integers(0, 9), st.integers(0, 99))
def test_layers_of_experts_are_kept_and_dense_ones_left_out(tokens: int, seed: int) -> None:
    sent = table(tokens, seed)
    found = parse_experts(packed(sent), ROUTING, tokens)
    assert (found.dtype, found.shape) == (np.int16, (tokens, 2, 2))
    assert found.flags.c_contiguous
    for place, layer in enumerate(ROUTING.mixtures):
        np.testing.assert_array_equal(found[:, place], sent[:, layer])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (packed(table(3)), "of 3 tokens, not of 4"),
        (packed(table(5)), "of 5 tokens"),
        (packed(table(4)[:, :2]), "not of 4"),
        ("", "of 0 tokens"),
        (base64.b64encode(b"abc").decode(), "no int32"),
        ("no base64!", "no int32"),
        (packed(table(4) + 1), "not among 4"),
        (packed(table(4) - 1), "not among 4"),
    ],
)
def test_what_cannot_be_the_experts_of_these_tokens_is_an_error(text: str, says: str) -> None:
    with pytest.raises(EngineFailedError, match=says):
        parse_experts(text, ROUTING, 4)


def test_the_layout_follows_from_the_models_config() -> None:
    assert read_routing(MIXTURE) == ROUTING
    latent = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    deepseek = MIXTURE | dict.fromkeys(latent, 4)
    deepseek |= {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_experts": None,
        "n_routed_experts": 16,
        "mlp_only_layers": None,
        "first_k_dense_replace": 2,
    }
    assert read_routing(deepseek) == Routing(layers=3, mixtures=(2,), experts=16, chosen=2)
    glm5 = deepseek | dict.fromkeys(("index_n_heads", "index_head_dim", "q_lora_rank"), 4)
    glm5 |= {"architectures": ["GlmMoeDsaForCausalLM"], "index_topk": 8}
    assert read_routing(glm5) == read_routing(deepseek)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["Qwen3ForCausalLM"], "num_experts": None}, "no layers of experts"),
        ({"mlp_only_layers": [0, 1, 2]}, "no layers of experts"),
        ({"num_experts_per_tok": None}, "no layers of experts"),
        ({"architectures": ["TinyForCausalLM"]}, "no weight rules"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
    ],
)
def test_a_model_without_experts_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnfitWeightsError, match=says):
        read_routing(MIXTURE | changes)


def test_experts_come_with_the_end_of_a_sample() -> None:
    sent = table(4)  # three of the prompt, two drawn, and none for the last
    last = message([8], LENGTH, routed_experts=packed(sent))
    first, second = take(message([9], None), last)
    assert first is not None and second is not None
    assert first.routed_experts is None
    assert second.routed_experts is not None
    np.testing.assert_array_equal(second.routed_experts, sent[:, [0, 2]])
    (_, second) = take(message([9], None), last, routing=None)
    assert second is not None
    assert second.routed_experts is None, "nobody asked"


@pytest.mark.parametrize("meta", [{}, {"routed_experts": packed(table(5))}])
def test_a_sample_that_ends_without_its_experts_is_an_error(meta: dict[str, Any]) -> None:
    with pytest.raises(EngineFailedError, match="routed experts"):
        take(message([9, 8], LENGTH, **meta))


def test_an_abort_may_come_without_experts() -> None:
    abort = {"type": "abort", "message": "aborted"}
    (without,) = take(message([9, 8], abort))
    assert without is not None
    assert (without.finish_reason, without.routed_experts) == (FinishReason.ABORTED, None)
    (brought,) = take(message([9, 8], abort, routed_experts=packed(table(4))))
    assert brought is not None and brought.routed_experts is not None
    assert brought.routed_experts.shape == (4, 2, 2)


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """A folder with a `model` of experts in every layer."""
    directory = write_model(tmp_path / "model")
    (directory / "config.json").write_text(json.dumps(MIXTURE | {"mlp_only_layers": []}))
    return tmp_path


def finished(prompt: list[int]) -> list[dict[str, Any]]:
    sent = packed(table(len(prompt) + 1, dense=False))
    end = message([9, 8], LENGTH, routed_experts=sent, prompt_tokens=len(prompt))
    return [{**end, "index": index} for index in range(2)]


def request(prompt: list[int]) -> Generation:
    sampling = Sampling(max_new_tokens=2)
    return Generation(request_id="a", prompt_token_ids=prompt, sampling=sampling, sample_count=2)


@pytest.mark.parametrize("wanted", [True, False])
async def test_samples_are_asked_for_experts_and_what_warms_the_cache_is_not(
    mixture: Path, wanted: bool
) -> None:
    prompt = list(range(WARM_TOKENS))
    recorded = Recorded(enable_return_routed_experts=True)
    recorded.messages = finished(prompt)
    async with attached(mixture, recorded, routed_experts=wanted) as engine:
        deltas = [delta async for delta in engine.generate(request(prompt))]
    warming, asked = recorded.bodies
    assert "max_new_tokens" in warming["sampling_params"]
    assert "return_routed_experts" not in warming
    assert asked.get("return_routed_experts", False) is wanted
    shapes = {None if d.routed_experts is None else d.routed_experts.shape for d in deltas}
    assert shapes == ({(WARM_TOKENS + 1, 3, 2)} if wanted else {None})


async def test_a_running_server_that_keeps_no_experts_is_refused(mixture: Path) -> None:
    with pytest.raises(MissingFeatureError, match="enable_return_routed_experts"):
        async with attached(mixture, Recorded(), routed_experts=True):
            pass


async def test_a_dense_version_is_not_prepared_for_an_engine_that_is_to_bring_experts(
    mixture: Path,
) -> None:
    store = WeightStore(mixture / "store", durable=False)
    dense = import_checkpoint(store, write_model(mixture / "dense"), None, 0)
    recorded = Recorded(enable_return_routed_experts=True)
    async with attached(mixture, recorded, routed_experts=True) as engine:
        with pytest.raises(UnfitWeightsError, match="routed_experts"):
            await engine.prepare(dense.version, dense.digest, dense.directory)


async def test_an_engine_that_is_to_bring_experts_serves_no_dense_model(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    recorded = Recorded(enable_return_routed_experts=True)
    with pytest.raises(UnfitWeightsError):
        async with attached(tmp_path, recorded, routed_experts=True):
            pass
    assert "/update_weights_from_disk" not in recorded.asked


@pytest.mark.parametrize("changes", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
async def test_a_mixture_with_dense_layers_is_refused(
    mixture: Path, changes: dict[str, Any]
) -> None:
    """SGLang would take them for mixtures too, and never read their weights."""
    document = {**MIXTURE, "mlp_only_layers": [], **changes}
    (mixture / "model" / "config.json").write_text(json.dumps(document))
    recorded = Recorded()
    with pytest.raises(UnfitWeightsError, match="dense layers"):
        async with attached(mixture, recorded, routed_experts=False):
            pass
    assert "/update_weights_from_disk" not in recorded.asked


@pytest.mark.parametrize("changes", [{}, {"indexer_rope_interleave": False}])
async def test_indexers_that_sglang_would_rotate_otherwise_are_refused(
    mixture: Path, changes: dict[str, Any]
) -> None:
    """transformers rotates pairs whatever it says, which published models say."""
    document = {**MIXTURE, "architectures": ["GlmMoeDsaForCausalLM"], **changes}
    (mixture / "model" / "config.json").write_text(json.dumps(document))
    recorded = Recorded()
    with pytest.raises(UnfitWeightsError, match="no `indexer_rope_interleave: true`"):
        async with attached(mixture, recorded, routed_experts=False):
            pass
    assert "/update_weights_from_disk" not in recorded.asked
    document["indexer_rope_interleave"] = True
    (mixture / "model" / "config.json").write_text(json.dumps(document))
    async with attached(mixture, recorded, routed_experts=False):
        pass


SEEING = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "text_config": {**MIXTURE, "mlp_only_layers": []},
    "vision_config": {"deepstack_visual_indexes": [8, 16, 24]},
    "vocab_size": 70,
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"text_config": MIXTURE}, "dense layers"),
        ({"text_config": {**MIXTURE, "decoder_sparse_step": 2}}, "dense layers"),
        ({"vision_config": {"deepstack_visual_indexes": [8, 16]}}, r"is \[8, 16\]"),
        ({"vision_config": None}, "deepstack_visual_indexes is None"),
        ({}, "as transformers writes it"),
    ],
)
def test_a_mixture_that_sees_and_that_sglang_would_serve_wrong_is_refused(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    """Square tensors of experts tell by the other one how they are stored."""
    model = write_model(
        tmp_path / "model",
        **{
            "model.language_model.layers.0.mlp.experts.gate_up_proj": np.ones((4, 8, 8), "f4"),
            "model.language_model.layers.0.mlp.experts.down_proj": np.ones((4, 8, 4), "f4"),
        },
    )
    (model / "config.json").write_text(json.dumps(SEEING | changes))
    with pytest.raises(UnfitWeightsError, match=says):
        read_model(model)
    store = WeightStore(tmp_path / "store", durable=False)
    version = import_checkpoint(store, model, None, 0)
    assert version.directory is not None
    with pytest.raises(UnfitWeightsError, match=says):
        read_version(version.version, version.digest, version.directory)


def test_a_mixture_that_sees_is_taken_as_it_is_published(tmp_path: Path) -> None:
    """In all of its layers."""
    prefix = "model.language_model.layers.{}.mlp.experts.{}_proj"
    experts = {
        prefix.format(layer, name): np.ones(shape, "f4")
        for layer in range(2)
        for name, shape in {"gate_up": (4, 8, 8), "down": (4, 4, 8)}.items()
    }
    model = write_model(tmp_path / "model", **experts)
    (model / "config.json").write_text(json.dumps(SEEING))
    down = prefix.format(1, "down")
    assert read_model(model).shapes[down] == (4, 4, 8)
    mixed = write_model(tmp_path / "mixed", **experts | {down: np.ones((4, 8, 4), "f4")})
    (mixed / "config.json").write_text(json.dumps(SEEING))
    with pytest.raises(UnfitWeightsError, match="as transformers writes it"):
        read_model(mixed)
    assert read_routing(SEEING | {"vision_config": SIGHT}).mixtures == (0, 1, 2)


def test_the_process_in_front_of_sglang_needs_no_torch() -> None:
    """Also where it reads the layout of a mixture."""
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import services.rollout.engine.sglang.engine\n"
        "from services.rollout.engine.sglang.samples import read_routing\n"
        f"read_routing({MIXTURE!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
