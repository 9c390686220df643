"""INT4 checkpoints as compressed-tensors packs them: out of plain ones, and into both formats."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice.weights.convert.conversion import convert
from sluice.weights.convert.options import ConvertOptions
from sluice.weights.errors import (
    InvalidCheckpointError,
    MissingTensorError,
    TensorDigestError,
    UnexpectedTensorError,
)
from sluice.weights.rules.packing import InexactTensorError
from tests import int4_oracle
from tests.converter.test_faults import resave
from tests.models.families import CASES, build

FAMILIES = ["qwen3_moe", "glm4_moe", "deepseek_v3"]
FILE = "model.safetensors"
TO_INT4 = ConvertOptions(to="hf", quantize="int4_32", sync=False)


def build_bfloat16(family: str, directory: Path) -> dict[str, torch.Tensor]:
    build(next(case for case in CASES if case.name == family), directory)
    tensors = {n: t.to(torch.bfloat16) for n, t in load_file(directory / FILE).items()}
    save_file(tensors, directory / FILE, {"format": "pt"})
    return tensors


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("int4") / "plain"
    build_bfloat16("qwen3_moe", directory)
    return directory


@pytest.fixture(scope="module")
def int4(plain: Path) -> Path:
    convert(plain, plain.with_name("int4"), TO_INT4)
    return plain.with_name("int4")


def numbers_of(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a checkpoint stands for, in bfloat16."""
    found = int4_oracle.plain(stored)
    return {
        name: tensor
        if tensor.dtype != torch.float64
        else torch.from_numpy(int4_oracle.bfloat16(tensor.numpy())).to(torch.bfloat16)
        for name, tensor in found.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_out_and_in(family: str, tmp_path: Path) -> None:
    tensors = build_bfloat16(family, tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "int4", TO_INT4)
    stored = load_file(tmp_path / "int4" / FILE)
    numbers = numbers_of(stored)
    assert numbers.keys() == tensors.keys()
    experts = {name for name in tensors if f"{name}_packed" in stored}
    assert len(experts) >= 12 and all(".experts." in name for name in experts)
    assert {name for name in tensors if ".experts." in name and tensors[name].dim() == 2} == experts
    for name, tensor in tensors.items():
        if name not in experts:
            assert torch.equal(numbers[name], tensor)
            continue
        weight, scale = tensor.float().numpy(), stored[f"{name}_scale"].double().numpy()
        errors = np.abs(int4_oracle.numbers(stored[f"{name}_packed"].numpy(), scale) - weight)
        assert (errors <= int4_oracle.least_errors(weight, scale) + 1e-6).all()
        assert stored[f"{name}_shape"].tolist() == list(tensor.shape)
    config = json.loads((tmp_path / "int4/config.json").read_bytes())["quantization_config"]
    kept = {
        n.removesuffix(".weight") for n, t in tensors.items() if t.dim() == 2 and "bias" not in n
    }
    assert set(config["ignore"]) == kept - {name.removesuffix(".weight") for name in experts}

    convert(tmp_path / "int4", tmp_path / "back", ConvertOptions(to="hf", sync=False))
    back = load_file(tmp_path / "back" / FILE)
    assert back.keys() == numbers.keys()
    assert all(torch.equal(back[name], numbers[name]) for name in back)
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_bytes())
    convert(tmp_path / "int4", tmp_path / "dist", ConvertOptions(vocab_multiple=8, sync=False))
    described = ConvertOptions(to="hf", model=tmp_path / "plain", sync=False)
    convert(tmp_path / "dist", tmp_path / "again", described)
    again = load_file(tmp_path / "again" / FILE)
    assert again.keys() == numbers.keys()
    assert all(torch.equal(again[name], numbers[name]) for name in again)
    convert(tmp_path / "back", tmp_path / "once more", TO_INT4)  # its own numbers: to the bit
    same = load_file(tmp_path / "once more" / FILE)
    assert all(torch.equal(same[name], stored[name]) for name in stored)


