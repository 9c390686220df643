"""What a torch_dist checkpoint holds: keys, and for each its chunks and where they lie.

`.metadata` is a pickle by the format's nature, written by torch and read by Megatron. It is read
here with a list of the classes that describe tensors, so a checkpoint from elsewhere cannot run
anything.
"""

from __future__ import annotations

import enum
import json
import pathlib
import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from sluice.weights.convert.errors import ForbiddenObjectError
from sluice.weights.errors import DamagedFileError, InvalidCheckpointError, MissingFileError

METADATA = ".metadata"
CONFIG = "metadata.json"  # Megatron's; written last
MALFORMED = (  # what readers of pickles and archives raise for bytes that make no sense
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
NOT_WEIGHTS = ("optimizer.", "rng/", "rng_state/", "rerun_state_machine_state/", "chained_")


def _member(kind: object, name: str) -> enum.Enum:
    """What Python 3.11.0 to 3.11.3 write as `getattr(kind, name)`: a member of an enumeration."""
    if not (isinstance(kind, enum.EnumType) and name in kind.__members__):
        raise ForbiddenObjectError("builtins.getattr")
    member: enum.Enum = kind[name]
    return member


_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        name: getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    "torch.distributed.checkpoint.filesystem": {
        name: getattr(filesystem, name) for name in ("_StorageInfo", "_StoragePrefix")
    },
    "torch": {"Size": torch.Size},
    "torch.serialization": {"_get_layout": torch.serialization._get_layout},
    "pathlib": {name: getattr(pathlib, name) for name in ("PosixPath", "PurePosixPath", "Path")},
    "builtins": {"set": set, "frozenset": frozenset, "getattr": _member},
    "collections": {"OrderedDict": dict},
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _CLASSES.get(module, {}).get(name)
        if found is not None:
            return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith("megatron.core.dist_checkpointing.") and name.startswith("MCore"):
            return type(name, (), {})  # of older versions; holds nothing that is needed
        raise ForbiddenObjectError(f"{module}.{name}")


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor at `offsets` of the whole; its container is bytes of `path`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    offset: int
    length: int


@dataclass(frozen=True)
class StoredKey:
    """A tensor of a torch_dist checkpoint."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def is_torch_dist(directory: Path) -> bool:
    """Whether a directory holds a torch_dist checkpoint, be it unfinished or damaged."""
    if (directory / METADATA).is_file():
        return True
    try:
        return "sharded_backend" in json.loads((directory / CONFIG).read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def _check_finished(directory: Path) -> None:
    try:
        config = json.loads((directory / CONFIG).read_bytes())
        backend = config["sharded_backend"]
    except FileNotFoundError as error:
        raise InvalidCheckpointError(f"{directory.name!r} is unfinished: no {CONFIG!r}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(CONFIG, f"is malformed: {error}") from error
    if backend != "torch_dist":
        raise InvalidCheckpointError(f"{directory.name!r} is of format {backend!r}, not torch_dist")


def read_keys(directory: Path) -> dict[str, StoredKey]:
    """The weights of a checkpoint by key; what belongs to an optimizer or is no tensor is left out.

    Raises MissingFileError, InvalidCheckpointError, DamagedFileError or ForbiddenObjectError.
    """
    _check_finished(directory)
    try:
        with (directory / METADATA).open("rb") as file:
            document = _MetadataUnpickler(file).load()
        described = document.state_dict_metadata
        stored: Mapping[Any, Any] = document.storage_data
        places: dict[tuple[str, tuple[int, ...]], Any] = {
            (index.fqn, tuple(index.offset)): place
            for index, place in stored.items()
            if index.offset is not None
        }
        return {
            key: _key(directory, key, entry, places)
            for key, entry in described.items()
            if isinstance(entry, metadata.TensorStorageMetadata) and not key.startswith(NOT_WEIGHTS)
        }
    except FileNotFoundError as error:
        raise MissingFileError(METADATA) from error
    except MALFORMED as error:
        raise DamagedFileError(METADATA, f"is malformed: {error!r}") from error


def _key(
    directory: Path,
    key: str,
    entry: metadata.TensorStorageMetadata,
    places: Mapping[tuple[str, tuple[int, ...]], Any],
) -> StoredKey:
    chunks = []
    for chunk in entry.chunks:
        place = places[key, tuple(chunk.offsets)]
        if getattr(place, "transform_descriptors", None):
            raise InvalidCheckpointError(f"tensor {key!r} is stored compressed or transformed")
        name = place.relative_path
        if Path(name).name != name:
            raise InvalidCheckpointError(f"tensor {key!r} lies outside of its checkpoint: {name!r}")
        chunks.append(
            Chunk(
                tuple(chunk.offsets),
                tuple(chunk.sizes),
                directory / name,
                place.offset,
                place.length,
            )
        )
    return StoredKey(key, entry.properties.dtype, tuple(entry.size), tuple(chunks))
