"""Starts the ranks of this host as processes, and serves the port at which all ranks report."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from contextlib import ExitStack

import grpc

from services.trainer.config import TrainerConfig
from services.trainer.controller.incarnation import WorkerServicer
from services.trainer.controller.rank_group import Launcher, OnExit, RankGroup
from services.trainer.errors import RankLostError
from sluice import platform
from sluice.address import join_address
from sluice.api.trainer.v1 import worker_service_pb2_grpc as pb_grpc
from sluice.durable import scratch
from sluice.runtime.processes import describe_end, memory_kills
from sluice.runtime.security import server_credentials
from sluice.runtime.server import opening, service_interceptor

# Where collectives listen on fixed ports: beyond those that kernels hand out. A host with two
# trainers sets the variables of `Platform.collective_ports` itself.
FIRST_PORT, PORTS_PER_RANK = 61000, 16
OPEN_PORTS = (
    (
        "the trainer's port for its ranks",
        "`ranks.listen_host`, `ranks.listen_port`",
        "certificate and token; over loopback a rank expects the name that the trainer advertises",
    ),
)
CLOSE_SECONDS = 2.0  # in which ranks hear that they may end


class LocalLauncher(Launcher):
    """The rank processes of one incarnation at a time."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._scratch = ExitStack()
        self._folder = self._scratch.enter_context(scratch("sluice-trainer-"))
        self._processes: list[asyncio.subprocess.Process] = []
        self._watchers: list[asyncio.Task[None]] = []

    async def launch(self, generation: int, controller: str, on_exit: OnExit) -> None:
        file, kills = self._folder / "config.json", memory_kills()
        file.write_text(json.dumps(self._config.model_dump(mode="json")))
        # Rank 0 is handed the socket, not a port that somebody else may have taken by then.
        with socket.create_server(("127.0.0.1", 0)) as meeting:
            for rank in range(self._config.ranks.count):
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-m", "services.trainer.rank"),
                    *("--config", str(file), "--controller", controller),
                    *("--incarnation", str(generation), "--parent", str(os.getpid())),
                    env=self._environment(rank, meeting),
                    pass_fds=[meeting.fileno()] if rank == 0 else [],
                    stdin=asyncio.subprocess.DEVNULL,
                )
                self._processes.append(process)
                self._watchers.append(asyncio.create_task(_watch(rank, process, kills, on_exit)))

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
        self._scratch.close()

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


async def _watch(
    rank: int, process: asyncio.subprocess.Process, kills: int, on_exit: OnExit
) -> None:
    how, lacked_memory = describe_end(await process.wait(), kills)
    on_exit(RankLostError(rank, how, lacked_memory=lacked_memory))


class WorkerServer:
    """The gRPC server of the ranks; its security is that of the public one."""

    def __init__(self, config: TrainerConfig, group: RankGroup) -> None:
        security, ranks = config.server.security, config.ranks
        self._server = grpc.aio.server(
            interceptors=[service_interceptor(config.server)],
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", config.server.max_message_bytes),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ],
        )
        pb_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(group.admit), self._server)
        listen = join_address(ranks.listen_host, ranks.listen_port)
        with opening("ranks.listen_port", listen):
            if security.tls is None:
                self.port = self._server.add_insecure_port(listen)
            else:
                self.port = self._server.add_secure_port(listen, server_credentials(security.tls))
        self.address = join_address(ranks.listen_host, self.port)

    async def start(self) -> None:
        await self._server.start()

    async def close(self) -> None:
        await self._server.stop(CLOSE_SECONDS)
