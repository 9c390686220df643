"""How a run and its services do: asked of all at once, each within a deadline; nothing is changed.

`docs/status.md` is the schema of what `read_status` returns.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from pydantic import Field, ValidationError

from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.client import Client, EngineClient, RemoteError, RouterClient, TrainerClient
from sluice.config import ConfigError, ProcessConfig
from sluice.loop.fleet import POOL
from sluice.loop.journal import END, NOTE, START, read_journal
from sluice.loop.report import RECENT, read_metrics, seconds_left, tokens_per_second
from sluice.runtime.addresses import address_of
from sluice.runtime.processes import is_at_work
from sluice.runtime.security import SecurityConfig
from sluice.runtime.waits import age_of
from sluice.runtime.wire import seconds_of
from sluice.starting import NO_ADDRESS, StartingService, read_starting

LOOP_ADDRESS = "loop.address.json"  # in a run directory
ADDRESS = re.compile(r"\S+:\d{1,5}")
CURVE = 40  # rewards that are shown
NOTES = 3
SERVICES = {  # whose health is that of a kind
    "trainer": ("sluice.api.trainer.v1.TrainerService",),
    "router": ("sluice.api.router.v1.RouterService",),
    "rollout": ("sluice.api.rollout.v1.EngineService", "sluice.api.rollout.v1.RolloutService"),
    "converter": ("sluice.api.converter.v1.ConverterService",),
}
SERVING, NOT_SERVING, NO_ANSWER = "serving", "not serving", "no answer"
STARTING = "starting"  # its supervisor waits for it


class StatusConfig(ProcessConfig):
    """How `sluice status` asks."""

    security: SecurityConfig | None = Field(
        None, description="None is that of the run, or none at all for an address."
    )
    timeout_seconds: float = Field(3, gt=0, le=600, description="For all answers, at once.")
    refresh_seconds: float = Field(2, ge=0.2, le=3600, description="Between screens.")


async def read_status(target: str, config: StatusConfig) -> dict[str, Any]:
    """The state of a run directory, or of the server at host:port. Raises ConfigError.

    Who gives no answer within the time is listed so. Numbers that are not finite are None.
    """
    run_dir, starting = Path(target), list[StartingService]()
    run, security = None, config.security or SecurityConfig()
    if (events := _events_of(target)) is not None:
        security = config.security or _security(events)
        starting = read_starting(_services_file(run_dir, events).parent)
        services = _addresses(run_dir, events)
        services |= {each.name: (each.kind, each.address) for each in starting if each.address}
        run = _run_status(run_dir, events, has_services=bool(services or starting))
    elif ADDRESS.fullmatch(address := placed(target)):
        services = {target: ("", address)}
    else:
        raise ConfigError(no_target_text(target))
    found = await _ask_all(services, security, config.timeout_seconds)
    _note_starting(found, starting)
    engines = [engine for service in found for engine in service.pop("engines")]
    versions = [service.pop("version_after_engines") for service in found]
    newest = max((v for v in versions if v is not None), default=None)
    for engine in engines:
        version, is_policy = engine["weight_version"], engine.pop("pool") in ("", POOL)
        is_known = newest is not None and version is not None and is_policy
        engine["versions_behind"] = newest - version if is_known else None
    status = {
        "target": target,
        "time": time.time(),
        "run": run,
        "services": found,
        "engines": sorted(engines, key=lambda engine: str(engine["id"])),
    }
    plain: dict[str, Any] = _finite(status)
    return plain


def security_of(target: str) -> SecurityConfig:
    """That of the run of a directory; none at all for an address."""
    events = _events_of(target)
    return SecurityConfig() if events is None else _security(events)


def _events_of(target: str) -> list[dict[str, Any]] | None:
    """What happened in a run directory; None for what is none, or can be no path."""
    return read_journal(Path(target)) if os.path.isdir(target) else None


async def _ask_all(
    services: Mapping[str, tuple[str, str]], security: SecurityConfig, seconds: float
) -> list[dict[str, Any]]:
    """What every service tells of itself, all together within so many seconds.

    A trainer is asked for its version once more after the routers have named the engines: a run
    goes on meanwhile, and an engine would serve a version that the trainer had not published yet.
    """
    deadline = asyncio.get_running_loop().time() + seconds
    asking = {
        name: asyncio.create_task(_service_status(name, kind, address, security, seconds))
        for name, (kind, address) in services.items()
    }
    routers = [asking[name] for name, (kind, _) in services.items() if kind == "router"]
    try:
        return await asyncio.gather(
            *(_after_engines(task, routers, security, deadline) for task in asking.values())
        )
    finally:
        for task in asking.values():
            task.cancel()


async def _after_engines(
    asking: asyncio.Task[dict[str, Any]],
    routers: Sequence[asyncio.Task[dict[str, Any]]],
    security: SecurityConfig,
    deadline: float,
) -> dict[str, Any]:
    """With `version_after_engines`: of a trainer that was there to be asked again in time."""
    status = await asking | {"version_after_engines": None}
    if status["kind"] != "trainer" or status["weight_version"] is None:
        return status
    with suppress(TimeoutError, RemoteError):
        async with asyncio.timeout_at(deadline):
            listed = await asyncio.gather(*map(asyncio.shield, routers))
            if any(each["engines"] for each in listed):
                await _ask_trainer(status, status["address"], security)
                status["version_after_engines"] = status["weight_version"]
    return status


def no_target_text(target: str) -> str:
    """What to say of a text that names neither a run nor a server."""
    return f"{target[:200]!r} is neither a run directory nor host:port, nor services.json#NAME"


def placed(target: str) -> str:
    """An address for `services.json#NAME`; what else is given, as it is. Raises ConfigError."""
    file, mark, name = target.rpartition("#")
    if not (mark and file and name) or os.path.isdir(target) or ADDRESS.fullmatch(target):
        return target
    try:
        return address_of(Path(file), name)
    except ConfigError:
        for service in read_starting(Path(file).parent):
            if service.name == name and service.address:
                return service.address
            if service.name == name:
                raise ConfigError(f"services: {name} is being started: {service.reason}") from None
        raise


def _finite(value: Any) -> Any:
    """JSON has no word for NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def _note_starting(found: list[dict[str, Any]], starting: Sequence[StartingService]) -> None:
    """Say of services that are not up yet what is awaited of each; adds those without a port."""
    by_name = {status["name"]: status for status in found}
    for service in starting:
        if (status := by_name.get(service.name)) is None:
            status = _unasked(service.name, service.kind, service.address or NO_ADDRESS)
            status["version_after_engines"] = None
            found.append(status)
        if service.reason:
            own = status["detail"] if status["health"] != NO_ANSWER else ""
            detail = f"{service.reason}; {own}" if own else service.reason
            status |= {"health": STARTING, "detail": detail}


