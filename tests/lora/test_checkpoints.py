"""Checkpoints of adapters: resumed bit for bit, by any backend, and only where they belong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice.weights.adapter import ADAPTER_CONFIG, ADAPTER_FILE
from tests.lora.conftest import ExpectedAdapters
from tests.rank_pool import Pool

fast = pytest.mark.fast
Place = tuple[str, int, dict[str, Any]]  # backend, ranks, layout
REFERENCE: Place = ("reference", 1, {})
FSDP: Place = ("fsdp", 2, {})
MEGATRON: Place = ("megatron", 2, {"tensor": 2})
STAGES: Place = ("megatron", 2, {"pipeline": 2})
EVERY = [pytest.param(REFERENCE, marks=fast), FSDP, pytest.param(MEGATRON, marks=fast)]


def arguments_of(expected: ExpectedAdapters, out: Path, place: Place) -> dict[str, Any]:
    oracle = expected("qwen3")
    return {
        "backend": place[0],
        "model": str(oracle.directory),
        "out": str(out),
        "layout": place[2],
        "lora": oracle.settings,
        "adapter": str(oracle.adapter),
    }


def save_midway(
    pool: Pool, expected: ExpectedAdapters, out: Path, place: Place, first: int = 2
) -> list[dict[str, Any]]:
    out.mkdir()
    return pool.run("save_midway", place[1], first=first, **arguments_of(expected, out, place))


def resume(
    pool: Pool, expected: ExpectedAdapters, out: Path, place: Place, checkpoint: Path, **more: Any
) -> list[dict[str, Any]]:
    out.mkdir(exist_ok=True)
    arguments = {**arguments_of(expected, out, place), "checkpoint": str(checkpoint), **more}
    return pool.run("resume", place[1], **arguments)


@pytest.mark.parametrize("place", [*EVERY, STAGES], ids=lambda place: f"{place[0]}{place[2]}")
@pytest.mark.parametrize("first", [0, 2])
def test_a_run_goes_on_bit_for_bit(
    pool: Pool, expected: ExpectedAdapters, tmp_path: Path, place: Place, first: int
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    wanted = save_midway(pool, expected, there, place, first)
    every = sorted(name for answer in wanted for name in answer["files"])
    names = [ADAPTER_CONFIG, "optimizer.safetensors", "policy.safetensors"]
    assert every == names + [f"random-{rank:05d}.safetensors" for rank in range(place[1])]
    found = resume(pool, expected, here, place, there / "checkpoint", first=first)
    assert [answer["steps"] for answer in found] == [answer["steps"] for answer in wanted]
    wanted_tensors, tensors = load_file(there / ADAPTER_FILE), load_file(here / ADAPTER_FILE)
    assert all(torch.equal(tensors[name], t) for name, t in wanted_tensors.items())


@pytest.mark.parametrize(
    ("saved", "read"),
    [
        pytest.param(REFERENCE, FSDP, id="reference, then fsdp"),
        pytest.param(FSDP, ("fsdp", 4, {}), id="two ranks, then four"),
        pytest.param(FSDP, REFERENCE, id="fsdp, then reference"),
        pytest.param(FSDP, MEGATRON, id="fsdp, then tensor ranks"),
        pytest.param(FSDP, ("fsdp", 2, {"tensor": 2}), id="fsdp, then its tensor ranks"),
        pytest.param(MEGATRON, STAGES, id="tensor ranks, then stages"),
        pytest.param(STAGES, REFERENCE, id="stages, then reference"),
    ],
)
def test_another_backend_goes_on_from_it(
    pool: Pool, expected: ExpectedAdapters, tmp_path: Path, saved: Place, read: Place
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    (wanted, *_) = save_midway(pool, expected, there, saved)
    for answer in resume(pool, expected, here, read, there / "checkpoint"):
        for step, should in zip(answer["steps"], wanted["steps"], strict=True):
            assert step["loss"] == pytest.approx(should["loss"], rel=1e-4, abs=1e-4)
            assert step["grad_norm"] == pytest.approx(should["grad_norm"], rel=1e-4)
    tensors = load_file(here / ADAPTER_FILE)
    for name, tensor in load_file(there / ADAPTER_FILE).items():
        assert (tensors[name] - tensor).abs().max() < 2e-4, name


def spoil(checkpoint: Path, damage: str) -> None:
    config = json.loads((checkpoint / ADAPTER_CONFIG).read_bytes())
    tensors = load_file(checkpoint / "policy.safetensors")
    name = sorted(tensors)[0]
    if damage == "another base":
        config["base_model_name_or_path"] = "sluice:" + "0" * 32
    elif damage == "another rank":
        config["r"] = 8
    elif damage == "another alpha":
        config["lora_alpha"] = 1.0
    elif damage == "other targets":
        config["target_modules"] = ["q_proj"]
    elif damage == "no adapter":
        (checkpoint / ADAPTER_CONFIG).unlink()
        return
    elif damage == "a layer less":
        del tensors[name]
    elif damage == "a shape that would broadcast":
        tensors[name] = tensors[name][:1].clone()
    elif damage == "a cut file":
        path = checkpoint / "policy.safetensors"
        path.write_bytes(path.read_bytes()[:-9])
        return
    save_file(tensors, checkpoint / "policy.safetensors")
    (checkpoint / ADAPTER_CONFIG).write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("another base", "is of other adapters: base_digest was 0000"),
        ("another rank", "is of other adapters: rank was 8, and is 4"),
        ("another alpha", "is of other adapters: alpha was 1.0, and is 10.0"),
        ("other targets", "is of other adapters: targets was "),
        ("no adapter", "is of no adapters: leave lora out"),
        ("a layer less", "they differ in: base_model.model.model.layers.0.mlp.down_proj.lora_A"),
        ("a shape that would broadcast", "has shape [1, "),
        ("a cut file", "policy.safetensors is damaged"),
    ],
)
@pytest.mark.parametrize("place", EVERY, ids=lambda place: place[0])
def test_what_does_not_belong_is_refused_by_name(
    pool: Pool, expected: ExpectedAdapters, tmp_path: Path, place: Place, damage: str, reason: str
) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(expected("qwen3").adapter, checkpoint)
    spoil(checkpoint, damage)
    for answer in resume(pool, expected, tmp_path / "out", place, checkpoint):
        assert reason in answer["error_message"]
        assert answer["error_message"].startswith("ValueError")


@pytest.mark.parametrize("place", EVERY, ids=lambda place: place[0])
def test_a_model_is_not_trained_from_a_checkpoint_of_adapters(
    pool: Pool, expected: ExpectedAdapters, tmp_path: Path, place: Place
) -> None:
    arguments = arguments_of(expected, tmp_path, place)
    checkpoint = arguments.pop("adapter")
    for answer in pool.run(
        "resume", place[1], **{**arguments, "lora": None}, checkpoint=checkpoint
    ):
        assert "is of adapters: set lora" in answer["error_message"]
