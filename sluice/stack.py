"""What services.yaml says of the services of a run, and services.json of those that run."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
from pydantic import Field, field_validator, model_validator

from sluice import platform
from sluice.config import PLAIN_NAME, PLAIN_NAME_RULE, Config, ConfigError, ProcessConfig
from sluice.place import Place, StorePlace, place_of
from sluice.runtime.addresses import read_entries
from sluice.runtime.security import SecurityConfig

Kind = Literal["router", "converter", "reward_model", "trainer", "rollout", "gateway"]
START_ORDER: tuple[Kind, ...] = (
    "router",
    "converter",
    "reward_model",
    "trainer",
    "rollout",
    "gateway",
)
MODULES: dict[str, str] = {  # by kind, what is run
    **{kind: f"services.{kind}" for kind in START_ORDER},
    "reward_model": "services.rollout.reward_model",
}
CONFIGS: dict[Kind, str] = {  # by kind, what its settings are read as
    "router": "services.router.config:RouterConfig",
    "converter": "services.converter.servicer:ConverterConfig",
    "reward_model": "services.rollout.reward_model.config:RewardModelConfig",
    "trainer": "services.trainer.config:TrainerConfig",
    "rollout": "services.rollout.config:RolloutConfig",
    "gateway": "services.gateway.config:GatewayConfig",
}
HTTP_SECTIONS = ("openai", "classify", "tinker")  # of configurations: those of a port beside gRPC's
ALWAYS_HTTP = {"reward_model": "classify", "gateway": "tinker"}  # by kind
LOOPBACK = "127.0.0.1"  # where services listen that name no host
STACK_FILE = "ray.json"  # in a run directory whose services are on Ray
MAX_NODES = 1024  # of an engine
MAX_REPLICAS = 65_536


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


def router_name(config: UpConfig) -> str:
    """The name of the router that rollout services and gateways are given. Raises ConfigError."""
    for name, entry in config.services.items():
        if entry.kind == "router":
            return entry.name_of(name, 0)
    raise ConfigError("services: a rollout service, or a gateway, needs a router")


def trainer_name(config: UpConfig) -> str:
    """The name of the trainer that a gateway is given. Raises ConfigError."""
    if (name := policy_trainer(config)) is None:
        raise ConfigError("services: a gateway needs a trainer")
    return config.services[name].name_of(name, 0)


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


def policy_trainer(config: UpConfig) -> str | None:
    """The name of the trainer of the policy: `trainer`, as a run finds it, or the first."""
    names = [
        name
        for name, entry in config.services.items()
        if entry.kind == "trainer" and entry.config.get("head", "policy") == "policy"
    ]
    return "trainer" if "trainer" in names else next(iter(names), None)


def policy_weights(config: UpConfig) -> str:
    """Where the trainer of the policy puts versions of weights, if not in the store."""
    name = policy_trainer(config)
    return "" if name is None else str(config.services[name].config.get("weights", ""))


def http_section(kind: str, config: Mapping[str, Any]) -> str:
    """The section of a configuration that has a port beside gRPC's; empty where none has."""
    if kind in ALWAYS_HTTP:
        return ALWAYS_HTTP[kind]
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
    if entry.kind in ("trainer", "rollout", "gateway"):
        filled.setdefault("store", default_store(config))
    if entry.kind == "converter":
        filled.setdefault("roots", [str(run_dir)])
    if entry.kind == "trainer":
        filled.setdefault("name", name)
    if entry.kind == "gateway":
        filled.setdefault("journal", str(run_dir / own / "journal.sqlite"))
    if entry.kind in ("rollout", "gateway") and (weights := policy_weights(config)):
        filled.setdefault("weights", weights)
    if entry.kind == "rollout":
        filled.setdefault("engine_id", name)
        filled.setdefault("services", str(run_dir / "services.json"))
    if node:
        filled["engine"] = with_sglang(filled, node_rank=node)
    return filled


def with_sglang(config: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    """The engine's settings of a service, with some of SGLang."""
    engine = _section(config, "engine")
    return {**engine, "sglang": {**_section(engine, "sglang"), **settings}}


def read_store(path: Path) -> Place:
    """The shared store of the trainer in a services.json."""
    return store_of(path, read_entries(path))


def store_of(path: Path, entries: Mapping[str, Mapping[str, Any]]) -> Place:
    """That of the trainer among the entries of a services.json. Raises ConfigError."""
    stores = {entry["store"] for entry in entries.values() if entry["kind"] == "trainer"}
    if len(stores) != 1:
        raise ConfigError(f"store: the trainers of {path} have {len(stores)}; name one")
    return place_of(stores.pop())


def read_weights(path: Path) -> str:
    """Where versions of weights are by a services.json; empty: in the store."""
    return weights_of(read_entries(path))


def weights_of(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Where versions of weights are by the entries of one; empty: in the store."""
    found = entries.values()
    return next((str(e.get("weights", "")) for e in found if e["kind"] == "trainer"), "")
