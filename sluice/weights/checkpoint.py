"""Reading a plain HF checkpoint directory, without torch: its shards and its companions."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import xxhash

from sluice.weights.digest import digest_bytes
from sluice.weights.errors import DamagedFileError, InvalidCheckpointError, MissingFileError
from sluice.weights.header import data_start, parse_header
from sluice.weights.manifest import ShardFile, TensorEntry

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

COMPANION_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",  # sentencepiece
    "*.tiktoken",
    "chat_template*",
    "*processor_config.json",
    "*.py",  # code of models that transformers does not have
)


def companion_files(directory: Path) -> list[Path]:
    """Config, tokenizer, chat template and processor files of a model directory."""
    found = {path for pattern in COMPANION_PATTERNS for path in directory.glob(pattern)}
    return sorted(path for path in found if path.is_file())


def shard_paths(directory: Path) -> list[Path]:
    """The safetensors files that make up the model; raises MissingFileError if incomplete.

    DamagedFileError or InvalidCheckpointError are for an index that makes no sense.
    Like transformers, a `model.safetensors` is taken before an index.
    """
    index = directory / INDEX_NAME
    if not (directory / SINGLE_NAME).is_file() and index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            strays = [name for name in names if Path(name).name != name]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise DamagedFileError(INDEX_NAME, f"is malformed: {error}") from error
        if strays:
            raise InvalidCheckpointError(
                f"{INDEX_NAME!r} names {strays[0]!r}, which lies elsewhere"
            )
    else:
        names = [SINGLE_NAME]
    for name in names:
        if not (directory / name).is_file():
            raise MissingFileError(name)
    return [directory / name for name in names]


def describe_shard(path: Path) -> ShardFile:
    """Digest a safetensors file and every tensor in it, in one pass."""
    with path.open("rb") as file:
        try:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:  # empty
            raise DamagedFileError(path.name, "is empty") from error
    extents = parse_header(mapped, file_name=path.name)
    view = memoryview(mapped)
    whole = xxhash.xxh3_128(view[: data_start(mapped)])
    tensors: dict[str, TensorEntry] = {}
    for name, extent in extents.items():
        piece = view[extent.begin : extent.end]
        tensors[name] = TensorEntry(extent.dtype, extent.shape, digest_bytes(piece))
        whole.update(piece)
    return ShardFile(path.name, len(view), whole.hexdigest(), tensors)
