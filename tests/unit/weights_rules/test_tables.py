"""The tables of the families: transformers' names, stated once, errors by name."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import GlmMoeDsaConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from sluice.weights.classifier import CLASSIFIED, NoClassifierError, reward_model_config
from sluice.weights.errors import (
    InvalidCheckpointError,
    MissingTensorError,
    UnexpectedTensorError,
)
from sluice.weights.rules.rule import Pack, ShardAxis, SourceTensor, Stage, WeightRule
from sluice.weights.rules.shape import read_shape
from sluice.weights.rules.weight_map import (
    FAMILIES,
    RuleConflictError,
    TensorShapeError,
    UnknownArchitectureError,
    WeightMap,
    family_of,
    rule_name,
)
from tests.unit.weights_rules.models import (
    CONFIGS,
    HUGGING_FACE,
    save_model,
    shape_of,
    weight_map,
)


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_names_and_shapes_are_those_transformers_saves(name: str, tmp_path: Path) -> None:
    saved = {
        k: tuple(t.shape)
        for k, t in load_file(save_model(name, tmp_path) / "model.safetensors").items()
    }
    config = json.loads((tmp_path / "config.json").read_bytes())
    found = family_of(config)
    weights = WeightMap(found, read_shape(found, config))
    assert weights.hf_tensors() == saved
    weights.check_hf(saved)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_is_bound_once_both_ways(name: str) -> None:
    weights = weight_map(name)
    taken = [s.name for b in weights.bindings() if not b.alias for s in b.sources]
    assert sorted(taken) == sorted(weights.hf_tensors())
    for binding in weights.bindings():
        assert weights.binding(binding.megatron) is binding
        if not binding.alias:
            assert all(weights.binding(source.name) is binding for source in binding.sources)


def test_every_family_has_a_table() -> None:
    architectures = [name for family in FAMILIES for name in family.architectures]
    assert len(set(architectures)) == len(architectures)
    tested = {family_of({"architectures": [model]}).name for _, model, _ in HUGGING_FACE.values()}
    untested = {family.name for family in FAMILIES} - tested
    assert untested == {"qwen3_5_moe", "mimo"}  # as with the tower; as qwen2


def test_owners_of_the_pipeline() -> None:
    stages = {b.megatron: b.stage for b in weight_map("qwen3").bindings()}
    assert stages["embedding.word_embeddings.weight"] is Stage.EMBEDDING
    assert stages["decoder.layers.2.mlp.linear_fc2.weight"] is Stage.LAYER
    assert stages["decoder.final_layernorm.weight"] is Stage.FINAL
    assert stages["output_layer.weight"] is Stage.HEAD


def test_dense_and_sparse_layers() -> None:
    assert shape_of("qwen3_moe").sparse_layers == {0, 2}
    assert shape_of("qwen3_moe", mlp_only_layers=[]).sparse_layers == {0, 1, 2}
    assert shape_of("qwen3_moe", mlp_only_layers=[], decoder_sparse_step=2).sparse_layers == {1}
    by_kind = partial(shape_of, "qwen3_moe", first_k_dense_replace=1)  # what says less, if at all
    assert by_kind(mlp_layer_types=["sparse", "dense", "sparse"]).sparse_layers == {0, 2}
    with pytest.raises(InvalidCheckpointError, match="mlp_layer_types has 2 entries for 3 layers"):
        by_kind(mlp_layer_types=["dense", "sparse"])
    experts = {b.expert for b in weight_map("qwen3_moe").bindings() if b.layer == 0}
    assert experts == {None, 0, 1, 2, 3}
    assert {b.expert for b in weight_map("qwen3_moe").bindings() if b.layer == 1} == {None}


SCHEDULES: list[dict[str, Any]] = [
    {},
    {"index_topk_freq": 1, "index_skip_topk_offset": 5},
    {"index_topk_freq": 3},
    {"index_topk_freq": 4, "index_skip_topk_offset": 3},
    {"index_topk_freq": 2, "index_skip_topk_offset": 0},
    {"index_topk_pattern": "FSSFSSFF"},
    {"index_topk_pattern": ["full", "shared"] * 4},
    {"index_topk_pattern": "FSFSFSFS", "index_topk_freq": 3},
    {"indexer_types": ["full"] + ["shared"] * 7, "index_topk_pattern": "FSSFSSFF"},
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_layers_with_an_indexer_are_those_of_transformers(schedule: dict[str, Any]) -> None:
    base = {**HUGGING_FACE["glm_moe_dsa"][2], "num_hidden_layers": 8}
    del base["indexer_types"]
    known = GlmMoeDsaConfig(**base, **schedule)
    read = {**base, **schedule, "architectures": ["GlmMoeDsaForCausalLM"]}
    shape = read_shape(family_of(read), read)
    assert known.indexer_types is not None
    assert shape.indexed_layers == {i for i, k in enumerate(known.indexer_types) if k == "full"}
    assert not shape_of("qwen3_moe").indexed_layers


@pytest.mark.parametrize("types", [["shared", "full"], ["full"] * 3, "FX", ["full", "dense"]])
def test_what_is_no_schedule_of_indexers_is_refused(types: Any) -> None:
    name = "index_topk_pattern" if isinstance(types, str) else "indexer_types"
    base = {**HUGGING_FACE["glm_moe_dsa"][2], "num_hidden_layers": 2, "indexer_types": None}
    read = {**base, name: types, "architectures": ["GlmMoeDsaForCausalLM"]}
    with pytest.raises(InvalidCheckpointError, match=r"indexer.* for 2 layers"):
        read_shape(family_of(read), read)


def test_tied_embedding_is_exported_once() -> None:
    weights = weight_map("qwen3_tied")
    assert "lm_head.weight" not in weights.hf_tensors()
    head = weights.binding("output_layer.weight")
    assert head.alias
    assert head.sources[0].name == "model.embed_tokens.weight"
    weights.check_hf({**weights.hf_tensors(), "lm_head.weight": (13, 16)})  # a copy may be there


def test_critic_ends_in_one_value() -> None:
    config = {**CONFIGS["qwen3"], "architectures": ["Qwen3ForTokenClassification"]}
    family = family_of(config)
    weights = WeightMap(family, read_shape(family, config, value_head=True))
    assert weights.hf_tensors()["score.weight"] == (1, 16)
    assert "lm_head.weight" not in weights.hf_tensors()
    assert weights.binding("output_layer.weight").cut is ShardAxis.NONE
    assert weights.hf_tensors()["score.bias"] == (1,)


def test_reward_model_ends_in_a_value_without_a_bias() -> None:
    config = {**CONFIGS["qwen3"], "architectures": ["Qwen3ForSequenceClassification"]}
    family = family_of(config)
    weights = WeightMap(family, read_shape(family, config, value_head=True, value_bias=False))
    assert weights.hf_tensors()["score.weight"] == (1, 16)
    assert not {"lm_head.weight", "score.bias"} & weights.hf_tensors().keys()


def test_bodies_of_reward_models_are_those_that_transformers_has_classifiers_of() -> None:
    known = {*MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()}
    for body in CLASSIFIED:
        config = {"architectures": [f"{body}ForCausalLM"], "num_labels": 2, "rope_theta": 1e4}
        made = reward_model_config(config)
        assert made["architectures"] == [f"{body}ForSequenceClassification"]
        assert f"{body}ForSequenceClassification" in known
        assert family_of(made) is family_of(config)
        assert reward_model_config(made) == made
        assert made["rope_theta"] == 1e4 and "num_labels" not in made
    own = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "auto_map": {}}
    made = reward_model_config(own)
    assert made["model_type"] == "deepseek_v3" and "auto_map" not in made  # nobody's own code


@pytest.mark.parametrize(
    "architectures",
    [["Glm4MoeForCausalLM"], ["Qwen3VLForConditionalGeneration"], ["GPT2LMHeadModel"], [], None],
)
def test_what_has_no_classifier_is_no_body_of_a_reward_model(architectures: Any) -> None:
    named = architectures[0] if architectures else "nothing"
    with pytest.raises(NoClassifierError, match=f"no sequence classifier of {named}"):
        reward_model_config({"architectures": architectures})


def test_checkpoints_that_do_not_fit_are_named() -> None:
    weights = weight_map("qwen3")
    right = weights.hf_tensors()
    norm = "model.layers.1.self_attn.q_norm.weight"
    with pytest.raises(MissingTensorError, match=norm):
        weights.check_hf({name: shape for name, shape in right.items() if name != norm})
    with pytest.raises(UnexpectedTensorError, match=r"layers\.3"):
        weights.check_hf({**right, "model.layers.3.input_layernorm.weight": (16,)})
    with pytest.raises(TensorShapeError, match=rf"{norm}.*\(5,\).*\(4,\)"):
        weights.check_hf({**right, norm: (5,)})
    weights.check_hf({**right, "model.layers.0.self_attn.rotary_emb.inv_freq": (2,)})
    with pytest.raises(UnexpectedTensorError, match="bias"):
        weights.binding("decoder.layers.0.self_attention.linear_qkv.bias")


def test_two_rules_for_one_tensor_are_refused() -> None:
    weights = weight_map("qwen3")
    family, shape = weights.family, weights.shape
    doubled = replace(family, rules=(*family.rules, family.rules[2]))
    with pytest.raises(RuleConflictError, match=r"final_layernorm"):
        WeightMap(doubled, shape)
    rule = WeightRule(
        megatron="elsewhere",
        sources=(SourceTensor("model.norm.weight", ("hidden",)),),
        stage=Stage.FINAL,
    )
    with pytest.raises(RuleConflictError, match=r"model\.norm\.weight"):
        WeightMap(replace(family, rules=(*family.rules, rule)), shape)


def test_rules_that_mean_nothing_cannot_be_written() -> None:
    sources = (SourceTensor("a", ("q", "hidden")), SourceTensor("b", ("kv", "hidden")))
    for wrong in ({"pack": Pack.GATED}, {"padded": True, "cut": ShardAxis.COLUMNS}):
        with pytest.raises(ValueError, match="cut by rows"):
            WeightRule(megatron="x", sources=sources, stage=Stage.LAYER, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": "8"}, "num_attention_heads is '8'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers is 'all'"),
    ],
)
def test_malformed_configurations_are_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidCheckpointError, match=text):
        weight_map("qwen3_moe", **changes)


def test_keys_that_older_checkpoints_lack() -> None:
    config = {**CONFIGS["qwen3"]}
    del config["head_dim"]
    assert read_shape(family_of(config), config).head_dim == 128  # transformers' default
    llama = {**CONFIGS["llama"], "num_key_value_heads": None, "head_dim": None}
    shape = read_shape(family_of(llama), llama)
    assert (shape.kv_heads, shape.head_dim) == (8, 2)
    renamed = {**CONFIGS["qwen3_moe"], "num_local_experts": 4}
    del renamed["num_experts"]
    assert read_shape(family_of(renamed), renamed).experts == 4


@pytest.mark.parametrize("architectures", [None, [], ["GPT2LMHeadModel"], ["A", "B"]])
def test_unknown_architectures_are_refused(architectures: Any) -> None:
    with pytest.raises(UnknownArchitectureError):
        family_of({"architectures": architectures})
    with pytest.raises(UnknownArchitectureError, match=r"known are Deepseek.*Qwen3MoeForCausalLM"):
        family_of({"architectures": ["GPT2LMHeadModel"]})


@pytest.mark.parametrize(
    ("parameter", "offsets", "name"),
    [
        (
            "decoder.layers.1.input_layernorm.weight",
            (4, 0),
            "decoder.layers.5.input_layernorm.weight",
        ),
        (
            "module.module.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
            (2, 0),
            "decoder.layers.2.input_layernorm.weight",
        ),
        (
            "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
            (0, 0),
            "decoder.layers.0.pre_mlp_layernorm.weight",
        ),
        (
            "decoder.layers.0.mlp.experts.linear_fc2.weight3",
            (1, 8),
            "decoder.layers.1.mlp.experts.local_experts.11.linear_fc2.weight",
        ),
        (
            "language_model.decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight",
            (1, 2),
            "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight",
        ),
        ("output_layer.weight", (4, 4), "output_layer.weight"),
    ],
)
def test_parameter_names_of_either_kind_of_layer(
    parameter: str, offsets: tuple[int, int], name: str
) -> None:
    assert rule_name(parameter, layer_offset=offsets[0], expert_offset=offsets[1]) == name
