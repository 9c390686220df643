"""How long a test waits for what has to happen: a limit that only a hang reaches.

Minutes, however fast a thing is on a quiet machine: a run beside forty other processes is slow
and not wrong. pytest's own limit (pyproject.toml) is a few of these.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

PATIENCE = 600.0  # seconds


def growing(seconds: float) -> Iterator[float]:
    """Deadlines that are to pass, each four times the one before, up to PATIENCE.

    What has to happen before one of them does, happens before a later one at the latest.
    """
    while seconds < PATIENCE:
        yield seconds
        seconds *= 4


async def told_late(
    call: Callable[[float], Awaitable[object]], error: type[Exception], seconds: float
) -> str:
    """What `error` says of a call with a deadline, once something was answered before that.

    Of deadlines from `seconds` on the first that is long enough.
    """
    told = ""
    for deadline in growing(seconds):
        try:
            await call(deadline)
        except error as late:
            told = str(late)
        else:
            raise AssertionError("no deadline has passed")
        if "no answer" not in told:
            break
    return told
