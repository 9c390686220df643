"""Starts the ranks of this host as processes and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from services.trainer.config import TrainerConfig
from sluice import platform

# Where collectives listen on fixed ports: beyond those that kernels hand out. A host with two
# trainers sets the variables of `Platform.collective_ports` itself.
FIRST_PORT, PORTS_PER_RANK = 61000, 16

OnExit = Callable[[int, str], None]  # rank, how it ended


class LocalLauncher:
    """The rank processes of one generation at a time."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix="sluice-trainer-")
        self._processes: list[asyncio.subprocess.Process] = []
        self._watchers: list[asyncio.Task[None]] = []

    async def launch(self, generation: int, front: str, on_exit: OnExit) -> None:
        """Start all ranks; `on_exit` hears of each one that ends before `end` is called."""
        file = Path(self._folder.name) / "config.json"
        file.write_text(json.dumps(self._config.model_dump(mode="json")))
        # Rank 0 is handed the socket, not a port that somebody else may have taken by then.
        with socket.create_server(("127.0.0.1", 0)) as meeting:
            for rank in range(self._config.ranks.count):
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-m", "services.trainer.rank"),
                    *("--config", str(file), "--front", front),
                    *("--generation", str(generation), "--parent", str(os.getpid())),
                    env=self._environment(rank, meeting),
                    pass_fds=[meeting.fileno()] if rank == 0 else [],
                    stdin=asyncio.subprocess.DEVNULL,
                )
                self._processes.append(process)
                self._watchers.append(asyncio.create_task(_watch(rank, process, on_exit)))

    async def end(self) -> None:
        """Kill what still runs: ranks may hang in a collective and keep nothing of worth."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await asyncio.gather(*(process.wait() for process in self._processes))
        self._processes.clear()
        self._watchers.clear()

    async def close(self) -> None:
        await self.end()
        self._folder.cleanup()

    def _environment(self, rank: int, meeting: socket.socket) -> dict[str, str]:
        """Each rank sees one device, its first; where there are none they are told apart too."""
        ranks, declared = self._config.ranks, platform.declared()
        masked = declared.visible_devices([rank])
        threads = str(self._config.threads)
        return {
            "GLOO_SOCKET_IFNAME": "lo",  # of processes of one host, whatever its name resolves to
            "OMP_WAIT_POLICY": "passive",
            **declared.collective_ports(FIRST_PORT + PORTS_PER_RANK * rank, PORTS_PER_RANK),
            **os.environ,
            **masked,
            "OMP_NUM_THREADS": threads,
            "RANK": str(rank),
            "LOCAL_RANK": "0" if masked else str(rank),
            "WORLD_SIZE": str(ranks.count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(meeting.getsockname()[1]),
            "MASTER_LISTEN_FD": str(meeting.fileno()),  # open in rank 0
        }


class ExternalLauncher:
    """Ranks that torchrun or a cluster starts, and starts again when their streams close."""

    async def launch(self, generation: int, front: str, on_exit: OnExit) -> None:
        """Nothing to start; the ranks come by themselves."""

    async def end(self) -> None:
        """Closed streams end them."""

    async def close(self) -> None:
        await self.end()


async def _watch(rank: int, process: asyncio.subprocess.Process, on_exit: OnExit) -> None:
    code = await process.wait()
    ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    on_exit(rank, ended)
