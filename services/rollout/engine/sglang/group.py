"""The servers of one engine, which are started, watched and ended together.

Without further nodes it is one server on this host, and its encoders. Over several nodes it is
one server of as many processes, of which only the first serves HTTP; with prefill apart it is two
such servers, and a request goes to both.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.sglang.client import SglangClient, SGLangRefusedError
from services.rollout.engine.sglang.nodes import PORT_BLOCK, EngineNodes, NodeOrder, NodeReport
from services.rollout.engine.sglang.pair import PairClient
from services.rollout.engine.sglang.servers import (
    POLL_SECONDS,
    USUAL_START_SECONDS,
    Arguments,
    Launch,
    ServerProcess,
    check_python,
    encoder_arguments,
    engine_arguments,
    environment,
    flags,
    model_arguments,
    with_python,
)
from services.rollout.engine.sglang.weights import read_config
from services.rollout.errors import EngineFailedError
from sluice import platform
from sluice.address import join_address, plain_host
from sluice.ports import free_port
from sluice.runtime.idempotency import all_of, cancel_all
from sluice.runtime.recovery import NotReadyError, wait_until_ready

logger = logging.getLogger(__name__)

REGISTER_SECONDS = 10.0
# of a node's block of ports: HTTP first
BOOTSTRAP_PORT, ENCODERS_PORT, MEETING_PORT = 1, 2, 4  # SGLang takes some above the last, too

OPEN_PORTS = (
    (
        "HTTP of SGLang and of its encoders; only with `engine.backend: sglang`",
        "`engine.sglang.host`, a free port of 20000 to 31999",
        "`engine.sglang.api_key`, where one is set; no TLS: keep it on loopback",
    ),
    (
        "between SGLang's own processes (ZMQ, encoders, NCCL)",
        "what SGLang chooses",
        "nothing: SGLang opens them",
    ),
)


@dataclass(frozen=True)
class NodePlace:
    """Where a process of a server runs: its host, as other nodes reach it, and free ports there.

    `listen` and `http_port` are of its HTTP, where that is elsewhere.
    """

    host: str
    port: int
    listen: str = ""
    http_port: int = 0

    @property
    def url(self) -> str:
        return f"http://{join_address(self.listen or self.host, self.http_port or self.port)}"


def spread(arguments: Arguments, places: Sequence[NodePlace]) -> list[dict[str, Any]]:
    """Returns the arguments of a server's process at each place; several meet at the first."""
    shared: dict[str, Any] = dict(arguments)
    if len(places) > 1:
        meeting = join_address(places[0].host, places[0].port + MEETING_PORT)
        shared |= {"nnodes": len(places), "dist_init_addr": meeting}
    return [
        {
            **shared,
            **({"node_rank": rank} if len(places) > 1 else {}),
            "host": place.listen or place.host,
            "port": place.http_port or place.port,
        }
        for rank, place in enumerate(places)
    ]


def command_lines(
    config: EngineConfig,
    device: str,
    model: Path,
    weight_version: str,
    places: Sequence[NodePlace],
    reading: Arguments,
) -> list[dict[str, Any]]:
    """Returns the arguments of the server's process at each place of an engine.

    The first `nnodes` places decode; where prefill is apart, the others read prompts. `reading`
    is for those that do.
    """
    sglang = config.sglang
    shared = {
        "model_path": model,
        "weight_version": weight_version,
        **model_arguments(config, read_config(model)),
        **engine_arguments(config, device),
    }
    if sglang.prefill is None:
        return spread({**shared, **reading}, places)
    decoding, prompts = places[: sglang.nnodes], places[sglang.nnodes :]
    apart = {"disaggregation_transfer_backend": sglang.transfer_backend}
    decode = {**shared, **apart, "disaggregation_mode": "decode"}
    prefill = {
        **shared,
        **sglang.prefill.server_args,
        **apart,
        "disaggregation_mode": "prefill",
        "disaggregation_bootstrap_port": prompts[0].port + BOOTSTRAP_PORT,
        **reading,
    }
    return [*spread(decode, decoding), *spread(prefill, prompts)]


