"""Bytes of tensors: written once, digested on the way, never handed out damaged."""

from __future__ import annotations

import json
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sluice.weights.checkpoint import CheckedShards, describe_shard, parse_header, verify_files
from sluice.weights.dtypes import TORCH_DTYPES
from sluice.weights.errors import (
    DamagedFileError,
    FileDigestError,
    InvalidCheckpointError,
    ManifestError,
    MissingFileError,
    TensorDigestError,
    WeightStoreError,
)
from sluice.weights.shards import load_verified, write_shard
from sluice.weights.store import StoredVersion, WeightStore
from tests.imported import import_checkpoint

Tensors = dict[str, torch.Tensor]


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def publish(store: WeightStore, tensors: Tensors, *companions: Path) -> StoredVersion:
    staging = store.allocate(None)
    names = sorted(tensors)
    shards = [
        write_shard(staging.directory, f"model-{i}.safetensors", {n: tensors[n] for n in part})
        for i, part in enumerate((names[:2], names[2:]))
    ]
    return store.commit(staging, shards, companions, 0)


def load(store: WeightStore, record: StoredVersion, dtype: torch.dtype | None = None) -> Tensors:
    return dict(load_verified(record.directory, store.manifest(record.version), dtype))


def test_tensors_come_back_bit_for_bit(store: WeightStore, tensors: Tensors) -> None:
    loaded = load(store, publish(store, tensors))
    assert set(loaded) == set(tensors)
    assert all(equal(loaded[name], tensors[name]) for name in tensors)


