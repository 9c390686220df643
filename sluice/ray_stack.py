"""`sluice up --on ray`: the services of a `services.yaml` on a Ray cluster that is there already.

Every process is the child of one detached, named actor (`sluice/ray_cell.py`), so that services
outlive the command; Ray places the actors, and starts them again where a node is lost. `run_dir`
is a directory that all nodes share.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from sluice.client import Client, RemoteError, RouterClient, TrainerClient
from sluice.config import RESERVED_ENV, ConfigError
from sluice.durable import DirectoryError, replace_file
from sluice.loop.training import active_trainer
from sluice.runtime.recovery import NotReadyError, wait_until_ready
from sluice.service_logs import CalledLog, LogSource, chosen
from sluice.stack import (
    MODULES,
    STACK_FILE,
    START_ORDER,
    LivenessConfig,
    ServiceEntry,
    UpConfig,
    filled_in,
    http_section,
    node_name,
    services_entry,
)
from sluice.starting import StartBoard, StartingService
from sluice.supervise import ServiceDiedError, ready_reward_model

REGISTRY = "registry"
POLL_SECONDS = 0.2
CONNECT_SECONDS = 60.0
LOG_SECONDS = 30.0
ANSWER_SECONDS = 30.0  # of the registry, once it has started
CARRIED = frozenset({"PYTHONPATH", "OMP_NUM_THREADS", *RESERVED_ENV})
CARRIED_PREFIXES = ("HF_", "NCCL_", "GLOO_", "HCCL_")
DEATHS_OF_A_START = 3  # in a row, of a process that has yet to serve
NOT_PLACED = "Ray has yet to place it"
NOT_OPEN = "it did not open its port"
LITTLE_CPU = 0.01  # of a process that asks for none
LITTLE_NODE = 0.001  # of a node's own resource, which has one


@dataclass(frozen=True)
class Member:
    """One process of a stack: what its cell is told, what it needs, and with whom it is placed."""

    name: str
    group: str
    spec: dict[str, Any]
    bundle: dict[str, float]
    strategy: str

    @property
    def is_awaited(self) -> bool:
        """Whether it is up only when it takes work, or a router of the stack knows it."""
        if self.spec["kind"] == "rollout":
            return "router" in self.spec and "leader" not in self.spec
        return self.spec["kind"] in ("trainer", "reward_model")


def members_of(config: UpConfig) -> list[Member]:
    """Expand replicas and external ranks to members. Raises ConfigError."""
    found = [
        member
        for kind in START_ORDER
        for name, entry in config.services.items()
        if entry.kind == kind
        for member in _members(config, name, entry)
    ]
    routers = [member.name for member in found if member.spec["kind"] == "router"]
    for member in found:
        if member.spec["kind"] == "gateway":
            raise ConfigError(
                f"services.{member.name}: a gateway keeps a journal on one machine: start it "
                "there, by python -m services.gateway"
            )
        if member.spec["kind"] == "rollout" and "router" not in member.spec["config"]:
            if not routers:
                raise ConfigError("services: a rollout service needs a router")
            member.spec["router"] = routers[0]
    return found


def _members(config: UpConfig, name: str, entry: ServiceEntry) -> Iterator[Member]:
    if entry.devices:
        raise ConfigError(f"services.{name}.devices: are of one machine; give resources on Ray")
    strategy = "PACK" if entry.strategy == "pack" else "SPREAD"
    external = entry.kind == "trainer" and entry.config.get("ranks", {}).get("launch") == "external"
    for replica in range(entry.replicas):
        own = entry.name_of(name, replica)
        bundle = {"CPU": LITTLE_CPU} if external else _bundle(entry)
        for node in range(entry.nodes):
            spec: dict[str, Any] = {
                "name": node_name(own, node),
                "kind": entry.kind,
                "module": MODULES[entry.kind],
                "http_section": http_section(entry.kind, entry.config),
                "config": filled_in(config, own, entry, node),
                "shown": services_entry(config, entry, node),
                **({"leader": own} if node else {}),
            }
            where = _pinned(entry, replica * entry.nodes + node)
            yield Member(spec["name"], name, spec, bundle | where, strategy)
    if external:
        count = int(entry.config["ranks"].get("count", 1))
        for rank in range(count):
            spec = {"kind": "rank", "trainer": name, "rank": rank, "count": count}
            spec["name"] = f"{name}-rank{rank}"
            where = {} if not entry.hosts else _on(entry.hosts[rank % len(entry.hosts)])
            bundle = _bundle(entry) | where
            yield Member(str(spec["name"]), f"{name}-ranks", spec, bundle, strategy)


def _bundle(entry: ServiceEntry) -> dict[str, float]:
    needs = entry.resources
    bundle = {
        "CPU": max(needs.cpus, LITTLE_CPU),
        "GPU": float(needs.gpus),
        "NPU": float(needs.npus),
        "memory": float(int(needs.memory_gib * 2**30)),
    }
    return {name: amount for name, amount in bundle.items() if amount}


def _pinned(entry: ServiceEntry, process: int) -> dict[str, float]:
    """The hosts in turn; without any it is Ray that places, and places anew."""
    return _on(entry.hosts[process % len(entry.hosts)]) if entry.hosts else {}


def _on(host: str) -> dict[str, float]:
    return {f"node:{host}": LITTLE_NODE}


def carried_environment() -> dict[str, str]:
    """What of this process's environment goes to the services of all nodes."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in CARRIED or name.startswith(CARRIED_PREFIXES)
    }


