"""Logs: what callers send cannot begin a line of its own, nor steer a terminal."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from sluice import logs

FORGED = "x\n2026-01-01 00:00:00,000 ERROR sluice [-] forged\r\x1b[2J\0\u2028\x9b"


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    """What is logged as a process would."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    logs.configure()
    (handler,) = root.handlers
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_record_is_one_line(output: io.StringIO) -> None:
    logging.getLogger("tests").warning("batch: %s", FORGED)
    (line,) = output.getvalue().splitlines()
    assert line.endswith(r"ERROR sluice [-] forged\r\x1b[2J\x00\u2028\x9b")


def test_a_traceback_is_indented_under_its_record(output: io.StringIO) -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        logging.getLogger("tests").exception("it failed")
    first, *rest = output.getvalue().splitlines()
    assert first.endswith("it failed")
    assert len(rest) >= 3
    assert all(line.startswith("  ") for line in rest)
    assert not any(sign in line for line in rest for sign in "\0\x1b\r")
