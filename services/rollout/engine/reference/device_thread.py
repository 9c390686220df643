"""The one thread that owns the device: takes commands between steps, steps while there is work."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from services.rollout.engine.reference.core import EngineCore, Outcome
from services.rollout.errors import EngineFailedError
from sluice.runtime.errors import ServiceError

logger = logging.getLogger(__name__)

T = TypeVar("T")
IDLE_SECONDS = 1.0  # longest wait for commands in one go
CLOSE_SECONDS = 60.0  # longest step that close waits for

Outbox = list[tuple[int, Outcome]]


@dataclass(frozen=True, eq=False)
class Command:
    """`run` on the device thread. A ServiceError goes to `future`, or to the outbox as `key`."""

    run: Callable[[], Any]
    future: Future[Any] | None = None
    key: int = 0
    when_quiet: bool = False


class _Reporting:
    """Hands whatever ends the block, or None, to `report`; nothing gets lost with a thread."""

    def __init__(self, report: Callable[[BaseException | None], object]) -> None:
        self._report = report

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._report(error)
        return True


class DeviceThread:
    """Its methods belong to the event loop; `deliver` and `ended` are called there too."""

    def __init__(
        self,
        core: EngineCore,
        deliver: Callable[[Outbox], None],
        ended: Callable[[EngineFailedError], None],
    ) -> None:
        self._core, self._deliver, self._ended = core, deliver, ended
        self._inbox: queue.SimpleQueue[list[Command]] = queue.SimpleQueue()
        self._unsent: list[Command] = []  # of this turn of the event loop
        self._open: set[Future[Any]] = set()
        self._quiet: list[Command] = []  # device thread only
        self._closing = False
        self._failure: EngineFailedError | None = EngineFailedError("the engine is not started")
        self._finished = asyncio.Event()

    def start(self, loop: asyncio.AbstractEventLoop, threads: int) -> None:
        self._loop, self._failure = loop, None
        # `close` ends it; as a daemon it does not hold up a process that ends without.
        threading.Thread(
            target=self._main, args=(threads,), name="engine-device", daemon=True
        ).start()

    def post(self, run: Callable[[], None], key: int) -> None:
        """Run before the next step; a ServiceError is delivered under `key`."""
        self._send(Command(run, key=key))

    async def call(self, run: Callable[[], T], *, when_quiet: bool = False) -> T:
        """Run before the next step, or when nothing decodes; until then nothing is admitted.

        Cancelling the wait withdraws the command if it has not run.
        """
        future: Future[T] = Future()
        self._send(Command(run, future=future, when_quiet=when_quiet))
        self._open.add(future)
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._open.discard(future)

    async def close(self) -> None:
        """End after the current step; raises TimeoutError when that takes CLOSE_SECONDS."""
        if self._failure is None:
            self._send(Command(self._set_closing))
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._finished.wait()

    def _send(self, command: Command) -> None:
        """Commands of one turn of the event loop travel together, so that requests that come
        together are prefilled together."""
        if self._failure is not None:
            raise self._failure
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(command)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        self._inbox.put(unsent)

    def _end(self, error: BaseException | None) -> None:
        if error is not None:
            logger.error("a step of the engine raised", exc_info=error)
        why = "the engine is closed" if error is None else f"a step raised {error!r}"
        self._failure = EngineFailedError(why)
        for future in self._open:
            if not future.done():
                future.set_exception(self._failure)
        self._ended(self._failure)
        self._finished.set()

    # Below: on the device thread.

    def _main(self, threads: int) -> None:
        with _Reporting(lambda error: self._loop.call_soon_threadsafe(self._end, error)):
            torch.set_num_threads(threads)
            self._run()

    def _run(self) -> None:
        while not self._closing:
            for command in self._take():
                if command.when_quiet:
                    self._quiet.append(command)
                else:
                    self._execute(command)
            self._core.draining = bool(self._quiet)
            if self._core.has_work:
                self._step()
            self._serve_quiet()
            if outbox := self._core.take_outbox():
                self._loop.call_soon_threadsafe(self._deliver, outbox)

    def _step(self) -> None:
        try:
            self._core.step()
        except ServiceError as error:  # of the weights or the requests, not of the engine
            self._core.fail_running(error)

    def _take(self) -> list[Command]:
        try:
            if self._core.has_work:
                batches = [self._inbox.get_nowait()]
            else:
                batches = [self._inbox.get(timeout=IDLE_SECONDS)]
            while not self._inbox.empty():
                batches.append(self._inbox.get_nowait())
        except queue.Empty:
            return []
        return list(itertools.chain.from_iterable(batches))

    def _serve_quiet(self) -> None:
        self._quiet = [c for c in self._quiet if c.future is None or not c.future.cancelled()]
        if self._core.quiet:
            for command in self._quiet:
                self._execute(command)
            self._quiet = []
        self._core.draining = bool(self._quiet)

    def _execute(self, command: Command) -> None:
        future = command.future
        if future is not None and not future.set_running_or_notify_cancel():
            return
        try:
            result = command.run()
        except ServiceError as error:
            if future is not None:
                future.set_exception(error)
            else:
                self._core.outbox.append((command.key, error))
        else:
            if future is not None:
                future.set_result(result)

    def _set_closing(self) -> None:
        self._closing = True
