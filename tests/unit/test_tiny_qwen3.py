"""The model that examples and tests build: what transformers takes it for, and would make."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from examples.models.tiny_qwen3 import build_tiny_qwen3
from tests.patience import PATIENCE


@pytest.mark.parametrize(("hidden", "layers", "heads"), [(64, 2, 4), (32, 1, 2), (96, 3, 3)])
def test_transformers_finds_every_weight_and_would_draw_the_same(
    tmp_path: Path, hidden: int, layers: int, heads: int
) -> None:
    build_tiny_qwen3(tmp_path, hidden_size=hidden, layers=layers, heads=heads)
    model, info = Qwen3ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    torch.manual_seed(0)
    fresh = Qwen3ForCausalLM(Qwen3Config.from_pretrained(tmp_path)).state_dict()
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in model.state_dict().items())


def test_it_is_made_without_transformers(tmp_path: Path) -> None:
    script = f"""
import sys
sys.modules["transformers"] = None
from pathlib import Path
from sluice.demo.tiny_qwen3 import build_tiny_qwen3
build_tiny_qwen3(Path({str(tmp_path)!r}))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE)
    assert (tmp_path / "tokenizer.json").exists()


def test_a_seed_says_what_is_built(tmp_path: Path) -> None:
    first, again, other = (
        load_file(build_tiny_qwen3(tmp_path / name, seed) / "model.safetensors")
        for name, seed in (("first", 7), ("again", 7), ("other", 8))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_transformers_reads_its_tokenizer(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(build_tiny_qwen3(tmp_path))
    ids = tokenizer("12 3=<end>")["input_ids"]
    assert ids == [1, 2, 3, 10, 11]
    assert tokenizer.decode(ids) == "123=<end>"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (11, 12)
