"""Where a thread of this process stands, in a line: of one that hangs, what it waits for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

CALLERS = 3  # that are named beside the innermost call
LONGEST = 600  # characters
_PASSED_OVER = {"torch", "concurrent", "uvloop"} | sys.stdlib_module_names  # how, and not what


def standing(thread: int | None) -> str:
    """Name the innermost Python call of a thread, by its `ident`, and the nearest callers of it.

    Callers within torch and the standard library are passed over. As `module:line function`; empty
    for a thread that has ended.
    """
    frames = list(_frames(sys._current_frames().get(thread or 0)))
    if not frames:
        return ""
    innermost, *callers = frames
    named = [_text(frame) for frame in callers if _package(frame) not in _PASSED_OVER][:CALLERS]
    called = f", called by {', '.join(named)}" if named else ""
    return (_text(innermost) + called)[:LONGEST]


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _text(frame: FrameType) -> str:
    return f"{_module(frame)}:{frame.f_lineno} {frame.f_code.co_name}"


def _package(frame: FrameType) -> str:
    return _module(frame).partition(".")[0]


def _module(frame: FrameType) -> str:
    """Its name; of the one that was run, as it is imported."""
    spec = frame.f_globals.get("__spec__")
    return str(getattr(spec, "name", None) or frame.f_globals.get("__name__") or "?")