@settings(max_examples=40)
@given(data=st.data())
def test_other_readers_see_the_same(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any dtype, shape and strides: the safetensors library reads what we wrote."""
    tensors: Tensors = {}
    for index in range(data.draw(st.integers(1, 5))):
        dtype = TORCH_DTYPES[data.draw(st.sampled_from(sorted(TORCH_DTYPES)))]
        shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
        raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
        tensor = raw.view(dtype).reshape(shape)
        if data.draw(st.booleans()) and tensor.ndim > 1:
            tensor = tensor.transpose(0, 1)
        tensors[f"layers.{index}.\u00fc"] = tensor
    directory = tmp_path_factory.mktemp("shard")
    written = write_shard(directory, "a.safetensors", tensors)
    read = load_file(directory / "a.safetensors")
    assert set(read) == set(tensors) == set(written.tensors)
    assert all(equal(read[name], tensors[name].contiguous()) for name in tensors)
    path = directory / "a.safetensors"
    assert describe_shard(path) == written
    for name, extent in parse_header(path.read_bytes(), file_name=path.name).items():
        assert extent.begin % tensors[name].dtype.itemsize == 0


def test_a_change_of_dtype_spares_integers(store: WeightStore, tensors: Tensors) -> None:
    loaded = load(store, publish(store, tensors), torch.float64)
    assert loaded["norm.weight"].dtype == loaded["embed.weight"].dtype == torch.float64
    assert torch.equal(loaded["norm.weight"], tensors["norm.weight"].double())
    assert (loaded["router.bias"].dtype, loaded["step"].dtype) == (torch.bool, torch.int64)


def test_writing_to_a_loaded_tensor_leaves_the_version_whole(
    store: WeightStore, tensors: Tensors
) -> None:
    record = publish(store, tensors)
    load(store, record)["embed.weight"].fill_(9.0)
    assert equal(load(store, record)["embed.weight"], tensors["embed.weight"])


def test_loaded_tensors_outlive_their_version(store: WeightStore, tensors: Tensors) -> None:
    loaded = load(store, publish(store, tensors))
    publish(store, tensors)
    store.retain(1)
    assert equal(loaded["embed.weight"], tensors["embed.weight"])


def test_a_flipped_tensor_is_named_and_not_handed_out(store: WeightStore, tensors: Tensors) -> None:
    record = publish(store, tensors)
    path = record.directory / store.manifest(record.version).tensors["norm.weight"].file
    content = bytearray(path.read_bytes())
    content[content.index(tensors["norm.weight"].view(torch.uint8).numpy().tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(TensorDigestError) as failure:
        for name, _ in load_verified(record.directory, store.manifest(record.version)):
            assert name != "norm.weight"
    assert failure.value.name == "norm.weight"
    assert f"tensor 'norm.weight' of {path.name!r} has digest" in str(failure.value)
    assert failure.value.expected != failure.value.actual


def test_no_flipped_byte_of_any_file_is_accepted(
    store: WeightStore, tensors: Tensors, checkpoint: Path
) -> None:
    """Every file, spread over its bytes: headers, data, padding, index, companions, manifest."""
    record = publish(store, tensors, checkpoint / "config.json")
    load(store, record)
    for path in sorted(record.directory.iterdir()):
        content = path.read_bytes()
        for position in range(0, len(content), max(1, len(content) // 40)):
            damaged = bytearray(content)
            damaged[position] ^= 1 << (position % 8)
            path.write_bytes(damaged)
            with pytest.raises(WeightStoreError) as failure:
                load(store, record)
            named = (path.name, *tensors)
            assert any(name in str(failure.value) for name in named), str(failure.value)
        path.write_bytes(content)
    load(store, record)


def test_a_flipped_byte_of_a_header_that_another_program_wrote_is_found(
    store: WeightStore, tensors: Tensors, tmp_path: Path
) -> None:
    """Headers like ours are compared; of any other the whole file is hashed."""
    (tmp_path / "model").mkdir()
    values = {"w": tensors["embed.weight"]}
    save_file(values, tmp_path / "model" / "model.safetensors", metadata={"note": "trained here"})
    record = import_checkpoint(store, tmp_path / "model", None, 0)
    assert equal(load(store, record)["w"], tensors["embed.weight"])
    path = record.directory / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"trained here", b"trained hare"))
    with pytest.raises(FileDigestError) as failure:
        load(store, record)
    assert failure.value.file_name == "model.safetensors"


@pytest.mark.parametrize("change", ["cut", "gone", "empty"])
def test_incomplete_files_are_named(store: WeightStore, tensors: Tensors, change: str) -> None:
    record = publish(store, tensors)
    path = record.directory / "model-1.safetensors"
    content = path.read_bytes()
    path.unlink()
    if change != "gone":
        path.write_bytes(content[:-1] if change == "cut" else b"")
    with pytest.raises(MissingFileError) as failure:
        load(store, record)
    assert failure.value.file_name == path.name


def test_files_of_two_versions_do_not_mix(store: WeightStore, tensors: Tensors) -> None:
    one = publish(store, tensors)
    changed = {**tensors, "embed.weight": tensors["embed.weight"] + 1}
    two = publish(store, changed)
    shutil.copy(one.directory / "model-0.safetensors", two.directory)
    with pytest.raises(TensorDigestError):
        load(store, two)
    shutil.copy(one.directory / "manifest.json", two.directory)
    with pytest.raises(ManifestError, match="version 2"):
        store.manifest(2)


def test_a_manifest_has_one_spelling(store: WeightStore, tensors: Tensors) -> None:
    path = publish(store, tensors).directory / "manifest.json"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"\n", b" ", 1))
    with pytest.raises(FileDigestError) as failure:
        store.manifest(1)
    assert failure.value.file_name == "manifest.json"
    path.write_bytes(content.replace(b'"format": 1', b'"format": 2', 1))
    with pytest.raises(FileDigestError):
        WeightStore(store.location).latest()
    path.write_bytes(b"{}")
    with pytest.raises(ManifestError):
        WeightStore(store.location).latest()


def test_a_changed_companion_is_named(
    store: WeightStore, tensors: Tensors, checkpoint: Path
) -> None:
    record = publish(store, tensors, checkpoint / "config.json")
    (record.directory / "config.json").write_text("{}")
    manifest = store.manifest(record.version)
    for check in (load_verified, verify_files):
        with pytest.raises(FileDigestError) as failure:
            list(check(record.directory, manifest) or ())
        assert failure.value.file_name == "config.json"


def test_a_shard_that_was_checked_against_other_digests_is_checked_again(
    store: WeightStore, tensors: Tensors
) -> None:
    """What was announced is not always what is committed."""
    record = publish(store, tensors)
    manifest, checked = store.manifest(record.version), CheckedShards()
    for shard in manifest.shards():
        checked.check(record.directory / shard.file_name, shard)
    verify_files(record.directory, manifest, checked)
    name = min(tensors)
    other = {**manifest.tensors, name: replace(manifest.tensors[name], digest="0" * 32)}
    with pytest.raises(TensorDigestError, match=re.escape(repr(name))):
        verify_files(record.directory, replace(manifest, tensors=other), checked)


def test_import_makes_a_plain_checkpoint_a_version(
    store: WeightStore, tensors: Tensors, checkpoint: Path
) -> None:
    record = import_checkpoint(store, checkpoint, None, 3)
    assert all(equal(tensor, tensors[name]) for name, tensor in load(store, record).items())
    assert sorted(path.name for path in record.directory.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "manifest.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert record.step == 3
    (checkpoint / "model.safetensors").write_bytes(b"overwritten in place")
    load(store, record)
    assert publish(store, tensors).digest == record.digest


def test_import_takes_sharded_and_unaligned_files(
    store: WeightStore, tensors: Tensors, tmp_path: Path
) -> None:
    source = tmp_path / "sharded"
    source.mkdir()
    save_file({"a": tensors["embed.weight"]}, source / "x.safetensors")
    header = json.dumps(
        {"m": {"dtype": "BOOL", "shape": [3], "data_offsets": [0, 3]},
         "w": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]}}
    ).encode()  # fmt: skip
    values = torch.tensor([1.5, -2.5])
    (source / "y.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + b"\1\0\1" + values.numpy().tobytes()
    )
    index = {"weight_map": {"a": "x.safetensors", "m": "y.safetensors", "w": "y.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = load(store, import_checkpoint(store, source, None, 0))
    assert equal(loaded["w"], values) and equal(loaded["a"], tensors["embed.weight"])
    assert loaded["m"].tolist() == [True, False, True]
    assert loaded["w"].data_ptr() % 4 == 0
    (source / "y.safetensors").unlink()
    with pytest.raises(MissingFileError) as failure:
        import_checkpoint(store, source, None, 0)
    assert failure.value.file_name == "y.safetensors"
    assert list(store.versions()) == [1]
    assert not list((Path(store.location) / "staging").iterdir())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        b"\xff" * 64,
        (2).to_bytes(8, "little") + b"[]",
        (9).to_bytes(8, "little") + b'{"a": {}}',
        (2).to_bytes(8, "little") + b"{}trailing",
        (53).to_bytes(8, "little")
        + b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[1,4]}}'
        + b"data",
        (53).to_bytes(8, "little")
        + b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,4]}}'
        + b"data",
        (55).to_bytes(8, "little")
        + b'{"a":{"dtype":"NONE","shape":[4],"data_offsets":[0,4]}}'
        + b"data",
    ],
)
def test_import_refuses_what_is_no_safetensors(
    store: WeightStore, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InvalidCheckpointError, match=r"model\.safetensors"):
        import_checkpoint(store, tmp_path, None, 0)
    with pytest.raises(MissingFileError):
        import_checkpoint(store, tmp_path / "nowhere", None, 0)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writes beyond `size` bytes of a file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_no_part_of_a_shard(store: WeightStore) -> None:
    staging = store.allocate(None)
    tensors = {"a": torch.ones(1000), "b": torch.ones(1000)}
    with files_of_at_most(6000), pytest.raises(OSError, match="large"):
        write_shard(staging.directory, "model.safetensors", tensors)
    assert not list(staging.directory.iterdir())
    shard = write_shard(staging.directory, "model.safetensors", tensors)
    with files_of_at_most(100), pytest.raises(OSError, match="large"):
        store.commit(staging, [shard], [], 0)
    assert list(store.versions()) == []
    record = store.commit(staging, [shard], [], 0)
    assert torch.equal(load(store, record)["b"], tensors["b"])


def test_transformers_loads_a_version(store: WeightStore, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, intermediate_size=8, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "hf")
    weights = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    record = publish(store, weights, tmp_path / "hf" / "config.json")
    loaded = AutoModelForCausalLM.from_pretrained(record.directory)
    state, expected = loaded.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    assert all(equal(state[name], tensor) for name, tensor in expected.items())
    ids = torch.arange(6)[None]  # files are mapped: not aligned, and not equal to the bit
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


ENTRY = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
NONE = '{"dtype":"F32","shape":[0,4611686018427387904,4],"data_offsets":[0,0]}'


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (f'{{"a":{ENTRY},"a":{ENTRY}}}', "'a' is there twice"),
        (f'{{"a":{{"dtype":"I32",{ENTRY[1:]}}}', "'dtype' is there twice"),
        (f'{{"a":{ENTRY},"b":{NONE.replace("[0,0]", "[8,8]")}}}', r"shape \[0, "),
        (f'{{"a":{ENTRY}}}', None),
    ],
)
def test_a_header_that_readers_take_differently_is_refused(
    header: str, message: str | None
) -> None:
    data = len(header).to_bytes(8, "little") + header.encode() + bytes(8)
    if message is None:
        assert list(parse_header(data, file_name="a")) == ["a"]
        return
    with pytest.raises(DamagedFileError, match=message):
        parse_header(data, file_name="a")
