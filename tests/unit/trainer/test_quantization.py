"""Weights in FP8 blocks and INT4 groups: the nearest numbers there are, and what has none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from services.trainer.config import TrainerConfig
from services.trainer.errors import UnquantizableWeightsError
from services.trainer.rank.quantization import quantizing
from sluice.config import ConfigError, parse_config
from sluice.weights.convert.quantization import restored, simulate
from sluice.weights.convert.quantized_layout import (
    Fp8Blocks,
    Int4Groups,
    QuantizedLayout,
    layout_named,
    layout_of,
)
from sluice.weights.errors import InvalidCheckpointError
from sluice.weights.manifest import ShardFile
from tests import fp8_oracle as oracle
from tests import int4_oracle

NAME = "model.layers.0.mlp.up_proj.weight"
FP8 = Fp8Blocks()
EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"
Written = tuple[Mapping[str, torch.Tensor], Mapping[str, torch.dtype]]


def quantized(
    tensors: Mapping[str, torch.Tensor],
    casts: Mapping[str, torch.dtype],
    layout: QuantizedLayout = FP8,
):
    """What would be written."""
    written: list[Written] = []

    def write(directory: Path, file_name: str, made: Any, left: Any):
        written.append((made, left))
        return lambda: ShardFile(file_name, 0, "", {})

    quantizing(write, layout)(Path(), "f", tensors, casts)()
    return written[0]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("self_attn.q_b_proj", True),
        ("self_attn.kv_a_proj_with_mqa", True),
        ("linear_attn.in_proj_qkv", True),
        ("mlp.experts.0.gate_proj", True),
        ("block_sparse_moe.experts.11.w1", True),  # MiniMaxAI/MiniMax-M2 has them so
        ("block_sparse_moe.experts.11.w2", True),
        ("block_sparse_moe.experts.11.w3", True),
        ("block_sparse_moe.gate", False),
        ("mlp.gate", False),
        ("linear_attn.in_proj_a", False),
        ("self_attn.indexer.weights_proj", False),  # SGLang makes it without scales
        ("self_attn.indexer.wk", False),
        ("input_layernorm", False),
    ],
)
def test_layers_that_hugging_face_s_checkpoints_have_in_fp8(name: str, wanted: bool) -> None:
    assert FP8.quantizes(f"model.layers.3.{name}.weight", (128, 128)) is wanted
    assert not FP8.quantizes(f"model.layers.3.{name}.weight", (128,))


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 257), (1, 300), (300, 2)])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_every_number_is_the_nearest_of_those_at_its_scale(
    shape: tuple[int, int], size: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator) * size
    weight[0, 0] = 0.0
    tensors, _ = quantized({NAME: weight}, {NAME: torch.bfloat16})
    assert set(tensors) == {NAME, f"{NAME}_scale_inv"}
    stored, scales = tensors[NAME], tensors[f"{NAME}_scale_inv"]
    assert (stored.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    codes, plain = stored.view(torch.uint8).numpy(), weight.numpy()
    np.testing.assert_allclose(scales.numpy(), oracle.expected_scales(plain), rtol=1e-6)
    errors = np.abs(oracle.numbers(codes, scales.numpy()) - plain)
    nearest = oracle.least_errors(plain, scales.numpy())
    slack = 1e-6 * np.abs(plain) + 1e-45
    assert (errors <= nearest + slack).all()
    if min(shape) > 1:
        assert errors.max() > 0  # or there would be nothing to compare
    (restored_weight,) = dict(restored(tensors, FP8, torch.float32)).values()
    np.testing.assert_allclose(
        restored_weight.numpy(), oracle.numbers(codes, scales.numpy()), rtol=1e-6, atol=1e-45
    )


def test_scales_of_powers_of_two_are_the_next_above() -> None:
    weight = torch.randn(130, 140, generator=torch.Generator().manual_seed(1))
    tensors, _ = quantized({NAME: weight}, {}, Fp8Blocks(scale_format="ue8m0"))
    scales = tensors[f"{NAME}_scale_inv"].double().numpy()
    exact = oracle.expected_scales(weight.numpy())
    np.testing.assert_array_equal(scales, 2.0 ** np.ceil(np.log2(exact)))


def test_what_is_no_linear_layer_stays_with_its_cast() -> None:
    tensors = {
        NAME: torch.ones(4, 4),
        "model.embed_tokens.weight": torch.ones(4, 4),
        "lm_head.weight": torch.ones(4, 4),
        "model.norm.weight": torch.ones(4),
        "model.layers.0.self_attn.q_proj.bias": torch.full((4,), torch.nan),
    }
    made, casts = quantized(tensors, dict.fromkeys(tensors, torch.bfloat16))
    assert casts == {name: torch.bfloat16 for name in tensors if name != NAME}
    for name in tensors.keys() - {NAME}:
        assert made[name] is tensors[name]
    assert torch.equal(made[NAME].float(), torch.full((4, 4), 448.0))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("mlp.experts.0.gate_proj", True),
        ("mlp.experts.12.down_proj", True),
        ("block_sparse_moe.experts.11.w2", True),
        ("mlp.shared_experts.gate_proj", False),
        ("mlp.shared_expert.up_proj", False),
        ("mlp.gate_proj", False),
        ("mlp.gate", False),
        ("self_attn.q_proj", False),
    ],
)
def test_int4_is_of_routed_experts(name: str, wanted: bool) -> None:
    assert Int4Groups(32).quantizes(f"model.layers.3.{name}.weight", (32, 64)) is wanted
    assert not Int4Groups(32).quantizes(f"model.layers.3.{name}.weight", (32,))


@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_every_number_of_int4_is_the_nearest_of_those_at_its_scale(
    size: int, rows: int, scale: float
) -> None:
    weight = torch.randn(rows, 384, generator=torch.Generator().manual_seed(rows)) * scale
    weight[0, :size] = 0.0
    tensors, casts = quantized({EXPERT: weight}, {EXPERT: torch.bfloat16}, Int4Groups(size))
    assert list(tensors) == [f"{EXPERT}_packed", f"{EXPERT}_scale", f"{EXPERT}_shape"]
    assert not casts
    packed, scales, shape = tensors.values()
    assert (packed.dtype, scales.dtype) == (torch.int32, torch.bfloat16)
    assert shape.tolist() == [rows, 384]
    plain, stored = weight.numpy(), scales.double().numpy()
    np.testing.assert_allclose(stored, int4_oracle.scales(plain, size), rtol=2**-7)
    assert (stored == int4_oracle.scales(plain, size)).mean() > 0.9  # but for float32's rounding
    wanted = int4_oracle.numbers(packed.numpy(), stored)
    errors = np.abs(wanted - plain)
    assert (errors <= int4_oracle.least_errors(plain, stored) + 1e-6 * np.abs(plain)).all()
    assert errors.max() > 0 and len(np.unique(int4_oracle.codes(packed.numpy()))) > 12
    (restored_weight,) = dict(restored(tensors, Int4Groups(size), torch.float32)).values()
    np.testing.assert_allclose(restored_weight.numpy(), wanted, rtol=1e-6, atol=1e-45)
    torch.testing.assert_close(simulate(weight, Int4Groups(size)), restored_weight, rtol=0, atol=0)


def test_int4_of_its_own_numbers_is_the_same() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    once = simulate(weight, Int4Groups(32))
    assert torch.equal(simulate(once, Int4Groups(32)), once)
    weight.requires_grad_()
    (simulate(weight, Int4Groups(32)) ** 2).sum().backward()
    assert torch.equal(weight.grad, 2 * once)  # straight through


def test_inputs_that_are_no_whole_groups_are_refused_by_name() -> None:
    with pytest.raises(UnquantizableWeightsError, match="no whole groups of 128") as refused:
        quantized({EXPERT: torch.ones(4, 192)}, {}, Int4Groups(128))
    assert refused.value.metadata["tensor"] == EXPERT
    plain = {NAME: torch.ones(4, 20)}
    assert quantized(plain, {}, Int4Groups(32))[0][NAME] is plain[NAME]  # no expert


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"_scale": None}, "has no .*_scale"),
        ({"_shape": None}, "has no .*_shape"),
        ({"_scale": torch.ones(4, 1)}, "scales of shape"),
        ({"_scale": torch.ones(4, 2, 1)}, "scales of shape"),
        ({"_shape": torch.tensor([4, 63])}, r"shape \[4, 63\]"),
        ({"_shape": torch.ones(())}, "shape 1.0"),
        ({"_packed": torch.ones(8, dtype=torch.int32)}, "no matrix"),
        ({"_packed": torch.ones(4, 5, dtype=torch.int32)}, "scales of shape"),
    ],
)
def test_int4_with_other_parts_is_refused(changes: dict, what: str) -> None:
    tensors, _ = quantized({EXPERT: torch.ones(4, 64)}, {}, Int4Groups(32))
    changed = {EXPERT + suffix: value for suffix, value in changes.items()}
    tensors = {n: t for n, t in {**tensors, **changed}.items() if t is not None}
    with pytest.raises(InvalidCheckpointError, match=what):
        dict(restored(tensors, Int4Groups(32), torch.float32))


KIMI = {  # of moonshotai/Kimi-K2-Thinking
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def test_configs_say_which_layout_it_is() -> None:
    assert layout_of({}) is None
    assert layout_of({"quantization_config": KIMI}) == Int4Groups(32)
    assert layout_of({"text_config": {"quantization_config": KIMI}}) == Int4Groups(32)
    assert layout_of({"quantization_config": Int4Groups(128).config([])}) == Int4Groups(128)
    made = Int4Groups(32).config(["lm_head", "re:.*self_attn.*"])
    assert made == KIMI
    assert layout_named("int4_128") == Int4Groups(128)
    assert layout_named("") is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_bits", 8),
        ("num_bits", "4"),
        ("type", "float"),
        ("symmetric", False),
        ("strategy", "channel"),
        ("actorder", "group"),
        ("group_size", 0),
        ("group_size", -32),
        ("group_size", 20),
        ("group_size", True),
        ("group_size", 2**40),
        ("group_size", float("nan")),
        ("group_size", None),
    ],
)
def test_what_int4_it_is_not_is_refused(key: str, value: object) -> None:
    entry = json.loads(json.dumps(KIMI))
    entry["config_groups"]["group_0"]["weights"][key] = value
    with pytest.raises(InvalidCheckpointError, match=key):
        layout_of({"quantization_config": entry})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", "int-quantized"),
        ("config_groups", None),
        ("config_groups", {}),
        ("config_groups", [1]),
        ("config_groups", {"group_0": 3}),
        ("config_groups", {"group_0": {"weights": None}}),
        ("config_groups", {**KIMI["config_groups"], "group_1": KIMI["config_groups"]["group_0"]}),
    ],
)
def test_other_groups_of_compressed_tensors_are_refused(key: str, value: object) -> None:
    with pytest.raises(InvalidCheckpointError, match="one group of format"):
        layout_of({"quantization_config": {**KIMI, key: value}})


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_is_refused_by_the_name_of_its_tensor(number: float) -> None:
    weight = torch.ones(4, 4)
    weight[1, 2] = number
    with pytest.raises(UnquantizableWeightsError) as refused:
        quantized({NAME: weight}, {})
    assert refused.value.metadata["tensor"] == NAME


def test_experts_in_one_tensor_are_refused_by_name() -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    with pytest.raises(UnquantizableWeightsError) as refused:
        quantized({name: torch.ones(2, 4, 4)}, {})
    assert refused.value.metadata["tensor"] == name


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({f"{NAME}_scale_inv": None}, "has no .*_scale_inv"),
        ({f"{NAME}_scale_inv": torch.ones(2, 1)}, "scales of shape"),
        ({f"{NAME}_scale_inv": torch.ones(1, 1, 1)}, "scales of shape"),
        ({NAME: torch.ones(4).to(torch.float8_e4m3fn)}, "no matrix"),
    ],
)
def test_fp8_with_other_scales_is_refused(changes: dict, what: str) -> None:
    tensors, _ = quantized({NAME: torch.ones(4, 4)}, {})
    tensors = {n: t for n, t in {**tensors, **changes}.items() if t is not None}
    with pytest.raises(InvalidCheckpointError, match=what):
        dict(restored(tensors, FP8, torch.float32))


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"lora": {"rank": 2}}, "no effect with lora"),
        ({"head": "value"}, "no effect with head value"),
        ({"transfer": {"enabled": True}}, "not for transfer.enabled"),
        ({"publish": {"quantization": "fp4"}}, "quantization"),
    ],
)
def test_what_does_not_go_with_it_is_refused(settings: dict, what: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    values = {
        "model": str(tmp_path),
        "store": str(tmp_path),
        "publish": {"quantization": "fp8"},
        **settings,
    }
    with pytest.raises(ConfigError, match=what):
        parse_config(TrainerConfig, values)


@pytest.mark.parametrize(
    ("quantization", "name", "shape", "what"),
    [
        ("int4_32", NAME, (32, 32), "has no weights that are stored in INT4"),
        ("int4_128", EXPERT, (32, 192), "192 inputs, which are no whole groups of 128"),
        ("int4_32", "model.layers.0.mlp.experts.down_proj", (2, 32, 32), "all experts in one"),
        ("fp8", "model.layers.0.mlp.experts.down_proj", (2, 32, 32), "all experts in one"),
        ("fp8", "model.norm.weight", (32,), "has no weights that are stored in FP8"),
        ("int4_32", EXPERT, (32, 192), ""),
        ("fp8", NAME, (32, 33), ""),
    ],
)
def test_a_model_that_has_no_place_for_it_is_refused_at_once(
    quantization: str, name: str, shape: tuple[int, ...], what: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({name: torch.zeros(shape)}, tmp_path / "model.safetensors")
    values = {
        "model": str(tmp_path),
        "store": str(tmp_path),
        "publish": {"quantization": quantization},
    }
    if not what:
        assert parse_config(TrainerConfig, values).publish.layout is not None
        return
    with pytest.raises(ConfigError, match=what):
        parse_config(TrainerConfig, values)


@pytest.mark.parametrize("text", [5, None, [], "quantization_config"])
def test_a_part_of_a_config_that_is_no_object_says_nothing(tmp_path: Path, text: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    assert layout_of({"text_config": text}) is None
    parse_config(TrainerConfig, {"model": str(tmp_path), "store": str(tmp_path)})


@pytest.mark.parametrize("key", ["{}", '{"text_config": {}}'])
def test_a_model_that_is_quantised_itself_is_refused(tmp_path: Path, key: str) -> None:
    entry = '"quantization_config": {"quant_method": "fp8"}'
    (tmp_path / "config.json").write_text(key.replace("{}", f"{{{entry}}}"))
    values = {"model": str(tmp_path), "store": str(tmp_path)}
    for publish in ({}, {"quantization": "fp8"}):
        with pytest.raises(ConfigError, match="is quantised, and trained weights are not"):
            parse_config(TrainerConfig, {**values, "publish": publish})
    parse_config(TrainerConfig, {**values, "lora": {"rank": 4}})  # which is published alone
    with pytest.raises(ConfigError, match="is quantised, and megatron reads plain weights alone"):
        parse_config(TrainerConfig, {**values, "lora": {"rank": 4}, "backend": "megatron"})
