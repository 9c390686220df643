"""Keeps code of users from harming others: in processes of its own, or in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import math
import os
import sys
import threading
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any, TypeVar

import grpc

from services.rollout import metrics
from services.rollout.config import GraderPoolConfig
from services.rollout.environments.environment import (
    PROTOCOL,
    EnvironmentFailedError,
    SettingError,
    TaskError,
    UserCode,
)
from sluice.durable import scratch
from sluice.logs import Output
from sluice.runtime.errors import DeadlineError, ServiceError
from sluice.runtime.processes import end_marked, name_of_signal

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_LINE_BYTES = 64 * 1024 * 1024
MARK = "SLUICE_ENVIRONMENT"  # a variable of processes that belong together
WORKER_MODULE = "services.rollout.environments.worker"
PRINTED_BYTES = 64 * 1024  # of one environment that the log has in `PRINTED_SECONDS`
PRINTED_SECONDS = 60.0
LAST_BYTES = 4096  # of what was left out, told when the process ends: where it was, say
CHUNK_BYTES = 64 * 1024
BLOCKED_SECONDS = 1.0  # a loop that does not turn for so long is logged
STOP_SECONDS = 1.0


class GraderCrashedError(ServiceError):
    """The process of an environment died in the middle of a call."""

    code = grpc.StatusCode.INTERNAL
    reason = "GRADER_CRASHED"


class GraderTimeoutError(DeadlineError):
    """An environment took longer than its deadline; its process was ended."""

    reason = "GRADER_TIMED_OUT"


class _GraderCall:
    """A call of an environment, as it travels, and the time it has."""

    def __init__(self, method: str, seconds: float, arguments: Mapping[str, Any]) -> None:
        self.method, self.seconds = method, seconds
        self.data = json.dumps({"method": method, "seconds": seconds, **arguments}).encode()


class _Printed:
    """Passes on what code of users prints, as much as a log may hold of it."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._began = -math.inf
        self._room = self._left_out = 0
        self._last = b""
        self._log = Output(sys.stderr)

    def take(self, text: bytes) -> None:
        if time.monotonic() - self._began >= PRINTED_SECONDS:
            self.tell()
            self._began, self._room = time.monotonic(), PRINTED_BYTES
        count = 0
        with contextlib.suppress(OSError):  # a full disk must not stop the reading
            count = self._log.put(text[: self._room]) if self._room else 0
        self._room -= count
        self._left_out += len(text) - count
        self._last = (self._last + text[count:])[-LAST_BYTES:]

    def tell(self) -> None:
        """Say how much was left out since the last time, and how it ended."""
        if self._left_out:
            last = self._last.decode(errors="replace")
            message = "%s printed %d bytes more, left out here; the last of them: %s"
            logger.warning(message, self._who, self._left_out, last)
        self._left_out, self._last = 0, b""


class _PrintedFile(io.RawIOBase):
    """Takes what is printed in this process."""

    def __init__(self, printed: _Printed) -> None:
        self._printed = printed

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return sys.stderr.fileno()  # for programs that are started with it

    def write(self, data: ReadableBuffer) -> int:
        text = bytes(data)
        self._printed.take(text)
        return len(text)


@contextlib.contextmanager
def bounded_output() -> Iterator[None]:
    """Has in the log of this process what code of users prints in it, in whatever thread."""
    printed = _Printed("code in this process")
    file = io.BufferedWriter(_PrintedFile(printed))
    text = io.TextIOWrapper(file, "utf-8", "backslashreplace", line_buffering=True)
    try:
        with contextlib.redirect_stdout(text):
            yield
    finally:
        text.flush()
        printed.tell()


