"""What every family is in Megatron: nothing moves unnoticed, and the hard parts by hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from sluice.weights.errors import InvalidCheckpointError
from sluice.weights.rules.packing import (
    BY_SECTION,
    InexactTensorError,
    Partition,
    PartitionError,
    pack,
    unpack,
)
from sluice.weights.rules.rule import Family, Layers, Pack, ShardAxis, Stage, WeightRule
from sluice.weights.rules.shape import read_shape
from sluice.weights.rules.weight_map import WeightMap, family_of
from sluice.weights.stored_experts import FIRST, SECOND, are_straight
from tests.unit.weights_rules.layouts import FILE, config_of, layout_of, numbers, share
from tests.unit.weights_rules.models import HUGGING_FACE

EXPECTED = json.loads(FILE.read_bytes())
OTHER_CUT = {
    ShardAxis.NONE: ShardAxis.ROWS,
    ShardAxis.ROWS: ShardAxis.COLUMNS,
    ShardAxis.COLUMNS: ShardAxis.NONE,
}
OTHER_STAGE = {Stage.LAYER: Stage.FINAL, Stage.VISION: Stage.HEAD, Stage.EMBEDDING: Stage.HEAD}
OTHER_LAYERS = {Layers.ALL: Layers.DENSE, Layers.SPARSE: Layers.ALL, Layers.DENSE: Layers.SPARSE}
cached_config = cache(config_of)


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_layouts_are_as_they_were_proven(name: str) -> None:
    config = cached_config(name)
    assert layout_of(family_of(config), config) == EXPECTED[name]


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_any_wrong_rule_is_noticed(name: str) -> None:
    config = cached_config(name)
    family, count = family_of(config), 0
    shape = read_shape(family, config)
    for index, rule in enumerate(family.rules):
        unused = "{layer}" in rule.megatron and not shape.layer_indices(rule.layers)
        if unused or not shape.allows(rule.when):
            continue
        for kind, wrong in mutations(rule):
            rules = (*family.rules[:index], *wrong, *family.rules[index + 1 :])
            assert noticed(replace(family, rules=rules), name, config), (rule.megatron, kind)
            count += 1
    assert count > 60


def noticed(family: Family, name: str, config: dict[str, Any]) -> bool:
    try:
        return layout_of(family, config) != EXPECTED[name]
    except (InvalidCheckpointError, PartitionError, IndexError, RuntimeError, ValueError):
        return True


def mutations(rule: WeightRule) -> Iterator[tuple[str, tuple[WeightRule, ...]]]:
    """A rule with one thing wrong in it, in every way that can be written."""
    changes: dict[str, dict[str, Any]] = {
        "name": {"megatron": rule.megatron.replace("weight", "wait") + "x"},
        "stage": {"stage": OTHER_STAGE.get(rule.stage, Stage.LAYER)},
        "alias": {"alias": not rule.alias},
        "source": {"sources": (replace(rule.sources[0], name="x"), *rule.sources[1:])},
        "cut": {"cut": OTHER_CUT[rule.cut]},
    }
    if rule.pack in (Pack.QKV, Pack.GATED_QKV, *BY_SECTION):
        changes["pack"] = {"pack": Pack.ONE}
        if len(rule.sources) > 1:
            changes["order"] = {"sources": rule.sources[::-1]}
        else:
            changes["sections"] = {"sources": (replace(rule.sources[0], sections=()),)}
    if rule.pack is Pack.GATED_QKV:
        changes["gate"] = {"pack": Pack.QKV}
    if rule.pack is Pack.GROUPED_SECTIONS:
        changes["grouping"] = {"pack": Pack.SECTIONS}
        changes["groups"] = {"groups": "one"}
    if rule.pack is Pack.SHIFTED:
        changes["shift"] = {"pack": Pack.ONE}
    if rule.pack is Pack.QKV:
        changes["groups"] = {"groups": "one"}
    if rule.sources[0].stacked:
        other = replace(rule.sources[0], transposed=not rule.sources[0].transposed)
        changes["transposed"] = {"sources": (other,)}
    if rule.sources[0].alternating:
        changes["alternating"] = {"sources": (replace(rule.sources[0], alternating=False),)}
    if rule.padded:
        changes["padding"] = {"padded": False}
    if rule.copies:
        changes["copies"] = {"copies": ()}
    if rule.section_keys:
        changes["keys"] = {"section_keys": rule.section_keys[::-1]}
    yield "missing", ()
    yield "twice", (rule, rule)
    for kind, change in changes.items():
        try:
            yield kind, (replace(rule, **change),)
        except ValueError:  # such a rule cannot be written
            continue


def weights_of(name: str) -> WeightMap:
    config = cached_config(name)
    family = family_of(config)
    return WeightMap(family, read_shape(family, config))


def hf(weights: WeightMap, name: str) -> torch.Tensor:
    return numbers(name, weights.hf_tensors()[name])


def test_mimo_joins_the_hidden_state_first() -> None:
    config = {**cached_config("qwen2"), "architectures": ["MiMoForCausalLM"]}
    family = family_of(config)
    weights = WeightMap(family, read_shape(family, config, predicts=True))
    binding = weights.binding("mtp.layers.0.eh_proj.weight")
    joined = hf(weights, "model.mtp_layers.0.input_proj.weight")
    size = joined.shape[0]
    turned = torch.cat([joined[:, size:], joined[:, :size]], dim=1)
    assert torch.equal(share(binding, Partition()), turned)
    shares = [share(binding, Partition(rank, 2)) for rank in (0, 1)]
    assert torch.equal(shares[1], turned[size // 2 :])
    assert torch.equal(unpack(binding, shares)["model.mtp_layers.0.input_proj.weight"], joined)


@pytest.mark.parametrize(
    ("name", "hf_prefix"), [("qwen2_5_vl", "visual."), ("qwen3_vl", "model.visual.")]
)
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_fused_heads_of_a_vision_tower(name: str, hf_prefix: str, kind: str) -> None:
    """[q; k; v] of 4 heads becomes [q0 k0 v0 q1 ...]: a rank has whole heads."""
    weights = weights_of(name)
    fused = hf(weights, f"{hf_prefix}blocks.1.attn.qkv.{kind}")
    q, k, v = (part.reshape(4, 8, *part.shape[1:]) for part in fused.chunk(3))
    by_head = [torch.cat([q[head], k[head], v[head]]) for head in range(4)]
    binding = weights.binding(f"vision_model.decoder.layers.1.self_attention.linear_qkv.{kind}")
    assert torch.equal(share(binding, Partition()), torch.cat(by_head))
    assert torch.equal(share(binding, Partition(1, 2)), torch.cat(by_head[2:]))


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_gated_and_plain_layers_of_towers(kind: str) -> None:
    """Qwen2.5-VL's tower has gates, Qwen3-VL's has none: by the family, not by the name."""
    name = f"vision_model.decoder.layers.0.mlp.linear_fc1.{kind}"
    gated, plain = weights_of("qwen2_5_vl"), weights_of("qwen3_vl")
    gate, up = (hf(gated, f"visual.blocks.0.mlp.{x}_proj.{kind}") for x in ("gate", "up"))
    expected = torch.cat([gate[22:], up[22:]])
    assert torch.equal(share(gated.binding(name), Partition(1, 2)), expected)
    fc1 = hf(plain, f"model.visual.blocks.0.mlp.linear_fc1.{kind}")
    assert torch.equal(share(plain.binding(name), Partition(1, 2)), fc1[22:])


def test_gates_of_attention_follow_the_queries_of_their_group() -> None:
    """12 heads in 2 groups; HF has [q0 g0 q1 g1 ...], Megatron [q0..q5 g0..g5 k0 v0 | ...]."""
    weights = weights_of("qwen3_5")
    q, k, v = (hf(weights, f"model.layers.3.self_attn.{x}_proj.weight") for x in "qkv")
    heads = q.reshape(12, 2, 8, 32)
    groups = []
    for g in (0, 1):
        own = heads[6 * g : 6 * g + 6]
        rows = [own[:, 0].reshape(48, 32), own[:, 1].reshape(48, 32)]
        groups.append(torch.cat([*rows, k[8 * g : 8 * g + 8], v[8 * g : 8 * g + 8]]))
    binding = weights.binding("decoder.layers.3.self_attention.linear_qkv.weight")
    assert torch.equal(share(binding, Partition()), torch.cat(groups))
    assert torch.equal(share(binding, Partition(1, 2)), groups[1])


def test_linear_attention_is_cut_section_by_section() -> None:
    weights = weights_of("qwen3_5")
    prefix = "model.layers.0.linear_attn."
    qkv, z, b, a = (
        hf(weights, f"{prefix}in_proj_{name}.weight") for name in ("qkv", "z", "b", "a")
    )
    q, k, v = qkv.split([16, 16, 36])
    binding = weights.binding("decoder.layers.0.self_attention.in_proj.weight")
    halves = [part.chunk(2) for part in (q, k, v, z, b, a)]
    for rank in (0, 1):
        assert torch.equal(
            share(binding, Partition(rank, 2)), torch.cat([half[rank] for half in halves])
        )
    conv = hf(weights, f"{prefix}conv1d.weight")
    halves = [part.chunk(2) for part in conv.split([16, 16, 36])]
    binding = weights.binding("decoder.layers.0.self_attention.conv1d.weight")
    assert torch.equal(share(binding, Partition(0, 2)), torch.cat([half[0] for half in halves]))


def test_linear_attention_that_lies_by_key_head_is_cut_section_by_section() -> None:
    """2 key heads of 8 rows, each with 2 value heads of 6: [q k v z | q k v z], [b a | b a]."""
    weights = weights_of("qwen3_next")
    prefix = "model.layers.0.linear_attn."
    qkvz, ba = (hf(weights, f"{prefix}in_proj_{name}.weight") for name in ("qkvz", "ba"))
    by_head = [
        (*wide.split([8, 8, 12, 12]), *narrow.split([2, 2]))
        for wide, narrow in zip(qkvz.chunk(2), ba.chunk(2), strict=True)
    ]
    binding = weights.binding("decoder.layers.0.self_attention.in_proj.weight")
    for rank in (0, 1):
        assert torch.equal(share(binding, Partition(rank, 2)), torch.cat(by_head[rank]))
    whole = [torch.cat(both) for both in zip(*by_head, strict=True)]
    assert torch.equal(share(binding, Partition()), torch.cat(whole))
    with pytest.raises(PartitionError, match="does not divide over 4"):
        share(binding, Partition(0, 4))


def test_fused_gate_and_up_are_cut_one_by_one() -> None:
    weights = weights_of("glm4")
    gate, up = hf(weights, "model.layers.2.mlp.gate_up_proj.weight").chunk(2)
    binding = weights.binding("decoder.layers.2.mlp.linear_fc1.weight")
    assert torch.equal(share(binding, Partition()), torch.cat([gate, up]))
    assert torch.equal(share(binding, Partition(1, 2)), torch.cat([gate[24:], up[24:]]))
    norm = weights.binding("decoder.layers.2.post_mlp_layernorm.weight")
    assert norm.sources[0].name == "model.layers.2.post_mlp_layernorm.weight"


def test_norms_stored_around_zero_lose_nothing_or_say_so() -> None:
    binding = weights_of("qwen3_5").binding("decoder.layers.0.self_attention.out_norm.weight")
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.linspace(0.5, 2, 6).to(dtype)
        stored = pack(binding, [weight], Partition())
        assert torch.equal(stored, weight - 1)
        assert torch.equal(unpack(binding, [stored])[binding.sources[0].name], weight)
    with pytest.raises(InexactTensorError, match=r"linear_attn\.norm\.weight"):
        pack(binding, [torch.full((6,), 1e-9)], Partition())


def test_experts_in_one_tensor_or_in_many() -> None:
    """Both forms of a checkpoint are the same tensors of Megatron."""
    config = cached_config("qwen3_5_vl_moe")
    family = family_of(config)
    stacked = WeightMap(family, read_shape(family, config, stacked_experts=True))
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    assert stacked.hf_tensors()[name] == (4, 40, 32)
    whole = hf(stacked, name)
    for expert in range(4):
        binding = stacked.binding(
            f"decoder.layers.1.mlp.experts.local_experts.{expert}.linear_fc1.weight"
        )
        gate, up = whole[expert].chunk(2)
        assert torch.equal(share(binding, Partition(1, 2)), torch.cat([gate[10:], up[10:]]))
    assert not any("experts.0" in key for key in stacked.hf_tensors())


@pytest.mark.parametrize("straight", [False, True])
def test_experts_whose_axes_are_exchanged(straight: bool) -> None:
    """[expert, hidden, gate and up], [expert, width, hidden], or as transformers writes them."""
    config = cached_config("qwen3_vl_moe")
    family = family_of(config)
    weights = WeightMap(family, read_shape(family, config, straight_experts=straight))
    prefix = "model.language_model.layers.1.mlp.experts."
    whole = {name: hf(weights, f"{prefix}{name}_proj") for name in ("gate_up", "down")}
    assert whole["gate_up"].shape == ((4, 40, 32) if straight else (4, 32, 40))
    assert whole["down"].shape == ((4, 32, 20) if straight else (4, 20, 32))
    for expert in range(4):
        first, second = (
            weights.binding(f"decoder.layers.1.mlp.experts.local_experts.{expert}.{name}.weight")
            for name in ("linear_fc1", "linear_fc2")
        )
        both, down = (whole[name][expert] for name in ("gate_up", "down"))
        gate, up = (both if straight else both.T).chunk(2)
        assert torch.equal(share(first, Partition()), torch.cat([gate, up]))
        assert torch.equal(share(first, Partition(1, 2)), torch.cat([gate[10:], up[10:]]))
        columns = (down if straight else down.T)[:, 10:]
        assert torch.equal(share(second, Partition(1, 2)), columns)
        for binding, part in ((first, both), (second, down)):
            shares = [share(binding, Partition(rank, 2)) for rank in (0, 1)]
            (made,) = unpack(binding, shares).values()
            assert torch.equal(made, part) and made.is_contiguous()


@pytest.mark.parametrize(("hidden", "width"), [(32, 20), (32, 16), (32, 32)])
def test_how_experts_are_stored_shows_in_both_tensors(hidden: int, width: int) -> None:
    """One alone is square where hidden is the width, or twice as much."""
    names = [f"layers.0.mlp{name}" for name in (FIRST, SECOND)]
    published = ((4, hidden, 2 * width), (4, width, hidden))
    assert not are_straight(dict(zip(names, published, strict=True)))
    saved = ((4, 2 * width, hidden), (4, hidden, width))
    assert are_straight(dict(zip(names, saved, strict=True)))
    assert not are_straight({"layers.0.mlp.experts.0.up_proj.weight": (width, hidden)})


def test_foreign_tensors_are_not_unknown() -> None:
    """Layers of multi-token prediction are there, and are not trained."""
    for name, tensor in (("deepseek_v3", "model.layers.4.x"), ("qwen3_5", "mtp.fc.weight")):
        weights = weights_of(name)
        weights.check_hf({**weights.hf_tensors(), tensor: (3,)})
        assert weights.is_foreign(tensor)
    assert not weights_of("deepseek_v3").is_foreign("model.layers.3.x")


def test_ten_times_the_experts_of_one_tensor_are_ten_times_the_work() -> None:
    config = config_of("qwen3_5_vl_moe")
    family = family_of(config)

    def calls(experts: int) -> int:
        config["text_config"]["num_experts"] = experts
        shape, count = read_shape(family, config, stacked_experts=True), 0

        def note(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(note)
        try:
            WeightMap(family, shape)
        finally:
            sys.setprofile(None)
        return count

    assert calls(160) <= 10 * calls(16)
