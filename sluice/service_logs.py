"""Lines of the logs of several processes, in the order of their times, and as they come."""

from __future__ import annotations

import gzip
import heapq
import math
import os
import re
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from sluice.config import ConfigError

SUFFIX = ".log"
READ_BYTES = 1 << 20
LONGEST_LINE = 1 << 16  # what is longer is told in pieces
_TIME = re.compile(rb"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[,.](\d{1,6}))?")
_TURNED = re.compile(r"\.(\d+)(\.gz)?$")  # what logrotate calls older files
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, order=True)
class LogLine:
    """A line and its time: its own, or that of the last line before it that has one."""

    time: float
    name: str
    text: str


class LogSource(ABC):
    """The log of one process, read from its beginning on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._rest, self._time = b"", -math.inf

    @abstractmethod
    def _read(self) -> bytes:
        """Return the bytes that come next; none where there are no more now."""

    def lines(self, *, whole: bool = True) -> list[LogLine]:
        """Return some of the lines that come next; none where there are no more now.

        With `whole` a last line that has no end yet waits for it.
        """
        while True:
            data = self._read()
            if not data and (whole or not self._rest):
                return []
            *ended, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > LONGEST_LINE or not data:
                ended, self._rest = [*ended, self._rest], b""
            if ended:
                return [self._line(part) for text in ended for part in _pieces(text)]

    def _line(self, text: bytes) -> LogLine:
        self._time = max(self._time, _time_of(text) or -math.inf)
        return LogLine(self._time, self.name, text.decode(errors="replace").rstrip("\r"))


class FileLog(LogSource):
    """A file of this host, with the older ones that it was turned into."""

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name)
        self._path, self._older = path, older_files(path)
        self._file: IO[bytes] | None = None

    def _read(self) -> bytes:
        while self._older:
            path = self._older[0]
            try:
                if data := self._part(path):
                    return data
                problem = b""
            except (EOFError, OSError, zlib.error) as error:
                problem = f"{path}: cannot be read on: {error}\n".encode()
            self._older.pop(0)
            self._close()
            if problem:
                return problem
        if data := self._part(self._path):
            return data
        if self._file is not None and self._was_replaced():
            self._close()  # what is there now is another file, or cut off: from its beginning
            return self._part(self._path)
        return b""

    def _part(self, path: Path) -> bytes:
        try:
            if self._file is None:
                self._file = _opened(path)
        except FileNotFoundError:
            return b""
        return self._file.read(READ_BYTES)

    def _was_replaced(self) -> bool:
        assert self._file is not None
        try:
            now = self._path.stat()
        except FileNotFoundError:
            return False
        own = os.fstat(self._file.fileno())
        return (now.st_dev, now.st_ino) != (own.st_dev, own.st_ino) or (
            now.st_size < self._file.tell()
        )

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


class CalledLog(LogSource):
    """A log that somebody else reads: `call(offset, size)` has bytes of it."""

    def __init__(self, name: str, call: Callable[[int, int], bytes]) -> None:
        super().__init__(name)
        self._call, self._offset = call, 0

    def _read(self) -> bytes:
        data = self._call(self._offset, READ_BYTES)
        self._offset += len(data)
        return data


def older_files(path: Path) -> list[Path]:
    """Return what a log was turned into, the oldest first."""
    found = list[tuple[int, Path]]()
    for other in path.parent.glob(f"{_escaped(path.name)}.*"):
        if turned := _TURNED.fullmatch(other.name.removeprefix(path.name)):
            found.append((int(turned[1]), other))
    return [other for _, other in sorted(found, reverse=True)]


def file_logs(directory: Path, names: Sequence[str] = ()) -> dict[str, LogSource]:
    """The logs of a directory by name, or those of `names`, a service or one of its replicas.

    Raises ConfigError for a name that is not there.
    """
    here = sorted(path.name.removesuffix(SUFFIX) for path in directory.glob(f"*{SUFFIX}"))
    return {name: FileLog(name, directory / f"{name}{SUFFIX}") for name in chosen(here, names)}


def chosen(known: Sequence[str], names: Sequence[str]) -> list[str]:
    """Those of `known` that `names` mean: all without any. Raises ConfigError."""
    if not names:
        return list(known)
    found = list[str]()
    for name in names:
        own = [k for k in known if k == name or re.fullmatch(rf"{re.escape(name)}-(rank)?\d+", k)]
        if not own:
            raise ConfigError(f"no log of {name[:100]!r}; there are {', '.join(known) or 'none'}")
        found += own
    return sorted(set(found))


def merged(sources: Iterable[LogSource], since: float) -> Iterator[LogLine]:
    """All lines that are there now, by time; of one process in its own order."""
    for line in heapq.merge(*(_every(source) for source in sources), key=lambda line: line.time):
        if line.time >= since:
            yield line


def _every(source: LogSource) -> Iterator[LogLine]:
    while lines := source.lines():
        yield from lines
    yield from source.lines(whole=False)


def since_time(text: str, now: float | None = None) -> float:
    """The time that `10m`, or `2026-01-31 12:00:00` of this host's clock, means.

    Raises ConfigError.
    """
    if not text:
        return -math.inf
    if span := _SPAN.fullmatch(text):
        return (time.time() if now is None else now) - float(span[1]) * _UNITS[span[2]]
    raw = text.encode(errors="replace")
    found = _time_of(raw) if (match := _TIME.match(raw)) and match.end() == len(raw) else None
    if found is None:
        raise ConfigError(
            f"--since: {text[:100]!r} is neither a span, as 90s, 10m, 2h, 1d, nor a time, as "
            "2026-01-31T12:00:00"
        )
    return found


def _time_of(text: bytes) -> float | None:
    """The time at which a line begins, by this host's clock."""
    if (found := _TIME.match(text)) is None:
        return None
    date, clock, part = (group and group.decode() for group in found.groups())
    try:
        seconds = time.mktime(time.strptime(f"{date} {clock}", "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return None
    return seconds + (float(f"0.{part}") if part else 0.0)


def _opened(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _pieces(text: bytes) -> Iterator[bytes]:
    yield text[:LONGEST_LINE]
    for start in range(LONGEST_LINE, len(text), LONGEST_LINE):
        yield text[start : start + LONGEST_LINE]


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
