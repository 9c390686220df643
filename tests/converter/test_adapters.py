"""Adapters merged into their base as peft merges them, and written as folders that peft reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sluice import faults
from sluice.convert_command import CheckpointError
from sluice.convert_command import convert as convert_command
from sluice.weights.adapter import ADAPTER_CONFIG, ADAPTER_FILE, AdapterSpec
from sluice.weights.checkpoint import INDEX_NAME, describe_shard, digest_base
from sluice.weights.convert.conversion import convert, staging_of, validate
from sluice.weights.convert.options import ConvertOptions, OptionError
from sluice.weights.errors import (
    InvalidAdapterError,
    OtherBaseError,
    TargetExistsError,
    TensorDigestError,
)
from sluice.weights.rules.packing import InexactTensorError
from sluice.weights.store import StoredVersion, WeightStore
from tests.adapters import TARGETS, import_adapter, make_adapter
from tests.contract.engine.cases import build_model
from tests.imported import import_checkpoint

IDS = torch.arange(20)[None]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of several files."""
    root = tmp_path_factory.mktemp("model")
    made = build_model(root / "one", "qwen3", seed=0)
    made.module.save_pretrained(root / "base", max_shard_size="40KB")
    assert len(list((root / "base").glob("*.safetensors"))) > 1
    return root / "base"


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(model, tmp_path_factory.mktemp("peft"), seed=0)


@pytest.fixture
def record(model: Path, folder: Path, tmp_path: Path) -> StoredVersion:
    store = WeightStore(tmp_path / "weights", durable=False)
    return import_adapter(store, folder, digest_base(model))


def options(**values: Any) -> ConvertOptions:
    return ConvertOptions(**{"to": "hf", "sync": False, **values})


def merged_by_peft(model: Path, folder: Path) -> Any:
    base = AutoModelForCausalLM.from_pretrained(model)
    return PeftModel.from_pretrained(base, folder).merge_and_unload().eval()


@torch.no_grad()
def test_a_published_adapter_is_merged_as_peft_merges(
    model: Path, folder: Path, record: StoredVersion, tmp_path: Path
) -> None:
    assert record.directory is not None
    result = convert(record.directory, tmp_path / "merged", options(origin=model))
    expected = merged_by_peft(model, folder)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    for name, tensor in expected.state_dict().items():
        assert torch.allclose(found.state_dict()[name], tensor, atol=1e-6, rtol=0), name
    assert (found(IDS).logits - expected(IDS).logits).abs().max() < 1e-4
    plain = AutoModelForCausalLM.from_pretrained(model).eval()
    assert (plain(IDS).logits - expected(IDS).logits).abs().max() > 0.1
    assert len(result.report.converted) == 2 * len(TARGETS)
    assert result.digests["model.norm.weight"] in {
        entry.digest
        for path in model.glob("*.safetensors")
        for entry in describe_shard(path).tensors.values()
    }


