"""Bytes of a source that are not as they were written: found, and named."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from sluice.weights.checkpoint import companion_files
from sluice.weights.convert.conversion import convert
from sluice.weights.convert.options import ConvertOptions, Layout
from sluice.weights.convert.pieces import Files
from sluice.weights.convert.stored import _MetadataUnpickler, find_bytes, read_keys
from sluice.weights.convert.verify import compare
from sluice.weights.errors import (
    DamagedFileError,
    FileDigestError,
    ForbiddenObjectError,
    InvalidCheckpointError,
    MissingFileError,
    TargetExistsError,
    TensorDigestError,
    UncoveredTensorError,
    WeightStoreError,
)
from sluice.weights.store import WeightStore
from tests.imported import import_checkpoint

TO_HF = ConvertOptions(to="hf", sync=False, max_file_bytes=60_000)
TO_MEGATRON = ConvertOptions(vocab_multiple=8, sync=False, max_file_bytes=60_000)


def visible(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def write_metadata(directory: Path, metadata: Metadata) -> None:
    """Replace a checkpoint's `.metadata`."""
    results = [
        dcp.storage.WriteResult(index, place.length, place)
        for index, place in metadata.storage_data.items()
    ]
    dcp.FileSystemWriter(directory).finish(metadata, [results])


