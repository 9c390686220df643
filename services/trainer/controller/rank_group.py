"""Starts the ranks of this host as processes and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from services.trainer import metrics
from services.trainer.config import RanksConfig, TrainerConfig
from services.trainer.controller.rank_incarnation import Build, RankIncarnation, RankLink
from services.trainer.errors import RankError, RankLostError, TrainerFailedError
from sluice import platform
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.api.trainer.v1 import worker_service_pb2_grpc as pb_grpc
from sluice.runtime.errors import InvalidFieldError, LoadingError, ServiceError
from sluice.runtime.interceptors import ServiceInterceptor
from sluice.runtime.security import server_credentials
from sluice.runtime.server import opening
from sluice.runtime.waits import Waits

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


logger = logging.getLogger(__name__)

Restore = Callable[[RankIncarnation], Awaitable[None]]
State = trainer_pb.Trainer.State


class RankGroup:
    """Generations of ranks, one at a time.

    `restore` brings the ranks of a new generation to where the lost ones were; no other
    command runs before it has ended.
    """

    def __init__(
        self,
        config: RanksConfig,
        launcher: LocalLauncher | ExternalLauncher,
        waits: Waits,
        restore: Restore,
    ) -> None:
        self.state: State = trainer_pb.Trainer.STATE_LOADING
        self.failure = ""
        self.restart_count = 0
        self._config, self._launcher, self._waits = config, launcher, waits
        self._restore = restore
        self._generation: RankIncarnation | None = None
        self._last_error: ServiceError | None = None
        self._restarts_in_a_row = 0
        self._supervisor: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._launched = asyncio.Event()  # set while there are ranks, loading or active

    @property
    def generation(self) -> RankIncarnation:
        """The ranks that take commands. Raises while there are none."""
        if self.state == trainer_pb.Trainer.STATE_FAILED:
            raise TrainerFailedError(f"the ranks are gone: {self.failure}", cause=self.failure)
        if self.state != trainer_pb.Trainer.STATE_ACTIVE or self._generation is None:
            raise self._last_error or LoadingError("the ranks are loading the model")
        return self._generation

    @property
    def links(self) -> list[RankLink]:
        links = {} if self._generation is None else self._generation.links
        return [link for _, link in sorted(links.items())]

    def start(self, front: str) -> None:
        """Launch the ranks, which connect to `front` (host:port), and keep them running."""
        self._supervisor = asyncio.create_task(self._supervise(front))

    async def wait_settled(self) -> None:
        """Until the first ranks are active or the group has failed."""
        await self._settled.wait()

    async def wait_given_up(self) -> None:
        """Until no more ranks are launched. Raises what nobody expected to end that."""
        assert self._supervisor is not None, "it has been started"
        await asyncio.shield(self._supervisor)

    async def close(self) -> None:
        """End all ranks."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._generation is not None:
            self._generation.fail(LoadingError("the trainer shuts down"))
            self._generation.close(orderly=True)
        await self._launcher.close()

    async def run_on(self, generation: RankIncarnation, build: Build) -> list[pb.CommandResult]:
        """Run one command on every rank; see Generation.run."""
        return await generation.run(build, self._config.command_timeout)

    def note_progress(self) -> None:
        """An optimizer step was taken: earlier losses of ranks do not count against the next."""
        self._restarts_in_a_row = 0

    async def admit(self, hello: pb.RankHello) -> tuple[RankIncarnation, RankLink]:
        """Take in a rank. Raises InvalidFieldError for one that does not belong here.

        Whoever launches ranks may be faster than the restart here: such ranks wait for it.
        """
        if hello.generation == 0 and self.state != trainer_pb.Trainer.STATE_FAILED:
            generation = self._generation
            before = generation and generation.links.get(hello.rank)
            if generation and before and before.loss:  # it is back before its loss was noted
                generation.fail(before.loss)
                self._launched.clear()
            async with asyncio.timeout(self._config.start_timeout):
                await self._launched.wait()
        generation = self._generation
        if (
            generation is None
            or generation.lost.done()
            or hello.generation not in (0, generation.number)
        ):
            raise InvalidFieldError("generation", f"{hello.generation} has ended")
        if hello.world_size != generation.world_size or not 0 <= hello.rank < hello.world_size:
            raise InvalidFieldError(
                "world_size",
                f"is {hello.world_size}, the trainer has {generation.world_size} ranks",
            )
        if hello.rank in generation.links:
            raise InvalidFieldError("rank", f"{hello.rank} is connected already")
        link = RankLink(hello.rank, hello.process_id, hello.host)
        generation.join(link)
        return generation, link

    async def _supervise(self, front: str) -> None:
        try:
            while True:
                error = await self._live(front)
                self._note_loss(error)
                if self._generation is not None:
                    self._generation.close()
                await self._launcher.end()
                if self._is_final(error):
                    return
                backoff = self._config.restart_backoff * 2**self._restarts_in_a_row
                self._restarts_in_a_row += 1
                self.restart_count += 1
                metrics.RESTARTS.inc()
                await asyncio.sleep(backoff)
        finally:
            self._settled.set()

    async def _live(self, front: str) -> ServiceError:
        """One generation from launch to loss; returns the error that ended it."""
        number = self.restart_count + 1
        generation = RankIncarnation(number, self._config.count, self._config, self._waits)
        self._generation = generation
        self._launched.set()

        def on_exit(rank: int, how: str) -> None:
            generation.fail(RankLostError(rank, how))

        try:
            await self._launcher.launch(number, front, on_exit)
            await self._load(generation)
        except OSError as error:  # the host may lack processes or disk for a while
            loss: ServiceError = LoadingError(f"the ranks cannot be launched: {error}")
        except ServiceError as error:
            loss = error
        else:
            self.state = trainer_pb.Trainer.STATE_ACTIVE
            self._settled.set()
            return await generation.lost
        generation.fail(loss)
        return loss

    async def _load(self, generation: RankIncarnation) -> None:
        timeout = self._config.start_timeout
        with self._waits.waiting(
            "ranks to load the model",
            on=lambda: _unready(generation),
            timeout=timeout,
        ):
            either: list[asyncio.Future[Any]] = [generation.ready, generation.lost]
            await asyncio.wait(
                either,
                timeout=timeout,
                return_when=asyncio.FIRST_COMPLETED,
            )
        if generation.lost.done():
            raise generation.lost.result()
        if not generation.ready.done():
            late = _unready(generation)
            raise RankLostError(int(late[0].split()[1]), f"was not ready within {timeout:g} s")
        await self._restore(generation)

    def _note_loss(self, error: ServiceError) -> None:
        logger.error("the ranks are lost: %s", error)
        self._launched.clear()
        self._last_error = error
        self.failure = str(error)
        self.state = trainer_pb.Trainer.STATE_LOADING

    def _is_final(self, error: ServiceError) -> bool:
        """Too many restarts, or a model that no rank can load."""
        never_ran = self.restart_count == 0 and not self._settled.is_set()
        if self._restarts_in_a_row >= self._config.max_restarts or (
            never_ran and isinstance(error, RankError)
        ):
            self.state = trainer_pb.Trainer.STATE_FAILED
            return True
        return False


