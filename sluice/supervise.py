"""`sluice up`: the services as local processes on free ports, restarted when they die or hang."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import grpc
import psutil
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import Field, field_validator, model_validator

from sluice import faults, platform
from sluice.client import Client, RouterClient, TrainerClient
from sluice.config import (
    PLAIN_NAME,
    PLAIN_NAME_RULE,
    RESERVED_ENV,
    Config,
    ConfigError,
    ProcessConfig,
)
from sluice.durable import DirectoryError, owned, replace_file
from sluice.loop.training import active_trainer
from sluice.place import Place, StorePlace, place_of
from sluice.runtime.addresses import read_entries
from sluice.runtime.addresses import read_services as read_services
from sluice.runtime.recovery import Backoff, NotReadyError, wait_until_ready
from sluice.runtime.security import SecurityConfig
from sluice.runtime.server import REWARD_MODEL
from sluice.weights.errors import FileDigestError
from sluice.weights.manifest import seal, unseal

logger = logging.getLogger(__name__)

T = TypeVar("T")
Kind = Literal["router", "converter", "reward_model", "trainer", "rollout"]
START_ORDER: tuple[Kind, ...] = ("router", "converter", "reward_model", "trainer", "rollout")
MODULES: dict[str, str] = {  # by kind, what is run
    **{kind: f"services.{kind}" for kind in START_ORDER},
    "reward_model": "services.rollout.reward_model",
}
HTTP_SECTIONS = ("openai", "classify")  # of configurations: those of a port beside gRPC's
LOOPBACK = "127.0.0.1"  # where services listen that name no host
RESTART_PAUSES = Backoff(first=0.2, longest=5.0)
LINGERING_SECONDS = 10.0  # for which processes of a killed supervisor may keep their ports
PORT_POLL_SECONDS = 0.05
SEAL = "digest"  # of the file of ports
DOWN_SECONDS = 600.0  # for all services of a directory to end
LONGEST_PATH = 4096
MAX_NODES = 1024  # of an engine
MAX_REPLICAS = 65_536
NO_ANSWER = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
LASTING_SECONDS = 30.0  # a process that served for so long is not failing in a row


class ResourcesConfig(Config):
    """What each process of a service needs; of a trainer with external ranks, each rank.

    On Ray it is set aside. On one machine `gpus` and `npus` are its own accelerators, counted
    through all services in their order, and no process may ask for more than the machine has.
    """

    cpus: float = Field(0, ge=0, le=1 << 20)
    gpus: int = Field(0, ge=0, le=1 << 20)
    npus: int = Field(0, ge=0, le=1 << 20)
    memory_gib: float = Field(0, ge=0, le=1 << 30)

    @model_validator(mode="after")
    def _one_kind_of_device(self) -> ResourcesConfig:
        if self.gpus and self.npus:
            raise ValueError("gpus and npus: a process runs on one of them")
        return self


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A part of a service's settings, which it checks itself; empty where it is none."""
    found = config.get(name)
    if name == "prefill" and isinstance(found, dict):
        return {"nnodes": 1, **found}  # it is there, be it empty
    return found if isinstance(found, dict) else {}


def _count(section: dict[str, Any], name: str) -> int:
    """A number of nodes. Raises ValueError."""
    value = section.get(name, 1)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_NODES:
        raise ValueError(f"config.engine.sglang: {name} is a number from 1 to {MAX_NODES}")
    return value


class ServiceEntry(Config):
    """One process. `config` is the service's own; name, ports, store and router are filled in.

    `devices`: accelerators of this machine that it sees, shared out evenly among replicas; empty
    is all of them. `hosts`: addresses of nodes, for replicas in turn; empty is anywhere.
    `strategy`: over many hosts or few; one machine is both.
    """

    kind: Kind
    config: dict[str, Any] = Field(default_factory=dict)
    replicas: int = Field(1, gt=0, le=MAX_REPLICAS)
    devices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    resources: ResourcesConfig = ResourcesConfig()
    hosts: tuple[str, ...] = ()
    strategy: Literal["spread", "pack"] = "spread"

    @model_validator(mode="after")
    def _devices_can_be_shared(self) -> ServiceEntry:
        if len(self.devices) % self.processes:
            raise ValueError(f"{len(self.devices)} devices cannot be shared by {self.processes}")
        if self.devices and self.accelerators:
            raise ValueError("devices and resources both say which accelerators it sees")
        return self

    @property
    def accelerators(self) -> int:
        """Those that each process needs."""
        return self.resources.gpus or self.resources.npus

    @property
    def nodes(self) -> int:
        """Processes of each replica: of an engine over several nodes, one for each of them."""
        sglang = _section(_section(self.config, "engine"), "sglang")
        if self.kind != "rollout":
            return 1
        further = _section(sglang, "prefill")
        return _count(sglang, "nnodes") + (_count(further, "nnodes") if further else 0)

    @property
    def processes(self) -> int:
        """Of all replicas together."""
        return self.replicas * self.nodes

    def name_of(self, name: str, replica: int) -> str:
        """Of a replica of the service `name`, and of its process that serves."""
        return name if self.replicas == 1 else f"{name}-{replica}"

    def environment(self, process: int, first: int = 0) -> dict[str, str]:
        """By which a process sees its devices only, those of `resources` counted from `first` on.

        Processes are counted through the nodes of all replicas. Raises PlatformError if the
        devices are not here.
        """
        share = len(self.devices) // self.processes
        devices = self.devices[process * share :][:share]
        if self.accelerators:
            start = first + process * self.accelerators
            devices = tuple(range(start, start + self.accelerators))
        return platform.declared().visible_devices(devices) if devices else {}