def connect(address: str, namespace: str) -> Any:
    """Return Ray, connected. Raises ConfigError where there is none, or it refuses.

    Whoever reaches the ports of Ray runs code there, so that it is asked for a token unless
    RAY_AUTH_MODE says otherwise.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise ConfigError("--on ray: Ray is not installed; pip install 'sluice[ray]'") from None
    if ray.is_initialized():
        ray.shutdown()
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        mode = os.environ["RAY_AUTH_MODE"]
        raise ConfigError(
            f"--address {address}: no Ray answers: {why} (RAY_AUTH_MODE is {mode}; the token is "
            "that of RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token)"
        ) from None
    return ray


class RayStack:
    """The services of a file on Ray. `start` leaves them running; `stop` ends them."""

    def __init__(self, config: UpConfig, address: str = "auto") -> None:
        if config.liveness != LivenessConfig():
            raise ConfigError("liveness: is not for Ray, where no health check ends a process")
        self.config = config.model_copy(update={"run_dir": config.run_dir.absolute()})
        self.run_dir, self._address = self.config.run_dir, address
        self._members = members_of(self.config)
        self._board = StartBoard(self.run_dir)
        self._placed = {member.name: time.time() for member in self._members}  # or looked for since
        self._open = dict[str, str]()  # addresses of those that have opened a port

    @property
    def services_file(self) -> Path:
        return self.run_dir / "services.json"

    async def start(self) -> None:
        """Start all, and wait until they serve. Raises ServiceDiedError; then none is left.

        Raises DirectoryError where the directory has services already, ConfigError without Ray.
        """
        file = self.run_dir / STACK_FILE
        if file.exists():
            raise DirectoryError(
                f"run_dir: {self.run_dir} has services on Ray; `sluice down` first"
            )
        for part in ("logs", "services"):
            (self.run_dir / part).mkdir(parents=True, exist_ok=True)
        ray = connect(self._address, _namespace(self.run_dir))
        known = {"address": self._address, "stop_seconds": self.config.stop_timeout_seconds}
        replace_file(file, json.dumps(known).encode(), temporary=self.run_dir, sync=False)
        self.services_file.unlink(missing_ok=True)
        for member in self._members:
            self._note_start(member, NOT_PLACED)
        try:
            registry = await asyncio.to_thread(self._create, ray)
            await self._wait(ray, registry)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(end_stack, self.run_dir))
            raise
        finally:
            self._board.clear()

    def _note_start(self, member: Member, reason: str, address: str = "") -> None:
        """Tell others what is awaited of a service; ranks are told of by their trainer."""
        if member.spec["kind"] != "rank":
            kind, since = member.spec["shown"]["kind"], self._placed[member.name]
            self._board.note(StartingService(member.name, kind, address, reason, since))

    def _create(self, ray: Any) -> Any:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from sluice import ray_cell

        ray.cloudpickle.register_pickle_by_value(ray_cell)
        always = {"lifetime": "detached", "max_restarts": -1}
        registry = (
            ray.remote(ray_cell.Registry)
            .options(name=REGISTRY, num_cpus=0, resources=_on("__internal_head__"), **always)
            .remote(str(self.services_file))
        )
        marker = self.run_dir / "services" / f".seen-{secrets.token_hex(8)}"
        marker.touch()
        groups: dict[str, list[Member]] = {}
        for member in self._members:
            groups.setdefault(member.group, []).append(member)
        common = {
            "run_dir": str(self.run_dir),
            "directory": str(Path.cwd()),
            "environment": carried_environment(),
            "restarts": self.config.restarts,
            "marker": str(marker),
        }
        cell = ray.remote(ray_cell.Cell)
        for name, members in groups.items():
            bundles = [member.bundle for member in members]
            full = f"{_namespace(self.run_dir)}:{name}"
            group = placement_group(bundles, members[0].strategy, full, lifetime="detached")
            if not group.wait(self.config.start_timeout_seconds):
                raise ServiceDiedError(f"Ray has no room for {name}: {_told(bundles)}")
            for index, member in enumerate(members):
                needs = dict(member.bundle)
                cpus, gpus = needs.pop("CPU"), needs.pop("GPU", 0)
                cell.options(
                    name=member.name,
                    num_cpus=cpus,
                    num_gpus=gpus,
                    memory=needs.pop("memory", None),
                    resources=needs,
                    max_concurrency=4,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
                    **always,
                ).remote(registry, {**member.spec, **common})
                self._placed[member.name] = time.time()
                self._note_start(member, NOT_OPEN)
        return registry

    async def _wait(self, ray: Any, registry: Any) -> None:
        """Until all have opened their ports, trainers take work and the router knows the rest."""
        deadline = time.monotonic() + self.config.start_timeout_seconds
        wanted = {member.name for member in self._members if member.spec["kind"] != "rank"}

        async def opened() -> dict[str, Any]:
            try:
                entries = await asyncio.to_thread(
                    ray.get, registry.entries.remote(), timeout=ANSWER_SECONDS
                )
            except ray.exceptions.GetTimeoutError:  # on a busy machine it may have yet to start
                raise NotReadyError("the registry on Ray's head does not answer") from None
            for name, entry in entries.items():
                if entry["failure"]:
                    raise ServiceDiedError(entry["failure"])
                if entry["deaths"] >= DEATHS_OF_A_START:
                    raise ServiceDiedError(f"{name} does not start: {entry['told']}")
            self._note_opened(entries)
            missing = wanted - {name for name, entry in entries.items() if entry["shown"]}
            if missing:
                raise NotReadyError(f"{', '.join(sorted(missing))} did not open a port")
            return {name: entries[name]["shown"] for name in wanted}

        found = await self._until(opened, deadline)
        security = self.config.security
        for member in self._members:
            kind, address = member.spec["kind"], found.get(member.name, {}).get("address", "")
            if kind == "trainer":
                async with TrainerClient(address, security) as trainer:

                    async def active(trainer: TrainerClient = trainer) -> None:
                        await opened()
                        await active_trainer(trainer)

                    await self._until(active, deadline, member)
            elif kind == "reward_model":
                async with Client(address, security) as client:

                    async def loaded(client: Client = client) -> None:
                        await opened()
                        await ready_reward_model(client)

                    await self._until(loaded, deadline, member)
            elif kind == "rollout" and member.is_awaited:
                router_address = found[member.spec["router"]]["address"]
                async with RouterClient(router_address, security) as router:

                    async def registered(
                        router: RouterClient = router, address: str = address
                    ) -> None:
                        await opened()
                        if address not in {e.address for e in await router.list_engines()}:
                            raise NotReadyError("the router does not know it yet")

                    await self._until(registered, deadline, member)

    def _note_opened(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Tell who has yet to open a port, and how its process ended if it did."""
        for member in self._members:
            entry = entries.get(member.name, {})
            address = str(entry.get("shown", {}).get("address", ""))
            if address and member.name not in self._open:
                self._open[member.name] = address
                reason = "its port is open" if member.is_awaited else ""
                self._note_start(member, reason, address)
            elif not address:
                self._open.pop(member.name, None)
                ended = f": {entry['told']}" if entry.get("told") else ""
                self._note_start(member, f"{NOT_OPEN}{ended}")

    async def _until(self, probe: Any, deadline: float, member: Member | None = None) -> Any:
        """Waits for all services to open their ports, or for what `member` has yet to be."""

        async def told() -> Any:
            try:
                return await probe()
            except (NotReadyError, RemoteError) as error:
                if member is not None and member.name in self._open:
                    self._note_start(member, str(error), self._open[member.name])
                raise

        what, seconds = "services" if member is None else member.name, deadline - time.monotonic()
        found = await wait_until_ready(
            what,
            told,
            max(1.0, seconds),
            ServiceDiedError,
            every=POLL_SECONDS,
            usual_seconds=60.0,
        )
        if member is not None:
            self._note_start(member, "", self._open[member.name])
        return found


