"""Starts and stops a gRPC server the same way in every service."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.longrunning import operations_pb2_grpc
from google.protobuf.descriptor_pool import Default, DescriptorPool
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from pydantic import Field, field_validator, model_validator

from sluice import faults
from sluice.address import OwnAddress, join_address, plain_host
from sluice.api.common.v1 import wait_service_pb2_grpc
from sluice.config import Config, ConfigError
from sluice.durable import replace_file
from sluice.runtime.host import HostCollector
from sluice.runtime.interceptors import RequestRoom, ServiceInterceptor, share_one_arena
from sluice.runtime.messages import Bound, MessageLimits, RequestRules
from sluice.runtime.metrics import MetricsServer
from sluice.runtime.operations import Operations
from sluice.runtime.processes import allow_open_files, end_with_parent, ending_signals
from sluice.runtime.security import SecurityConfig, server_credentials
from sluice.runtime.waits import Waits

logger = logging.getLogger(__name__)

OPEN_PORTS = (  # (what, where it listens, what it asks for): rows of docs/security.md
    (
        "gRPC of trainer, rollout, router and converter",
        "`server.host`, `server.port`",
        "certificate and token; health checks need no token",
    ),
    (
        "gRPC of the loop of a run: what it waits for",
        "`server.host`, `server.port` of the run",
        "the run's token; TLS where the run has a certificate of its own, or `server` says so",
    ),
    (
        "metrics of each of them",
        "`server.host`, `server.metrics_port`",
        "the same; Prometheus has `authorization` and `tls_config` for it",
    ),
)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
WAIT_SERVICE = "sluice.api.common.v1.WaitService"
OPERATIONS_SERVICE = "google.longrunning.Operations"
LAST_PORT = 65_535  # gRPC would take a larger number for another port
REWARD_MODEL = "sluice.RewardModel"  # over HTTP: health of gRPC tells whether it is ready


@contextlib.contextmanager
def opening(setting: str, address: str) -> Iterator[None]:
    """Raises ConfigError naming the setting of a port that cannot be opened."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # grpc raises the latter
        raise ConfigError(
            f"{setting}: cannot listen at {address}: the port is taken, or the host is not this one"
        ) from error