def _run_status(
    run_dir: Path, events: list[dict[str, Any]], has_services: bool
) -> dict[str, Any] | None:
    """None where there are services and no run yet. Raises ConfigError."""
    try:
        rows = read_metrics(run_dir, recent=CURVE)
    except OSError as error:
        raise ConfigError(f"{run_dir}: {error.strerror}") from None
    if not rows and not events:
        if has_services or (run_dir / "services.json").exists():
            return None
        raise ConfigError(f"{run_dir} holds no run: neither metrics.jsonl nor a journal")
    steps = [row for row in rows if "score" not in row]
    last = steps[-1] if steps else {}
    step = last.get("step", 0)
    started = _last_start(events)
    total = started.get("steps")
    total = total if isinstance(total, int) else None
    state, detail = life_of(run_dir, events, bool(steps))
    left = seconds_left(steps[-RECENT:], step, total) if total is not None else None
    scores = {
        str(row["dataset"]): {"score": row["score"], "step": row["step"]}
        for row in rows
        if "score" in row and "dataset" in row
    }
    notes = [
        {"time": event["time"], "step": event.get("step"), "text": str(event.get("text", ""))}
        for event in events
        if event["event"] == NOTE
    ]
    return {
        "run_dir": str(run_dir),
        "kind": started.get("kind"),
        "state": state,
        "detail": detail,
        "step": step,
        "steps": total,
        "seconds_left": left if state in ("running", "starting") else None,
        "started": started.get("time"),
        "updated": last.get("time"),
        "starts": sum(event["event"] == START for event in events),
        "tokens_per_second": tokens_per_second(last),
        "rewards": [row.get("reward_mean") for row in steps[-CURVE:] if "reward_mean" in row],
        "skipped_steps": sum(bool(row.get("skipped")) for row in steps),
        "last": {k: v for k, v in last.items() if isinstance(v, int | float)},
        "scores": scores,
        "notes": notes[-NOTES:],
    }


