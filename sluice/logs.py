"""Log lines that carry the request they belong to."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import stat
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TextIO

STALL_SECONDS = 1.0  # that a log which takes nothing more holds up who writes to it, once

request_id: ContextVar[str] = ContextVar("request_id", default="-")


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with control characters and lone surrogates written as escapes, on one line."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def printable_lines(text: str) -> str:
    """The same of a text of several lines."""
    return "\n".join(map(printable, text.split("\n")))


class _Formatter(logging.Formatter):
    """A record is one line but for a traceback: what callers send can neither begin nor end one."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join("  " + printable(line) for line in lines)


class _RequestFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


class Output:
    """A log. A terminal or pipe that nobody reads holds up those who write to it once only.

    What it did not take is left out, and how much that was is told as soon as it takes more.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_stalled = False
        self._left_out = 0

    def write(self, text: str) -> None:
        """Write a part of the log. Raises OSError."""
        if self._left_out:
            note = f"\n[{self._left_out} bytes of the log are left out here: nobody read it]\n"
            if self.put(note.encode()) == len(note):
                self._left_out = 0
        data = text.encode(self._stream.encoding, "backslashreplace")
        self._left_out += len(data) - self.put(data)

    def flush(self) -> None:
        """Does nothing: nothing is kept back."""

    def put(self, data: bytes) -> int:
        """Writes bytes; returns how many were taken. Raises OSError."""
        end = time.monotonic() + (0.0 if self._is_stalled else STALL_SECONDS)
        taken = 0
        with _unblocked(self._stream.fileno()) as file:
            poll = select.poll()
            poll.register(file, select.POLLOUT)
            while taken < len(data) and poll.poll(max(0.0, end - time.monotonic()) * 1000):
                try:  # what a pipe that has room takes at once
                    taken += os.write(file, data[taken : taken + select.PIPE_BUF])
                except BlockingIOError:  # another process was faster
                    if time.monotonic() >= end:
                        break
                    time.sleep(0.001)
        self._is_stalled = taken < len(data)
        return taken


@contextlib.contextmanager
def _unblocked(file: int) -> Iterator[int]:
    """The same terminal or pipe, opened anew: that it is not waited for is seen by nobody else."""
    own = file
    mode = os.fstat(file).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        with contextlib.suppress(OSError):  # a terminal of another user, no /proc
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
            own = os.open(f"/proc/self/fd/{file}", flags)
    try:
        yield own
    finally:
        if own != file:
            os.close(own)


def has_file(stream: object) -> bool:
    """Whether a stream has a descriptor; captured ones of test runners have none."""
    try:
        stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False
    return True


def configure(level: str = "INFO") -> None:
    """Log to stderr: time, level, module, request id, message."""
    handler = logging.StreamHandler(Output(sys.stderr) if has_file(sys.stderr) else sys.stderr)
    handler.addFilter(_RequestFilter())
    handler.setFormatter(
        _Formatter("%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
