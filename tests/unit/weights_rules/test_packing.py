"""Shares of tensors: equal to the layout written out by hand, and back without a bit lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.weights.rules.packing import (
    Partition,
    PartitionError,
    Slice,
    pack,
    padded_rows,
    share_shape,
    source_slices,
    unpack,
)
from sluice.weights.rules.rule import Pack, ShardAxis, Stage
from sluice.weights.rules.weight_map import Binding, HfTensor
from tests.unit.weights_rules.models import CONFIGS, checkpoint, weight_map

Tensors = dict[str, torch.Tensor]


def share(binding: Binding, tensors: Tensors, partition: Partition) -> torch.Tensor:
    """What a rank makes from its slices alone."""
    parts = []
    for part in source_slices(binding, partition):
        index = (slice(None),) * part.axis + (slice(part.start, part.stop),)
        parts.append(tensors[part.name][index])
    return pack(binding, parts, partition)


def shares(binding: Binding, tensors: Tensors, size: int, padded: int) -> list[torch.Tensor]:
    return [share(binding, tensors, Partition(rank, size, padded)) for rank in range(size)]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("multiple", [1, 3])
def test_shares_come_back_bit_by_bit(name: str, size: int, multiple: int) -> None:
    weights = weight_map(name)
    tensors = checkpoint(weights)
    padded = padded_rows(weights.shape.vocab, multiple=multiple, size=size)
    found: Tensors = {}
    for binding in weights.bindings():
        parts = shares(binding, tensors, size, padded)
        for rank, part in enumerate(parts):
            assert part.shape == share_shape(binding, Partition(rank, size, padded))
        if not binding.alias:
            found |= unpack(binding, parts)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensors[key]) for key in tensors)


def test_query_key_value_lie_by_group() -> None:
    """8 query heads in 2 groups: [q0..q3 k0 v0 | q4..q7 k1 v1], one group a rank."""
    weights = weight_map("qwen2")
    tensors = checkpoint(weights)
    for kind in ("weight", "bias"):
        binding = weights.binding(f"decoder.layers.1.self_attention.linear_qkv.{kind}")
        q, k, v = (tensors[f"model.layers.1.self_attn.{x}_proj.{kind}"] for x in "qkv")
        by_hand = [torch.cat([q[:16], k[:4], v[:4]]), torch.cat([q[16:], k[4:], v[4:]])]
        whole, (first, second) = shares(binding, tensors, 1, 13), shares(binding, tensors, 2, 13)
        assert torch.equal(whole[0], torch.cat(by_hand))
        assert torch.equal(first, by_hand[0])
        assert torch.equal(second, by_hand[1])


def test_more_ranks_than_groups_share_one() -> None:
    weights = weight_map("qwen2")
    tensors = checkpoint(weights)
    binding = weights.binding("decoder.layers.0.self_attention.linear_qkv.weight")
    whole = share(binding, tensors, Partition(0, 1))
    parts = shares(binding, tensors, 4, 13)
    assert torch.equal(torch.cat(parts), whole)
    (query, key, value) = source_slices(binding, Partition(3, 4))
    assert (query.start, query.stop) == (28, 32)  # of the second group, the last rows
    assert (key.start, key.stop, value.stop) == (4, 8, 8)


def test_gate_and_up_are_cut_one_by_one() -> None:
    weights = weight_map("llama_biased")
    tensors = checkpoint(weights)
    for kind in ("weight", "bias"):
        binding = weights.binding(f"decoder.layers.2.mlp.linear_fc1.{kind}")
        gate = tensors[f"model.layers.2.mlp.gate_proj.{kind}"]
        up = tensors[f"model.layers.2.mlp.up_proj.{kind}"]
        second = share(binding, tensors, Partition(1, 2))
        assert torch.equal(second, torch.cat([gate[12:], up[12:]]))


def test_rows_beyond_the_vocabulary_are_zero() -> None:
    weights = weight_map("qwen3")
    tensors = checkpoint(weights)
    binding = weights.binding("output_layer.weight")
    first, second = shares(binding, tensors, 2, 24)
    assert torch.equal(first, tensors["lm_head.weight"][:12])
    assert torch.equal(second[:1], tensors["lm_head.weight"][12:])
    assert second.shape == (12, 16)
    assert not second[1:].any()


def test_a_rank_beyond_the_vocabulary_reads_nothing() -> None:
    binding = weight_map("qwen3").binding("output_layer.weight")
    (part,) = source_slices(binding, Partition(3, 4, 32))
    assert part == Slice("lm_head.weight", 0, 13, 13)


def test_uneven_shares_are_refused() -> None:
    binding = weight_map("qwen3").binding("decoder.layers.0.mlp.linear_fc2.weight")
    with pytest.raises(PartitionError, match=r"linear_fc2.*24 does not divide over 5"):
        source_slices(binding, Partition(0, 5))
    embedding = weight_map("qwen3").binding("embedding.word_embeddings.weight")
    with pytest.raises(PartitionError, match="13 rows in a vocabulary of 8"):
        source_slices(embedding, Partition(0, 2, 8))


@settings(max_examples=50)
@given(
    groups=st.integers(1, 4),
    queries=st.integers(1, 4),
    head=st.integers(1, 3),
    size=st.integers(1, 4),
    columns=st.integers(0, 2),
)
def test_any_grouping_round_trips(
    groups: int, queries: int, head: int, size: int, columns: int
) -> None:
    rest = (columns,) if columns else ()
    rows = (groups * queries * head, groups * head, groups * head)
    sources = tuple(HfTensor(n, (r, *rest)) for n, r in zip("qkv", rows, strict=True))
    binding = Binding(
        megatron="qkv",
        sources=sources,
        stage=Stage.LAYER,
        pack=Pack.QKV,
        cut=ShardAxis.ROWS,
        groups=groups,
    )
    tensors = {s.name: torch.randn(s.shape) for s in sources}
    if sum(rows) % size:
        with pytest.raises(PartitionError):
            source_slices(binding, Partition(0, size))
        return
    found = unpack(binding, shares(binding, tensors, size, 0))
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    whole = share(binding, tensors, Partition())
    for group in range(groups):  # each group: its queries, then its key, then its value
        block = whole[group * (queries + 2) * head : (group + 1) * (queries + 2) * head]
        q, k, v = torch.split(block, [queries * head, head, head])
        assert torch.equal(q, tensors["q"][group * queries * head : (group + 1) * queries * head])
        assert torch.equal(k, tensors["k"][group * head : (group + 1) * head])
        assert torch.equal(v, tensors["v"][group * head : (group + 1) * head])


@given(rows=st.integers(1, 10_000), multiple=st.integers(1, 256), size=st.integers(1, 64))
def test_padding_is_the_least_that_divides(rows: int, multiple: int, size: int) -> None:
    padded = padded_rows(rows, multiple=multiple, size=size)
    assert padded % (multiple * size) == 0
    assert rows <= padded < rows + multiple * size