class ServerConfig(Config):
    """Where a server listens and what it accepts. Port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=LAST_PORT)
    metrics_port: int = Field(0, ge=0, le=LAST_PORT)
    address_file: Path | None = Field(
        None, description="JSON {address, metrics_address, pid}, written when open."
    )
    parent: int = Field(0, description="Process to die with; 0 is none.")
    advertise: OwnAddress = Field(
        "", description="host:port under which others reach it; empty means host:port."
    )
    max_message_bytes: int = Field(
        1 << 26, ge=1024, lt=1 << 31, description="Of one message; then refused."
    )
    max_held_bytes: int = Field(
        1 << 31, ge=1024, description="Of requests received or served at once; then QUEUE_FULL."
    )
    limits: MessageLimits = MessageLimits()
    drain_seconds: float = Field(30.0, ge=0)
    allow_insecure: bool = Field(False, description="Listen beyond loopback without TLS.")
    security: SecurityConfig = SecurityConfig()

    @field_validator("host")
    @classmethod
    def _has_no_brackets(cls, value: str) -> str:
        return plain_host(value)

    @model_validator(mode="after")
    def _insecure_only_on_loopback(self) -> ServerConfig:
        if self.security.tls is None and not self.allow_insecure and not _is_loopback(self.host):
            raise ValueError(
                f"host {self.host} is not loopback: set security.tls, or allow_insecure: true"
            )
        return self


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def service_interceptor(
    config: ServerConfig, bounds: Mapping[str, Bound] | None = None
) -> ServiceInterceptor:
    """What every RPC goes through, with the token and within the limits of a configuration."""
    return ServiceInterceptor(
        config.security.token(),
        RequestRules(config.limits, bounds),
        lambda: RequestRoom(config.max_held_bytes, config.max_message_bytes),
    )


def _interceptors(outermost: ServiceInterceptor) -> list[grpc.aio.ServerInterceptor]:
    """The outermost first."""
    found: list[grpc.aio.ServerInterceptor] = [outermost]
    if faults.enabled():
        from sluice.runtime.interceptors import LostReplies

        found.append(LostReplies())
    return found


class _Health(health.aio.HealthServicer):
    """Tells all who watch of every change, and lets them go when the server stops."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = asyncio.Event()

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last = None
        while True:
            changed = self._changed
            status = self._server_status.get(request.service, SERVICE_UNKNOWN)
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
            if self._gracefully_shutting_down:
                return
            last = status
            await changed.wait()  # for as long as the caller listens

    async def set(self, service: str, status: int) -> None:
        await super().set(service, status)
        self._tell()

    async def enter_graceful_shutdown(self) -> None:
        await super().enter_graceful_shutdown()
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Server:
    """A server whose services are NOT_SERVING until `set_serving`. Raises ConfigError.

    Health answers "" = alive as soon as the port is open, a service's name = ready.
    """

    def __init__(self, config: ServerConfig) -> None:
        share_one_arena()
        self.config = config
        self.waits = Waits()
        self.operations = Operations()
        self.port = 0
        self._bounds: dict[str, Bound] = {}
        tls = config.security.tls
        self._credentials = None if tls is None else server_credentials(tls)
        limit = config.max_message_bytes
        self.grpc_server = grpc.aio.server(
            interceptors=_interceptors(service_interceptor(config, self._bounds)),
            options=[
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
                ("grpc.so_reuseport", 0),  # two servers on one port is an error
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
            ],
        )
        self._health = _Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc_server)
        self._services: list[str] = []
        self._ports: list[str] = []  # of other protocols
        self._metrics: MetricsServer | None = None
        self._host: HostCollector | None = None
        self.disks: dict[str, list[Path]] = {}  # by use: whose room is shown, from the start on
        # Describes these services for reflection, where they are not served as they are declared.
        self.describe: Callable[[Sequence[str]], DescriptorPool] = lambda names: Default()
        self.further_addresses: dict[str, str] = {}  # told in the address file beside its own
        self._stop = asyncio.Event()
        self.failed = False  # what the process depends on did: it should end with an error
        self.stopping = asyncio.Event()  # set first: calls that only wait should answer now
        self.add(wait_service_pb2_grpc.add_WaitServiceServicer_to_server, self.waits, WAIT_SERVICE)
        self.add(
            operations_pb2_grpc.add_OperationsServicer_to_server,
            self.operations,
            OPERATIONS_SERVICE,
        )

    def add(self, register: Callable[[Any, Any], None], servicer: object, name: str) -> None:
        register(servicer, self.grpc_server)
        self._services.append(name)

    def add_port(self, name: str) -> None:
        """Have health tell by this name whether a port of another protocol is ready."""
        self._ports.append(name)

    def bound(self, message: type[Message], name: str, limit: int, setting: str) -> None:
        """Take so many values in a field of requests, or such a number; `setting` says so."""
        self._bounds[message.DESCRIPTOR.fields_by_name[name].full_name] = Bound(limit, setting)

    @property
    def address(self) -> str:
        """host:port under which others reach this server."""
        return self.config.advertise or join_address(self.config.host, self.port)

    @property
    def metrics_address(self) -> str:
        assert self._metrics is not None
        return join_address(self.config.host, self._metrics.port)

    async def start(self) -> None:
        """Open the ports and tell them. Raises ConfigError when one is taken, and OSError.

        What was open is closed then: nobody is told of it, and grpc complains of what stays open.
        """
        if self.config.parent:
            end_with_parent(self.config.parent)
        try:
            await self._open()
            self._write_address()
        except BaseException:
            await self.stop()
            raise
        logger.info("listening on %s, metrics on %s", self.address, self.metrics_address)

    async def _open(self) -> None:
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc_server, pool=self.describe(names))
        config, security = self.config, self.config.security
        listen = join_address(config.host, config.port)
        with opening("server.port", listen):
            if self._credentials is None:
                self.port = self.grpc_server.add_insecure_port(listen)
            else:
                self.port = self.grpc_server.add_secure_port(listen, self._credentials)
        with opening("server.metrics_port", join_address(config.host, config.metrics_port)):
            self._metrics = MetricsServer(config.host, config.metrics_port, security)
        self._host = HostCollector(self.disks, security.tls)
        await self._health.set("", SERVING)  # alive
        await self._set_services(NOT_SERVING)  # not ready
        await self._health.set(WAIT_SERVICE, SERVING)
        await self.grpc_server.start()

    def _write_address(self) -> None:
        if self.config.address_file is None:
            return
        addresses = {
            "address": self.address,
            "metrics_address": self.metrics_address,
            **self.further_addresses,
            "pid": os.getpid(),
        }
        path, data = self.config.address_file, json.dumps(addresses).encode()
        replace_file(path, data, temporary=path.parent, sync=False)

    async def set_serving(self, serving: bool = True) -> None:
        """Tell health whether the services are ready."""
        await self._set_services(SERVING if serving else NOT_SERVING)

    async def _set_services(self, status: int) -> None:
        for name in (*self._services, *self._ports):
            await self._health.set(name, status)

    async def stop(self) -> None:
        """Refuse new calls, let running ones end within `drain_seconds`, close the ports."""
        self.stopping.set()
        await self._health.enter_graceful_shutdown()
        await self.grpc_server.stop(self.config.drain_seconds)
        await self.operations.close()
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.stop)
        if self._host is not None:
            self._host.close()
            self._host = None

    def request_stop(self) -> None:
        self._stop.set()

    def depend_on(self, task: asyncio.Task[None]) -> None:
        """Should the task fail, log its error and stop with `failed` set."""

        def note(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("%s failed: the process stops", task.get_name(), exc_info=error)
                self.failed = True
                self.request_stop()

        task.add_done_callback(note)

    def stop_on_signals(self, also: Callable[[], object] = lambda: None) -> None:
        """Have what ends a process request a stop, and call `also`; allow what a server needs.

        A process calls it before `start`, whose address file tells others whom to signal.
        """
        allow_open_files()

        def stop() -> None:
            self.request_stop()
            also()

        for number in ending_signals():
            asyncio.get_running_loop().add_signal_handler(number, stop)

    async def run(self, start: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Call `start`, then serve until a signal; one that comes while it starts ends that.

        Raises what `start` does.
        """
        starting = asyncio.create_task(start(), name="start")
        self.stop_on_signals(starting.cancel)  # which does nothing once it has ended
        await asyncio.wait([starting])
        if not starting.cancelled():
            await starting
            await self.run_until_signal()

    async def run_until_signal(self) -> None:
        """Serve until a signal, if it has been told to stop on them, or `request_stop`; drain."""
        await self._stop.wait()
        logger.info("draining")
        await self.stop()
