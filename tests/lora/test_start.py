"""A run that begins at adapters of a folder, as peft or a store left them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from services.trainer.backends.lora import read_start
from sluice.weights.adapter import ADAPTER_CONFIG, ADAPTER_FILE, AdapterSpec, decode_adapter_config
from sluice.weights.checkpoint import digest_base
from sluice.weights.errors import WeightStoreError
from sluice.weights.store import WeightStore
from tests.adapters import import_adapter
from tests.fsdp.oracle import gradient_difference, logprob_difference, read_ranks
from tests.lora.conftest import ExpectedAdapters
from tests.rank_pool import Pool

fast = pytest.mark.fast
PLACES = [
    pytest.param("reference", 1, {}, id="reference", marks=fast),
    pytest.param("fsdp", 2, {}, id="fsdp"),
    pytest.param("megatron", 2, {"tensor": 2}, id="tensor 2", marks=fast),
    pytest.param("megatron", 2, {"pipeline": 2}, id="pipeline 2"),
]


@pytest.fixture
def folder(expected: ExpectedAdapters, tmp_path: Path) -> Path:
    """Of the oracle's adapters, its configuration written by peft, which knows no digest."""
    oracle, folder = expected("qwen3"), tmp_path / "peft"
    settings = oracle.settings
    LoraConfig(
        r=settings["rank"],
        lora_alpha=settings["alpha"],
        target_modules=settings["targets"],
        task_type="CAUSAL_LM",
        base_model_name_or_path="somebody/model",
    ).save_pretrained(folder)
    shutil.copyfile(oracle.adapter / "policy.safetensors", folder / ADAPTER_FILE)
    return folder


@pytest.mark.parametrize(("backend", "world", "layout"), PLACES)
def test_it_begins_where_the_folder_ends(
    pool: Pool,
    expected: ExpectedAdapters,
    tmp_path: Path,
    folder: Path,
    backend: str,
    world: int,
    layout: dict[str, Any],
) -> None:
    oracle = expected("qwen3")
    answers = pool.run(
        "parity",
        world,
        backend=backend,
        layout=layout,
        model=str(oracle.directory),
        out=str(tmp_path),
        lora={**oracle.settings, "start": str(folder)},
    )
    assert logprob_difference(read_ranks(tmp_path, "logprobs"), oracle.logprobs) <= 5e-6
    assert logprob_difference(read_ranks(tmp_path, "base"), oracle.base) <= 5e-6
    assert gradient_difference(read_ranks(tmp_path, "gradients"), oracle.gradients) <= 5e-5
    for answer in answers:
        for found, should in zip(answer["steps"], oracle.steps, strict=True):
            assert found["loss"] == pytest.approx(should["loss"], rel=1e-4, abs=1e-4)
    assert logprob_difference(oracle.base, oracle.logprobs) > 0.1


def rename(old: str, new: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / ADAPTER_FILE)
        save_file(
            {name.replace(old, new): tensor for name, tensor in tensors.items()},
            folder / ADAPTER_FILE,
        )

    return spoil


def drop(part: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / ADAPTER_FILE)
        kept = {name: tensor for name, tensor in tensors.items() if part not in name}
        save_file(kept, folder / ADAPTER_FILE)

    return spoil


def cut_rows(folder: Path) -> None:
    tensors = load_file(folder / ADAPTER_FILE)
    name = next(name for name in tensors if name.endswith("0.self_attn.q_proj.lora_B.weight"))
    save_file({**tensors, name: tensors[name][:-1].clone()}, folder / ADAPTER_FILE)


LAYERS = [
    (drop("layers.1.mlp.up_proj"), "has no adapter of layer 'model.layers.1.mlp.up_proj'"),
    (rename("layers.1.", "layers.9."), "has no adapter of layer 'model.layers.1."),
    (cut_rows, "layer 'model.layers.0.self_attn.q_proj' has"),
    (lambda folder: (folder / ADAPTER_FILE).unlink(), "is of no use"),
]


@pytest.mark.parametrize(("spoil", "reason"), LAYERS)
@pytest.mark.parametrize(
    ("backend", "world"),
    [pytest.param("reference", 1, marks=fast), ("fsdp", 2), pytest.param("megatron", 1)],
)
def test_other_layers_than_the_models_are_refused_by_name(
    pool: Pool,
    expected: ExpectedAdapters,
    tmp_path: Path,
    folder: Path,
    backend: str,
    world: int,
    spoil: Callable[[Path], None],
    reason: str,
) -> None:
    oracle = expected("qwen3")
    spoil(folder)
    answers = pool.run(
        "attempt",
        world,
        backend=backend,
        model=str(oracle.directory),
        out=str(tmp_path),
        lora={**oracle.settings, "start": str(folder)},
    )
    for answer in answers:
        assert reason in answer["error_message"]


@pytest.fixture
def spec(expected: ExpectedAdapters, folder: Path) -> AdapterSpec:
    data = (folder / ADAPTER_CONFIG).read_bytes()
    return decode_adapter_config(data, digest_base(expected("qwen3").directory))


def configure(**values: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        document = json.loads((folder / ADAPTER_CONFIG).read_bytes())
        (folder / ADAPTER_CONFIG).write_text(json.dumps(document | values))

    return spoil


def poison(folder: Path) -> None:
    tensors = load_file(folder / ADAPTER_FILE)
    tensors[min(tensors)][0, 0] = float("nan")
    save_file(tensors, folder / ADAPTER_FILE)


def cut(folder: Path) -> None:
    path = folder / ADAPTER_FILE
    path.write_bytes(path.read_bytes()[:-9])


@fast
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (configure(r=8), "rank was 8, and is 4"),
        (configure(lora_alpha=3), "alpha was 3.0, and is 10.0"),
        (configure(target_modules=["q_proj"]), "targets was"),
        (configure(use_dora=True), "use_dora is True, which is unknown here"),
        (configure(base_model_name_or_path="sluice:" + "0" * 32), "0000"),
        (configure(peft_type="IA3"), "peft_type is 'IA3'"),
        (drop("lora_B"), "has no lora_B"),
        (rename("lora_A", "lora_C"), "is none of an adapter"),
        (poison, "is not finite"),
        (cut, ADAPTER_FILE),
        (lambda folder: (folder / ADAPTER_CONFIG).write_bytes(b"{"), "malformed"),
        (lambda folder: (folder / ADAPTER_CONFIG).unlink(), "is of no use"),
        (shutil.rmtree, "is of no use"),
    ],
)
def test_what_is_no_such_adapter_is_refused_by_name(
    folder: Path, spec: AdapterSpec, spoil: Callable[[Path], None], reason: str
) -> None:
    assert read_start(folder, spec)
    spoil(folder)
    with pytest.raises(WeightStoreError) as error:
        read_start(folder, spec)
    assert reason in str(error.value)


@fast
def test_a_published_version_is_checked_to_the_byte(
    folder: Path, spec: AdapterSpec, tmp_path: Path
) -> None:
    record = import_adapter(WeightStore(tmp_path / "weights"), folder, spec.base_digest)
    assert record.directory is not None
    found = read_start(record.directory, spec)
    wanted = load_file(folder / ADAPTER_FILE)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    path = record.directory / ADAPTER_FILE
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    with pytest.raises(WeightStoreError, match=min(wanted)[:10]):
        read_start(record.directory, spec)