def _last_start(events: list[dict[str, Any]]) -> dict[str, Any]:
    return next((event for event in reversed(events) if event["event"] == START), {})


def life_of(run_dir: Path, events: list[dict[str, Any]], has_steps: bool) -> tuple[str, str]:
    """What became of the process that began last, and what to say of it."""
    last = next((event for event in reversed(events) if event["event"] in (START, END)), None)
    if last is None:
        return "unknown", "an earlier release kept no journal"
    if last["event"] == END:
        outcome = str(last.get("outcome"))
        known = outcome in ("done", "stopped", "failed")
        return outcome if known else "unknown", str(last.get("text", ""))
    pid, alive = last.get("pid"), is_at_work(last)
    if alive is None:
        return "unknown", f"it runs, or ran, on {last.get('host')}"
    if not alive:
        return "gone", f"process {pid} ended without a word; `--resume` goes on with the run"
    return ("running" if has_steps else "starting"), f"process {pid}"


def _security(events: list[dict[str, Any]]) -> SecurityConfig:
    """That of the run's own settings."""
    for event in reversed(events):
        if event["event"] == START and isinstance(event.get("config"), Mapping):
            try:
                return SecurityConfig.model_validate(event["config"].get("security", {}))
            except ValidationError:
                break
    return SecurityConfig()