@pytest.mark.parametrize("origin", ["published", "converted"])
def test_a_base_that_was_damaged_since_is_not_merged_into(
    origin: str, model: Path, folder: Path, tmp_path: Path
) -> None:
    """A folder of peft's does not say of which bytes its base is; who wrote those did."""
    if origin == "published":
        store = WeightStore(tmp_path / "bases", durable=False)
        base = import_checkpoint(store, model, None, 0).directory
        assert base is not None
    else:
        base = tmp_path / "base"
        convert(model, base, options())
    convert(folder, tmp_path / "merged", options(origin=base))
    path = min(base.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(TensorDigestError):
        convert(folder, tmp_path / "again", options(origin=base))


@pytest.mark.parametrize("kind", ["hf", "peft"])
def test_every_file_is_on_the_disk_before_the_target_appears(
    kind: str, model: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    target, sync = tmp_path / "target", os.fsync

    def note(descriptor: int) -> None:
        sync(descriptor)
        if not target.exists():
            synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", note)
    convert(folder, target, options(to=kind, origin=model, sync=True))
    assert {path.stat().st_ino for path in (target, *target.iterdir())} <= synced


def test_a_merge_may_be_of_another_type(model: Path, folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "small", options(origin=model, dtype="bfloat16"))
    expected = merged_by_peft(model, folder).to(torch.bfloat16).state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype="auto").state_dict()
    for name, tensor in expected.items():
        assert found[name].dtype == torch.bfloat16
        torch.testing.assert_close(found[name].float(), tensor.float(), atol=0, rtol=0.01)


def test_what_a_merge_says_of_its_bytes_is_so(model: Path, folder: Path, tmp_path: Path) -> None:
    for dtype in ("keep", "bfloat16"):
        made, wanted = tmp_path / dtype, options(origin=model, dtype=dtype)
        promised = validate(folder, made, wanted).size
        sizes = [promised, convert(folder, made, wanted).size]
        index = json.loads((made / INDEX_NAME).read_bytes())
        files = {path.name: load_file(path) for path in made.glob("*.safetensors")}
        there = sum(tensor.nbytes for file in files.values() for tensor in file.values())
        assert [*sizes, index["metadata"]["total_size"]] == [there] * 3
        assert index["weight_map"] == {n: file for file, held in files.items() for n in held}
    small = convert(folder, tmp_path / "peft", options(to="peft", origin=model, dtype="bfloat16"))
    there = sum(t.nbytes for t in load_file(tmp_path / "peft" / ADAPTER_FILE).values())
    assert small.size == there


def test_a_base_of_scaled_numbers_is_not_merged_into(tmp_path: Path) -> None:
    """W + B A of an FP8 base would add to numbers that a scale beside them multiplies."""
    made = build_model(tmp_path / "one", "qwen3", seed=0)
    base, small = tmp_path / "base", tmp_path / "fp8"
    made.module.to(torch.bfloat16).save_pretrained(base)
    folder = make_adapter(base, tmp_path / "peft", seed=0)
    convert(base, small, options(quantize="fp8"))
    for values in ({}, {"dtype": "bfloat16"}):
        for check in (validate, convert):
            with pytest.raises(OptionError, match=r"proj\.weight' in F8_E4M3"):
                check(folder, tmp_path / "merged", options(origin=small, **values))
    plain = tmp_path / "plain"
    convert(small, plain, options(dtype="bfloat16"))
    convert(folder, tmp_path / "merged", options(origin=plain))
    expected = merged_by_peft(plain, folder).state_dict()
    found = load_file(tmp_path / "merged" / "model.safetensors")
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name].to(tensor.dtype), atol=0, rtol=0.01)


def test_numbers_that_are_none_are_not_merged(model: Path, folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    for value, error in ((float("nan"), InvalidAdapterError), (3e38, InexactTensorError)):
        tensors = load_file(folder / ADAPTER_FILE)
        name = next(n for n in tensors if n.endswith("layers.1.self_attn.q_proj.lora_A.weight"))
        tensors[name][0, 0] = value
        tensors[name.replace("lora_A", "lora_B")] *= 1e3
        save_file(tensors, broken / ADAPTER_FILE)
        with pytest.raises(error, match=r"layers\.1\.self_attn\.q_proj"):
            convert(broken, tmp_path / "merged", options(origin=model))
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    "values",
    [{"deny": ["*"]}, {"allow": []}, {"max_file_bytes": 9}, {"plain_norms": True}, {"model": "."}],
    ids=lambda values: next(iter(values)),
)
def test_options_without_effect_on_adapters_are_refused(
    values: dict[str, Any], model: Path, folder: Path, tmp_path: Path
) -> None:
    for to in ("hf", "peft"):
        with pytest.raises(OptionError, match=next(iter(values))):
            convert(folder, tmp_path / "made", options(origin=model, to=to, **values))


