"""Logs: what callers send cannot begin a line of its own, nor steer a terminal."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import sys
import tty
from collections.abc import Callable, Iterator

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


def _raw_terminal() -> tuple[int, int]:
    reader, writer = pty.openpty()
    tty.setraw(writer)  # a line ends in one byte
    return reader, writer


@pytest.mark.parametrize("open_pair", [os.pipe, _raw_terminal])
def test_a_log_that_nobody_reads_holds_up_nobody_and_tells_what_it_lacks(
    open_pair: Callable[[], tuple[int, int]], output: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = open_pair()
    with os.fdopen(reader, "rb", buffering=0) as log, os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        logs.configure()
        logging.getLogger().handlers[0].setFormatter(logging.Formatter("%(message)s"))
        logged = 0
        for _ in range(2000):
            logging.getLogger("tests").warning("x" * 199)
            logged += 200
        assert os.get_blocking(writer), "others who write there do not expect it"
        os.set_blocking(reader, False)
        found = log.read(1_000_000) or b""
        while b"read again\n" not in found:
            logging.getLogger("tests").warning("read again")
            logged += len("read again\n")
            found += log.read(1_000_000) or b""
        logging.getLogger("tests").warning("the end")
        logged += len("the end\n")
        while not found.endswith(b"the end\n"):  # a terminal takes its time
            found += log.read(1_000_000) or b""
    note = re.search(rb"\n\[(\d+) bytes of the log are left out here.*\]\n", found)
    assert note is not None
    assert len(found) - len(note[0]) + int(note[1]) == logged
