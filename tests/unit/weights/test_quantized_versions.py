"""Quantised versions as the reference engine takes them: as what they stand for, or not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from services.rollout.engine.reference.loading import VersionLoader, check_plain, open_model
from services.rollout.errors import DigestMismatchError, UnfitWeightsError
from services.trainer.rank.quantization import quantizing
from sluice.weights.checkpoint import parse_header
from sluice.weights.convert.quantized_layout import (
    Fp8Blocks,
    Int4Groups,
    QuantizedLayout,
    modules_kept,
)
from sluice.weights.manifest import read_manifest
from sluice.weights.shards import PublishedShards
from sluice.weights.store import StoredVersion, WeightStore
from tests import fp8_oracle as oracle
from tests import int4_oracle
from tests.contract.engine.cases import build_model
from tests.models.families import CASES, build

NAME = "model.layers.0.mlp.down_proj.weight"
CPU = torch.device("cpu")
FP8 = Fp8Blocks()


@dataclass
class Published:
    store: WeightStore
    record: StoredVersion
    plain: dict[str, torch.Tensor]

    @property
    def directory(self) -> Path:
        assert self.record.directory is not None
        return self.record.directory

    @property
    def expected(self) -> np.ndarray:
        tensors = load_file(self.directory / "model.safetensors")
        codes = tensors[NAME].view(torch.uint8).numpy()
        return oracle.numbers(codes, tensors[f"{NAME}_scale_inv"].numpy())


def as_it_is(config: dict[str, Any]) -> None:
    pass


def publish(
    root: Path,
    change_config: Callable[[dict[str, Any]], object] = as_it_is,
    family: str = "",
    layout: QuantizedLayout = FP8,
) -> Published:
    if family:
        model: Any = build(next(case for case in CASES if case.name == family), root / "model")
    else:
        model = build_model(root / "model", "qwen3", 0)
    plain = load_file(model.directory / "model.safetensors")
    store = WeightStore(root / "weights", durable=False)
    staging = store.allocate(None)
    shards = PublishedShards(keep=False, sync=False)
    shards.begin(None)
    write = quantizing(shards.submit, layout)
    shard = write(staging.directory, "model.safetensors", plain, {})()
    shards.finish(staging.version)
    config = json.loads((model.directory / "config.json").read_bytes())
    kept = modules_kept({n: (t.dtype, t.shape) for n, t in shard.tensors.items()})
    config["quantization_config"] = layout.config(kept)
    change_config(config)
    path, ends = (staging.directory / f"{name}.json" for name in ("config", "generation_config"))
    path.write_text(json.dumps(config))
    ends.write_text(json.dumps({"eos_token_id": [3, 7]}))
    return Published(store, store.commit(staging, [shard], [path, ends], 0), plain)


def load(published: Published, loader: VersionLoader) -> torch.Tensor:
    record = published.record
    prepared = loader.load(record.version, record.digest, published.directory)
    return prepared.parameters[NAME].detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_what_they_stand_for(tmp_path: Path, dtype: torch.dtype) -> None:
    published = publish(tmp_path)
    loader = VersionLoader(dtype, CPU)
    first = load(published, loader)
    assert first.dtype == dtype
    rounding = 1e-6 if dtype == torch.float32 else 2**-8
    np.testing.assert_allclose(first.double().numpy(), published.expected, rtol=rounding)
    assert np.abs(first.double().numpy() - published.plain[NAME].double().numpy()).max() > 1e-5
    (shard,) = read_manifest(published.directory).shards()
    loader.stage(published.directory / shard.file_name, shard)  # of no use here
    assert torch.equal(load(published, loader), first)  # by an engine that has a model
    assert NAME in loader.model.parameter_names()
    assert {3, 7} <= loader.model.stop_token_ids
    loader.close()
    if dtype == torch.float32:
        _, opened = open_model(published.directory, dtype, CPU)
        assert torch.equal(opened.parameters[NAME].detach(), first)


@pytest.mark.parametrize("layout", [FP8, Int4Groups(32)], ids=["fp8", "int4"])
@pytest.mark.parametrize(
    "family", ["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "qwen3_next", "minimax_m2"]
)
def test_experts_are_what_they_stand_for(
    tmp_path: Path, family: str, layout: QuantizedLayout
) -> None:
    """Stored one by one, which transformers puts together."""
    published = publish(tmp_path, family=family, layout=layout)
    stored = load_file(published.directory / "model.safetensors")
    exact = shutil.copytree(tmp_path / "model", tmp_path / "exact")
    numbers = dict(published.plain)
    for name in published.plain:
        if (scales := stored.get(f"{name}_scale_inv")) is not None:
            codes = stored[name].view(torch.uint8).numpy()
            numbers[name] = torch.from_numpy(oracle.numbers(codes, scales.numpy())).float()
        elif (packed := stored.get(f"{name}_packed")) is not None:
            scale = stored[f"{name}_scale"].double().numpy()
            numbers[name] = torch.from_numpy(int4_oracle.numbers(packed.numpy(), scale)).float()
    changed = {name for name in numbers if numbers[name] is not published.plain[name]}
    assert sum(".experts." in name for name in changed) >= 12
    assert all(".experts." in name for name in changed) is (layout is not FP8)
    save_file(numbers, exact / "model.safetensors", {"format": "pt"})
    module: Any = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float32)
    kept = module.state_dict().keys()  # of buffers: biases that experts are chosen by
    buffers = {name: each for name, each in module.named_buffers() if name in kept}
    expected, loader = dict(module.named_parameters()) | buffers, VersionLoader(torch.float32, CPU)
    record = published.record
    first = loader.load(record.version, record.digest, published.directory)
    again = loader.load(record.version, record.digest, published.directory)  # by one with a model
    _, opened = open_model(published.directory, torch.float32, CPU)
    for weights in (first, again, opened):
        assert weights.parameters.keys() == expected.keys()
        for name, value in weights.parameters.items():
            torch.testing.assert_close(value.data, expected[name].data, rtol=1e-6, atol=0)
    loader.close()


@pytest.mark.parametrize("known", [False, True])
def test_a_config_that_does_not_say_so_is_refused(tmp_path: Path, known: bool) -> None:
    loader = VersionLoader(torch.float32, CPU)
    if known:
        load(publish(tmp_path / "good"), loader)
    bad = publish(tmp_path / "bad", lambda config: config.pop("quantization_config"))
    with pytest.raises(UnfitWeightsError, match=r"config\.json that knows of none"):
        load(bad, loader)
    loader.close()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weight_block_size", [0, 128]),
        ("weight_block_size", None),
        ("weight_block_size", [1, 1]),
        ("quant_method", "awq"),
    ],
)
def test_blocks_of_another_kind_are_refused(tmp_path: Path, key: str, value: object) -> None:
    def change(config) -> None:
        config["quantization_config"][key] = value

    loader = VersionLoader(torch.float32, CPU)
    with pytest.raises(UnfitWeightsError):
        load(publish(tmp_path, change), loader)
    loader.close()


def test_a_flipped_bit_of_a_scale_is_refused_by_its_name(tmp_path: Path) -> None:
    published = publish(tmp_path)
    path = published.directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    extent = parse_header(bytes(data), file_name=path.name)[f"{NAME}_scale_inv"]
    data[extent.end - 1] ^= 1
    path.write_bytes(data)
    loader = VersionLoader(torch.float32, CPU)
    with pytest.raises(DigestMismatchError) as refused:
        load(published, loader)
    assert refused.value.metadata["tensor"] == f"{NAME}_scale_inv"
    loader.close()


def test_a_transfer_of_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnfitWeightsError, match="needs the store"):
        check_plain(read_manifest(publish(tmp_path).directory))
