"""What is durable of a rollout: which groups are finished, and where.

<store>/rollouts/<request id>.open      a rollout that may go on
<store>/rollouts/<request id>.settled   one in which every group is settled

JSON lines: the first holds the digest of the request, each further one a finished group and its
blob, or groups that were cancelled. Any worker of the store can go on from it. The blobs are
pinned by `rollout/<request id>` until retention removes the journal.

Nobody locks a journal: only `open` creates one, lines are one write at its end, and a rename
takes the lines of those who write just then along. Each write begins on a new line, so that one
which a crash or a full disk cut off spoils no other; its groups are sampled again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sluice import faults
from sluice.durable import sync_path
from sluice.samples.blobs import BlobReference, BlobStore

OPEN, SETTLED = ".open", ".settled"
OWNER = "rollout/"  # of pins; the request id follows
ABANDONED_SECONDS = 7 * 24 * 3600.0  # an unsettled rollout nobody came back for


@dataclass
class Progress:
    """What a journal says."""

    body: str  # digest of the request
    finished: dict[str, BlobReference] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)


class Journals:
    """The journals of a store. Calls block on the disk."""

    def __init__(self, store: Path, blobs: BlobStore, *, sync: bool) -> None:
        self._root = store / "rollouts"
        self._root.mkdir(parents=True, exist_ok=True)
        self._blobs, self._sync = blobs, sync

    def open(self, request_id: str, body: str) -> Progress:
        """What is known of a rollout; begins its journal if it is new."""
        while (progress := self._read(request_id)) is None:  # whoever is first, its line counts
            line = {"body": body, "created": time.time()}
            self._write(self._path(request_id), [line], os.O_CREAT)
            if self._sync:
                sync_path(self._root)
            faults.point("journal.opened")
        return progress

    def record(self, request_id: str, groups: Mapping[str, BlobReference]) -> None:
        """Pin the blobs of finished groups and make them known; durable when it returns.

        Raises FileNotFoundError when the rollout has been forgotten; `settle` unpins the blobs.
        """
        self._blobs.pin(_owner(request_id), [blob.digest for blob in groups.values()])
        lines = [
            {"group": group_id, "blob": blob.digest, "size": blob.size}
            for group_id, blob in groups.items()
        ]
        self._append(request_id, lines)
        faults.point("journal.recorded")

    def cancel(self, request_id: str, group_ids: Iterable[str]) -> None:
        """Remember that these groups are not to be run again."""
        with contextlib.suppress(FileNotFoundError):  # forgotten: nobody runs any of them again
            self._append(request_id, [{"cancelled": sorted(group_ids)}])

    def settle(self, request_id: str, keep: int) -> None:
        """Every group is settled; forget all settled rollouts but the `keep` latest."""
        with contextlib.suppress(FileNotFoundError):  # another worker has settled it
            self._path(request_id).rename(self._settled_path(request_id))
            faults.point("journal.settled")
        settled: list[tuple[float, str]] = []
        abandoned: list[tuple[float, str]] = []
        for entry in os.scandir(self._root):
            try:
                age = (entry.stat().st_mtime, entry.name)
            except FileNotFoundError:  # settled or forgotten by another call meanwhile
                continue
            (settled if entry.name.endswith(SETTLED) else abandoned).append(age)
        oldest = time.time() - ABANDONED_SECONDS
        gone = [name for modified, name in abandoned if modified < oldest]
        gone += [name for _, name in sorted(settled)[: max(0, len(settled) - keep)]]
        for name in gone:
            (self._root / name).unlink(missing_ok=True)
        self._unpin_forgotten()

    def _unpin_forgotten(self) -> None:
        """Unpin what belongs to no journal.

        The journals go first, so that no record pins behind this and is lost with its journal.
        What a crash or a late record leaves pinned, the next call finds.
        """
        for owner in self._blobs.owners():
            request_id = owner.removeprefix(OWNER)
            paths = (self._path(request_id), self._settled_path(request_id))  # as it is renamed
            if owner.startswith(OWNER) and not any(path.exists() for path in paths):
                self._blobs.unpin(owner)

    def _append(self, request_id: str, lines: Iterable[Mapping[str, Any]]) -> None:
        try:
            self._write(self._path(request_id), lines)
        except FileNotFoundError:  # it is only ever renamed this way round
            self._write(self._settled_path(request_id), lines)

    def _write(self, path: Path, lines: Iterable[Mapping[str, Any]], flags: int = 0) -> None:
        data = "".join(f"\n{json.dumps(line)}" for line in lines).encode()
        file = os.open(path, os.O_WRONLY | os.O_APPEND | flags, 0o666)
        try:
            if os.write(file, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            if self._sync:
                os.fsync(file)
        finally:
            os.close(file)

    def _read(self, request_id: str) -> Progress | None:
        for path in (self._path(request_id), self._settled_path(request_id)):
            with contextlib.suppress(FileNotFoundError):
                if (progress := _read(path)) is not None:
                    return progress
        return None

    def _path(self, request_id: str) -> Path:
        return self._root / f"{quote(request_id, safe='')}{OPEN}"

    def _settled_path(self, request_id: str) -> Path:
        return self._root / f"{quote(request_id, safe='')}{SETTLED}"


def _owner(request_id: str) -> str:
    return OWNER + request_id


def _read(path: Path) -> Progress | None:
    """None for a journal without the line of its request."""
    progress: Progress | None = None
    for line in path.read_bytes().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # cut off, or the empty one before the first
            continue
        if progress is None:
            progress = Progress(entry["body"]) if "body" in entry else None
        elif "cancelled" in entry:
            progress.cancelled.update(entry["cancelled"])
        elif "group" in entry:
            blob = BlobReference(entry["blob"], entry["size"])
            progress.finished.setdefault(entry["group"], blob)
    return progress
