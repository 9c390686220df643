"""Why a model cannot be loaded reaches the clients, whatever library says it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from services.trainer.config import TrainerConfig
from services.trainer.rank import is_refusal
from sluice.config import parse_config
from tests.patience import PATIENCE
from tests.service.trainer.harness import FAILED, running_trainer, until

MEGATRON = {"backend": "megatron", "megatron": {"dtype": "float32"}}
REPLAY = {"backend": "megatron", "megatron": {"routing_replay": "rollout"}}  # of no experts


def damage(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def leave_a_pointer(model: Path) -> None:
    """As a clone without Git LFS does."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (model / "model.safetensors").write_text(pointer)


def rename_architecture(model: Path) -> None:
    config = model / "config.json"
    document = json.loads(config.read_text())
    config.write_text(json.dumps({**document, "architectures": ["Qwen9ForCausalLM"]}))


def drop_tensor(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.0.mlp.down_proj.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})


def add_biases(model: Path) -> None:
    config = model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "attention_bias": True}))


@pytest.mark.parametrize(
    ("spoil", "settings", "reason"),
    [
        pytest.param(
            add_biases,
            MEGATRON,
            "UnsupportedFeatureError: attention_bias is true in config.json, and MLPs have no "
            "biases: .* backend: fsdp",
            id="some-biases",
        ),
        pytest.param(
            damage, {}, r"ValueError: \S+/model/model\.safetensors is damaged: ", id="damaged"
        ),
        pytest.param(
            leave_a_pointer,
            {"backend": "fsdp"},
            r"ValueError: \S+/model/model\.safetensors is a pointer of Git LFS: `git lfs pull`",
            id="pointer",
        ),
        pytest.param(
            drop_tensor,
            {},
            r"ValueError: model lacks tensors: model\.layers\.0\.mlp\.down_proj\.weight$",
            id="missing",
        ),
        pytest.param(lambda model: None, REPLAY, "LayoutError: ", id="replay-without-experts"),
        pytest.param(rename_architecture, MEGATRON, "UnknownArchitectureError: ", id="unknown"),
    ],
)
async def test_a_model_that_no_rank_can_load_says_why(
    spoil: Any,
    settings: dict[str, Any],
    reason: str,
    model: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The caller, and the log in a line: nobody is to look for a fault where there is none."""
    spoiled = Path(shutil.copytree(model, tmp_path / "model"))
    spoil(spoiled)
    with running_trainer(tmp_path / "trainer", spoiled, **settings) as running:
        async with running.client() as client:
            failed = await until(client, lambda now: now.state == FAILED)
            assert re.match(f"rank 0: {reason}", failed.failure)
            assert failed.restart_count == 0
    log = capfd.readouterr().err
    lines = [line for line in log.splitlines() if failed.failure.removeprefix("rank 0: ") in line]
    assert len(lines) == 1
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("raise_it", "is_told"),
    [
        (lambda: parse_config(TrainerConfig, {}), True),
        (lambda: Path("/nothing").read_bytes(), True),
        (lambda: AutoConfig.for_model("qwen9"), True),
        (lambda: torch.zeros(2).reshape(3), False),
        (lambda: torch.zeros(2).numpy().reshape(3), False),
        (lambda: {}["key"], False),
    ],
)
def test_what_is_told_in_a_line_is_what_was_asked_for(
    raise_it: Callable[[], object], is_told: bool
) -> None:
    """Any other failure keeps its trace."""
    with pytest.raises(Exception) as caught:  # of any type
        raise_it()
    assert is_refusal(caught.value) is is_told


def test_a_store_that_cannot_be_written_is_told_in_a_line(model: Path, tmp_path: Path) -> None:
    lock = tmp_path / "store/blobs.lock"
    lock.mkdir(parents=True)  # nobody can open it, as on a disk that is read-only
    ended = subprocess.run(
        [sys.executable, "-m", "services.trainer", "--model", str(model), "--store", lock.parent],
        env={**os.environ, "SLUICE_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ended.returncode == 1
    assert f"the process ends: [Errno 21] Is a directory: {str(lock)!r}" in ended.stderr
    assert "Traceback" not in ended.stderr