def test_a_flipped_byte_of_a_known_source_is_found(
    qwen3: Path, megatron: Path, tmp_path: Path
) -> None:
    """By the record that the converter left; each stored tensor in turn."""
    digests = json.loads((megatron / "conversion.json").read_bytes())["digests"]
    for key, stored in read_keys(megatron).items():
        copy = tmp_path / "copy"
        shutil.copytree(megatron, copy)
        chunk = stored.chunks[-1]
        flip(copy / chunk.path.name, chunk.offset + chunk.length // 2)
        try:
            convert(copy, tmp_path / "target", TO_HF)
        except TensorDigestError as error:
            assert error.name.partition("@")[0] == key
        except InvalidCheckpointError as error:  # in what surrounds a small tensor
            assert chunk.length < 4096
            assert chunk.path.name in str(error)
        else:  # between a small tensor and its description
            assert compare(qwen3, tmp_path / "target").same
            shutil.rmtree(tmp_path / "target")
        assert visible(tmp_path) == ["copy"]
        shutil.rmtree(copy)
    assert len(digests) > 30


def test_a_flipped_byte_of_an_unknown_source_is_found_by_comparison(
    qwen3: Path, tmp_path: Path
) -> None:
    shutil.copytree(qwen3, tmp_path / "copy")
    flip(tmp_path / "copy/model.safetensors", -3)
    convert(tmp_path / "copy", tmp_path / "target", TO_MEGATRON)
    found = compare(qwen3, tmp_path / "target")
    (name,) = found.different
    assert found.different[name] == "other numbers"
    assert found.equal == 46


@pytest.mark.parametrize("name", [".metadata", "metadata.json", "__0_0.distcp", "conversion.json"])
def test_damaged_files_are_refused(name: str, megatron: Path, tmp_path: Path) -> None:
    shutil.copytree(megatron, tmp_path / "copy")
    path = tmp_path / "copy" / name
    for data in (path.read_bytes()[: path.stat().st_size // 2], b""):
        path.write_bytes(data)
        with pytest.raises(WeightStoreError):
            convert(tmp_path / "copy", tmp_path / "target", TO_HF)
        assert visible(tmp_path) == ["copy"]


def test_a_finished_target_that_has_lost_something_is_not_taken_for_done(
    qwen3: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    convert(qwen3, target, TO_MEGATRON)
    companions = {path.name for path in companion_files(target)}
    for path in sorted(target.iterdir()):
        whole = path.read_bytes()
        for size in (None, -2):
            path.unlink() if size is None else path.write_bytes(whole[:size])
            if path.name == "conversion.json":
                with pytest.raises(TargetExistsError):
                    convert(qwen3, target, TO_MEGATRON)
            elif path.exists() and path.name in companions:  # people edit these
                assert path.name in str(convert(qwen3, target, TO_MEGATRON).report.notes)
            else:
                with pytest.raises(DamagedFileError, match=re.escape(path.name)):
                    convert(qwen3, target, TO_MEGATRON)
        path.write_bytes(whole)
    record = target / "conversion.json"
    place = record.read_bytes().index(b'"digests"') + 60
    flip(record, place)
    with pytest.raises(DamagedFileError, match="remove that to convert again"):
        convert(qwen3, target, TO_MEGATRON)
    flip(record, place)
    assert len(convert(qwen3, target, TO_MEGATRON).digests) > 10


@pytest.mark.parametrize("options", [TO_HF, TO_MEGATRON])
def test_a_flipped_byte_of_a_finished_target_is_not_taken_for_done(
    options: ConvertOptions, qwen3: Path, tmp_path: Path
) -> None:
    """In tensors, and in what stands around them."""
    target = tmp_path / "target"
    done = convert(qwen3, target, options)
    for path in [path for path in target.iterdir() if path not in companion_files(target)]:
        size = path.stat().st_size
        for place in (0, size // 7, size // 3, size // 2, size - size // 5, size - 1):
            flip(path, place)
            with pytest.raises((DamagedFileError, TargetExistsError)) as found:
                convert(qwen3, target, options)
            if isinstance(found.value, DamagedFileError):
                assert found.value.file_name == path.name
            else:
                assert path.name == "conversion.json"
            flip(path, place)
    assert convert(qwen3, target, options) == done


def test_metadata_runs_nothing(megatron: Path, tmp_path: Path) -> None:
    """The format is a pickle: what is no description of tensors is not even looked up."""
    shutil.copytree(megatron, tmp_path / "copy")
    (tmp_path / "copy/conversion.json").unlink()  # of another writer
    evil = b"cos\nsystem\n(S'touch %s'\ntR." % str(tmp_path / "evil").encode()
    (tmp_path / "copy/.metadata").write_bytes(evil)
    with pytest.raises(ForbiddenObjectError, match=r"os\.system"):
        convert(tmp_path / "copy", tmp_path / "target", TO_HF)
    assert not (tmp_path / "evil").exists()


def test_getattr_in_metadata_only_names_members_of_enumerations(
    megatron: Path, tmp_path: Path
) -> None:
    """Python 3.11.0 to 3.11.3 write members of enumerations so; anything else is refused."""
    shutil.copytree(megatron, tmp_path / "copy")
    (tmp_path / "copy/conversion.json").unlink()  # of another writer
    evil = b"cbuiltins\ngetattr\n(ctorch\nSize\nS'__class__'\ntR."
    (tmp_path / "copy/.metadata").write_bytes(evil)
    with pytest.raises(ForbiddenObjectError, match=r"builtins\.getattr"):
        convert(tmp_path / "copy", tmp_path / "wrong", TO_HF)
    member = b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    found = _MetadataUnpickler(io.BytesIO(member + b"S'TORCH_CONTIGUOUS_FORMAT'\ntR.")).load()
    assert found.name == "TORCH_CONTIGUOUS_FORMAT"


def test_a_lost_rank_is_noticed(qwen3: Path, tmp_path: Path) -> None:
    options = ConvertOptions(layout=Layout(tensor=2), vocab_multiple=4, sync=False)
    convert(qwen3, tmp_path / "made", options)
    (tmp_path / "made/__1_0.distcp").unlink()
    with pytest.raises(MissingFileError, match="__1_0"):
        convert(tmp_path / "made", tmp_path / "target", TO_HF)


def test_rows_that_no_chunk_has_are_noticed(megatron: Path, tmp_path: Path) -> None:
    """A checkpoint of one layer less under a stacked key."""
    shutil.copytree(megatron, tmp_path / "copy")
    reader = dcp.FileSystemReader(tmp_path / "copy")
    metadata = reader.read_metadata()
    entry = metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"]
    entry.chunks.pop()  # type: ignore[union-attr]
    write_metadata(tmp_path / "copy", metadata)
    (tmp_path / "copy/conversion.json").unlink()
    with pytest.raises(UncoveredTensorError, match=r"linear_fc2"):
        convert(tmp_path / "copy", tmp_path / "target", TO_HF)


@pytest.mark.parametrize("change", ["lost", "moved"])
def test_columns_that_no_chunk_has_are_noticed(change: str, qwen3: Path, tmp_path: Path) -> None:
    """Of two ranks that hold half of the columns each."""
    options = ConvertOptions(layout=Layout(tensor=2), vocab_multiple=4, sync=False)
    convert(qwen3, tmp_path / "made", options)
    (tmp_path / "made/conversion.json").unlink()
    metadata = dcp.FileSystemReader(tmp_path / "made").read_metadata()
    key = "decoder.layers.mlp.linear_fc2.weight"
    chunks = metadata.state_dict_metadata[key].chunks  # type: ignore[union-attr]
    number = next(i for i, c in enumerate(chunks) if c.offsets[2])
    if change == "lost":
        chunks.pop(number)
    else:  # a column to the left, where the other rank's are
        moved = torch.Size((*chunks[number].offsets[:2], chunks[number].offsets[2] - 1))
        chunks[number] = ChunkStorageMetadata(moved, chunks[number].sizes)
        places = metadata.storage_data
        old = next(index for index in places if index.fqn == key and index.index == number)
        places[MetadataIndex(key, moved, number)] = places.pop(old)
    write_metadata(tmp_path / "made", metadata)
    with pytest.raises(UncoveredTensorError, match=key):
        convert(tmp_path / "made", tmp_path / "target", TO_HF)


def test_a_chunk_that_is_listed_twice_is_read_once(
    qwen3: Path, megatron: Path, tmp_path: Path
) -> None:
    shutil.copytree(megatron, tmp_path / "copy")
    (tmp_path / "copy/conversion.json").unlink()
    metadata = dcp.FileSystemReader(tmp_path / "copy").read_metadata()
    entry = metadata.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"]
    entry.chunks.append(entry.chunks[0])  # type: ignore[union-attr]
    write_metadata(tmp_path / "copy", metadata)
    convert(tmp_path / "copy", tmp_path / "target", TO_HF)
    assert compare(qwen3, tmp_path / "target").same


def test_rows_that_two_chunks_have_are_noticed(megatron: Path, tmp_path: Path) -> None:
    """The second half of a tensor is said to begin a row earlier."""
    shutil.copytree(megatron, tmp_path / "copy")
    (tmp_path / "copy/conversion.json").unlink()
    metadata = dcp.FileSystemReader(tmp_path / "copy").read_metadata()
    key = "decoder.layers.mlp.linear_fc1.weight"  # gate and up are a chunk each
    entry = metadata.state_dict_metadata[key]
    chunks = entry.chunks  # type: ignore[union-attr]
    number = next(i for i, c in enumerate(chunks) if c.offsets[1])
    moved = torch.Size((chunks[number].offsets[0], chunks[number].offsets[1] - 1, 0))
    chunks[number] = ChunkStorageMetadata(moved, chunks[number].sizes)
    places = metadata.storage_data
    old = next(index for index in places if index.fqn == key and index.index == number)
    places[MetadataIndex(key, moved, number)] = places.pop(old)
    write_metadata(tmp_path / "copy", metadata)
    with pytest.raises(UncoveredTensorError, match=key):
        convert(tmp_path / "copy", tmp_path / "target", TO_HF)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_every_byte_around_a_tensor_is_as_it_was_or_does_no_harm(
    megatron: Path, tmp_path: Path
) -> None:
    """A container has its lengths twice; of a checkpoint whose writer left no digests."""
    shutil.copytree(megatron, tmp_path / "copy")
    key, stored = next(iter(read_keys(tmp_path / "copy").items()))
    chunk, expected = stored.chunks[0], (stored.dtype, torch.Size(stored.chunks[0].sizes))
    whole = chunk.path.read_bytes()
    with Files() as files:
        start = find_bytes(files, chunk.path, chunk.offset, chunk.length, expected)
    size = math.prod(chunk.sizes) * stored.dtype.itemsize
    before = range(chunk.offset, start)
    after = range(start + size, chunk.offset + chunk.length)
    refused = 0
    for position in (*before, *after):
        flip(chunk.path, position)
        try:
            with Files() as files:
                assert find_bytes(files, chunk.path, chunk.offset, chunk.length, expected) == start
        except DamagedFileError as error:
            assert error.file_name == chunk.path.name
            refused += 1
        chunk.path.write_bytes(whole)
    assert refused > 100, key


@pytest.mark.parametrize("position", [*range(100, 6000, 590), -9])
def test_metadata_of_bytes_that_make_no_sense(
    position: int, megatron: Path, tmp_path: Path
) -> None:
    """Of a checkpoint whose writer left no digests: nothing but the error of damaged files."""
    shutil.copytree(megatron, tmp_path / "copy")
    (tmp_path / "copy/conversion.json").unlink()
    whole = bytearray((tmp_path / "copy/.metadata").read_bytes())
    for bit in (1, 16, 128):
        data = bytearray(whole)
        data[position] ^= bit
        (tmp_path / "copy/.metadata").write_bytes(data)
        with contextlib.suppress(WeightStoreError):
            read_keys(tmp_path / "copy")


@pytest.mark.parametrize("name", [".metadata", "metadata.json", "common.pt"])
def test_a_flipped_byte_of_a_small_file_is_found(name: str, megatron: Path, tmp_path: Path) -> None:
    shutil.copytree(megatron, tmp_path / "copy")
    flip(tmp_path / "copy" / name, 10)
    with pytest.raises(FileDigestError) as found:
        convert(tmp_path / "copy", tmp_path / "target", TO_HF)
    assert found.value.file_name == name


def test_a_type_that_was_changed_in_a_header_is_found(megatron: Path, tmp_path: Path) -> None:
    """The bytes of the tensor are as they were, and so is its digest."""
    convert(megatron, tmp_path / "made", TO_HF)
    path = min((tmp_path / "made").glob("*.safetensors"))
    data = path.read_bytes()
    assert b'"dtype":"BF16"' in data
    path.write_bytes(data.replace(b'"dtype":"BF16"', b'"dtype": "F16"', 1))
    with pytest.raises(FileDigestError, match=path.name):
        convert(tmp_path / "made", tmp_path / "target", TO_HF)


def test_two_tensors_read_at_one_place_are_noticed(megatron: Path, tmp_path: Path) -> None:
    """Metadata that points at another tensor of the same shape; each has a digest of its own."""
    shutil.copytree(megatron, tmp_path / "copy")
    metadata = dcp.FileSystemReader(tmp_path / "copy").read_metadata()
    key = "decoder.layers.self_attention.linear_proj.weight"
    first, second = [i for i in metadata.storage_data if i.fqn == key][:2]
    metadata.storage_data[first] = metadata.storage_data[second]
    write_metadata(tmp_path / "copy", metadata)
    record = json.loads((tmp_path / "copy/conversion.json").read_bytes())
    del record["files"], record["record"]
    (tmp_path / "copy/conversion.json").write_text(json.dumps(record))
    with pytest.raises(TensorDigestError, match=key):
        convert(tmp_path / "copy", tmp_path / "target", TO_HF)


@pytest.mark.parametrize("position", [4, 9, 60, 700])
def test_a_malformed_header_is_named(position: int, qwen3: Path, tmp_path: Path) -> None:
    shutil.copytree(qwen3, tmp_path / "copy")
    path = tmp_path / "copy/model.safetensors"
    data = bytearray(path.read_bytes())
    data[position : position + 3] = b"}}}"
    path.write_bytes(data)
    with pytest.raises(DamagedFileError) as found:
        convert(tmp_path / "copy", tmp_path / "target", TO_MEGATRON)
    assert found.value.file_name == "model.safetensors"


@pytest.mark.parametrize("options", [TO_HF, TO_MEGATRON])
def test_a_published_tensor_is_checked_on_the_way(
    options: ConvertOptions, qwen3: Path, tmp_path: Path
) -> None:
    store = WeightStore(tmp_path / "store", durable=False)
    version = import_checkpoint(store, qwen3, None, 0).directory
    flip(version / "model.safetensors", -3)
    with pytest.raises(TensorDigestError):
        convert(version, tmp_path / "target", options)
    assert not (tmp_path / "target").exists()


def test_a_published_version_is_checked_to_its_config(qwen3: Path, tmp_path: Path) -> None:
    """A number of config.json that no shape depends on would be wrong for good."""
    store = WeightStore(tmp_path / "store", durable=False)
    version = import_checkpoint(store, qwen3, None, 0).directory
    convert(version, tmp_path / "fine", TO_MEGATRON)
    text = (version / "config.json").read_text()
    (version / "config.json").write_text(text.replace('"rope_theta": 1', '"rope_theta": 2'))
    assert (version / "config.json").read_text() != text
    with pytest.raises(FileDigestError, match=r"config\.json"):
        convert(version, tmp_path / "target", TO_MEGATRON)