def test_an_origin_in_int4_fills_in_numbers(plain: Path, int4: Path, tmp_path: Path) -> None:
    """Trained in another form, its experts come from the source; what it lacks, from the origin."""
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    config = json.loads((plain / "config.json").read_bytes())
    own = tmp_path / "own"
    shutil.copytree(plain, own)
    (own / "config.json").write_text(json.dumps({**config, "architectures": ["Strange"]}))
    tensors = load_file(plain / FILE)
    save_file({n: t for n, t in tensors.items() if n != name}, own / FILE)
    report = convert(
        own, tmp_path / "filled", ConvertOptions(to="hf", origin=int4, sync=False)
    ).report
    assert report.copied == (name,)
    assert {n for n in report.skipped if name in n} == {
        f"{name}_{part}" for part in ("packed", "scale", "shape")
    }
    filled = load_file(tmp_path / "filled" / FILE)
    assert filled.keys() == tensors.keys()
    assert torch.equal(filled[name], numbers_of(load_file(int4 / FILE))[name])


def test_parts_come_together(int4: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    bare = tmp_path / "bare"
    shutil.copytree(int4, bare)
    (bare / "conversion.json").unlink()
    for part in ("scale", "shape"):
        source = resave(bare, tmp_path / f"no {part}", {f"{name}_{part}": None})
        with pytest.raises(MissingTensorError, match=f"{name}_{part}"):
            convert(source, tmp_path / "target", TO_INT4)
    source = resave(bare, tmp_path / "no codes", {f"{name}_packed": None})
    with pytest.raises(UnexpectedTensorError, match=f"{name}_scale"):
        convert(source, tmp_path / "target", TO_INT4)
    source = resave(bare, tmp_path / "other", {f"{name}_shape": torch.tensor([32, 31])})
    with pytest.raises(InvalidCheckpointError, match=r"shape \[32, 31\]"):
        convert(source, tmp_path / "target", ConvertOptions(to="hf", sync=False))


@pytest.mark.parametrize("shape", [(32,), (2, 32, 4)])
def test_codes_that_are_no_matrix_are_refused(
    int4: Path, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """Also where no rules say which shape it has."""
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    codes = torch.zeros(shape, dtype=torch.int32)
    source = resave(int4, tmp_path / "other", {f"{name}_packed": codes})
    (source / "conversion.json").unlink()
    config = json.loads((source / "config.json").read_bytes())
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["Strange"]}))
    with pytest.raises(InvalidCheckpointError, match=f"{name}' is INT4 and no matrix"):
        convert(source, tmp_path / "target", ConvertOptions(to="hf", sync=False))


@pytest.mark.parametrize("part", ["packed", "scale", "shape"])
def test_a_flipped_bit_is_found(part: str, int4: Path, tmp_path: Path) -> None:
    name = f"model.layers.1.mlp.experts.2.up_proj.weight_{part}"
    damaged = tmp_path / "damaged"
    shutil.copytree(int4, damaged)
    tensors = load_file(int4 / FILE)
    tensors[name].view(torch.uint8)[-1] ^= 1
    save_file(tensors, damaged / FILE, {"format": "pt"})
    with pytest.raises(
        (TensorDigestError, InvalidCheckpointError), match=r"up_proj|for a weight of"
    ):
        convert(damaged, tmp_path / "target", ConvertOptions(to="hf", sync=False))


def test_what_int4_has_no_place_for_is_refused(plain: Path, qwen3: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpointError, match="no whole groups of 128"):
        convert(plain, tmp_path / "wide", ConvertOptions(to="hf", quantize="int4_128", sync=False))
    with pytest.raises(InvalidCheckpointError, match="no weights that are stored in INT4"):
        convert(qwen3, tmp_path / "dense", TO_INT4)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    bad = torch.full((32, 32), float("nan"), dtype=torch.bfloat16)
    source = resave(plain, tmp_path / "nan", {name: bad})
    with pytest.raises(InexactTensorError, match="infinite, or none"):
        convert(source, tmp_path / "target", TO_INT4)
    assert not (tmp_path / "target").exists()
