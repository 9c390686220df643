"""gpt-oss as it is published: experts in MXFP4, into plain checkpoints and Megatron's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice.weights.convert.conversion import convert
from sluice.weights.convert.options import ConvertOptions, Layout
from sluice.weights.convert.verify import compare
from sluice.weights.errors import InvalidCheckpointError, MissingTensorError, UnexpectedTensorError
from tests.models.families import CASES, build

FILE = "model.safetensors"
TO_HF = ConvertOptions(to="hf", sync=False)
LAYOUTS = {"one rank": Layout(), "EP2xPP2": Layout(expert=2, pipeline=2), "TP2": Layout(tensor=2)}
PACKED = ("gate_up_proj", "down_proj")


def numbers_of(blocks: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """float64[experts, inputs, rows] by the words of the format, number by number.

    Sign, two bits of exponent, one of mantissa: 2^(e-1) x (1 + m/2), and m/2 where e is 0.
    """
    codes = np.stack([blocks.numpy() & 15, blocks.numpy() >> 4], axis=-1).astype(int)
    sign, exponent, mantissa = codes >> 3, (codes >> 1) & 3, codes & 1
    size = np.where(exponent == 0, mantissa / 2, np.exp2(exponent - 1.0) * (1 + mantissa / 2))
    shared = np.exp2(scales.numpy().astype(float) - 127)
    values = np.where(sign == 1, -size, size) * shared[..., None, None]
    return values.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)


def quantised(tensors: dict[str, torch.Tensor], seed: int = 0) -> dict[str, torch.Tensor]:
    """Experts by lot: every code, and scales of all sizes that bfloat16 has."""
    generator = torch.Generator().manual_seed(seed)
    made = dict(tensors)
    for name in [name for name in tensors if name.endswith(PACKED)]:
        experts, inputs, rows = made.pop(name).shape
        shape = experts, rows, inputs // 32, 16
        draw = {"dtype": torch.uint8, "generator": generator}
        made[f"{name}_blocks"] = torch.randint(0, 256, shape, **draw)  # type: ignore[call-overload]
        made[f"{name}_scales"] = torch.randint(40, 200, shape[:3], **draw)  # type: ignore[call-overload]
    return made


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mxfp4") / "published"
    build(next(case for case in CASES if case.name == "gpt_oss"), directory)
    tensors = {n: t.to(torch.bfloat16) for n, t in load_file(directory / FILE).items()}
    save_file(quantised(tensors), directory / FILE, {"format": "pt"})
    config = json.loads((directory / "config.json").read_bytes())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def plain(published: Path) -> Path:
    convert(published, published.with_name("plain"), TO_HF)
    return published.with_name("plain")


def test_each_number_is_what_the_format_says(published: Path, plain: Path) -> None:
    stored, made = load_file(published / FILE), load_file(plain / FILE)
    packed = {name for name in stored if name.endswith(("_blocks", "_scales"))}
    assert len(packed) == 8
    for name in stored.keys() - packed:
        assert torch.equal(made[name], stored[name])
    for name in {name.rpartition("_")[0] for name in packed}:
        expected = numbers_of(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        assert made[name].dtype == torch.bfloat16
        assert np.array_equal(made[name].double().numpy(), expected)
    assert made.keys() == (stored.keys() - packed) | {n.rpartition("_")[0] for n in packed}
    assert "quantization_config" not in json.loads((plain / "config.json").read_bytes())


def test_transformers_reads_the_same(published: Path, plain: Path) -> None:
    from transformers.integrations.mxfp4 import dequantize_convertops

    stored, made = load_file(published / FILE), load_file(plain / FILE)
    for layer in range(2):
        for part in PACKED:
            name = f"model.layers.{layer}.mlp.experts.{part}"
            theirs = dequantize_convertops(stored[f"{name}_blocks"], stored[f"{name}_scales"])
            assert torch.equal(made[name], theirs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_gets_the_same_numbers(
    layout: str, published: Path, plain: Path, tmp_path: Path
) -> None:
    options = ConvertOptions(layout=LAYOUTS[layout], vocab_multiple=8, sync=False)
    convert(published, tmp_path / "megatron", options)
    convert(tmp_path / "megatron", tmp_path / "back", TO_HF)
    assert compare(plain, tmp_path / "back").same
    assert compare(plain, tmp_path / "megatron").same


def damaged(published: Path, directory: Path, changed: dict[str, torch.Tensor | None]) -> Path:
    directory.mkdir()
    tensors = {**load_file(published / FILE), **changed}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, directory / FILE, {"format": "pt"})
    (directory / "config.json").write_bytes((published / "config.json").read_bytes())
    return directory


FIRST = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({f"{FIRST}_scales": None}, MissingTensorError, f"{FIRST}_scales"),
        ({f"{FIRST}_blocks": None}, UnexpectedTensorError, f"{FIRST}_scales"),
        (
            {f"{FIRST}_scales": torch.zeros(4, 64, 1, dtype=torch.uint8)},
            InvalidCheckpointError,
            "scales of shape",
        ),
        (
            {f"{FIRST}_blocks": torch.zeros(4, 64, 16, dtype=torch.uint8)},
            InvalidCheckpointError,
            "has shape",
        ),
        (
            {f"{FIRST}_scales": torch.zeros(3, 32, 2, dtype=torch.uint8)},
            InvalidCheckpointError,
            rf"{FIRST}.*scales of shape \(3, 32, 2\)",
        ),
        (
            {f"{FIRST}_scales": torch.full((4, 32, 2), 255, dtype=torch.uint8)},
            InvalidCheckpointError,
            f"{FIRST}.*not finite.*255",
        ),
        (
            {f"{FIRST}_scales": torch.zeros(4, 32, 2)},
            InvalidCheckpointError,
            f"{FIRST}.*float32",
        ),
        (
            {FIRST: torch.zeros(4, 64, 32, dtype=torch.bfloat16)},
            InvalidCheckpointError,
            f"{FIRST}.*both",
        ),
    ],
    ids=[
        *("no scales", "no blocks", "too few scales", "no blocks of sixteen bytes"),
        *("scales of an expert less", "no numbers", "scales of another type", "plain too"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    changed: dict[str, torch.Tensor | None],
    error: type[Exception],
    said: str,
    published: Path,
    tmp_path: Path,
) -> None:
    source = damaged(published, tmp_path / "damaged", changed)
    with pytest.raises(error, match=said):
        convert(source, tmp_path / "made", TO_HF)