def _unready(generation: RankIncarnation) -> list[str]:
    ready = {rank for rank, link in generation.links.items() if link.layout is not None}
    return [f"rank {rank}" for rank in range(generation.world_size) if rank not in ready]


HELLO_SECONDS = 30.0
CLOSE_SECONDS = 2.0  # in which ranks hear that they may end


class WorkerServicer(pb_grpc.WorkerServiceServicer):
    """Connects the streams of ranks with the group."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    async def Follow(
        self,
        request_iterator: AsyncIterator[pb.FollowRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[pb.FollowResponse]:
        async with asyncio.timeout(HELLO_SECONDS):
            first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("event") != "hello":
            raise InvalidFieldError("hello", "must come first")
        generation, link = await self._group.admit(first.hello)
        listener = asyncio.create_task(_listen(generation, link, request_iterator))
        try:
            while (command := await link.outgoing.get()) is not None:
                yield command
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)
            generation.leave(link)


async def _listen(
    generation: RankIncarnation, link: RankLink, events: AsyncIterator[pb.FollowRequest]
) -> None:
    """Take in what the rank says until its stream ends; then end the other direction too."""
    try:
        async for event in events:
            generation.hear(link, event)
    finally:
        link.outgoing.put_nowait(None)


class WorkerServer:
    """The gRPC server of the ranks; its security is that of the public one."""

    def __init__(self, config: TrainerConfig, group: RankGroup) -> None:
        security, ranks = config.server.security, config.ranks
        self._server = grpc.aio.server(
            interceptors=[ServiceInterceptor(security.token())],
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", config.server.max_message_bytes),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ],
        )
        pb_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(group), self._server)
        listen = f"{ranks.listen_host}:{ranks.listen_port}"
        with opening("ranks.listen_port", listen):
            if security.tls is None:
                self.port = self._server.add_insecure_port(listen)
            else:
                self.port = self._server.add_secure_port(listen, server_credentials(security.tls))
        self.address = f"{ranks.listen_host}:{self.port}"

    async def start(self) -> None:
        await self._server.start()

    async def close(self) -> None:
        await self._server.stop(CLOSE_SECONDS)