def end_stack(run_dir: Path) -> None:
    """End all that runs on Ray for a directory. Raises ConfigError where Ray cannot be reached."""
    run_dir = run_dir.absolute()
    file = run_dir / STACK_FILE
    try:
        known = json.loads(file.read_text())
        address, stop_seconds = str(known["address"]), float(known["stop_seconds"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"down: {file} does not say which Ray: {error}") from None
    namespace = _namespace(run_dir)
    try:
        ray = connect(address, namespace)
    except ConfigError as error:
        raise ConfigError(f"{error}; where that cluster is gone for good, remove {file}") from None
    from ray.util.placement_group import placement_group_table, remove_placement_group

    try:
        names = [
            each["name"]
            for each in ray.util.list_named_actors(all_namespaces=True)
            if each["namespace"] == namespace
        ]
        cells = {}
        for name in names:
            with contextlib.suppress(ValueError):  # it has gone meanwhile
                cells[name] = ray.get_actor(name)
        registry = cells.pop(REGISTRY, None)
        stopping = [cell.stop.remote(stop_seconds) for cell in cells.values()]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=stop_seconds + CONNECT_SECONDS)
        for actor in [*cells.values(), *([registry] if registry is not None else [])]:
            ray.kill(actor)
        for group in placement_group_table().values():
            if group["state"] != "REMOVED" and str(group["name"]).startswith(f"{namespace}:"):
                remove_placement_group(ray.util.get_placement_group(group["name"]))
        for path in (run_dir / "services").glob(".seen-*"):
            path.unlink(missing_ok=True)
        (run_dir / "services.json").unlink(missing_ok=True)
        file.unlink(missing_ok=True)
    finally:
        ray.shutdown()


