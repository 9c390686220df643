"""`sluice up`: the services as local processes on free ports, restarted when they die or hang."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import psutil
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice import faults
from sluice.address import join_address
from sluice.client import Client, RouterClient, TrainerClient
from sluice.config import RESERVED_ENV, ConfigError
from sluice.durable import DirectoryError, owned, replace_file
from sluice.loop.training import TrainerBrokenError, active_trainer
from sluice.ports import POLL_SECONDS, read_ports, take_port, write_ports
from sluice.runtime.addresses import read_services as read_services
from sluice.runtime.errors import RemoteError
from sluice.runtime.processes import describe_end, memory_kills
from sluice.runtime.recovery import Backoff, NotReadyError, wait_until_ready
from sluice.runtime.security import SecurityConfig
from sluice.runtime.server import REWARD_MODEL
from sluice.stack import (
    HTTP_SECTIONS,
    LOOPBACK,
    MODULES,
    START_ORDER,
    Kind,
    ServiceEntry,
    UpConfig,
    check_fits_here,
    filled_in,
    http_section,
    node_name,
    router_name,
    services_entry,
    trainer_name,
    with_sglang,
)
from sluice.starting import NOT_BEGUN, StartBoard, StartingService

logger = logging.getLogger(__name__)

T = TypeVar("T")
RESTART_PAUSES = Backoff(first=0.2, longest=5.0)
DOWN_SECONDS = 600.0  # for all services of a directory to end
LONGEST_PATH = 4096
NO_ANSWER = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
START_SECONDS = 30.0  # of a service; then the log says whom the start waits for, and why
LASTING_SECONDS = 30.0  # a process that served for so long is not failing in a row


class ServiceDiedError(Exception):
    """A service ended while starting, or too often; the message names its log."""


@dataclass(eq=False)
class _Service:
    name: str
    entry: ServiceEntry
    kind: Kind
    config: dict[str, Any]
    address_file: Path
    log: Path
    environment: dict[str, str]
    engine: str = ""  # the replica's name, of which it may be a further node
    node: int = 0
    log_start: int = 0  # where its process began to write
    spawned: float = 0.0  # seconds since 1970
    kills: int = 0  # by the kernel for want of memory, before that
    process: asyncio.subprocess.Process | None = None
    addresses: dict[str, Any] = field(default_factory=dict)
    ports: dict[str, socket.socket] = field(default_factory=dict)
    restarts: int = 0
    answered: bool = False  # a health check, once at least

    @property
    def end(self) -> str:
        """How its process has ended."""
        assert self.process is not None
        assert self.process.returncode is not None
        return describe_end(self.process.returncode, self.kills)[0]

    def kill(self) -> None:
        """The process and its children; those in other sessions die with it."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, signal.SIGKILL)


