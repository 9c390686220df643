"""HF to torch_dist and back, for every family and layout: not a bit is lost, transformers loads it.

Which layout of bytes Megatron expects is tested in test_megatron.py and in test_layouts.py of
tests/unit/weights_rules.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sluice.weights.convert.conversion import Result, convert
from sluice.weights.convert.options import ConvertOptions, Layout
from sluice.weights.convert.verify import compare
from tests.unit.weights_rules.models import HUGGING_FACE, build_model, exchanged, write_model

LAYOUTS = {
    "TP1": Layout(),
    "TP2": Layout(tensor=2),
    "PP2": Layout(pipeline=2),
    "TP2xPP2": Layout(tensor=2, pipeline=2),
    "EP2": Layout(expert=2),
}
SPARSE = (
    "qwen3_next",
    "qwen3_moe",
    "qwen3_30b",
    "qwen3_5_vl_moe",
    "qwen3_vl_moe",
    "glm4_moe",
    "minimax_m2",
    "gpt_oss",
    "glm_moe_dsa",
    "deepseek_v3",
    "deepseek_v3_direct",
)
CASES = [
    (name, layout)
    for name in HUGGING_FACE
    for layout in LAYOUTS
    if layout != "EP2" or name in SPARSE
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    for name in HUGGING_FACE:
        write_model(build_model(name).to(torch.bfloat16), root / name)
    return {name: root / name for name in HUGGING_FACE}


def to_megatron(source: Path, target: Path, layout: str = "TP1") -> Result:
    options = ConvertOptions(layout=LAYOUTS[layout], vocab_multiple=8, sync=False)
    return convert(source, target, options)


def to_hf(source: Path, target: Path, **more: object) -> Result:
    options = ConvertOptions(to="hf", sync=False, **more)  # type: ignore[arg-type]
    return convert(source, target, options)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_nothing_is_lost(name: str, layout: str, saved: dict[str, Path], tmp_path: Path) -> None:
    made = to_megatron(saved[name], tmp_path / "megatron", layout)
    back = to_hf(tmp_path / "megatron", tmp_path / "back", max_file_bytes=50_000)
    assert compare(saved[name], tmp_path / "back").same
    assert compare(saved[name], tmp_path / "megatron").same
    assert set(back.report.converted) == set(made.report.converted)
    ranks = {path.name.split("_")[2] for path in (tmp_path / "megatron").glob("__*.distcp")}
    sizes = LAYOUTS[layout]
    assert len(ranks) == max(sizes.tensor, sizes.expert) * sizes.pipeline


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_transformers_computes_the_same(name: str, saved: dict[str, Path], tmp_path: Path) -> None:
    to_megatron(saved[name], tmp_path / "megatron", "TP2")
    to_hf(tmp_path / "megatron", tmp_path / "back", max_file_bytes=50_000)
    kind = getattr(transformers, HUGGING_FACE[name][1])
    before, after = (
        kind.from_pretrained(path, dtype=torch.float32).eval()
        for path in (saved[name], tmp_path / "back")
    )
    tokens = torch.arange(12)[None] % 50
    with torch.no_grad():
        logits = [model(input_ids=tokens).logits for model in (before, after)]
    assert torch.equal(*logits)
    states = before.state_dict(), after.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_experts_as_transformers_writes_them_come_back_as_published(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    """From HF to HF they stay as they are; Megatron's format knows one way."""
    published, straight = saved["qwen3_vl_moe"], tmp_path / "straight"
    shutil.copytree(published, straight)
    tensors = load_file(published / "model.safetensors")
    save_file(exchanged(tensors), straight / "model.safetensors", {"format": "pt"})
    to_hf(straight, tmp_path / "copied")
    assert compare(straight, tmp_path / "copied").same
    to_megatron(straight, tmp_path / "megatron", "EP2")
    assert compare(straight, tmp_path / "megatron").same
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert compare(published, tmp_path / "back").same
    to_hf(tmp_path / "megatron", tmp_path / "again", model=straight)
    assert compare(straight, tmp_path / "again").same


@pytest.mark.parametrize("layout", ["TP1", "TP2xPP2"])
def test_a_reward_model_keeps_its_head(layout: str, saved: dict[str, Path], tmp_path: Path) -> None:
    """A value without a bias in place of logits, whether the embedding was tied or not."""
    for name in ("qwen3", "llama_tied", "glm4", "qwen3_next", "deepseek_v3"):
        kind = transformers.AutoModelForSequenceClassification
        model = kind.from_pretrained(saved[name], num_labels=1)
        model.save_pretrained(tmp_path / name)
        to_megatron(tmp_path / name, tmp_path / f"{name}-megatron", layout)
        to_hf(tmp_path / f"{name}-megatron", tmp_path / f"{name}-back")
        assert compare(tmp_path / name, tmp_path / f"{name}-back").same
        again = kind.from_pretrained(tmp_path / f"{name}-back")
        assert torch.equal(again.score.weight, model.score.weight)


def test_stacked_layers_and_plain_names(saved: dict[str, Path], tmp_path: Path) -> None:
    """Other Megatron models name layers one by one, or norms as without TransformerEngine."""
    for number, more in enumerate(({"stacking": "single"}, {"plain_norms": True})):
        for name in ("qwen3", "deepseek_v3", "qwen3_vl"):
            made = tmp_path / f"{name}-{number}"
            convert(saved[name], made, ConvertOptions(sync=False, **more))  # type: ignore[arg-type]
            assert compare(saved[name], made).same


def test_types_change_and_some_do_not(tmp_path: Path) -> None:
    """A router's bias is kept in float32, as transformers and Megatron keep it."""
    build_model("deepseek_v3").save_pretrained(tmp_path / "wide")
    to_hf(tmp_path / "wide", tmp_path / "narrow", dtype="bfloat16")
    wide, narrow = (load_file(tmp_path / d / "model.safetensors") for d in ("wide", "narrow"))
    for name, tensor in narrow.items():
        kept = name.endswith("e_score_correction_bias")
        assert tensor.dtype is (torch.float32 if kept else torch.bfloat16)
        assert torch.equal(tensor, wide[name].to(tensor.dtype))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "narrow")
    assert model.dtype is torch.bfloat16  # config.json says so
    convert(tmp_path / "wide", tmp_path / "megatron", ConvertOptions(dtype="bfloat16", sync=False))
    assert compare(tmp_path / "narrow", tmp_path / "megatron").same


def test_shards_of_another_size_are_the_same_model(saved: dict[str, Path], tmp_path: Path) -> None:
    to_hf(saved["qwen2"], tmp_path / "many", max_file_bytes=40_000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    to_hf(tmp_path / "many", tmp_path / "one")
    assert [path.name for path in (tmp_path / "one").glob("*.safetensors")] == ["model.safetensors"]
    assert compare(saved["qwen2"], tmp_path / "one").same
    assert compare(saved["qwen2"], tmp_path / "many").same