class LivenessConfig(Config):
    """Health checks of running services; one that answers none is killed and started again.

    failures: in a row, each without an answer for `timeout_seconds`; 0 never ends a service. The
    defaults leave it minutes, for a machine under load.
    """

    interval_seconds: float = Field(10, gt=0)
    timeout_seconds: float = Field(30, gt=0)
    failures: int = Field(5, ge=0)


class UpConfig(ProcessConfig):
    """Services to run on this machine."""

    run_dir: Path
    store: StorePlace | None = Field(
        None, description="Of every service that names none; a bucket, or run_dir/store."
    )
    services: dict[str, ServiceEntry] = Field(min_length=1)
    security: SecurityConfig = Field(
        SecurityConfig(), description="Of every service that names none of its own."
    )
    start_timeout_seconds: float = Field(180, gt=0)
    stop_timeout_seconds: float = Field(40, gt=0)
    restarts: int = Field(20, ge=0, description="Of one process in a row, before it is given up.")
    liveness: LivenessConfig = LivenessConfig()

    @field_validator("services")
    @classmethod
    def _names_are_plain(cls, services: dict[str, ServiceEntry]) -> dict[str, ServiceEntry]:
        for name in services:
            if not PLAIN_NAME.fullmatch(name):  # files in run_dir have it too
                raise ValueError(f"{name[:80]!r}: {PLAIN_NAME_RULE}")
        return services


def check_fits_here(name: str, entry: ServiceEntry) -> None:
    """Raises ConfigError for a service that this machine has not the room for, or is not."""
    needs, cpus = entry.resources, os.cpu_count() or 1
    memory = psutil.virtual_memory().total / 2**30
    if needs.cpus > cpus:
        raise ConfigError(f"services.{name}.resources.cpus: this machine has {cpus}")
    if needs.memory_gib > memory:
        raise ConfigError(f"services.{name}.resources.memory_gib: this machine has {memory:.1f}")
    for kind in ("gpus", "npus"):
        if getattr(needs, kind) and not platform.declared().visible_env:
            raise ConfigError(
                f"services.{name}.resources.{kind}: this machine is told to have none"
            )
    here = {"localhost", LOOPBACK, socket.gethostname()}
    here |= {each.address for found in psutil.net_if_addrs().values() for each in found}
    if foreign := [host for host in entry.hosts if host not in here]:
        raise ConfigError(f"services.{name}.hosts: {foreign[0]} is not this machine; see --on ray")


def policy_weights(config: UpConfig) -> str:
    """Where the trainer of the policy puts versions of weights, if not in the store."""
    for entry in config.services.values():
        if entry.kind == "trainer" and entry.config.get("head", "policy") == "policy":
            return str(entry.config.get("weights", ""))
    return ""


def http_section(kind: str, config: Mapping[str, Any]) -> str:
    """The section of a configuration that has a port beside gRPC's; empty where none has."""
    if kind == "reward_model":
        return "classify"
    return "openai" if config.get("openai") is not None else ""


def default_store(config: UpConfig) -> str:
    """The store of services that name none."""
    store = config.store
    if store is None:
        return str(config.run_dir.absolute() / "store")
    return str(store.absolute() if isinstance(store, Path) else store)


def node_name(name: str, node: int) -> str:
    """Of the process on a node of an engine; the first has the engine's."""
    return f"{name}-node{node}" if node else name


def services_entry(config: UpConfig, entry: ServiceEntry, node: int = 0) -> dict[str, str]:
    """What services.json says of a process besides its addresses.

    A further node of an engine is of a kind of its own: nobody is to ask it for anything.
    """
    store = str(entry.config.get("store", default_store(config)))
    weights = {"weights": policy_weights(config)} if entry.kind == "trainer" else {}
    return {"kind": "node" if node else entry.kind, "store": store, **weights}


