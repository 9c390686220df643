"""The FLOPs estimate against sums written out token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@settings(max_examples=30, deadline=None)
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


def test_a_missing_size_is_named():
    with pytest.raises(KeyError, match="vocab_size"):
        shape_from_config({key: value for key, value in DENSE.items() if key != "vocab_size"})
