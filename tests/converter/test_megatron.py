"""Megatron-Core reads what the converter wrote, and computes what transformers computes.

And the converter reads what Megatron-Core wrote, from ranks of any layout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from sluice.weights.convert.conversion import convert
from sluice.weights.convert.options import ConvertOptions, Layout
from sluice.weights.convert.verify import compare
from tests.converter.megatron_reader import TOKENS
from tests.megatron.models import build_checkpoint
from tests.patience import PATIENCE
from tests.rank_pool import Pool
from tests.unit.weights_rules.models import HUGGING_FACE, save_model

# plain_norms: Megatron's layers without TransformerEngine have other names in these families
CASES = {
    "llama": ConvertOptions(),
    "llama_tied": ConvertOptions(),
    "qwen2": ConvertOptions(layout=Layout(tensor=2)),
    "qwen3": ConvertOptions(layout=Layout(tensor=2, pipeline=2)),
    "qwen3_moe": ConvertOptions(layout=Layout(expert=2), plain_norms=True),
    "qwen3_30b": ConvertOptions(layout=Layout(expert=2), plain_norms=True),
    "qwen3_next": ConvertOptions(layout=Layout(tensor=2), plain_norms=True),
    "qwen3_5": ConvertOptions(layout=Layout(tensor=2), plain_norms=True),
    "qwen3_5_vl_moe": ConvertOptions(layout=Layout(expert=2), plain_norms=True),
    "qwen3_vl_moe": ConvertOptions(layout=Layout(expert=2), plain_norms=True),
    "glm4_moe": ConvertOptions(layout=Layout(expert=2), plain_norms=True),
    "minimax_m2": ConvertOptions(layout=Layout(expert=2), plain_norms=True),
    "gpt_oss": ConvertOptions(layout=Layout(expert=2), plain_norms=True),
    "glm_moe_dsa": ConvertOptions(layout=Layout(expert=2), plain_norms=True),
    "deepseek_v3": ConvertOptions(layout=Layout(expert=2), plain_norms=True),
    "deepseek_v3_direct": ConvertOptions(plain_norms=True),
}
TOLERANCE = 2e-5
SAVED = {  # family of tests/megatron, ranks, layout
    "TP2": ("qwen3", 2, {"tensor": 2}),
    "PP2 tied": ("qwen3_tied", 2, {"pipeline": 2}),
    "PP2xVPP2": ("qwen3", 2, {"pipeline": 2, "virtual_pipeline": 2}),
    "PP2 of 1+3": ("qwen3", 2, {"pipeline": 2, "first_stage_layers": 1}),
    "EP2": ("qwen3_moe", 2, {"expert": 2}),
    "EP2xETP2": ("qwen3_moe", 4, {"tensor": 2, "sequence_parallel": True, "expert": 2}),
    "CP2xPP2": ("glm4", 4, {"context": 2, "pipeline": 2}),
    "latent": ("deepseek_v3", 2, {"expert": 2, "context": 2}),
    "chosen keys": ("glm_moe_dsa_shared", 2, {"pipeline": 2}),
    "sinks": (
        "gpt_oss",
        2,
        {"expert": 2, "tensor": 2, "sequence_parallel": True, "expert_tensor": 1},
    ),
    "wide norms": ("minimax_m2", 2, {"tensor": 2, "sequence_parallel": True}),
}


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what Megatron made of every case."""
    root = tmp_path_factory.mktemp("megatron")
    for name, options in CASES.items():
        save_model(name, root / f"{name}-hf")
        values = {**vars(options), "vocab_multiple": 8, "sync": False}
        if options.layout.tensor > 1:
            values["vocab_multiple"] = 4
        convert(root / f"{name}-hf", root / name, ConvertOptions(**values))
    done = subprocess.run(
        [sys.executable, "-m", "tests.converter.megatron_reader", str(root), *CASES],
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return root


@pytest.mark.parametrize("name", CASES)
def test_megatron_reads_and_computes(name: str, read: Path) -> None:
    found = json.loads((read / f"{name}.json").read_bytes())
    vision = [key for key in found["missing"] if key.startswith("vision_model.")]
    assert [key for key in found["missing"] if key not in vision] == []
    assert found["unexpected"] == []
    kind = getattr(transformers, HUGGING_FACE[name][1])
    model = kind.from_pretrained(read / f"{name}-hf").eval()
    with torch.no_grad():
        expected = model(input_ids=TOKENS).logits
    logits = torch.load(read / f"{name}.pt")[..., : expected.shape[-1]]
    assert expected.abs().max() > 0.1
    assert (logits - expected).abs().max() < TOLERANCE


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool("tests.megatron.jobs")
    yield pool
    pool.close()


@pytest.mark.parametrize("layout", SAVED)
def test_what_ranks_saved_becomes_the_model_again(layout: str, pool: Pool, tmp_path: Path) -> None:
    """A checkpoint of the trainer, optimizer state and all, before its first step."""
    family, world, sizes = SAVED[layout]
    model = build_checkpoint(family, tmp_path / "model")
    (tmp_path / "saved/checkpoint").mkdir(parents=True)
    pool.run(
        "save_midway",
        world,
        model=str(model),
        layout=sizes,
        out=str(tmp_path / "saved"),
        first=0,
    )
    options = ConvertOptions(to="hf", model=model, sync=False)
    convert(tmp_path / "saved/checkpoint", tmp_path / "back", options)
    assert compare(model, tmp_path / "back").same
    assert compare(model, tmp_path / "saved/checkpoint").same
