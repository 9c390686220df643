"""The FLOPs estimate against sums written out token by token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GlmMoeDsaConfig, GlmMoeDsaModel

from sluice.balance.planner import TransformerShape, forward_flops, row_costs, shape_from_config

SMALL = TransformerShape(
    hidden_size=8,
    layer_count=3,
    head_count=2,
    kv_head_count=1,
    head_size=4,
    feed_forward_size=16,
    vocabulary_size=32,
)


def by_token(shape: TransformerShape, start: int, stop: int) -> float:
    """Every matrix product of tokens start..stop, one query at a time."""
    total = 0.0
    for position in range(start, stop):
        seen = position + 1
        full = shape.layer_count - shape.windowed_layer_count - shape.linear_attention_layer_count
        pairs = full * seen + shape.windowed_layer_count * min(seen, shape.window or seen)
        total += pairs * 2 * 2 * shape.head_count * shape.head_size
        for _ in range(shape.layer_count):
            queries_and_output = 2 * shape.hidden_size * shape.head_count * shape.head_size
            keys_and_values = 2 * shape.hidden_size * shape.kv_head_count * shape.head_size
            matrices = 3 if shape.gated else 2
            feed_forward = matrices * shape.hidden_size * shape.feed_forward_size
            total += 2 * (queries_and_output + keys_and_values + feed_forward)
        total += 2 * shape.hidden_size * shape.vocabulary_size
    return total


@settings(max_examples=30)
@given(
    cached=st.integers(0, 40),
    more=st.integers(0, 40),
    window=st.integers(1, 50),
    windowed=st.integers(0, 3),
    gated=st.booleans(),
)
def test_flops_equal_the_sum_over_tokens(
    cached: int, more: int, window: int, windowed: int, gated: bool
):
    shape = replace(SMALL, window=window, windowed_layer_count=windowed, gated=gated)
    expected = by_token(shape, cached, cached + more)
    assert forward_flops(shape, cached + more, cached) == pytest.approx(expected)


def test_a_long_row_costs_more_than_its_tokens_in_short_ones():
    assert forward_flops(SMALL, 4096) > 8 * forward_flops(SMALL, 512)


def test_siblings_save_the_prompt():
    costs, prompt_costs = row_costs(SMALL, [30, 50], [20, 20])
    assert costs == [forward_flops(SMALL, 30), forward_flops(SMALL, 50)]
    assert prompt_costs == [forward_flops(SMALL, 20)] * 2
    assert costs[1] - prompt_costs[1] == pytest.approx(by_token(SMALL, 20, 50))


DENSE = {
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "vocab_size": 32,
    "hidden_act": "silu",
    "sliding_window": 4096,
    "layer_types": ["full_attention"] * 3,
}


def test_a_dense_config():
    assert shape_from_config(DENSE) == replace(SMALL, window=4096)
    assert shape_from_config({"text_config": DENSE}) == shape_from_config(DENSE)


def test_a_mixture_of_experts_counts_what_a_token_visits():
    config = {**DENSE, "num_experts_per_tok": 4, "moe_intermediate_size": 6, "num_experts": 64}
    assert shape_from_config(config).feed_forward_size == 24
    assert shape_from_config({**config, "n_shared_experts": 2}).feed_forward_size == 36


def test_layers_without_full_attention():
    types = ["full_attention", "sliding_attention", "linear_attention"]
    shape = shape_from_config({**DENSE, "layer_types": types})
    assert (shape.windowed_layer_count, shape.linear_attention_layer_count) == (1, 1)


def test_layers_of_a_hybrid_are_read_by_whatever_tells_of_them():
    plain = {name: value for name, value in DENSE.items() if name != "layer_types"}
    saved = {name: value for name, value in plain.items() if name != "num_hidden_layers"}
    for told in (
        {**plain, "hybrid_override_pattern": "ME*"},  # as Nemotron 3's directories have it
        {**saved, "layers_block_type": ["mamba", "moe", "full_attention"]},  # and transformers
        {**plain, "layer_types": ["mamba", "mamba", "attention"]},  # Granite 4
        {**plain, "layer_types": ["conv", "conv", "full_attention"]},  # LFM2
    ):
        shape = shape_from_config(told)
        assert (shape.layer_count, shape.linear_attention_layer_count) == (3, 2)


def test_sizes_of_experts_are_read_by_their_other_names():
    plain = {name: value for name, value in DENSE.items() if name != "intermediate_size"}
    kimi = {**DENSE, "num_experts_per_token": 4, "moe_intermediate_size": 6}
    assert shape_from_config({**kimi, "num_shared_experts": 1}).feed_forward_size == 30
    assert shape_from_config({**plain, "block_ff_dim": 48}).feed_forward_size == 48  # LFM2
    assert (
        shape_from_config(  # Hunyuan-A13B says each of every layer
            {**DENSE, "moe_topk": [4, 4, 4], "moe_intermediate_size": [6, 6, 6]}
        ).feed_forward_size
        == 24
    )
    longcat = {name: v for name, v in plain.items() if not name.endswith(("layers", "types"))}
    longcat |= {"num_layers": 3, "moe_topk": 2, "ffn_hidden_size": 9, "expert_ffn_hidden_size": 5}
    shape = shape_from_config(longcat)
    assert (shape.layer_count, shape.feed_forward_size) == (6, 10)


LATENT = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 6,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "head_dim": 4,
    "layer_types": None,
    "sliding_window": None,
}
INDEXED = {"index_topk": 9, "index_n_heads": 3, "index_head_dim": 8}


@pytest.mark.parametrize("more", [{}, {"indexer_types": ["full", "shared", "full"]}])
def test_latent_attention_and_its_indexer_cost_what_their_matrices_do(more: dict[str, Any]):
    config = {**DENSE, **LATENT, **INDEXED, **more}
    given = {**config, "pad_token_id": None, "n_routed_experts": 2, "num_experts_per_tok": 1}
    model = GlmMoeDsaModel(GlmMoeDsaConfig(**given, n_group=1, first_k_dense_replace=3))
    matrices = {n: p.numel() for n, p in model.layers.named_parameters() if p.ndim == 2}
    attention = sum(n for name, n in matrices.items() if "self_attn" in name)
    indexers = sum(n for name, n in matrices.items() if ".indexer." in name)
    token = 2 * (sum(matrices.values()) - indexers + 8 * 32)
    pair, heads_of_indexers = 3 * 2 * 2 * (5 + 4 + 7), 3 if not more else 2
    shape = shape_from_config(config)
    assert attention > indexers > 0
    for cached, length in ((0, 9), (4, 9)):  # all keys are seen: no indexer runs
        pairs = sum(range(cached + 1, length + 1))
        expected = (length - cached) * token + pairs * pair
        assert forward_flops(shape, length, cached) == pytest.approx(expected)
    for cached, length in ((0, 30), (4, 30)):
        pairs = sum(range(cached + 1, length + 1))
        expected = (length - cached) * (token + 2 * indexers) + pairs * pair
        expected += pairs * heads_of_indexers * 2 * 3 * 8
        assert forward_flops(shape, length, cached) == pytest.approx(expected)


def test_a_missing_size_is_named():
    with pytest.raises(KeyError, match="vocab_size"):
        shape_from_config({key: value for key, value in DENSE.items() if key != "vocab_size"})


QWEN3_VL = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0, 1],
}
QWEN2_5_VL = {
    **{name: QWEN3_VL[name] for name in QWEN3_VL if name != "deepstack_visual_indexes"},
    "window_size": 32,
    "fullatt_block_indexes": [2],
}


def matrix_flops(config: dict[str, Any], patches: int) -> float:
    """Counted matrix by matrix: two operations per entry and row."""
    hidden, wide = config["hidden_size"], config["hidden_size"] * 4
    gated = "window_size" in config
    total = 2 * patches * (3 * 2 * 8 * 8) * hidden  # patches to vectors
    for layer in range(config["depth"]):
        for rows, columns in ((hidden, 3 * hidden), (hidden, hidden)):
            total += 2 * patches * rows * columns
        total += (3 if gated else 2) * 2 * patches * hidden * config["intermediate_size"]
        full = not gated or layer in config["fullatt_block_indexes"]
        total += 2 * 2 * patches * (patches if full else min(patches, 16)) * hidden
    mergers = 1 + len(config.get("deepstack_visual_indexes", ()))
    tokens = patches // 4
    return total + mergers * 2 * tokens * (wide * wide + wide * config["out_hidden_size"])


@pytest.mark.parametrize("config", [QWEN3_VL, QWEN2_5_VL], ids=["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("patches", [4, 16, 64, 1024])
def test_an_image_costs_its_matrix_products(config: dict[str, Any], patches: int):
    tower = shape_from_config({"text_config": DENSE, "vision_config": config}).tower
    assert tower is not None
    assert tower.flops(patches) == pytest.approx(matrix_flops(config, patches))


def test_a_tower_of_another_kind_costs_nothing_that_is_known():
    strange = {name: QWEN3_VL[name] for name in QWEN3_VL if name != "depth"}
    assert shape_from_config({"text_config": DENSE, "vision_config": strange}).tower is None
    assert shape_from_config(DENSE).tower is None


def test_the_sizes_of_gpt2_and_opt_are_read_by_their_own_names() -> None:
    """Both smallest are known as models of 124 million weights; no product is made of positions."""
    gpt2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "activation_function": "gelu_new"}
    opt = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    opt |= {"activation_function": "relu", "ffn_dim": 3072}
    for config in (gpt2, opt, {**gpt2, "n_inner": None}):
        shape = shape_from_config({**config, "vocab_size": 50257})
        assert shape.flops_per_token / 2e6 == pytest.approx(123.5, abs=0.1)
