"""Checkpoints in a directory that all ranks share."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from services.trainer.checkpoint_files import check_size
from services.trainer.controller.checkpoint_record import (
    PREFIX,
    RECORD,
    SEAL,
    CheckpointRecord,
    Checkpoints,
    check_complete,
    check_id,
    decode_record,
    document_of,
    id_of,
)
from services.trainer.errors import CheckpointDamagedError
from sluice import faults
from sluice.durable import sync_path, write_new
from sluice.place import Place, StoreCacheConfig, directory_of, within
from sluice.runtime.errors import (
    AlreadyExistsError,
    NotFoundError,
)
from sluice.weights.manifest import seal


def open_checkpoints(store: Place, cache: StoreCacheConfig, *, durable: bool) -> Checkpoints:
    """Open the checkpoints of a store; those of a bucket have the `cache` of this host."""
    place = within(store, "checkpoints")
    if (directory := directory_of(place)) is not None:
        return CheckpointStore(directory, durable=durable)
    from services.trainer.controller.bucket_checkpoints import BucketCheckpoints  # needs obstore

    return BucketCheckpoints(str(place), cache)


class CheckpointStore(Checkpoints):
    """`<root>/<id>/`: complete, or not there. Unfinished ones are `<root>/.<id>-<nonce>`."""

    def __init__(self, root: Path, *, durable: bool) -> None:
        self._root, self._durable = root, durable
        root.mkdir(parents=True, exist_ok=True)

    def begin(self, checkpoint_id: str) -> str:
        check_id(checkpoint_id)
        if (self._root / checkpoint_id).exists():
            raise AlreadyExistsError("checkpoint", PREFIX + checkpoint_id)
        partial = self._root / f".{checkpoint_id}-{secrets.token_hex(8)}"
        partial.mkdir()
        return str(partial.resolve())

    def finish(self, checkpoint_id: str, partial: str, record: CheckpointRecord) -> None:
        try:
            self._finish(checkpoint_id, Path(partial), record)
        except BaseException:
            self.abandon(partial)
            raise

    def abandon(self, partial: str) -> None:
        shutil.rmtree(partial, ignore_errors=True)

    def _finish(self, checkpoint_id: str, partial: Path, record: CheckpointRecord) -> None:
        faults.point("checkpoint.files")
        found = {
            str(path.relative_to(partial)): path.stat().st_size
            for path in partial.rglob("*")
            if path.is_file()
        }
        check_complete(str(partial), found, record)
        if self._durable:
            for path in partial.rglob("*"):
                sync_path(path)
        data = seal(document_of(record), SEAL)
        write_new(partial / RECORD, data, sync=self._durable)
        if self._durable:
            sync_path(partial)
        faults.point("checkpoint.record")
        try:
            os.rename(partial, self._root / checkpoint_id)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            raise AlreadyExistsError("checkpoint", PREFIX + checkpoint_id) from None
        if self._durable:
            sync_path(self._root)
        faults.point("checkpoint.renamed")

    def directory(self, name: str) -> Path:
        """Find the directory of `checkpoints/<id>`. Raises InvalidFieldError, NotFoundError, and
        CheckpointDamagedError for one without its record."""
        directory = self._root / id_of(name)
        if not directory.is_dir():
            raise NotFoundError("checkpoint", name)
        if not (directory / RECORD).is_file():
            raise CheckpointDamagedError(RECORD, f"{name}: file {RECORD!r} is missing")
        return directory

    def location(self, name: str, record: CheckpointRecord) -> str:
        return str(self.directory(name).resolve())

    def files(self, name: str, record: CheckpointRecord) -> AbstractContextManager[Path]:
        return nullcontext(self.directory(name))

    def read(self, name: str, backend: str) -> CheckpointRecord:
        directory = self.directory(name)
        record = decode_record((directory / RECORD).read_bytes(), name, backend)
        for file, entry in (record.files or {}).items():  # ranks that read them keep no state
            check_size(directory / file, file, entry)
        return record
