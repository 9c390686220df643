"""What SGLang is told of adapters, and the folders that are written for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.rollout.engine.config import EngineConfig, SglangConfig
from services.rollout.engine.interface import ServedWeights
from services.rollout.engine.sglang.adapters import AdapterFolders, DiskAdapter
from services.rollout.engine.sglang.client import Capabilities
from services.rollout.engine.sglang.servers import engine_arguments, flags
from services.rollout.engine.sglang.weights import read_model
from services.rollout.errors import DigestMismatchError, UnfitAdapterError
from sluice.weights.adapter import ADAPTER_FILE, DEFAULT_TARGETS
from sluice.weights.store import StoredVersion, WeightStore
from tests.adapters import import_adapter, make_adapter
from tests.contract.engine.cases import build_model

CAPABILITIES = Capabilities(
    release="0.5.23",
    dp_size=1,
    tp_size=1,
    pp_size=1,
    device="cpu",
    dtype="float32",
    max_length=64,
    cache_tokens=64,
    is_incremental=True,
    is_seeded=False,
    can_transfer=True,
    can_sleep=False,
    has_radix_cache=True,
    is_language_only=False,
    serving=None,
    lora_rank=8,
    lora_targets=DEFAULT_TARGETS,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model"), "qwen3", seed=0).directory


def read(
    record: StoredVersion, model: Path, folders: AdapterFolders, capabilities: Capabilities
) -> DiskAdapter:
    assert record.directory is not None
    base = read_model(model)
    weights = ServedWeights(0, base.digest)
    return folders.read(
        record.version, record.digest, record.directory, weights, base.shapes, capabilities
    )


def test_a_server_is_started_for_the_adapters_of_the_settings() -> None:
    config = EngineConfig(
        backend="sglang",
        max_adapters=3,
        sglang=SglangConfig(lora={"max_rank": 32, "targets": ("q_proj", "o_proj")}),
    )
    words = " ".join(flags(engine_arguments(config, "cpu")))
    for part in (
        "--enable-lora",
        "--lora-backend torch_native",
        "--max-lora-rank 32",
        "--lora-target-modules q_proj o_proj",
        "--max-loras-per-batch 5",
    ):
        assert part in words
    assert "lora" not in " ".join(flags(engine_arguments(EngineConfig(), "cpu")))


@pytest.mark.parametrize(
    "lora",
    [
        {"max_rank": 0},
        {"max_rank": -1},
        {"max_rank": 1 << 40},
        {"targets": []},
        {"targets": ["../q_proj"]},
        {"targets": ["q\0"]},
        {"targets": ["q" * 5000]},
        {"targets": ["q_proj", "q_proj"]},
        {"rank": 4},
    ],
)
def test_settings_that_mean_nothing_are_refused(lora: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SglangConfig(lora=lora)


def test_a_running_server_and_several_ranks_take_no_such_settings() -> None:
    with pytest.raises(ValidationError, match="url"):
        SglangConfig(url="http://127.0.0.1:1", lora={})
    with pytest.raises(ValidationError, match="dp_size"):
        SglangConfig(server_args={"dp_size": 2}, lora={})


@torch.no_grad()
def test_stacks_are_completed_and_the_adapter_stays_the_same(model: Path, tmp_path: Path) -> None:
    store, folders = WeightStore(tmp_path / "weights", durable=False), AdapterFolders()
    folder = make_adapter(model, tmp_path / "a", seed=0, targets=["v_proj", "up_proj", "o_proj"])
    record = import_adapter(store, folder, read_model(model).digest)
    adapter = read(record, model, folders, CAPABILITIES)
    assert adapter.name == f"policy@{record.version}"
    tensors, given = load_file(adapter.directory / ADAPTER_FILE), load_file(folder / ADAPTER_FILE)
    added = tensors.keys() - given.keys()
    assert {name.split(".")[-3] for name in added} == {"q_proj", "k_proj", "gate_proj"}
    assert all(not tensors[name].any() for name in added)
    assert all(torch.equal(tensors[name], given[name]) for name in given)
    logits = []
    for place in (folder, adapter.directory):
        base = AutoModelForCausalLM.from_pretrained(model)
        logits.append(PeftModel.from_pretrained(base, place).eval()(torch.arange(9)[None]).logits)
    assert torch.equal(*logits)
    folders.close()
    assert not adapter.directory.exists()


def test_what_the_server_cannot_take_is_named(model: Path, tmp_path: Path) -> None:
    store, folders = WeightStore(tmp_path / "weights", durable=False), AdapterFolders()
    folder = make_adapter(model, tmp_path / "a", seed=0, rank=8)
    record = import_adapter(store, folder, read_model(model).digest)
    for changes, word in (
        ({"lora_rank": 0}, "engine.sglang.lora"),
        ({"lora_rank": 7}, "rank 8"),
        ({"lora_targets": ("q_proj",)}, "target 'down_proj'"),
        ({"dp_size": 2}, "dp_size"),
    ):
        with pytest.raises(UnfitAdapterError, match=word):
            read(record, model, folders, replace(CAPABILITIES, **changes))
    assert record.directory is not None
    path = record.directory / ADAPTER_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DigestMismatchError):
        read(record, model, folders, CAPABILITIES)
    folders.close()
