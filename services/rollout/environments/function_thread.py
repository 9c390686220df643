"""Coroutine functions of users on an event loop of their own, so that they stall nobody else."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from services.rollout.environments.failures import UserCode

logger = logging.getLogger(__name__)

T = TypeVar("T")

BLOCKED_SECONDS = 1.0  # a loop that does not turn for so long is told of
STOP_SECONDS = 1.0


class FunctionThread:
    """Runs the calls of one function in a thread, from the first one to `close`.

    A function that blocks holds up its own calls; where it does is logged.
    """

    def __init__(self, name: str, blocked_seconds: float = BLOCKED_SECONDS) -> None:
        self._name, self._blocked_seconds = name, blocked_seconds
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        # A daemon: one that blocks for ever must not keep the process.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        self._open_count = 0
        self._watching: asyncio.Task[None] | None = None

    async def run(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the coroutine returns. Cancelling returns at once, whatever the coroutine does.

        Raises EnvironmentFailedError for what it raises, unless that is typed.
        """
        self._open_count += 1
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), name=f"watch {self._name}")
        try:
            return await on_loop(self._loop, self._guarded(function))
        finally:
            self._open_count -= 1

    async def close(self) -> None:
        """Cancel what runs and end the thread."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        self._loop.call_soon_threadsafe(self._stopped.set)
        await asyncio.to_thread(self._thread.join, STOP_SECONDS)
        if self._thread.is_alive():
            logger.warning("%s blocks still: %s; left behind", self._name, self._where())

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        await self._stopped.wait()

    async def _guarded(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        with UserCode(self._name):
            return await function()

    async def _watch(self) -> None:
        """While calls are open: tell, once each time, where the function blocks."""
        is_told = False
        while self._open_count:
            turn = asyncio.ensure_future(on_loop(self._loop, asyncio.sleep(0)))
            _, pending = await asyncio.wait([turn], timeout=self._blocked_seconds)
            if pending:
                turn.cancel()
                if not is_told:
                    logger.warning(
                        "%s blocks, so that its other episodes wait: %s", self._name, self._where()
                    )
            else:
                await asyncio.sleep(self._blocked_seconds)
            is_told = bool(pending)

    def _where(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return "ended"
        last = traceback.extract_stack(frame)[-1]
        return f"{last.filename}:{last.lineno} in {last.name}"


async def on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, run on the loop of another thread or on this one."""
    if asyncio.get_running_loop() is loop:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
