"""Log lines that carry the request they belong to."""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="-")


class _RequestFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


def configure(level: str = "INFO") -> None:
    """Log to stderr: time, level, module, request id, message."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_RequestFilter())
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
