"""One server process: started, watched and ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from services.rollout.backends.sglang.commands import Launch
from services.rollout.errors import EngineFailedError

logger = logging.getLogger(__name__)

SHIM = Path(__file__).with_name("launch.py")
POLL_SECONDS = 0.25
PORTS = range(20000, 32000)


def free_port(host: str) -> int:
    """A port that nobody listens at now, of those that no kernel hands out by itself.

    SGLang takes it long after it was chosen. Raises EngineFailedError.
    """
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind((host, port))
            return port
    raise EngineFailedError(f"no free port at {host}")


class ServerProcess:
    """Owns a server and its children, which end with it; also when this process is killed.

    The server leads a process group of its own. Its output goes where this process's errors go.
    """

    def __init__(self, launch: Launch, stop_seconds: float) -> None:
        self.launch = launch
        self._stop_seconds = stop_seconds
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process is None or self._process.returncode is not None

    async def start(self, answers: Callable[[], Awaitable[bool]], seconds: float) -> None:
        """Start and wait until `answers`. Raises EngineFailedError; then nothing is left."""
        command = self.launch.command
        self._process = await asyncio.create_subprocess_exec(
            command[0],
            str(SHIM),
            str(os.getpid()),
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_file(sys.stderr) else asyncio.subprocess.DEVNULL,
            env={**os.environ, **self.launch.environment},
            start_new_session=True,
        )
        logger.info("%s server starts at %s", self.launch.role, self.launch.url)
        deadline = time.monotonic() + seconds
        try:
            while not await answers():
                if self.has_ended:
                    raise EngineFailedError(
                        f"the {self.launch.role} server ended with {self._process.returncode} "
                        "before it answered"
                    )
                if time.monotonic() > deadline:
                    raise EngineFailedError(
                        f"the {self.launch.role} server gave no answer in {seconds:g} s"
                    )
                await asyncio.sleep(POLL_SECONDS)
        except BaseException:
            await self.stop()
            raise

    async def wait(self) -> int:
        """Its exit status, once it has ended."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL to the whole group; returns when the server is gone.

        A scheduler that got the first as well would look crashed, and be mourned for seconds.
        """
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._stop_seconds):
                    await process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # also what has lost its parent
        await process.wait()


def _has_file(stream: object) -> bool:
    """Captured streams of test runners have none."""
    try:
        stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False
    return True