def _addresses(run_dir: Path, events: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Kinds and addresses by name: of the loop, and of the services that its settings name."""
    found: dict[str, tuple[str, str]] = {}
    loop = _json(run_dir / LOOP_ADDRESS)
    if isinstance(loop.get("address"), str):
        found["loop"] = ("loop", loop["address"])
    started = _last_start(events)
    config = started.get("config")
    config = config if isinstance(config, Mapping) else {}
    for kind in ("trainer", "router"):
        if isinstance(address := config.get(kind), str) and address:
            found[kind] = (kind, address)
    for name, entry in _json(_services_file(run_dir, events)).items():
        if isinstance(entry, Mapping) and isinstance(entry.get("address"), str):
            found[str(name)] = (str(entry.get("kind", "")), entry["address"])
    return found


def _services_file(run_dir: Path, events: list[dict[str, Any]]) -> Path:
    """That which the settings of a run name, or its directory's."""
    config = _last_start(events).get("config")
    file = config.get("services") if isinstance(config, Mapping) else None
    return Path(file) if isinstance(file, str) else run_dir / "services.json"


def _json(path: Path) -> dict[str, Any]:
    """Empty where it is not there, or no object."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _unasked(name: str, kind: str, address: str) -> dict[str, Any]:
    """What there is to say of a service before it answers."""
    return {
        "name": name,
        "kind": kind,
        "address": address,
        "health": NO_ANSWER,
        "detail": "",
        "weight_version": None,
        "step": None,
        "waits": [],
        "engines": [],
    }


async def _service_status(
    name: str, kind: str, address: str, security: SecurityConfig, seconds: float
) -> dict[str, Any]:
    status = _unasked(name, kind, address)
    try:
        async with asyncio.timeout(seconds), Client(address, security) as client:
            status["health"] = SERVING if await client.is_serving() else NOT_SERVING
            status["waits"] = [
                {
                    "what": wait.what,
                    "on": list(wait.on),
                    "seconds": age_of(wait),
                    "explanation": wait.explanation,
                }
                for wait in await client.list_waits()
            ]
            await _ask_kind(status, security)
            for name in SERVICES.get(status["kind"], ()):
                if not await _serves(client, name):
                    status["health"] = NOT_SERVING
    except TimeoutError:
        status["detail"] = f"no answer within {seconds:g} s"
    except ConfigError as error:  # no address, or no file of a token
        status["detail"] = await asyncio.to_thread(_ended_text, address) or str(error)
    except RemoteError as error:
        status["detail"] = unreachable_text(error) or str(error)
        spoke = error.code is not grpc.StatusCode.UNAVAILABLE
        if error.code in _REFUSED or (spoke and status["health"] == NO_ANSWER):
            status["health"] = NOT_SERVING
    return status


def _ended_text(address: str) -> str:
    """What to say of a service whose services.json is no longer there; empty where it is."""
    file = Path(address.partition("#")[0])
    return f"ended: {file.name} is gone" if "#" in address and not file.exists() else ""


_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)  # this caller


def unreachable_text(error: RemoteError) -> str:
    """Why nobody was reached, in a few words; empty where somebody was, or it is not known."""
    if error.code is not grpc.StatusCode.UNAVAILABLE or error.reason:
        return ""
    for pattern, text in _UNREACHABLE:
        if re.search(pattern, error.message):
            return text
    return ""


_UNREACHABLE = (
    ("Connection refused", "nobody listens there"),
    ("DNS resolution failed", "no host of that name is known"),
    ("No route to host|Network is unreachable", "no route to that host"),
    ("Socket closed", "it hangs up; does it ask for TLS?"),
    ("Ssl handshake failed|CERTIFICATE_VERIFY_FAILED|SSL_ERROR", "no TLS that both sides take"),
)


async def _serves(client: Client, service: str) -> bool:
    try:
        return await client.is_serving(service)
    except RemoteError as error:
        if error.code is not grpc.StatusCode.NOT_FOUND:  # a rollout process without an engine, say
            raise
        return True


async def _ask_kind(status: dict[str, Any], security: SecurityConfig) -> None:
    """What a trainer, a router or an engine tells of itself; of an unknown kind all are tried."""
    address, kind = status["address"], status["kind"]
    for of, ask in (("trainer", _ask_trainer), ("router", _ask_router), ("rollout", _ask_engine)):
        if kind not in ("", of):
            continue
        try:
            await ask(status, address, security)
        except RemoteError as error:
            if error.code is not grpc.StatusCode.UNIMPLEMENTED:
                raise
        else:
            status["kind"] = of
            return


async def _ask_trainer(status: dict[str, Any], address: str, security: SecurityConfig) -> None:
    async with TrainerClient(address, security) as client:
        trainer = await client.get()
    state = trainer_pb.Trainer.State.Name(trainer.state).removeprefix("STATE_").lower()
    told = [f"{state}, {trainer.backend}, step {trainer.step}, {len(trainer.ranks)} ranks"]
    if trainer.restart_count:
        told.append(f"{trainer.restart_count} restarts, the last: {trainer.failure}")
    if trainer.consecutive_skipped_count:
        told.append(f"{trainer.consecutive_skipped_count} steps skipped in a row")
    version = trainer.weights.version if trainer.HasField("weights") else None
    status |= {"detail": "; ".join(told), "step": trainer.step, "weight_version": version}


async def _ask_router(status: dict[str, Any], address: str, security: SecurityConfig) -> None:
    async with RouterClient(address, security) as client:
        listed = await client.list_engines()
    engines = [engine for engine in listed if engine.role != router_pb.ROLE_EPISODES]
    others = len(listed) - len(engines)
    status["detail"] = f"engines: {len(engines)}, episode workers: {others}"
    status["engines"] = [
        {
            "id": engine.engine_id,
            "address": engine.address,
            "pool": engine.pool,
            "state": router_pb.EngineState.Name(engine.state).removeprefix("ENGINE_STATE_").lower(),
            "weight_version": engine.weights.version if engine.HasField("weights") else None,
            "leased": sum(engine.leased_counts),
            "capacity": engine.max_running_count * max(1, engine.dp_size),
            "slowdown": engine.slowdown,
            "heartbeat_seconds": time.time() - seconds_of(engine.heartbeat_time),
        }
        for engine in engines
    ]


async def _ask_engine(status: dict[str, Any], address: str, security: SecurityConfig) -> None:
    async with EngineClient(address, security) as client:
        engine: engine_pb.GetEngineResponse = await client.get()
    version = engine.weights.version if engine.HasField("weights") else None
    told = "no weights yet" if version is None else f"weights of version {version}"
    status |= {"detail": told, "weight_version": version}