def _in_url(host: str) -> str:
    """A host as URLs have it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _own_address(host: str) -> dict[str, str]:
    """Tells SGLang under which address it is reached; it would take that of any network."""
    try:
        ipaddress.ip_address(plain_host(host))
    except ValueError:
        return {}
    return {"SGLANG_HOST_IP": plain_host(host)}


class ServerGroup:
    """Owns the servers of one engine. `url` is where the one listens that decodes."""

    def __init__(self, config: EngineConfig) -> None:
        check_python(config.sglang)
        self._config, self._sglang = config, config.sglang
        self._device = platform.declared().device_type
        self._arguments = engine_arguments(config, self._device)
        count = config.sglang.node_count - 1
        self.nodes = EngineNodes(count, config.sglang.silent_seconds) if count else None
        self.incarnation = 0  # of all that runs together, another one at every start
        self._server: ServerProcess | None = None
        self._encoders: list[ServerProcess] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._encoders_url = ""  # where new encoders are made known
        self._prefill: NodePlace | None = None
        self.published_count = 0  # encoders that came back at a new URL
        self.url = ""

    @property
    def pids(self) -> list[int]:
        """Process ids on this host of the server, then of its encoders."""
        processes = [*([self._server] if self._server else []), *self._encoders]
        return [process.pid for process in processes]

    @property
    def _host(self) -> str:
        """Where what others have to reach listens."""
        return self._sglang.node_host if self.nodes is not None else self._sglang.host

    def client(self) -> SglangClient:
        """Returns a client of the servers; the caller closes it."""
        if self._prefill is None:
            return SglangClient(self.url, self._sglang.api_key)
        place = self._prefill
        return PairClient(
            self.url,
            place.url,
            _in_url(place.host),
            place.port + BOOTSTRAP_PORT,
            self._sglang.api_key,
        )

    async def start(self, model: Path, weight_version: str) -> None:
        """Starts everything on fresh ports, or nothing. Raises EngineFailedError or OSError."""
        try:
            reports: Mapping[int, NodeReport] = {}
            if self.nodes is not None:
                reports = await self.nodes.gather(self._sglang.start_seconds)
            # never one that any process before this one may have given
            self.incarnation = max(self.incarnation + 1, time.time_ns() // 1_000_000)
            await all_of(self._add_encoder(model) for _ in range(self._sglang.encoders))
            await self._unless_lost(self._start_servers(model, weight_version, reports))
        except BaseException:
            await self.stop()
            raise
        self._keepers = [
            asyncio.create_task(self._keep(number, model), name=f"encoder {number}")
            for number in range(len(self._encoders))
        ]

    async def wait(self) -> str:
        """Waits until the server here has ended, or a node is lost; says which."""
        assert self._server is not None
        waiting: list[asyncio.Task[Any]] = [asyncio.create_task(self._server.wait())]
        if self.nodes is not None:
            waiting.append(asyncio.create_task(self.nodes.lost(self.incarnation)))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if waiting[0].done():
                return f"SGLang ended with {waiting[0].result()}"
            return str(waiting[1].result())
        finally:
            await cancel_all(waiting)

    async def kill_server(self) -> None:
        """Ends the server here alone, and at once; `wait` returns."""
        if self._server is not None:
            await self._server.kill()

    async def kill(self) -> None:
        """Ends everything at once, on all nodes."""
        await self._end(ServerProcess.kill)

    async def stop(self) -> None:
        """Ends everything, and leaves the servers here some time for it."""
        await self._end(ServerProcess.stop)

    async def _end(self, end: Callable[[ServerProcess], Awaitable[None]]) -> None:
        """Holds the servers until they have ended: who is called off leaves them to the next."""
        if self.nodes is not None:
            self.nodes.end()
        await cancel_all(self._keepers)
        processes = [*self._encoders, *([self._server] if self._server else [])]
        await asyncio.gather(*(end(process) for process in processes))
        self._keepers, self._encoders, self._server = [], [], None

    async def _unless_lost(self, work: Coroutine[Any, Any, None]) -> None:
        """Does the work. Raises EngineFailedError as soon as a node is lost meanwhile."""
        if self.nodes is None:
            return await work
        working = asyncio.create_task(work)
        losing = asyncio.create_task(self.nodes.lost(self.incarnation))
        try:
            await asyncio.wait((working, losing), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise EngineFailedError(losing.result())
        finally:
            await cancel_all((working, losing))

    async def _start_servers(
        self, model: Path, weight_version: str, reports: Mapping[int, NodeReport]
    ) -> None:
        """Has the nodes start theirs, starts the one here, and waits until all answer."""
        first = NodePlace(
            self._host,
            free_port(self._host, PORT_BLOCK) if reports else 0,
            self._sglang.host,
            free_port(self._sglang.host),
        )
        places = [first, *(NodePlace(report.host, report.port) for report in reports.values())]
        prompts = places[self._sglang.nnodes :]
        self._prefill = prompts[0] if prompts else None
        commands = command_lines(
            self._config,
            self._device,
            model,
            weight_version,
            places,
            self._reading(self._prefill),
        )
        environments = [self._environment(arguments) for arguments in commands]
        if self.nodes is not None:
            environments = [
                {**_own_address(place.host), **each}
                for place, each in zip(places, environments, strict=True)
            ]
            self.nodes.run(
                {
                    number: (
                        report,
                        NodeOrder(
                            self.incarnation,
                            tuple(flags(commands[number])),
                            environments[number],
                            str(model),
                        ),
                    )
                    for number, report in reports.items()
                }
            )
        role = "decode" if prompts else "regular"
        server = self._server = ServerProcess(
            Launch(
                role=role,
                url=first.url,
                command=with_python(self._sglang, flags(commands[0])),
                environment=environments[0],
            ),
            self._sglang.stop_seconds,
        )
        self.url = first.url
        client = SglangClient(first.url, self._sglang.api_key)
        try:
            await server.start(client.answers, self._sglang.start_seconds)
        finally:
            await client.close()
        if prompts:
            await self._wait_for_prefill(prompts[0])

    def _reading(self, prefill: NodePlace | None) -> dict[str, Any]:
        """Arguments of the server that reads prompts, which asks encoders for images."""
        if not self._encoders:
            return {}
        if prefill is None:
            host, port = self._sglang.host, free_port(self._sglang.host)
        else:
            host, port = prefill.host, prefill.port + ENCODERS_PORT
        self._encoders_url = f"http://{join_address(host, port)}"
        return {
            "language_only": True,
            "encoder_transfer_backend": self._sglang.encoder_backend,
            "encoder_urls": [encoder.launch.url for encoder in self._encoders],
            "encoder_bootstrap_port": port,
        }

    def _environment(self, arguments: Arguments) -> dict[str, str]:
        ranks = int(arguments.get("dp_size") or 1) * int(arguments.get("tp_size") or 1)
        return environment(
            self._config, self._device, max(1, ranks // int(arguments.get("nnodes") or 1))
        )

    async def _wait_for_prefill(self, place: NodePlace) -> None:
        client = SglangClient(place.url, self._sglang.api_key)

        async def probe() -> None:
            if not await client.answers():
                raise NotReadyError("it does not answer")

        try:
            await wait_until_ready(
                f"the prefill server at {place.url}",
                probe,
                self._sglang.start_seconds,
                EngineFailedError,
                every=POLL_SECONDS,
                usual_seconds=USUAL_START_SECONDS,
            )
        finally:
            await client.close()

    async def _add_encoder(self, model: Path) -> None:
        """Adds an encoder as soon as it runs, so that it is ended if another one never does."""
        self._encoders.append(await self._start_encoder(model))

    async def _start_encoder(self, model: Path) -> ServerProcess:
        host, port = self._host, free_port(self._host)
        arguments = encoder_arguments(
            {"model_path": model, **self._arguments},
            host,
            port,
            self._sglang.encoder_backend,
            self._sglang.encoder_args,
        )
        launch = Launch(
            role="encoder",
            url=f"http://{join_address(host, port)}",
            command=with_python(self._sglang, flags(arguments)),
            environment=environment(self._config, self._device),
        )
        client = SglangClient(launch.url, self._sglang.api_key)
        encoder = ServerProcess(launch, self._sglang.stop_seconds)
        try:
            await encoder.start(client.is_healthy, self._sglang.start_seconds)
        finally:
            await client.close()
        return encoder

    async def _keep(self, number: int, model: Path) -> None:
        """Starts an encoder that ended anew, and publishes its new URL."""
        failures = 0
        while True:
            status = await self._encoders[number].wait()
            old = self._encoders[number].launch.url
            logger.error("encoder %d at %s ended with %d", number, old, status)
            if failures >= self._sglang.restarts:
                logger.error("encoder %d is given up", number)
                return
            await asyncio.sleep(self._sglang.backoff.seconds(failures + 1))
            try:
                self._encoders[number] = await self._start_encoder(model)
                await self._publish(old, self._encoders[number].launch.url)
                failures = 0
                self.published_count += 1
            except (EngineFailedError, SGLangRefusedError) as error:
                failures += 1
                logger.error("encoder %d: %s", number, error)

    async def _publish(self, old: str, new: str) -> None:
        """Gives the server, which reads prompts, an encoder's new URL."""
        client = SglangClient(self._encoders_url)
        try:
            await client.post("/register_encoder_url", {"url": new}, REGISTER_SECONDS)
            await client.delete("/unregister_encoder_url", {"url": old}, REGISTER_SECONDS)
        finally:
            await client.close()
