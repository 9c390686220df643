"""Journals of rollouts in a store that is a bucket.

rollouts/<request id>/body                digest of the request; written by whoever is first
rollouts/<request id>/groups/<group id>   where a finished group is; the first one counts
rollouts/<request id>/cancelled/<nonce>   groups that were cancelled
rollouts/<request id>/settled             every group of it is settled

A bucket appends to nothing, and so each line of a journal is an object, its xxh3 after a tab.
`body` is removed last: a folder without one is no journal, and what is left in it goes with the
next.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from urllib.parse import unquote

from services.rollout.episodes.spool import (
    ABANDONED_SECONDS,
    MALFORMED,
    OWNER,
    Journals,
    SpoolProgress,
    add_line,
    owner_of,
)
from sluice import faults
from sluice.bucket import ObjectBucket, ObjectInfo, each_of, quoted
from sluice.durable import decode_line, encode_line
from sluice.samples.blobs import BlobReference, Blobs

logger = logging.getLogger(__name__)

FOLDER = "rollouts"
BODY, SETTLED, GROUPS, CANCELLED = "body", "settled", "groups", "cancelled"
STRAY_SECONDS = 600.0  # after which a folder without a body is nobody's


class BucketJournals(Journals):
    """Keeps the journals of a bucket. Calls block on the network."""

    def __init__(self, url: str, blobs: Blobs, bucket: ObjectBucket | None = None) -> None:
        """`bucket` has deadlines of its own. Raises ValueError for a URL that names no bucket."""
        self._bucket, self._blobs = bucket or ObjectBucket(url), blobs

    def open(self, request_id: str, body: str) -> SpoolProgress:
        key = f"{_folder(request_id)}/{BODY}"
        line = encode_line({"body": body, "created": time.time()})
        self._bucket.put_once(key, line)
        faults.point("journal.opened")
        if not (progress := self._read(request_id)).body:  # it is damaged
            self._bucket.put(key, line)
            progress.body = body
        return progress

    def _read(self, request_id: str) -> SpoolProgress:
        progress, folder = SpoolProgress(""), _folder(request_id)
        keys = [k for k in self._bucket.keys(folder) if k != f"{folder}/{SETTLED}"]
        for key, data in zip(keys, each_of(self._bucket.get, keys), strict=True):
            kind, _, name = key.removeprefix(f"{folder}/").partition("/")
            try:
                line = decode_line(data)
                add_line(progress, {"group": unquote(name), **line} if kind == GROUPS else line)
            except MALFORMED as error:
                logger.warning("%s/%s is left out: %s", self._bucket.url, key, error)
        return progress

    def record(self, request_id: str, groups: Mapping[str, BlobReference]) -> None:
        self._blobs.pin(owner_of(request_id), [blob.digest for blob in groups.values()])
        lines = {
            f"{_folder(request_id)}/{GROUPS}/{quoted(group_id)}": encode_line(
                {"group": group_id, "blob": blob.digest, "size": blob.size}
            )
            for group_id, blob in groups.items()
        }
        each_of(lambda key: self._bucket.put_once(key, lines[key]), lines)
        if not self._bucket.exists(f"{_folder(request_id)}/{BODY}"):
            self._bucket.delete(lines)
            raise FileNotFoundError(_folder(request_id))
        faults.point("journal.recorded")

    def cancel(self, request_id: str, group_ids: Iterable[str]) -> None:
        if self._bucket.exists(f"{_folder(request_id)}/{BODY}"):
            key = f"{_folder(request_id)}/{CANCELLED}/{secrets.token_hex(8)}"
            self._bucket.put(key, encode_line({"cancelled": sorted(group_ids)}))

    def settle(self, request_id: str, keep: int) -> None:
        if self._bucket.exists(f"{_folder(request_id)}/{BODY}"):
            self._bucket.put_once(f"{_folder(request_id)}/{SETTLED}", b"")
            faults.point("journal.settled")
        journals = defaultdict[str, dict[str, ObjectInfo]](dict)
        for info in self._bucket.list(FOLDER):
            _, name, line = info.key.split("/", 2)
            journals[name][line] = info
        settled = sorted(
            (lines[SETTLED].modified, name)
            for name, lines in journals.items()
            if SETTLED in lines and BODY in lines
        )
        gone = {name for _, name in settled[: max(0, len(settled) - keep)]}
        for name, lines in journals.items():
            youngest = min(info.age for info in lines.values())
            if youngest > (ABANDONED_SECONDS if BODY in lines else STRAY_SECONDS):
                gone.add(name)
        for name in gone:
            self._bucket.delete(info.key for line, info in journals[name].items() if line != BODY)
            self._bucket.delete([f"{FOLDER}/{name}/{BODY}"])
        self._unpin_forgotten()

    def _unpin_forgotten(self) -> None:
        """Unpin what belongs to no journal; the owners first, so that a new one is not missed."""
        owners = [owner for owner in self._blobs.owners() if owner.startswith(OWNER)]
        left = {unquote(name) for name in self._bucket.folders(FOLDER)}
        for owner in owners:
            if owner.removeprefix(OWNER) not in left:
                self._blobs.unpin(owner)


def _folder(request_id: str) -> str:
    return f"{FOLDER}/{quoted(request_id)}"