def filled_in(config: UpConfig, name: str, entry: ServiceEntry, node: int = 0) -> dict[str, Any]:
    """The settings of a process, but for what depends on where it is: host, ports and router.

    `node` is of the engine `name`.
    """
    run_dir, filled = config.run_dir.absolute(), dict(entry.config)
    server = dict(filled.get("server", {}))
    own = node_name(name, node)
    server["address_file"] = str(run_dir / "services" / f"{own}.address.json")
    server.setdefault("security", config.security.model_dump(mode="json"))
    filled["server"] = server
    if entry.kind in ("trainer", "rollout"):
        filled.setdefault("store", default_store(config))
    if entry.kind == "converter":
        filled.setdefault("roots", [str(run_dir)])
    if entry.kind == "trainer":
        filled.setdefault("name", name)
    if entry.kind == "rollout":
        if weights := policy_weights(config):
            filled.setdefault("weights", weights)
        filled.setdefault("engine_id", name)
        filled.setdefault("services", str(run_dir / "services.json"))
    if node:
        filled["engine"] = with_sglang(filled, node_rank=node)
    return filled


def with_sglang(config: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    """The engine's settings of a service, with some of SGLang."""
    engine = _section(config, "engine")
    return {**engine, "sglang": {**_section(engine, "sglang"), **settings}}


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
    process: asyncio.subprocess.Process | None = None
    addresses: dict[str, Any] = field(default_factory=dict)
    ports: dict[str, socket.socket] = field(default_factory=dict)
    restarts: int = 0
    answered: bool = False  # a health check, once at least

    def kill(self) -> None:
        """The process and its children; those in other sessions die with it."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, signal.SIGKILL)


class Supervisor:
    """Owns the processes. `start`, then `watch` until cancelled, then `stop`."""

    def __init__(self, config: UpConfig) -> None:
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
        self._remembered = _read_ports(self._ports_file)
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
        self._write_services()

    async def watch(self) -> None:
        """Restart what dies, or answers no health check, on its old ports; until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for service in self._services:
                tasks.create_task(self._keep_alive(service))

    async def stop(self) -> None:
        """SIGTERM to all, SIGKILL to those that do not end in time."""
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
            service.log_start = log.tell()
            service.process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", MODULES[service.kind], "--config", str(path)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**environment, **service.environment},
                start_new_session=True,  # Ctrl-C is for the supervisor, which stops in order
            )

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
                service.ports[name] = await _take_port(host, old)
            except (OSError, UnicodeError) as error:
                raise ConfigError(
                    f"{service.name}: server.host: cannot listen at {host!r}: {error}"
                ) from None
            port = int(service.ports[name].getsockname()[1])
            if old and port != old:
                logger.warning("%s: port %d is taken; %d instead", service.name, old, port)
            self._remembered.setdefault(service.name, {})[name] = port
            ports = seal({"ports": self._remembered}, SEAL)
            replace_file(self._ports_file, ports, temporary=self._ports_file.parent, sync=False)

    def _filled_in(self, service: _Service) -> dict[str, Any]:
        config = filled_in(self.config, service.engine, service.entry, service.node)
        server = config["server"]
        server["parent"] = os.getpid()  # a killed supervisor leaves nobody behind
        ports = {name: int(held.getsockname()[1]) for name, held in service.ports.items()}
        server |= {name: ports[name] for name in ("port", "metrics_port") if name in ports}
        for section in ports.keys() & HTTP_SECTIONS:
            config[section] = {**config.get(section, {}), "port": ports[section]}
        if service.kind == "rollout":
            config.setdefault("router", self._router_address())
        if service.node:
            config["engine"] = with_sglang(config, leader=self._leader_address(service))
        return config

    def _leader_address(self, node: _Service) -> str:
        """Of the first node of its engine, whose port was reserved before."""
        first = next(each for each in self._services if each.name == node.engine)
        server = first.config.get("server", {})
        port = server.get("port") or first.ports["port"].getsockname()[1]
        return f"{server.get('host', LOOPBACK)}:{port}"

    def _router_address(self) -> str:
        for service in self._services:
            if service.kind == "router":
                return str(service.addresses["address"])
        raise ConfigError("services: a rollout service needs a router")

    async def _opened(self, service: _Service) -> None:
        """Waits until a service has opened its ports."""

        async def addresses() -> dict[str, Any]:
            if not service.address_file.exists():
                raise NotReadyError(f"it did not open its port; see {service.log}")
            found: dict[str, Any] = json.loads(service.address_file.read_text())
            return found

        service.addresses = await self._alive_until(service, addresses)

    async def _ready(self, service: _Service) -> None:
        """Waits until a trainer or a reward model takes work, or the router knows a process."""
        address, security = service.addresses["address"], self.config.security
        if service.kind == "trainer":
            async with TrainerClient(address, security) as trainer:
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

    async def _alive_until(self, service: _Service, probe: Callable[[], Awaitable[T]]) -> T:
        """Waits for `probe`. Raises ServiceDiedError after too long, or when the process ends."""

        async def checked() -> T:
            assert service.process is not None
            if service.process.returncode is not None:
                raise ServiceDiedError(
                    f"{service.name} ended with {service.process.returncode} while starting: "
                    f"{_last_line(service.log, service.log_start)} (log: {service.log})"
                )
            return await probe()

        seconds = self.config.start_timeout_seconds
        return await wait_until_ready(
            service.name, checked, seconds, ServiceDiedError, every=0.05, usual_seconds=math.inf
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
                return f"ended with {ending.result()}"
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


STACK_FILE = "ray.json"  # in a run directory whose services are on Ray


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
        time.sleep(PORT_POLL_SECONDS)


def _is_free(run_dir: Path) -> bool:
    try:
        with owned(run_dir, "up"):
            return True
    except DirectoryError:
        return False


def _read_ports(path: Path) -> dict[str, dict[str, int]]:
    """By service and name; none where there was no supervisor before.

    Where the file is damaged, those that stand in the services' configurations.
    """
    try:
        found = unseal(path.read_bytes(), SEAL, path.name)["ports"]
        return {
            str(service): {str(name): int(port) for name, port in ports.items()}
            for service, ports in found.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, FileDigestError) as error:
        logger.warning("%s: %s; ports are read from the configurations beside it", path, error)
        return {each.stem: _configured_ports(each) for each in path.parent.glob("*.yaml")}


def _configured_ports(path: Path) -> dict[str, int]:
    """The ports of a configuration that a supervisor filled in; none where it is damaged."""
    try:
        config = yaml.safe_load(path.read_bytes())
        ports = {name: config["server"].get(name) for name in ("port", "metrics_port")}
        ports |= {name: (config.get(name) or {}).get("port") for name in HTTP_SECTIONS}
        return {name: int(port) for name, port in ports.items() if port is not None}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
        logger.warning("%s: %s; the service gets new ports", path, error)
        return {}


async def _take_port(host: str, wanted: int) -> socket.socket:
    """A port of the host: the wanted one, unless somebody else keeps it. Raises as reserve_port."""
    deadline = time.monotonic() + LINGERING_SECONDS
    while wanted:
        try:
            return reserve_port(host, wanted)
        except OverflowError:
            break
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                break
            await asyncio.sleep(PORT_POLL_SECONDS)
    return reserve_port(host)


def reserve_port(host: str, port: int = 0) -> socket.socket:
    """Binds a port of `host`, a free one by default, and does not listen there.

    Until the socket is closed, only a server that names the port and sets SO_REUSEADDR, as ours
    do, can have it: no process that asks for any port, or connects from one, is given it while
    the server is down. Raises OSError, and UnicodeError for text that is no name of a host.
    """
    name = host.strip("[]") or None  # none is all interfaces
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, address = found[0][0], found[0][4]
    holder = socket.socket(family)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind(address)
    except BaseException:
        holder.close()
        raise
    return holder


async def ready_reward_model(client: Client) -> None:
    """Raises NotReadyError until it has loaded its model."""
    request = health_pb2.HealthCheckRequest(service=REWARD_MODEL)
    try:
        answer = await health_pb2_grpc.HealthStub(client.channel).Check(request, timeout=5)
    except grpc.aio.AioRpcError as error:
        raise NotReadyError(str(error.details())) from None
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise NotReadyError("it loads its model")


def read_store(path: Path) -> Place:
    """The shared store of the trainer in a services.json."""
    stores = {entry["store"] for entry in read_entries(path).values() if entry["kind"] == "trainer"}
    if len(stores) != 1:
        raise ConfigError(f"store: the trainers of {path} have {len(stores)}; name one")
    return place_of(stores.pop())


def read_weights(path: Path) -> str:
    """Where versions of weights are by a services.json; empty: in the store."""
    entries = read_entries(path).values()
    return next((str(e.get("weights", "")) for e in entries if e["kind"] == "trainer"), "")


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system


def _last_line(log: Path, start: int) -> str:
    lines = log.read_bytes()[start:].decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