class Supervisor:
    """Owns the processes. `start`, then `watch` until cancelled, then `stop`."""

    def __init__(self, config: UpConfig, asked_in: Path | None = None) -> None:
        """`asked_in` is another directory whose reader looks for what is being started."""
        self.config = config
        self.run_dir = config.run_dir.absolute()
        firsts, count = {}, 0  # accelerators of the services before
        for name, entry in config.services.items():
            check_fits_here(name, entry)
            firsts[name], count = count, count + entry.accelerators * entry.processes
        self._services = [
            self._service(name, entry, replica, node, firsts[name])
            for kind in START_ORDER
            for name, entry in config.services.items()
            if entry.kind == kind
            for replica in range(entry.replicas)
            for node in range(entry.nodes)
        ]
        self._claim = ExitStack()  # of the directory, from start to stop
        self._remembered: dict[str, dict[str, int]] = {}  # ports of the supervisor before
        self._up = False  # all of them were ready, and each is watched by itself
        self._board = StartBoard(self.run_dir, [] if asked_in is None else [asked_in])

    @property
    def services_file(self) -> Path:
        return self.run_dir / "services.json"

    @property
    def targets_file(self) -> Path:
        """Metrics addresses, as Prometheus's `file_sd_configs` read them."""
        return self.run_dir / "prometheus.json"

    @property
    def _ports_file(self) -> Path:
        return self.run_dir / "services" / "ports.json"

    def _service(
        self, name: str, entry: ServiceEntry, replica: int, node: int, first: int
    ) -> _Service:
        engine = entry.name_of(name, replica)
        name = node_name(engine, node)
        return _Service(
            name=name,
            engine=engine,
            node=node,
            entry=entry,
            kind=entry.kind,
            config=dict(entry.config),
            address_file=self.run_dir / "services" / f"{name}.address.json",
            log=self.run_dir / "logs" / f"{name}.log",
            environment=entry.environment(replica * entry.nodes + node, first),
        )

    async def start(self) -> None:
        """Start all, the router first. Raises ServiceDiedError; then all are stopped again.

        Raises DirectoryError where another supervisor has the directory.
        """
        self._claim.enter_context(owned(self.run_dir, "up"))
        (self.run_dir / "logs").mkdir(exist_ok=True)
        (self.run_dir / "services").mkdir(exist_ok=True)
        self.services_file.unlink(missing_ok=True)  # of a supervisor that was killed
        self._remembered = read_ports(self._ports_file)
        began = time.time()
        for service in self._services:
            service.spawned = began
            self._note_start(service, NOT_BEGUN)
        try:
            for kind in START_ORDER:
                starting = [service for service in self._services if service.kind == kind]
                for service in starting:
                    await self._spawn(service)
                await asyncio.gather(*(self._opened(service) for service in starting))
            await asyncio.gather(*(self._ready(service) for service in self._services))
            await asyncio.gather(*(self._first_answer(service) for service in self._services))
        except BaseException:
            await self.stop()
            raise
        self._up = True
        self._write_services()
        self._board.clear()

    async def watch(self) -> None:
        """Restart what dies, or answers no health check, on its old ports; until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for service in self._services:
                tasks.create_task(self._keep_alive(service))

    async def stop(self) -> None:
        """SIGTERM to all, SIGKILL to those that do not end in time."""
        self._board.clear()
        for service in reversed(self._services):
            await self._end(service)
            while service.ports:
                service.ports.popitem()[1].close()
        self.services_file.unlink(missing_ok=True)
        self.targets_file.unlink(missing_ok=True)
        self._claim.close()

    def cpu_seconds(self) -> float:
        """Processor time so far of this process, of all its ended children, and of all services."""
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        total = sum(each.ru_utime + each.ru_stime for each in used)
        for service in self._services:
            if service.process is None or service.process.returncode is not None:
                continue
            try:
                root = psutil.Process(service.process.pid)
                tree = [root, *root.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
            total += sum(_cpu_seconds(process) for process in tree)
        return total

    async def _spawn(self, service: _Service) -> None:
        service.address_file.unlink(missing_ok=True)
        await self._reserve_ports(service)
        path = self.run_dir / "services" / f"{service.name}.yaml"
        path.write_text(yaml.safe_dump(self._filled_in(service)))
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("SLUICE_") or name in RESERVED_ENV
        }
        environment.setdefault("OMP_WAIT_POLICY", "passive")
        if faults.enabled():  # of one service, not of its neighbours
            environment[faults.VARIABLE] = str(Path(environment[faults.VARIABLE], service.name))
        with service.log.open("ab") as log:
            service.log_start, service.kills = log.tell(), memory_kills()
            service.process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", MODULES[service.kind], "--config", str(path)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**environment, **service.environment},
                start_new_session=True,  # Ctrl-C is for the supervisor, which stops in order
            )
        service.spawned = time.time()
        self._note_start(service, f"it did not open its port; see {service.log}")

    def _note_start(self, service: _Service, reason: str) -> None:
        """Tell others what is awaited of a service, until all are up; nothing once it is."""
        if self._up:
            return
        kind = services_entry(self.config, service.entry, service.node)["kind"]
        address = str(service.addresses.get("address", ""))
        self._board.note(StartingService(service.name, kind, address, reason, service.spawned))

    async def _reserve_ports(self, service: _Service) -> None:
        """Take free ports for those that its configuration leaves open, once for all restarts.

        They are those that the supervisor before this one had, for clients that run on. Raises
        ConfigError.
        """
        server = service.config.get("server", {})
        given = {name: server.get(name) for name in ("port", "metrics_port")}
        if section := http_section(service.kind, service.config):
            given[section] = service.config.get(section, {}).get("port")
        host = str(server.get("host", LOOPBACK))
        for name in [
            name for name, port in given.items() if not port and name not in service.ports
        ]:
            old = self._remembered.get(service.name, {}).get(name, 0)
            try:
                service.ports[name] = await take_port(host, old)
            except (OSError, UnicodeError) as error:
                raise ConfigError(
                    f"{service.name}: server.host: cannot listen at {host!r}: {error}"
                ) from None
            port = int(service.ports[name].getsockname()[1])
            if old and port != old:
                logger.warning("%s: port %d is taken; %d instead", service.name, old, port)
            self._remembered.setdefault(service.name, {})[name] = port
            write_ports(self._ports_file, self._remembered)

    def _filled_in(self, service: _Service) -> dict[str, Any]:
        config = filled_in(self.config, service.engine, service.entry, service.node)
        server = config["server"]
        server["parent"] = os.getpid()  # a killed supervisor leaves nobody behind
        ports = {name: int(held.getsockname()[1]) for name, held in service.ports.items()}
        server |= {name: ports[name] for name in ("port", "metrics_port") if name in ports}
        for section in ports.keys() & HTTP_SECTIONS:
            config[section] = {**config.get(section, {}), "port": ports[section]}
        if service.kind in ("rollout", "gateway"):
            config.setdefault("router", self._router_address())
        if service.kind == "gateway":
            config.setdefault("trainer", self._trainer_address())
        if service.node:
            config["engine"] = with_sglang(config, leader=self._leader_address(service))
        return config

    def _leader_address(self, node: _Service) -> str:
        """Of the first node of its engine, whose port was reserved before."""
        first = next(each for each in self._services if each.name == node.engine)
        server = first.config.get("server", {})
        port = server.get("port") or first.ports["port"].getsockname()[1]
        return join_address(str(server.get("host", LOOPBACK)), int(port))

    def _router_address(self) -> str:
        return self._address_of(router_name(self.config))

    def _trainer_address(self) -> str:
        """Of the trainer of the policy."""
        return self._address_of(trainer_name(self.config))

    def _address_of(self, name: str) -> str:
        return next(str(s.addresses["address"]) for s in self._services if s.name == name)

    async def _opened(self, service: _Service) -> None:
        """Waits until a service has opened its ports."""

        async def addresses() -> dict[str, Any]:
            if not service.address_file.exists():
                raise NotReadyError(f"it did not open its port; see {service.log}")
            found: dict[str, Any] = json.loads(service.address_file.read_text())
            return found

        service.addresses = await self._alive_until(service, addresses)
        self._note_start(service, "its port is open")

    async def _ready(self, service: _Service) -> None:
        """Waits until a trainer or a reward model takes work, or the router knows a process."""
        address, security = service.addresses["address"], self.config.security
        if service.kind == "trainer":
            role = f"trainer {service.name}"
            async with TrainerClient(address, security, role=role) as trainer:
                await self._alive_until(service, lambda: active_trainer(trainer))
        elif service.kind == "reward_model":
            async with self._client(service) as client:
                await self._alive_until(service, lambda: ready_reward_model(client))
        elif service.kind == "rollout" and not service.node:
            async with RouterClient(self._router_address(), security) as router:

                async def registered() -> None:
                    if address not in {each.address for each in await router.list_engines()}:
                        raise NotReadyError(f"the router does not know it yet; see {service.log}")

                await self._alive_until(service, registered)
        self._note_start(service, "")

    async def _alive_until(self, service: _Service, probe: Callable[[], Awaitable[T]]) -> T:
        """Waits for `probe`. Raises ServiceDiedError after too long, or when the process ends.

        Until all are up, when any does: `probe` may ask another one, and nobody restarts it yet.
        """

        async def checked() -> T:
            for each in (service,) if self._up else self._services:
                if each.process is not None and each.process.returncode is not None:
                    raise ServiceDiedError(
                        f"{each.name} {each.end} while starting: "
                        f"{_last_line(each.log, each.log_start)} (log: {each.log})"
                    )
            try:
                return await probe()
            except (NotReadyError, RemoteError) as error:
                self._note_start(service, str(error))
                raise
            except TrainerBrokenError as error:
                raise ServiceDiedError(f"{error} (log: {service.log})") from None

        def late(text: str) -> ServiceDiedError:
            return ServiceDiedError(f"{text} (start_timeout_seconds of the services file)")

        seconds = self.config.start_timeout_seconds
        return await wait_until_ready(
            service.name, checked, seconds, late, every=0.05, usual_seconds=START_SECONDS
        )

    async def _keep_alive(self, service: _Service) -> None:
        while True:
            opened = time.monotonic()
            why = await self._until_down(service)
            if time.monotonic() - opened > LASTING_SECONDS:
                service.restarts = 0
            await self._restart(service, why)

    async def _until_down(self, service: _Service) -> str:
        """Waits for the end of a process, or ends one that hangs; why it ended."""
        assert service.process is not None
        ending = asyncio.create_task(service.process.wait(), name=f"end of {service.name}")
        probing = asyncio.create_task(self._until_silent(service), name=f"probe {service.name}")
        try:
            await asyncio.wait((ending, probing), return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return service.end
            why = probing.result()
            logger.error("%s %s; killing it", service.name, why)
            service.kill()
            await ending
            return why
        finally:
            for task in (ending, probing):
                task.cancel()
            await asyncio.gather(ending, probing, return_exceptions=True)

    async def _until_silent(self, service: _Service) -> str:
        """Returns once enough health checks in a row got no answer: what to say of it.

        Checks that were made count, not time that went by: this process may have been stopped
        itself. Nor do those of an address that has never answered from here.
        """
        config, failures = self.config.liveness, 0
        async with self._client(service) as client:
            while True:
                await asyncio.sleep(config.interval_seconds)
                if await self._answers(service, client):
                    failures = 0
                    continue
                failures += service.answered
                if config.failures and failures >= config.failures:
                    return f"answered no health check, {failures} in a row"

    async def _first_answer(self, service: _Service) -> None:
        """Asks for health at once, so that a service that hangs from here on is found too."""
        async with self._client(service) as client:
            await self._answers(service, client)

    def _client(self, service: _Service) -> Client:
        own = service.config.get("server", {}).get("security", self.config.security)
        return Client(service.addresses["address"], SecurityConfig.model_validate(own))

    async def _answers(self, service: _Service, client: Client) -> bool:
        """Whether a service answers a health check, and notes it if so."""
        try:
            await health_pb2_grpc.HealthStub(client.channel).Check(
                health_pb2.HealthCheckRequest(),
                timeout=self.config.liveness.timeout_seconds,
                wait_for_ready=True,  # a refused connection takes its time too
            )
        except grpc.aio.AioRpcError as error:
            if error.code() in NO_ANSWER:
                logger.warning("%s: no answer to a health check: %s", service.name, error.code())
                return False  # whatever else it says, it is alive
        service.answered = True
        return True

    async def _restart(self, service: _Service, why: str) -> None:
        """Until it has opened its ports again. Raises ServiceDiedError after too many tries."""
        while True:
            service.restarts += 1
            if service.restarts > self.config.restarts:
                raise ServiceDiedError(f"{service.name} died too often: {why}; see {service.log}")
            logger.warning("%s %s; restarting it", service.name, why)
            await asyncio.sleep(RESTART_PAUSES.seconds(service.restarts))
            try:
                await self._spawn(service)
                await self._opened(service)
            except (ServiceDiedError, OSError) as error:  # a full disk, no more processes
                why = str(error)
                await self._end(service)
                continue
            self._note_services()
            return

    async def _end(self, service: _Service) -> None:
        process = service.process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)  # one that is stopped hears nothing before
        try:
            async with asyncio.timeout(self.config.stop_timeout_seconds):
                await process.wait()
        except TimeoutError:
            logger.warning("%s does not stop; killing it", service.name)
            service.kill()
            await process.wait()

    def _note_services(self) -> None:
        """Where a disk is full, the ports at least have stayed."""
        try:
            self._write_services()
        except OSError as error:
            logger.warning("%s: %s", self.services_file, error)

    def _write_services(self) -> None:
        entries = {
            service.name: {
                **services_entry(self.config, service.entry, service.node),
                **service.addresses,
            }
            for service in self._services
        }
        data = json.dumps(entries, indent=1).encode()
        replace_file(self.services_file, data, temporary=self.run_dir, sync=False)
        targets = [
            {"targets": [service.addresses["metrics_address"]], "labels": {"service": service.name}}
            for service in self._services
        ]
        data = json.dumps(targets, indent=1).encode()
        replace_file(self.targets_file, data, temporary=self.run_dir, sync=False)


@contextlib.asynccontextmanager
async def supervised(supervisor: Supervisor) -> AsyncIterator[Supervisor]:
    """Services that live as long as the block; one that dies for good ends the block."""
    await supervisor.start()
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(supervisor.watch())
            try:
                yield supervisor
            finally:
                watching.cancel()
    finally:
        await supervisor.stop()


def end_supervisor(run_dir: Path) -> None:
    """End the services of a directory, and the process that keeps them; waits until it has gone.

    Raises ConfigError if there is none, ServiceDiedError if it does not end.
    """
    if "\0" in str(run_dir) or len(str(run_dir)) > LONGEST_PATH or not run_dir.is_dir():
        raise ConfigError(f"down: {str(run_dir)[:200]!r} is no directory")
    if _is_free(run_dir):
        raise ConfigError(f"down: {run_dir} has no services that run")
    os.kill(int((run_dir / ".up.lock").read_text()), signal.SIGTERM)
    deadline = time.monotonic() + DOWN_SECONDS
    while not _is_free(run_dir):
        if time.monotonic() > deadline:
            raise ServiceDiedError(f"the services of {run_dir} do not end")
        time.sleep(POLL_SECONDS)


def _is_free(run_dir: Path) -> bool:
    try:
        with owned(run_dir, "up"):
            return True
    except DirectoryError:
        return False


async def ready_reward_model(client: Client) -> None:
    """Raises NotReadyError until it has loaded its model."""
    request = health_pb2.HealthCheckRequest(service=REWARD_MODEL)
    try:
        answer = await health_pb2_grpc.HealthStub(client.channel).Check(request, timeout=5)
    except grpc.aio.AioRpcError as error:
        raise NotReadyError(str(error.details())) from None
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise NotReadyError("it loads its model")


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system


def _last_line(log: Path, start: int) -> str:
    lines = log.read_bytes()[start:].decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
