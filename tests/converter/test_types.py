"""Layers of one key that differ in type: no number is lost, whatever reads the result."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from sluice.weights.convert.conversion import convert
from sluice.weights.convert.options import ConvertOptions, Layout
from sluice.weights.convert.stored import read_keys
from sluice.weights.convert.verify import compare
from sluice.weights.errors import MixedTypesError
from tests.unit.weights_rules.models import save_model

ODD = "model.layers.1.mlp.down_proj.weight"
EXPERT = "model.layers.2.mlp.experts.3.down_proj.weight"


def narrow(directory: Path, *names: str) -> dict[str, torch.Tensor]:
    """Have some tensors of a float32 checkpoint in bfloat16, rounded; what it holds then."""
    tensors = load_file(directory / "model.safetensors")
    tensors |= {name: tensors[name].to(torch.bfloat16) for name in names}
    save_file(tensors, directory / "model.safetensors")
    return tensors


def to_megatron(source: Path, target: Path, **more: Any) -> Any:
    return convert(source, target, ConvertOptions(vocab_multiple=8, sync=False, **more))


def to_hf(source: Path, target: Path) -> dict[str, torch.Tensor]:
    convert(source, target, ConvertOptions(to="hf", sync=False))
    return load_file(target / "model.safetensors")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype is second[name].dtype and torch.equal(first[name], second[name])
        for name in first
    )


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, pipeline=2)])
def test_layers_that_differ_in_type_are_stored_one_by_one(layout: Layout, tmp_path: Path) -> None:
    model = save_model("qwen3", tmp_path / "model")
    tensors = narrow(model, ODD)
    report = to_megatron(model, tmp_path / "made", layout=layout).report
    (note,) = report.notes
    assert ODD in note and "bfloat16" in note
    dcp_to_torch_save(tmp_path / "made", tmp_path / "whole.pt")  # torch's own reader
    stored = torch.load(tmp_path / "whole.pt")
    assert torch.equal(stored["decoder.layers.1.mlp.linear_fc2.weight"], tensors[ODD])
    other = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(stored["decoder.layers.0.mlp.linear_fc2.weight"], tensors[other])
    assert not any(key.startswith("decoder.layers.mlp.") for key in stored)  # no layer else either
    assert compare(model, tmp_path / "made").same
    assert same(to_hf(tmp_path / "made", tmp_path / "back"), tensors)


def test_layers_of_one_type_stay_stacked(tmp_path: Path) -> None:
    model = save_model("qwen3", tmp_path / "model")
    assert to_megatron(model, tmp_path / "made").report.notes == ()
    assert "decoder.layers.mlp.linear_fc2.weight" in read_keys(tmp_path / "made")


def test_a_type_for_all_keeps_them_stacked(tmp_path: Path) -> None:
    model = save_model("qwen3", tmp_path / "model")
    tensors = narrow(model, ODD, "model.layers.0.self_attn.k_proj.weight")
    report = to_megatron(model, tmp_path / "made", dtype="float32").report
    assert report.notes == ()
    assert "decoder.layers.mlp.linear_fc2.weight" in read_keys(tmp_path / "made")
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    assert same(to_hf(tmp_path / "made", tmp_path / "back"), wide)


def test_where_layers_must_be_stacked_the_odd_one_is_named(tmp_path: Path) -> None:
    model = save_model("qwen3", tmp_path / "model")
    narrow(model, ODD)
    with pytest.raises(MixedTypesError, match=re.escape(ODD)) as refused:
        to_megatron(model, tmp_path / "made", stacking="stacked")
    assert refused.value.names == (ODD,)
    assert not (tmp_path / "made").exists()


def test_parts_of_one_tensor_that_differ_are_named(tmp_path: Path) -> None:
    model = save_model("qwen3", tmp_path / "model")
    narrow(model, "model.layers.0.self_attn.k_proj.weight")
    with pytest.raises(MixedTypesError) as refused:
        to_megatron(model, tmp_path / "made")
    assert "model.layers.0.self_attn.k_proj.weight" in refused.value.names


@pytest.mark.parametrize("stacking", ["auto", "single"])
def test_an_expert_that_differs_is_named(stacking: str, tmp_path: Path) -> None:
    """Experts of a layer lie under one key however layers are stored."""
    model = save_model("qwen3_moe", tmp_path / "model")
    tensors = narrow(model, EXPERT)
    with pytest.raises(MixedTypesError) as refused:
        to_megatron(model, tmp_path / "made", stacking=stacking)
    assert refused.value.names == (EXPERT,)
    to_megatron(model, tmp_path / "made", dtype="float32", stacking=stacking)
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    assert same(to_hf(tmp_path / "made", tmp_path / "back"), wide)


def test_all_layers_with_experts_are_stacked_as_megatron_does(tmp_path: Path) -> None:
    """Of `moe_layer_freq` 1; test_megatron.py has Megatron read it."""
    model = save_model("qwen3_30b", tmp_path / "model")
    to_megatron(model, tmp_path / "made")
    keys = read_keys(tmp_path / "made")
    assert keys["decoder.layers.mlp.experts.experts.linear_fc1.weight"].shape[:2] == (4, 4)
    assert compare(model, tmp_path / "made").same
    to_megatron(model, tmp_path / "single", stacking="single")
    assert compare(tmp_path / "made", tmp_path / "single").same


def test_an_index_that_is_wrong_is_reported(tmp_path: Path) -> None:
    """Sizes that do not add up, and tensors that it names and no file has."""
    model = save_model("qwen3", tmp_path / "model")
    convert(model, tmp_path / "many", ConvertOptions(to="hf", sync=False, max_file_bytes=60_000))
    path = tmp_path / "many/model.safetensors.index.json"
    index = json.loads(path.read_bytes())
    assert convert(tmp_path / "many", tmp_path / "fine", ConvertOptions(to="hf")).report.notes == ()
    (tmp_path / "many/conversion.json").unlink()
    right = index["metadata"]["total_size"]
    first, last = sorted(set(index["weight_map"].values()))[
        :: len(set(index["weight_map"].values())) - 1
    ]
    index["metadata"]["total_size"] = right + 1
    index["weight_map"]["model.layers.9.ghost.weight"] = first
    moved = "model.norm.weight"
    index["weight_map"][moved] = last if index["weight_map"][moved] == first else first
    del index["weight_map"]["model.embed_tokens.weight"]
    path.write_text(json.dumps(index))
    for to in ("hf", "torch_dist"):
        options = ConvertOptions(to=to, sync=False, max_file_bytes=60_000)  # type: ignore[arg-type]
        report = convert(tmp_path / "many", tmp_path / to, options).report
        assert "model.layers.9.ghost.weight" in report.skipped
        notes = "\n".join(report.notes)
        assert f"{right + 1}" in notes and f"{right}" in notes
        assert moved in notes and "model.embed_tokens.weight" in notes
        assert compare(model, tmp_path / to).same
    made = json.loads((tmp_path / "hf/model.safetensors.index.json").read_bytes())
    assert made["metadata"]["total_size"] == right
    assert "model.layers.9.ghost.weight" not in made["weight_map"]


@pytest.mark.parametrize(
    "size", [-1, 1e308, float("nan"), "much", [], 10**400], ids=lambda size: str(size)[:8]
)
def test_any_size_in_an_index_is_only_reported(size: object, tmp_path: Path) -> None:
    model = save_model("llama", tmp_path / "model")
    convert(model, tmp_path / "many", ConvertOptions(to="hf", sync=False, max_file_bytes=60_000))
    (tmp_path / "many/conversion.json").unlink()
    path = tmp_path / "many/model.safetensors.index.json"
    index = json.loads(path.read_bytes())
    index["metadata"]["total_size"] = size
    path.write_text(json.dumps(index))
    report = to_megatron(tmp_path / "many", tmp_path / "made").report
    assert len(report.notes) == 1 and len(report.notes[0]) < 300
