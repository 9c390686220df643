"""What the caller of a conversion watches and says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from sluice.weights.errors import CancelledConversionError
from sluice.weights.manifest import digest_bytes

if TYPE_CHECKING:
    from sluice.weights.convert.pieces import Content


@dataclass
class ConversionProgress:
    """How far a conversion is; written by its threads, read by anyone."""

    total_bytes: int = 0
    total_tensors: int = 0
    done_bytes: int = 0
    done_tensors: int = 0
    resumed_bytes: int = 0  # of done_bytes: found written by an earlier run
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float | None:
        """At the rate so far; None before there is one."""
        made = self.done_bytes - self.resumed_bytes
        if made <= 0:
            return None
        return (time.monotonic() - self.started) * (self.total_bytes - self.done_bytes) / made


@dataclass(frozen=True)
class Control:
    """What the caller watches and says. `stop` ends the work before the next piece.

    With `keep` set as well, what is written stays for a later run to go on from.
    """

    progress: ConversionProgress = field(default_factory=ConversionProgress)
    stop: threading.Event = field(default_factory=threading.Event)
    keep: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raises CancelledConversionError after `stop`."""
        if self.stop.is_set():
            raise CancelledConversionError("the conversion was stopped")


JOURNAL = "journal.jsonl"
FORMAT = 1


class Journal:
    """Digests by group name and task name; `fingerprint` names the work that they belong to."""

    def __init__(self, directory: Path, fingerprint: str) -> None:
        self._path = directory / JOURNAL
        self._fingerprint = fingerprint
        self._lock = threading.Lock()
        self.finished, size = self._read()
        self._file = self._path.open("ab", buffering=0)
        self._file.truncate(size)  # what follows a line that was cut short would not be read
        if not size:
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
    """Return whether a staging directory was made for this work."""
    try:
        with (directory / JOURNAL).open() as file:
            line = file.readline()
        return bool(json.loads(line.rpartition("\t")[0])["fingerprint"] == fingerprint)
    except (OSError, ValueError, KeyError, TypeError):
        return False


@dataclass(frozen=True)
class TensorTask:
    """A tensor, or a part of one, that goes to `offset` of file `file`. Names are unique."""

    name: str
    content: Content
    file: str
    offset: int


@dataclass(frozen=True)
class Group:
    """Tensors that are made of the same tensors: the unit of work and of the journal."""

    name: str
    tasks: tuple[TensorTask, ...]

    @property
    def size(self) -> int:
        """Bytes that it writes."""
        return sum(task.content.size for task in self.tasks)

    @property
    def working_bytes(self) -> int:
        """Memory that it needs beyond a buffer."""
        return max((task.content.working_bytes for task in self.tasks), default=0)


@dataclass(frozen=True)
class Check:
    """Bytes of the source, or of the origin, whose digest is known; `place` names which.

    is_file: they are a whole file, `name`, and no tensor.
    """

    name: str
    content: Content
    digest: str
    place: str
    is_file: bool = False


@dataclass(frozen=True)
class OutputFile:
    """A file of known size; `frames` are the bytes at offsets that are no tensor."""

    name: str
    size: int
    frames: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True)
class ConversionReport:
    """What became of the tensors of a conversion, by HF name.

    `converted` came through the rules, `copied` from the origin, `skipped` were left out with
    the reason, `conflicting` are in both and differ: the converted one was kept. `notes` say what
    is odd about the source, or about how the target had to be written.
    """

    converted: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    conflicting: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Work:
    """All of a conversion: bytes of tensors, then `finish` in the directory, then small `texts`.

    `checks` are made first or on the way.
    """

    files: tuple[OutputFile, ...]
    groups: tuple[Group, ...]
    texts: Mapping[str, bytes]
    report: ConversionReport
    checks: tuple[Check, ...] = ()
    finish: Callable[[Path], None] = lambda directory: None

    @property
    def size(self) -> int:
        """Bytes of tensors."""
        return sum(group.size for group in self.groups)

    @property
    def largest_group(self) -> int:
        return max((group.size for group in self.groups), default=0)