class _Grader:
    """Owns one process, which takes one call at a time and says nothing unasked.

    What it and its descendants start is known by a mark in the environment, and their temporary
    files lie in a folder of their own: both end with it, by whatever it ends.
    """

    def __init__(self, path: str, printed: _Printed) -> None:
        self._path, self._printed = path, printed
        self._process: asyncio.subprocess.Process | None = None
        self._listener: asyncio.Task[None] | None = None
        self._printer: asyncio.Task[None] | None = None
        self._cleaner: asyncio.Task[None] | None = None
        self._call_id = ""
        self._reply: asyncio.Future[dict[str, Any]] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it may be asked: it has neither died nor said what makes no sense."""
        if self._process is None or self._listener is None:
            return False
        return self._process.returncode is None and not self._listener.done()

    async def ask(self, call: bytes) -> dict[str, Any]:
        """Starts the process if need be. Raises GraderCrashedError; leaves timing to the caller."""
        process = self._process or await self._start()
        assert process.stdin is not None
        self._call_id, self._reply = uuid.uuid4().hex, asyncio.get_running_loop().create_future()
        with contextlib.suppress(ConnectionError):  # it died: the listener says how
            process.stdin.write(b'{"id": "%b", "call": %b}\n' % (self._call_id.encode(), call))
            await process.stdin.drain()
        if not self.is_alive and not self._reply.done():
            raise GraderCrashedError(f"grader {self._path} died before it was asked")
        return await self._reply

    async def _start(self) -> asyncio.subprocess.Process:
        mark = uuid.uuid4().hex
        # None of asyncio's, whose `wait` is for the end of all that hold it.
        output, error = os.pipe()
        with os.fdopen(error, "wb") as held, contextlib.ExitStack() as stack:
            self._printer = asyncio.create_task(
                self._print(os.fdopen(output, "rb")), name=f"log {self._path}"
            )
            folder = stack.enter_context(scratch("sluice-environment-"))
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", WORKER_MODULE),
                *(self._path, str(os.getpid()), str(PROTOCOL)),
                env={**os.environ, MARK: mark, "TMPDIR": str(folder)},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=held,
                limit=MAX_LINE_BYTES,
                start_new_session=True,  # a Ctrl-C is for the service, which ends it
            )
            self._cleaner = asyncio.create_task(
                _clean_up(self._process, mark, stack.pop_all()), name=f"clean up {self._path}"
            )
        self._listener = asyncio.create_task(self._listen(self._process), name=f"hear {self._path}")
        return self._process

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Takes replies until one is wrong, whether or not a call is open: then none counts."""
        assert process.stdout is not None
        wrong = "wrote more than a line may hold"
        with contextlib.suppress(ValueError):
            while (line := await process.stdout.readline()).endswith(b"\n"):
                if not self._take(line):
                    wrong = f"wrote what answers no call: {line[:100]!r}"
                    break
            else:
                wrong = f"died: {_ending(await process.wait())}"
        if process.returncode is None:
            logger.error("grader %s %s; its process is ended", self._path, wrong)
            process.terminate()
        if self._reply is not None and not self._reply.done():
            code = {} if process.returncode is None else {"exit_code": process.returncode}
            self._reply.set_exception(GraderCrashedError(f"grader {self._path} {wrong}", **code))

    async def _print(self, output: IO[bytes]) -> None:
        """Has what it prints in the log until it and all that it started have ended."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), output
        )
        try:
            while text := await reader.read(CHUNK_BYTES):
                self._printed.take(text)
        finally:
            transport.close()
            self._printed.tell()

    def _take(self, line: bytes) -> bool:
        """Whether it answers the open call, or one that was cancelled while it did."""
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if self._reply is None or not isinstance(reply, dict) or reply.get("id") != self._call_id:
            return False
        if self._reply.cancelled():
            return True
        if self._reply.done():
            return False
        self._reply.set_result(reply)
        return True

    async def end(self) -> None:
        """Have the process ended, whatever it does, with all that it started, and reap it."""
        if self._process is None or self._listener is None:
            return
        assert self._cleaner is not None
        assert self._printer is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()  # its keeper
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:  # the keeper is stopped, say
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        await self._cleaner
        self._listener.cancel()
        await asyncio.wait([self._printer], timeout=STOP_SECONDS)  # what was on its way
        self._printer.cancel()
        await asyncio.gather(self._listener, self._printer, return_exceptions=True)


def _ending(code: int) -> str:
    """Says how a process ended by its code."""
    return f"exit status {code}" if code >= 0 else name_of_signal(-code)


async def _clean_up(
    process: asyncio.subprocess.Process, mark: str, files: contextlib.ExitStack
) -> None:
    """Once it has ended: its keeper may have been killed before it could do it."""
    await process.wait()
    await asyncio.to_thread(end_marked, MARK, mark)
    await asyncio.to_thread(files.close)


class GraderPool:
    """Owns up to `size` processes of one environment, and `max_slow` with slow calls beside them.

    Started when needed, ended when idle.
    """

    def __init__(self, name: str, path: str, config: GraderPoolConfig) -> None:
        self._name, self._path, self._config = name, path, config
        self._printed = _Printed(f"environment {path}")
        self._slots = asyncio.Semaphore(config.size)
        self._slow_count = 0  # calls that have given their slot away
        self._overdue: list[Callable[[], None]] = []  # of calls that may not yet, in order
        self._idle: list[_Grader] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._reaper: asyncio.TimerHandle | None = None

    async def call(self, method: str, settings: Mapping[str, Any], **arguments: Any) -> Any:
        """Returns the value the environment answered.

        A crash or a timeout is tried again on another process, `attempts` times in all.
        Raises SettingError, TaskError, GraderCrashedError, GraderTimeoutError and
        EnvironmentFailedError. Cancelling ends the process that was at it.
        """
        config = self._config
        opening = _GraderCall("open", config.start_seconds, {"settings": settings})
        call = _GraderCall(method, config.timeout_seconds, {"settings": settings, **arguments})
        for attempt in range(1, self._config.attempts + 1):
            try:
                return _reply_value(self._name, await self._ask(opening, call))
            except (GraderCrashedError, GraderTimeoutError) as error:
                metrics.WORKERS_LOST.labels(error.reason.lower()).inc()
                logger.warning("%s, attempt %d: %s", self._name, attempt, error)
                if attempt == self._config.attempts:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        """End all processes; no call runs any more."""
        if self._reaper is not None:
            self._reaper.cancel()
        self._end_idle()
        await asyncio.gather(*self._ending)

    async def _ask(self, opening: _GraderCall, call: _GraderCall) -> dict[str, Any]:
        async with self._slot():
            while self._idle and not self._idle[-1].is_alive:
                self._end(self._idle.pop())
            calls = [call] if self._idle else [opening, call]  # an import has its own deadline
            grader = self._idle.pop() if self._idle else _Grader(self._path, self._printed)
            reply: dict[str, Any] = {"error": "crash"}
            try:
                for each in calls:
                    reply = {"error": "crash"}
                    async with asyncio.timeout(each.seconds):
                        reply = await grader.ask(each.data)
                    if "error" in reply:
                        break
            except TimeoutError:
                raise GraderTimeoutError(
                    f"{self._name}: `{each.method}` did not answer in {each.seconds:g} s; "
                    "the log of its episode worker has where it was",
                    seconds=each.seconds,
                ) from None
            finally:  # also when the caller is cancelled
                if reply.get("error") == "crash":
                    self._end(grader)
                else:
                    self._keep(grader)
            return reply

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """Takes one of `size` slots; a slow call gives it away, so that quick ones go on."""
        await self._slots.acquire()
        gave_away = False

        def give_away() -> None:
            nonlocal gave_away
            if self._slow_count == self._config.max_slow:
                self._overdue.append(give_away)
                return
            gave_away = True
            self._slow_count += 1
            self._slots.release()

        timer = asyncio.get_running_loop().call_later(self._config.slow_seconds, give_away)
        try:
            yield
        finally:
            timer.cancel()
            if not gave_away:
                if give_away in self._overdue:
                    self._overdue.remove(give_away)
                self._slots.release()
            else:
                self._slow_count -= 1
                if self._overdue:
                    self._overdue.pop(0)()

    def _keep(self, grader: _Grader) -> None:
        self._idle.append(grader)
        if self._reaper is not None:
            self._reaper.cancel()
        loop = asyncio.get_running_loop()
        self._reaper = loop.call_later(self._config.idle_seconds, self._end_idle)

    def _end_idle(self) -> None:
        while self._idle:
            self._end(self._idle.pop())

    def _end(self, grader: _Grader) -> None:
        task = asyncio.ensure_future(grader.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _reply_value(name: str, reply: Mapping[str, Any]) -> Any:
    kind = reply.get("error")
    if kind is None:
        return reply["value"]
    if kind == "setting":
        raise SettingError(reply["key"], reply["message"])
    if kind == "task":
        raise TaskError(reply["key"], reply["message"])
    raise EnvironmentFailedError(f"{name}: {reply['message']}", environment=name)


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

    async def run(self, function: Callable[[], Awaitable[T]]) -> T:
        """Returns what the coroutine does. Cancelling returns at once, whatever the coroutine does.

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
            runner.run(self._stopped.wait())

    async def _guarded(self, function: Callable[[], Awaitable[T]]) -> T:
        with UserCode(self._name):
            return await function()

    async def _watch(self) -> None:
        """While calls are open: log, once each time, where the function blocks."""
        is_logged = False
        while self._open_count:
            turn = asyncio.ensure_future(on_loop(self._loop, asyncio.sleep(0)))
            _, pending = await asyncio.wait([turn], timeout=self._blocked_seconds)
            if pending:
                turn.cancel()
                if not is_logged:
                    logger.warning(
                        "%s blocks, so that its other episodes wait: %s", self._name, self._where()
                    )
            else:
                await asyncio.sleep(self._blocked_seconds)
            is_logged = bool(pending)

    def _where(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return "ended"
        last = traceback.extract_stack(frame)[-1]
        return f"{last.filename}:{last.lineno} in {last.name}"


async def on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Returns what `work` does, run on the loop of another thread or on this one."""
    if asyncio.get_running_loop() is loop:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
