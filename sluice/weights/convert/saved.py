"""A trainer's checkpoint: its record, which has a digest of every file, and who wrote it."""

from __future__ import annotations

from pathlib import Path

import torch

from sluice.json_values import load_json
from sluice.place import is_plain_name
from sluice.weights.adapter import ADAPTER_CONFIG
from sluice.weights.checkpoint import check_file
from sluice.weights.convert.pieces import Content, FileRange
from sluice.weights.convert.work import Check
from sluice.weights.errors import DamagedFileError, InvalidCheckpointError, MissingFileError
from sluice.weights.manifest import FileEntry, unseal

SAVED = "checkpoint.json"
DESCRIPTION = "sluice.json"  # of backends that cut a model over ranks
MODEL_FILE = "policy.safetensors"  # of `reference`, and of adapters on any backend
_SEAL = "record_digest"
_LARGE = (".distcp", ".safetensors")


def has_modules(directory: Path) -> bool:
    """Whether a directory has the tensors of a model's modules, as `fsdp` and `reference` save it.

    Raises DamagedFileError, or InvalidCheckpointError for a form of `fsdp` that is not known.
    """
    if (directory / MODEL_FILE).is_file():
        return not (directory / ADAPTER_CONFIG).is_file()
    try:
        description = load_json((directory / DESCRIPTION).read_bytes())
        backend, form = description["backend"], description["format"]
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(DESCRIPTION, f"is malformed: {error!r}") from error
    if backend == "fsdp" and form != 1:
        raise InvalidCheckpointError(f"{directory.name!r} is of format {form!r} of fsdp, not 1")
    return bool(backend == "fsdp")


def check_saved(directory: Path, *, large: bool = False) -> None:
    """Check the sizes of all files of a trainer's checkpoint, and the digests of small ones.

    large: of the others too. Raises MissingFileError, DamagedFileError or FileDigestError.
    """
    for name, entry in _saved_files(directory).items():
        try:
            size = (directory / name).stat().st_size
        except FileNotFoundError:
            raise MissingFileError(name) from None
        if size != entry.size:
            raise DamagedFileError(name, f"has {size} bytes, not {entry.size}")
        if large or not name.endswith(_LARGE):
            check_file(directory / name, entry.digest)


def saved_checks(directory: Path) -> tuple[Check, ...]:
    """List the files that `check_saved` leaves: all of each has a digest, optimizer and all."""
    return tuple(
        Check(
            name,
            Content(torch.uint8, (e.size,), (FileRange(directory / name, 0, e.size),)),
            e.digest,
            directory.name,
            is_file=True,
        )
        for name, e in _saved_files(directory).items()
        if name.endswith(_LARGE)
    )


def _saved_files(directory: Path) -> dict[str, FileEntry]:
    """Read the record; nothing where there is none, or its release noted no digests."""
    try:
        data = (directory / SAVED).read_bytes()
    except FileNotFoundError:
        return {}
    try:
        document = load_json(data)
        if _SEAL in document:
            document = unseal(data, _SEAL, SAVED)
        elif document["format"] != 1:
            raise ValueError("it has lost its digest")
        files = {name: FileEntry(**entry) for name, entry in (document.get("files") or {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(SAVED, f"is malformed: {error!r}") from error
    if other := [name for name in files if not is_plain_name(name)]:
        raise DamagedFileError(SAVED, f"names {other[0][:80]!r}, which lies elsewhere")
    return files
