"""Settings of the fsdp backend belong to it alone, and families are known without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from services.trainer.backend import LayoutError
from services.trainer.backends.families import (
    FAMILIES,
    REFUSED,
    TENSOR_REFUSED,
    UnknownFamilyError,
    check_context,
    check_lengths,
    check_tensor,
    layout_of,
    shares_prompts,
)
from services.trainer.backends.fsdp.config import FsdpConfig
from services.trainer.backends.fsdp.layout import mesh_of
from services.trainer.config import TrainerConfig
from services.trainer.controller.planning import Packing, packing_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"backend": "reference", "fsdp": {"dtype": "float32"}}, "fsdp has no effect"),
        ({"backend": "fsdp", "megatron": {"tensor": 2}}, "megatron has no effect"),
        ({"backend": "fsdp", "autocast": True}, "set fsdp.dtype"),
        ({"backend": "fsdp", "fsdp": {"dtype": "float16"}}, "fsdp.dtype"),
        ({"backend": "fsdp", "fsdp": {"offload": True}}, "fsdp.offload"),
        ({"backend": "fsdp", "fsdp": {"tensor": 0}}, "fsdp.tensor"),
        ({"backend": "fsdp", "fsdp": {"cp_layout": "contiguous"}}, "cp_layout has no effect"),
        (
            {"backend": "fsdp", "fsdp": {"replicas": 2, "tensor": 2}},
            "replicas is not for tensor above 1",
        ),
        (
            {"backend": "fsdp", "fsdp": {"expert": 2, "tensor": 2}},
            "expert is not for tensor above 1",
        ),
        ({"backend": "fsdp", "fsdp": {"expert": 2}}, "fsdp.expert has no effect on .*experts"),
        ({"backend": "reference", "fsdp": {"expert": 2}}, "fsdp has no effect"),
        (
            {"backend": "fsdp", "fsdp": {"activation_offload": True}},
            "of what activation_checkpointing keeps",
        ),
        ({"backend": "fsdp", "fsdp": {"context": 0}}, "fsdp.context"),
        (
            {"backend": "fsdp", "fsdp": {"dtype": "float32"}, "float32_head": False},
            "float32_head has no effect",
        ),
    ],
)
def test_what_has_no_effect_is_refused(model: Path, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        TrainerConfig(model=str(model), store=model, **settings)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3_moe", "num_experts": 6},
        {"model_type": "mixtral", "num_local_experts": 6},
        {"model_type": "deepseek_v3", "n_routed_experts": 6},
        {"model_type": "kimi_k2", "n_routed_experts": 6},
        {"model_type": "ernie4_5_moe", "moe_num_experts": 6},
        {"model_type": "qwen3_5_moe", "text_config": {"num_experts": 6}},
    ],
)
def test_expert_ranks_have_as_many_experts_each(model: Path, config: dict[str, Any]) -> None:
    (model / "config.json").write_text(json.dumps(config))

    def settings(expert: int) -> TrainerConfig:
        fsdp = {"expert": expert}
        return TrainerConfig(model=str(model), store=model, backend="fsdp", fsdp=fsdp)

    assert settings(3).fsdp.expert == 3
    with pytest.raises(ValidationError, match=r"fsdp\.expert 4 does not divide the 6 experts"):
        settings(4)


def test_experts_of_an_unproven_family_are_counted_when_it_is_loaded(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    assert TrainerConfig(model=str(model), store=model, backend="fsdp", fsdp={"expert": 4})


def test_rows_share_prompts_where_attention_knows_no_window(model: Path) -> None:
    def plan(**config: Any) -> bool:
        (model / "config.json").write_text(json.dumps(config))
        settings = TrainerConfig(model=str(model), store=model, backend="fsdp")
        packing = packing_of(settings, 1)
        assert packing == Packing(shares_prompts=shares_prompts(str(model)))
        if config["model_type"] in FAMILIES:
            assert packing.shares_prompts == (layout_of(config) == "shared")
        return packing.shares_prompts

    assert plan(model_type="mistral", sliding_window=None)
    assert not plan(model_type="mistral", sliding_window=4096)
    assert plan(model_type="qwen2", sliding_window=4096, use_sliding_window=False)
    assert plan(model_type="qwen2", sliding_window=9, layer_types=["full_attention"])
    assert not plan(model_type="qwen2", sliding_window=9, layer_types=["sliding_attention"])
    assert not plan(model_type="qwen3_next")
    assert not plan(model_type="unheard_of")


def test_rows_that_are_cut_over_context_ranks_share_no_prompts(model: Path) -> None:
    def plan(**fsdp: Any) -> Packing:
        settings = TrainerConfig(model=str(model), store=model, backend="fsdp", fsdp=fsdp)
        return packing_of(settings, settings.fsdp.context)

    assert plan() == Packing(shares_prompts=True)
    assert plan(context=2) == Packing(shares_prompts=False, row_multiple=4)
    assert plan(context=2, cp_layout="contiguous") == Packing(shares_prompts=False)


def test_ranks_of_a_context_group_lie_side_by_side() -> None:
    found = [mesh_of(FsdpConfig(context=2), rank, 6) for rank in range(6)]
    assert [mesh.data_rank for mesh in found] == [0, 0, 1, 1, 2, 2]
    assert [mesh.reports for mesh in found] == [True, False] * 3
    assert {(mesh.data_size, mesh.context_size) for mesh in found} == {(3, 2)}
    with pytest.raises(LayoutError, match=r"5 ranks do not divide into .* x fsdp.context 2"):
        mesh_of(FsdpConfig(context=2), 0, 5)
    with pytest.raises(LayoutError, match=r"6 ranks do not divide into fsdp.replicas 4"):
        mesh_of(FsdpConfig(replicas=4), 0, 6)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"rope_scaling": {"type": "longrope"}}, "rope_type longrope"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type dynamic"),
        ({"rope_parameters": {"full": {"rope_type": "longrope"}}}, "rope_type longrope"),
        ({"vision_config": {}}, "reads images"),
    ],
)
def test_what_goes_by_whole_rows_is_not_cut_over_context_ranks(
    config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnknownFamilyError, match=f"fsdp.context above 1 .*{reason}"):
        check_context(config)


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 64}, 64),
        (
            {
                "max_position_embeddings": 128,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "original_max_position_embeddings": 32,
                },
            },
            32,
        ),
        ({"max_position_embeddings": 96, "rope_parameters": {"rope_type": "dynamic"}}, 96),
    ],
)
def test_rows_that_change_the_angles_of_others_are_refused(
    config: dict[str, Any], most: int
) -> None:
    check_lengths(config, most)
    check_lengths({"rope_parameters": {"rope_type": "yarn"}}, None)
    for longest in (most + 1, None):
        with pytest.raises(UnknownFamilyError, match=f"to {most} at most"):
            check_lengths(config, longest)


@pytest.mark.parametrize(
    "rope", [None, {}, {"rope_type": "llama3"}, {"full": {"rope_type": "yarn", "factor": 2.0}}]
)
def test_angles_of_a_position_alone_are_cut(rope: Any) -> None:
    check_context({"rope_parameters": rope})


def test_unknown_families_are_let_in_on_purpose_and_refused_ones_never() -> None:
    with pytest.raises(UnknownFamilyError, match="unheard_of is not proven"):
        layout_of({"model_type": "unheard_of"})
    assert layout_of({"model_type": "unheard_of"}, unproven=True) == "rows"
    for name in REFUSED:
        with pytest.raises(UnknownFamilyError, match=f"{name} cannot be trained"):
            layout_of({"model_type": name}, unproven=True)
    assert not FAMILIES.keys() & REFUSED.keys()


def test_families_whose_layers_cannot_be_cut_are_refused_by_name() -> None:
    for name in FAMILIES.keys() - TENSOR_REFUSED.keys():
        check_tensor(name)
    for name, reason in TENSOR_REFUSED.items():
        with pytest.raises(UnknownFamilyError, match=f"{name} .* fsdp.tensor above 1: {reason}"):
            check_tensor(name)
    assert TENSOR_REFUSED.keys() < FAMILIES.keys()