@torch.no_grad()
def test_a_version_of_several_files_becomes_one_folder_of_peft(
    model: Path, folder: Path, tmp_path: Path
) -> None:
    store = WeightStore(tmp_path / "weights", durable=False)
    tensors, staging = load_file(folder / ADAPTER_FILE), store.allocate(None)
    for part in range(2):
        path = staging.directory / f"model-{part}.safetensors"
        save_file({n: tensors[n] for n in sorted(tensors)[part::2]}, path)
    shards = [describe_shard(path) for path in sorted(staging.directory.iterdir())]
    spec = AdapterSpec(rank=4, alpha=12.0, targets=TARGETS, base_digest=digest_base(model))
    record = store.commit(staging, shards, [], 0, adapter=spec)
    assert record.directory is not None
    made = tmp_path / "made"
    convert(record.directory, made, options(to="peft"))
    assert sorted(path.name for path in made.iterdir()) == [ADAPTER_CONFIG, ADAPTER_FILE]
    base = AutoModelForCausalLM.from_pretrained(model)
    found = PeftModel.from_pretrained(base, made).eval()(IDS).logits
    assert (found - merged_by_peft(model, folder)(IDS).logits).abs().max() < 1e-4
    convert(made, tmp_path / "again", options(origin=model))  # and it knows its base
    other = build_model(tmp_path / "other", "qwen3", seed=1).directory
    with pytest.raises(OtherBaseError):
        convert(made, tmp_path / "none", options(origin=other))
    assert not (tmp_path / "none").exists()


def test_what_does_not_go_together_is_refused_and_leaves_nothing(
    model: Path, folder: Path, record: StoredVersion, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    assert record.directory is not None
    for values, word in (({"to": "torch_dist"}, "peft"), ({}, "--origin")):
        with pytest.raises(OptionError, match=word):
            convert(record.directory, target, options(**values))
    with pytest.raises(OptionError, match="whole weights"):
        convert(model, target, options(to="peft"))
    wide = build_model(tmp_path / "llama", "llama", seed=0).directory
    config = (wide / "config.json").read_text()
    assert "llama" in config
    broken = shutil.copytree(folder, tmp_path / "broken")
    tensors = load_file(broken / ADAPTER_FILE)
    save_file(
        {n.replace("layers.1", "layers.9"): t for n, t in tensors.items()}, broken / ADAPTER_FILE
    )
    for check in (validate, convert):
        with pytest.raises(InvalidAdapterError, match=r"layers\.9"):
            check(broken, target, options(origin=model))
    path = record.directory / ADAPTER_FILE
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(TensorDigestError):
        convert(record.directory, target, options(origin=model))
    assert not target.exists()
    assert not staging_of(target).exists()
    target.mkdir()
    with pytest.raises(TargetExistsError):
        convert(folder, target, options(to="peft", origin=model))


async def test_the_command_merges(model: Path, record: StoredVersion, tmp_path: Path) -> None:
    source, made = str(record.directory), str(tmp_path / "merged")
    await convert_command([source, made, "--to", "hf", "--origin", str(model)])
    assert AutoModelForCausalLM.from_pretrained(made)
    with pytest.raises(CheckpointError, match="exists already"):
        await convert_command([source, made, "--to", "hf", "--origin", str(model)])


def test_a_killed_merge_leaves_nothing_under_the_name_and_runs_again(
    model: Path, record: StoredVersion, tmp_path: Path
) -> None:
    made, command = tmp_path / "merged", [sys.executable, "-m", "sluice.cli", "convert"]
    command += [str(record.directory), str(made), "--to", "hf", "--origin", str(model)]
    (tmp_path / "faults").mkdir()
    faults.arm(tmp_path / "faults", "convert.whole")
    environment = {**os.environ, faults.VARIABLE: str(tmp_path / "faults"), "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, env=environment, check=False).returncode == -9
    assert not made.exists()
    subprocess.run(command, env=environment, check=True)
    assert AutoModelForCausalLM.from_pretrained(made)
