"""A router in a process of its own, and others beside it, that a test may kill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.patience import PATIENCE

TTL = 1.5


class Processes:
    """Subprocesses of a test, and the router among them."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "address.json"
        self._started: list[asyncio.subprocess.Process] = []
        self.address = ""

    async def spawn(self, *arguments: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        self._started.append(process)
        return process

    async def router(self, ttl: float = TTL) -> asyncio.subprocess.Process:
        """Starts one, on the port of the one before."""
        self._file.unlink(missing_ok=True)
        port = self.address.rpartition(":")[2] or "0"
        process = await self.spawn(
            *("-m", "services.router", "--server.address_file", str(self._file)),
            *("--server.port", port, "--tick_seconds", "0.1"),
            *("--default_pool.client_ttl", str(ttl), "--default_pool.engine_ttl", str(ttl)),
        )
        async with asyncio.timeout(PATIENCE):
            while not self._file.exists():
                assert process.returncode is None
                await asyncio.sleep(0.02)
        self.address = json.loads(self._file.read_text())["address"]
        return process

    async def kill(self, process: asyncio.subprocess.Process) -> None:
        process.send_signal(signal.SIGKILL)
        await process.wait()

    async def close(self) -> None:
        for process in self._started:
            if process.returncode is None:
                await self.kill(process)


@asynccontextmanager
async def processes(directory: Path) -> AsyncIterator[Processes]:
    started = Processes(directory)
    try:
        yield started
    finally:
        await started.close()
