"""Checkpoints in a store that is a bucket.

checkpoints/<id>/<nonce>/<file>     a file of a rank, uploaded by that rank
checkpoints/<id>/checkpoint.json    comes last, once: it names the folder, and makes it a checkpoint
"""

from __future__ import annotations

import contextlib
import secrets
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from services.trainer.checkpoint_files import fetched
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
from sluice import faults
from sluice.bucket import ObjectBucket
from sluice.place import StoreCacheConfig
from sluice.runtime.errors import AlreadyExistsError, NotFoundError
from sluice.weights.manifest import seal


class BucketCheckpoints(Checkpoints):
    """`<url>/<id>/`: complete, or not there. Nothing is ever written over."""

    def __init__(
        self, url: str, cache: StoreCacheConfig, bucket: ObjectBucket | None = None
    ) -> None:
        """`bucket` has deadlines of its own. Raises ValueError for a URL that names no bucket."""
        self._bucket, self._cache = bucket or ObjectBucket(url), cache

    def begin(self, checkpoint_id: str) -> str:
        check_id(checkpoint_id)
        if self._bucket.exists(f"{checkpoint_id}/{RECORD}"):
            raise AlreadyExistsError("checkpoint", PREFIX + checkpoint_id)
        return f"{self._bucket.url}/{checkpoint_id}/{secrets.token_hex(8)}"

    def finish(self, checkpoint_id: str, partial: str, record: CheckpointRecord) -> None:
        faults.point("checkpoint.files")
        folder = partial.removeprefix(f"{self._bucket.url}/")
        found = {
            info.key.removeprefix(f"{folder}/"): info.size for info in self._bucket.list(folder)
        }
        try:
            check_complete(partial, found, record)
        except BaseException:
            self.abandon(partial)
            raise
        record = replace(record, folder=folder.rpartition("/")[2])
        data = seal(document_of(record), SEAL)
        faults.point("checkpoint.record")
        # Should its answer be lost, and the bucket too, nobody knows whether it is one: it stays.
        if not self._bucket.put_once(f"{checkpoint_id}/{RECORD}", data):
            self.abandon(partial)
            raise AlreadyExistsError("checkpoint", PREFIX + checkpoint_id)
        faults.point("checkpoint.renamed")

    def abandon(self, partial: str) -> None:
        folder = partial.removeprefix(f"{self._bucket.url}/")
        with contextlib.suppress(OSError):  # the loop removes what is left
            self._bucket.delete(self._bucket.keys(folder))

    def location(self, name: str, record: CheckpointRecord) -> str:
        return f"{self._bucket.url}/{id_of(name)}/{record.folder}"

    def files(self, name: str, record: CheckpointRecord) -> AbstractContextManager[Path]:
        return fetched(self.location(name, record), record.files or {}, self._cache)

    def read(self, name: str, backend: str) -> CheckpointRecord:
        try:
            data = self._bucket.get(f"{id_of(name)}/{RECORD}")
        except FileNotFoundError:
            raise NotFoundError("checkpoint", name) from None
        return decode_record(data, name, backend)
