"""What a checkpoint has besides the files of ranks, and who keeps checkpoints."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.trainer.controller.state import PublishedWeights
from services.trainer.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
)
from sluice.runtime.errors import InvalidFieldError
from sluice.weights.errors import FileDigestError
from sluice.weights.manifest import FileEntry, unseal

PREFIX = "checkpoints/"
RECORD = "checkpoint.json"
FORMAT = 2
UNDIGESTED_FORMAT = 1  # of earlier releases
SEAL = "record_digest"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_id(checkpoint_id: str) -> None:
    """Raises InvalidFieldError for an id that names no directory of its own."""
    if not _ID.fullmatch(checkpoint_id):
        raise InvalidFieldError("checkpoint_id", f"{checkpoint_id!r} must match {_ID.pattern}")


def id_of(name: str) -> str:
    """Return the id in `checkpoints/<id>`. Raises InvalidFieldError."""
    checkpoint_id = name.removeprefix(PREFIX)
    if checkpoint_id == name or not _ID.fullmatch(checkpoint_id):
        raise InvalidFieldError("checkpoint", f"{name!r} is not of the form {PREFIX}<id>")
    return checkpoint_id


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """What the controller itself needs of a checkpoint.

    `files` are all others of its directory; None where the release that wrote it did not say.
    `processor`: digest of how images were prepared; None for a model of text, or of such a release.
    `adapter`: the one of several that it is of; empty is the policy of the settings.
    `folder` is where files are in a bucket.
    """

    backend: str
    step: int
    skipped_count: int
    weights: PublishedWeights | None
    layout: dict[str, int]
    files: dict[str, FileEntry] | None
    processor: str | None = None
    adapter: str = ""
    folder: str = ""


class Checkpoints(ABC):
    """Where checkpoints are. Calls block, and raise OSError besides what they say."""

    @abstractmethod
    def begin(self, checkpoint_id: str) -> str:
        """Return the place that ranks fill. Raises InvalidFieldError and AlreadyExistsError."""

    @abstractmethod
    def finish(self, checkpoint_id: str, partial: str, record: CheckpointRecord) -> None:
        """Make what the ranks wrote a checkpoint, in one step; it is dropped when that fails.

        Raises AlreadyExistsError, and CheckpointDamagedError where other files are there.
        """

    @abstractmethod
    def abandon(self, partial: str) -> None:
        """Drop what nobody finishes."""

    @abstractmethod
    def location(self, name: str, record: CheckpointRecord) -> str:
        """Return the place of the files of `checkpoints/<id>`, as ranks know it."""

    @abstractmethod
    def files(self, name: str, record: CheckpointRecord) -> AbstractContextManager[Path]:
        """Have a directory with the files of `checkpoints/<id>` for the block.

        Raises CheckpointDamagedError where what comes from elsewhere is not as it was written.
        """

    @abstractmethod
    def read(self, name: str, backend: str) -> CheckpointRecord:
        """Read the record of a checkpoint. Raises InvalidFieldError, NotFoundError,
        CheckpointDamagedError, and CheckpointMismatchError for another backend's.
        """


def document_of(record: CheckpointRecord) -> dict[str, Any]:
    """A record as it is stored."""
    document = {"format": FORMAT, **asdict(record)}
    for name in ("adapter", "folder"):
        if not document[name]:  # earlier releases do not know these
            del document[name]
    return document


def check_complete(partial: str, found: Mapping[str, int], record: CheckpointRecord) -> None:
    """What the ranks say they wrote is here, and nothing else: the store is one for all.

    `found` are the sizes of files by name. Raises CheckpointDamagedError.
    """
    stated = {name: entry.size for name, entry in (record.files or {}).items()}
    if found != stated:
        different = ", ".join(sorted({name for name, _ in found.items() ^ stated.items()})[:8])
        raise CheckpointDamagedError(
            different.split(", ")[0],
            f"the ranks wrote other files than are in {partial.rpartition('/')[2]}: {different}; "
            "the store must be a directory that all of them share, or a bucket",
        )


def decode_record(data: bytes, name: str, backend: str) -> CheckpointRecord:
    """Raises CheckpointDamagedError, and CheckpointMismatchError for another backend's."""
    try:
        record = _decode_record(data, name)
    except FileDigestError as error:
        raise CheckpointDamagedError(RECORD, f"{name}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        detail = f"{name}: file {RECORD!r} is malformed: {error}"
        raise CheckpointDamagedError(RECORD, detail) from None
    if record.backend != backend:
        raise CheckpointMismatchError(
            f"{name} is of backend {record.backend}, this one is {backend}: set backend to that, "
            "or start from the weights that were published, as model",
            name=name,
        )
    return record


def _decode_record(data: bytes, name: str) -> CheckpointRecord:
    document: dict[str, Any] = json.loads(data)
    if SEAL in document:
        document = unseal(data, SEAL, RECORD)
    elif document["format"] == FORMAT:
        raise ValueError("it has lost its digest")
    if document.pop("format") not in (FORMAT, UNDIGESTED_FORMAT):
        raise CheckpointMismatchError(
            f"{name} has a format that this release does not know", name=name
        )
    weights, files = document.pop("weights"), document.pop("files", None)
    return CheckpointRecord(
        weights=None if weights is None else PublishedWeights(**weights),
        files=files and {path: FileEntry(**entry) for path, entry in files.items()},
        **document,
    )
