"""Files from elsewhere: any number, any name, any byte is refused by name or does no harm."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
import random
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sluice.weights.convert.conversion import convert
from sluice.weights.convert.options import ConvertOptions
from sluice.weights.convert.stored import read_keys
from sluice.weights.errors import (
    LONGEST,
    DamagedFileError,
    InvalidCheckpointError,
    WeightStoreError,
)
from sluice.weights.store import WeightStore
from tests.imported import import_checkpoint
from tests.unit.weights_rules.models import save_model

TO_HF = ConvertOptions(to="hf", sync=False)
TO_MANY = ConvertOptions(to="hf", sync=False, max_file_bytes=60_000)
TO_MEGATRON = ConvertOptions(vocab_multiple=8, sync=False)
NUMBERS: list[Any] = [
    *(-1, 1.5, 1e308, float("nan"), float("inf"), 2**31, 2**63, 10**30, True),
    *("5", None, [], {}, "x" * 5000),
]
NAMES = ["../x", "..", "", "a\0b", "x" * 5000, "/etc/passwd", "a/b", "\ud800"]


def write_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Have another header before the same data."""
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:start])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[start:])


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))


def refused(source: Path, options: ConvertOptions = TO_HF) -> WeightStoreError:
    """What the converter says in a line of some length."""
    with pytest.raises(WeightStoreError) as found:
        convert(source, source.with_name("target"), options)
    assert len(str(found.value)) <= LONGEST + 3
    assert not source.with_name("target").exists()
    return found.value


@pytest.fixture
def copied(qwen3: Path, tmp_path: Path) -> Path:
    return shutil.copytree(qwen3, tmp_path / "copy")


@pytest.mark.parametrize("field", ["shape", "begin", "end", "dtype"])
def test_numbers_in_a_header(field: str, copied: Path) -> None:
    path = copied / "model.safetensors"
    whole = path.read_bytes()
    for value in NUMBERS:

        def change(header: dict[str, Any], value: Any = value) -> None:
            entry = header["model.norm.weight"]
            if field in ("shape", "dtype"):
                entry[field] = [value] if field == "shape" else value
            else:
                entry["data_offsets"][field == "end"] = value

        write_header(path, change)
        assert isinstance(refused(copied), InvalidCheckpointError), value
        path.write_bytes(whole)


@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"a":' * 200_000, b'{"\\ud800": 1}', b"\xff"])
def test_a_header_that_is_no_table(text: bytes, copied: Path) -> None:
    data = len(text).to_bytes(8, "little") + text
    (copied / "model.safetensors").write_bytes(data)
    assert isinstance(refused(copied), DamagedFileError)


def test_an_empty_tensor_of_any_shape_is_copied(copied: Path) -> None:
    """Also where it would be quantised."""
    edit(copied / "config.json", lambda config: config.update(architectures=["Strange"]))
    tensors = load_file(copied / "model.safetensors")
    more = {"wide.up_proj.weight": torch.empty(0, 2**40), "a[0]": torch.ones(3)}
    save_file(tensors | more, copied / "model.safetensors")
    fp8 = ConvertOptions(to="hf", sync=False, quantize="fp8")
    convert(copied, copied.with_name("made"), fp8)
    made = load_file(copied.with_name("made") / "model.safetensors")
    assert made["wide.up_proj.weight"].shape == (0, 2**40)
    assert torch.equal(made["a[0]"], torch.ones(3))


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "num_attention_heads", "num_local_experts", "decoder_sparse_step"]
)
def test_numbers_in_a_config(key: str, tmp_path: Path) -> None:
    model = save_model("qwen3_30b", tmp_path / "model")
    for value in (*NUMBERS, 0, 10**6, 10**4000):
        if value is None or (key == "decoder_sparse_step" and value in (2**31 - 1,)):
            continue
        edit(model / "config.json", lambda config, value=value: config.update({key: value}))
        refused(model, TO_MEGATRON)


@pytest.mark.parametrize("block", [[0, -1], [128, "x"], [float("nan"), 1], [10**30, 1], [128]])
def test_numbers_of_a_quantisation(block: list[Any], copied: Path) -> None:
    entry = {"quant_method": "fp8", "weight_block_size": block}
    edit(copied / "config.json", lambda config: config.update(quantization_config=entry))
    refused(copied)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:12])
