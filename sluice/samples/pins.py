"""Who still names which blob: one append-only file an owner, cheap to write, replayed to read.

A line is "+<digest>" or "-<digest>" and a newline: 34 bytes, so that a line torn by a crash is
known by the length of the file. The first line, "=<32 random hex digits>", names the file's
life: inode numbers are used again too soon to tell a new file from an old one. A pin is a set
member, not a count: one unpin undoes any number of pins. Callers hold the lock of the store:
shared to append, exclusive to drop or compact, so that no file vanishes under an append.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from sluice.durable import locked, replace_file, sync_path

DIGEST = re.compile(r"[0-9a-f]{32}")
LINE = 34
COMPACT_LINES = 4096  # shorter files are not worth a rewrite


def pin_path(directory: Path, owner: str) -> Path:
    """The file of an owner; any text is a name, except the empty one."""
    if not owner:
        raise ValueError("a pin needs an owner")
    return directory / ("owner." + quote(owner, safe=""))


def owner_of(path: Path) -> str:
    """The owner whose file `path` is."""
    return unquote(path.name.removeprefix("owner."))


def pin_files(directory: Path) -> list[Path]:
    """The files of all owners."""
    return sorted(directory.glob("owner.*"))


def append(path: Path, sign: str, digests: Iterable[str], *, sync: bool) -> None:
    """Append lines of one sign, whole and durable, behind whatever a crash left."""
    lines = "".join(f"{sign}{digest}\n" for digest in digests).encode()
    created = not path.exists()
    with locked(path), path.open("r+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        end = size - size % LINE
        if end != size:
            file.truncate(end)
            file.seek(end)
        if end == 0:
            lines = _birth_line() + lines
        view = memoryview(lines)
        while view:
            view = view[file.write(view) :]
        if sync:
            os.fsync(file.fileno())
    if created and sync:
        sync_path(path.parent)


def _birth_line() -> bytes:
    return f"={secrets.token_hex(16)}\n".encode()


@dataclass
class Replay:
    """The pins of one owner up to an offset of its file."""

    birth: bytes = b""
    offset: int = 0
    live: set[str] = field(default_factory=set)

    def refresh(self, path: Path) -> None:
        """Read what was appended since; everything, if it is another file than before."""
        try:
            with path.open("rb") as file:
                birth = file.read(LINE)
                if birth != self.birth or len(birth) < LINE:
                    self.birth, self.offset, self.live = birth, len(birth), set()
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            self.birth, self.offset, self.live = b"", 0, set()
            return
        whole = len(data) - len(data) % LINE
        for line in data[:whole].decode("ascii").splitlines():
            (self.live.add if line[0] == "+" else self.live.discard)(line[1:])
        self.offset += whole


class PinBoard:
    """The pins of all owners, kept current by reading only what was appended."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._replays: dict[Path, Replay] = {}

    def refresh(self) -> None:
        """Catch up with the files."""
        paths = pin_files(self._directory)
        self._replays = {path: self._replays.get(path) or Replay() for path in paths}
        for path, replay in self._replays.items():
            replay.refresh(path)

    def names(self, digest: str) -> bool:
        """Whether any owner had pinned `digest` at the last refresh."""
        return any(digest in replay.live for replay in self._replays.values())

    def compact(self, temporary: Path, *, sync: bool) -> None:
        """Rewrite files that are mostly history; needs the exclusive lock and a fresh board."""
        for path, replay in self._replays.items():
            lines = replay.offset // LINE
            if lines > COMPACT_LINES and len(replay.live) < lines // 2:
                text = "".join(f"+{digest}\n" for digest in sorted(replay.live))
                data = _birth_line() + text.encode()
                replace_file(path, data, temporary=temporary, sync=sync)
