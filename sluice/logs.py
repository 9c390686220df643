"""Log lines that carry the request they belong to."""

from __future__ import annotations

import logging
import re
import sys
from contextvars import ContextVar
from typing import Any

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


def configure(level: str = "INFO") -> None:
    """Log to stderr: time, level, module, request id, message."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_RequestFilter())
    handler.setFormatter(
        _Formatter("%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