def test_names_of_files(name: str, qwen3: Path, megatron: Path, tmp_path: Path) -> None:
    """In an index, a record and the metadata of torch: none leads out of the directory."""
    many, dist = tmp_path / "many", tmp_path / "dist"
    convert(qwen3, many, TO_MANY)
    record = json.loads((many / "conversion.json").read_bytes())
    (many / "conversion.json").unlink()
    index = many / "model.safetensors.index.json"
    whole = index.read_bytes()
    edit(index, lambda document: document["weight_map"].update({"model.norm.weight": name}))
    refused(many)
    index.write_bytes(whole)
    for kind in ("files", "headers"):
        changed = {**record, kind: {name: "0" * 32}}
        del changed["record"]  # of an earlier release, or anybody's
        (many / "conversion.json").write_text(json.dumps(changed))
        assert isinstance(refused(many), DamagedFileError)
    shutil.copytree(megatron, dist)
    (dist / "conversion.json").unlink()
    metadata = pickle.loads((dist / ".metadata").read_bytes())
    first = next(index for index in metadata.storage_data if index.fqn.endswith("norm.weight"))
    metadata.storage_data[first] = replace(metadata.storage_data[first], relative_path=name)
    (dist / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(dist)


@pytest.mark.parametrize(
    "named",
    [
        "pathlib.PosixPath",
        "torch.distributed.checkpoint.metadata.Metadata",
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
        "torch.serialization._get_layout",
    ],
)
def test_metadata_changes_nothing_of_the_process(
    named: str, megatron: Path, tmp_path: Path
) -> None:
    """A pickle may set any attribute of what it names, a method of all paths for one."""
    dist = shutil.copytree(megatron, tmp_path / "dist")
    (dist / "conversion.json").unlink()
    module, _, name = named.rpartition(".")
    known = dict(vars(getattr(importlib.import_module(module), name)))
    setting = f"c{module}\n{name}\n(N(dS'cache'\ncbuiltins\nset\nstb."
    (dist / ".metadata").write_bytes(setting.encode())
    assert isinstance(refused(dist), DamagedFileError)
    assert dict(vars(getattr(importlib.import_module(module), name))) == known


def test_metadata_takes_no_more_memory_than_it_has(megatron: Path, tmp_path: Path) -> None:
    dist = shutil.copytree(megatron, tmp_path / "dist")
    (dist / ".metadata").write_bytes(b"\x80\x02K\x01r" + (5_000_000).to_bytes(4, "little") + b".")
    tracemalloc.start()
    with pytest.raises(DamagedFileError):
        read_keys(dist)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("field", ["offsets", "sizes", "offset", "length", "size"])
def test_numbers_in_the_metadata_of_torch(field: str, megatron: Path, tmp_path: Path) -> None:
    dist = shutil.copytree(megatron, tmp_path / "dist")
    (dist / "conversion.json").unlink()
    whole = (dist / ".metadata").read_bytes()
    key = "decoder.layers.mlp.linear_fc2.weight"
    for value in (*NUMBERS[:-5], "x", 2**62 - 1):
        metadata = pickle.loads(whole)
        entry = metadata.state_dict_metadata[key]
        index = next(i for i in metadata.storage_data if i.fqn == key and not any(i.offset))
        if field in ("offset", "length"):
            place = replace(metadata.storage_data[index], **{field: value})
            metadata.storage_data[index] = place
        elif field == "size":
            entry.size = (value, *entry.size[1:])
        else:
            chunk = copy.copy(next(c for c in entry.chunks if not any(c.offsets)))
            entry.chunks = [c for c in entry.chunks if any(c.offsets)] + [chunk]
            object.__setattr__(chunk, field, (value, *getattr(chunk, field)[1:]))
            if field == "offsets":
                moved = copy.copy(index)
                object.__setattr__(moved, "offset", chunk.offsets)
                metadata.storage_data[moved] = metadata.storage_data.pop(index)
        (dist / ".metadata").write_bytes(pickle.dumps(metadata))
        assert isinstance(refused(dist), InvalidCheckpointError), value


def test_any_byte_of_any_file_is_refused_or_does_no_harm(
    qwen3: Path, megatron: Path, tmp_path: Path
) -> None:
    """Of sources whose writers left digests; config and tokenizer may be edited, and are noted."""
    rng, expected = random.Random(17), load_file(qwen3 / "model.safetensors")
    convert(qwen3, tmp_path / "many", TO_MANY)
    shutil.copytree(megatron, tmp_path / "dist")
    store = WeightStore(tmp_path / "store", durable=False)
    version = import_checkpoint(store, qwen3, None, 0).directory
    silent, refusals = [], 0
    for source in (tmp_path / "many", tmp_path / "dist", version):
        edited = ("config.json", "generation_config.json") if source != version else ()
        for path in [path for path in source.iterdir() if path.is_file()]:
            whole = path.read_bytes()
            flipped = []
            for position in (rng.randrange(len(whole)), rng.randrange(min(len(whole), 2000))):
                data = bytearray(whole)
                data[position] ^= 1 << rng.randrange(8)
                flipped.append(bytes(data))
            for data in (*flipped, whole[: len(whole) // 2], b""):
                path.unlink()
                path.write_bytes(data)
                target = tmp_path / "target"
                try:
                    report = convert(source, target, TO_HF).report
                except WeightStoreError:
                    refusals += 1
                    continue
                made = load_file(target / "model.safetensors")
                same = all(torch.equal(made[name], expected[name]) for name in expected)
                noted = any(path.name in note for note in report.notes)
                if made.keys() != expected.keys() or not same or noted != (path.name in edited):
                    silent.append((path.name, len(data)))
                shutil.rmtree(target)
            path.write_bytes(whole)
    assert silent == []
    assert refusals > 50


def test_what_remains_is_loaded_by_others(qwen3: Path, tmp_path: Path) -> None:
    """The oracle of all of the above: transformers, strictly."""
    convert(qwen3, tmp_path / "many", TO_MANY)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "many", output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = load_file(qwen3 / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], expected[name]) for name in expected)