def _told(bundles: list[dict[str, float]]) -> str:
    return ", ".join(json.dumps(bundle) for bundle in bundles[:4])


def stack_logs(run_dir: Path, names: Sequence[str], address: str) -> dict[str, LogSource]:
    """The logs of the services of a directory that nodes of Ray see. Raises ConfigError."""
    run_dir = run_dir.absolute()
    namespace = _namespace(run_dir)
    ray = connect(address, namespace)
    cells = {}
    for each in ray.util.list_named_actors(all_namespaces=True):
        if each["namespace"] == namespace and each["name"] != REGISTRY:
            with contextlib.suppress(ValueError):  # it has gone meanwhile
                cells[each["name"]] = ray.get_actor(each["name"])
    if not cells:
        raise ConfigError(f"--address {address}: has no services of {run_dir}")
    wanted = chosen(sorted(cells), names)

    def caller(name: str) -> Callable[[int, int], bytes]:
        def call(offset: int, size: int) -> bytes:
            try:
                data: bytes = ray.get(
                    cells[name].read_log.remote(offset, size), timeout=LOG_SECONDS
                )
            except ray.exceptions.RayError as error:
                why = type(error).__name__
                raise ConfigError(f"{name}: its actor does not answer: {why}") from None
            return data

        return call

    return {name: CalledLog(name, caller(name)) for name in wanted}


def _namespace(run_dir: Path) -> str:
    """One for each directory, so that stacks of one cluster do not meet."""
    return f"sluice-{xxhash.xxh3_64_hexdigest(str(run_dir).encode())}"
