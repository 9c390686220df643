"""What a command writes to: it may be closed, full, or a terminal that is no more."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, BinaryIO, cast

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class OutputError(Exception):
    """Standard output takes no more; the message says why."""


class _Output(io.FileIO):
    """Loses what a terminal that was closed is written, and what a log on a full disk is: a run has
    its directory to end in. Of results that were asked for it says that they are not all there."""

    _is_over = False

    def write(self, data: ReadableBuffer) -> int:
        if not self._is_over:
            try:
                return super().write(data)
            except OSError as error:
                if error.errno not in (errno.EIO, *FULL):
                    raise  # nobody reads it, say
                if error.errno != errno.EIO and self.fileno() == 1:
                    self._is_over = True  # so that this is said once
                    raise OutputError(f"standard output: {error.strerror}") from None
        return memoryview(data).nbytes


def guard_output() -> None:
    """Have what this process writes be taken as above; and files 0 to 2 be open, for whatever is
    opened next would be taken for one of them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))
        elif type(stream) is io.TextIOWrapper:
            _replace(name, stream)


def _replace(name: str, stream: io.TextIOWrapper) -> None:
    is_buffered = isinstance(stream.buffer, io.BufferedWriter)
    before = stream.buffer.raw if isinstance(stream.buffer, io.BufferedWriter) else stream.buffer
    if isinstance(before, _Output):
        return
    stream.flush()
    raw = _Output(stream.fileno(), "w", closefd=False)
    again = io.TextIOWrapper(
        io.BufferedWriter(raw) if is_buffered else cast(BinaryIO, raw),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    setattr(sys, name, again)
