"""What a conversion has written so far, kept in its staging directory.

A line for every finished group, with the digests of its tensors. A later run trusts a line only
after it has read those bytes again, so the lines need no sync of their own.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from sluice.weights.digest import digest_bytes

JOURNAL = "journal.jsonl"
FORMAT = 1


class Journal:
    """Digests by group name and task name; `fingerprint` names the work that they belong to."""

    def __init__(self, directory: Path, fingerprint: str) -> None:
        self._path = directory / JOURNAL
        self._fingerprint = fingerprint
        self._lock = threading.Lock()
        self.finished, whole = self._read()
        self._file = self._path.open("ab", buffering=0)
        self._file.truncate(whole)  # what follows a line that was cut short would not be read
        if not whole:
            self._append({"format": FORMAT, "fingerprint": fingerprint})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def add(self, group: str, digests: Mapping[str, str]) -> None:
        """Note a group whose bytes are written."""
        self._append({"group": group, "digests": dict(digests)})
        with self._lock:
            self.finished[group] = dict(digests)

    def forget(self, group: str) -> None:
        """Do not count on a group whose bytes are not as they were noted."""
        with self._lock:
            del self.finished[group]

    def _append(self, line: Mapping[str, object]) -> None:
        text = json.dumps(line)
        data = f"{text}\t{digest_bytes(text.encode())}\n".encode()
        with self._lock:
            self._file.write(data)

    def _read(self) -> tuple[dict[str, dict[str, str]], int]:
        """Whole lines of the same work, up to one that a crash cut short, and their bytes."""
        lines, size = [], 0
        try:
            for line in self._path.read_bytes().splitlines(keepends=True):
                text, _, digest = line.rpartition(b"\t")
                if f"{digest_bytes(text)}\n".encode() != digest:
                    break
                lines.append(json.loads(text))
                size += len(line)
        except FileNotFoundError:
            return {}, 0
        first = {"format": FORMAT, "fingerprint": self._fingerprint}
        if not lines or lines[0] != first:
            return {}, 0
        return {line["group"]: line["digests"] for line in lines[1:]}, size


def is_same_work(directory: Path, fingerprint: str) -> bool:
    """Whether a staging directory was made for this work."""
    try:
        with (directory / JOURNAL).open() as file:
            line = file.readline()
        return bool(json.loads(line.rpartition("\t")[0])["fingerprint"] == fingerprint)
    except (OSError, ValueError, KeyError, TypeError):
        return False
