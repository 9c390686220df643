"""Weights in FP8 blocks: the nearest numbers that there are, and by name what has none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.config import TrainerConfig
from services.trainer.errors import UnquantizableWeightsError
from services.trainer.rank.quantization import quantizing
from sluice.config import ConfigError, parse_config
from sluice.weights.convert.quantization import restored
from sluice.weights.convert.quantized_layout import Fp8Blocks, QuantizedLayout
from sluice.weights.errors import InvalidCheckpointError
from sluice.weights.manifest import ShardFile
from tests import fp8_oracle as oracle

NAME = "model.layers.0.mlp.up_proj.weight"
FP8 = Fp8Blocks()
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


def test_a_model_that_is_quantised_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    values = {"model": str(tmp_path), "store": str(tmp_path)}
    for publish in ({}, {"quantization": "fp8"}):
        with pytest.raises(ConfigError, match="is quantised, and trained weights are not"):
            parse_config(TrainerConfig, {**values, "publish": publish})
    parse_config(TrainerConfig, {**values, "lora": {"rank": 4}})  # which is published alone
