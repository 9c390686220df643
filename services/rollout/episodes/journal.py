"""What is durable of a rollout: which groups are finished, and where.

<store>/rollouts/<request id>.open      a rollout that may go on
<store>/rollouts/<request id>.settled   one in which every group is settled

JSON lines: the first holds the digest of the request, each further one a finished group and its
blob, or groups that were cancelled. Any worker of the store can go on from it. The blobs are
pinned by `rollout/<request id>` until retention removes the journal.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from sluice import faults
from sluice.durable import sync_path
from sluice.samples.blobs import BlobReference, BlobStore

OPEN, SETTLED = ".open", ".settled"
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
        for path in (self._path(request_id), self._settled_path(request_id)):
            if path.exists() and (progress := _read(path)) is not None:
                return progress
        self._append(request_id, [{"body": body, "created": time.time()}])
        if self._sync:
            sync_path(self._root)
        faults.point("journal.opened")
        return Progress(body)

    def record(self, request_id: str, groups: Mapping[str, BlobReference]) -> None:
        """Pin the blobs of finished groups and make them known; durable when it returns."""
        self._blobs.pin(_owner(request_id), [blob.digest for blob in groups.values()])
        lines = [
            {"group": group_id, "blob": blob.digest, "size": blob.size}
            for group_id, blob in groups.items()
        ]
        self._append(request_id, lines)
        faults.point("journal.recorded")

    def cancel(self, request_id: str, group_ids: Iterable[str]) -> None:
        """Remember that these groups are not to be run again."""
        self._append(request_id, [{"cancelled": sorted(group_ids)}])

    def settle(self, request_id: str, keep: int) -> None:
        """Every group is settled; forget all settled rollouts but the `keep` latest."""
        path = self._path(request_id)
        if path.exists():
            path.rename(self._settled_path(request_id))
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
            self._blobs.unpin(_owner(unquote(name.rpartition(".")[0])))
            (self._root / name).unlink(missing_ok=True)

    def _append(self, request_id: str, lines: Iterable[Mapping[str, Any]]) -> None:
        path = self._path(request_id)
        if not path.exists() and self._settled_path(request_id).exists():
            path = self._settled_path(request_id)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        with path.open("ab", buffering=0) as file:
            file.write(text.encode())
            if self._sync:
                os.fsync(file.fileno())

    def _path(self, request_id: str) -> Path:
        return self._root / f"{quote(request_id, safe='')}{OPEN}"

    def _settled_path(self, request_id: str) -> Path:
        return self._root / f"{quote(request_id, safe='')}{SETTLED}"


def _owner(request_id: str) -> str:
    return f"rollout/{request_id}"


def _read(path: Path) -> Progress | None:
    """None for a journal without a first line. A line that a crash cut off is cut off for good."""
    progress: Progress | None = None
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        os.truncate(path, whole)
    for line in data[:whole].splitlines():
        entry = json.loads(line)
        if progress is None:
            progress = Progress(entry["body"])
        elif "cancelled" in entry:
            progress.cancelled.update(entry["cancelled"])
        else:
            blob = BlobReference(entry["blob"], entry["size"])
            progress.finished.setdefault(entry["group"], blob)
    return progress
