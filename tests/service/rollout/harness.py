"""Rollout and router processes on free ports, in one event loop with the test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format

from services.rollout.config import RolloutConfig
from services.rollout.engine.interface import PauseMode
from services.rollout.engine.reference.engine import ReferenceEngine
from services.rollout.process import RolloutProcess
from services.router.__main__ import RouterProcess
from services.router.config import RouterConfig
from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.client import EngineClient, RemoteError, RolloutClient, RouterClient, new_request_id
from sluice.config import parse_config
from sluice.runtime import wire
from sluice.samples.arrow import decode_group
from sluice.samples.blob_store import BlobStore
from sluice.samples.sample import Sample
from sluice.weights.store import StoredVersion, WeightStore
from tests.patience import PATIENCE
from tests.unit.rollout import grim

SERVER = {"drain_seconds": 0.2}
ENGINE = {"max_running": 32, "max_model_length": 64, "threads": 1}


@dataclass(frozen=True)
class Models:
    """Two tiny models of one architecture."""

    first: Path
    second: Path


@dataclass(frozen=True)
class Store:
    """A shared store with two weight versions."""

    root: Path
    weights: WeightStore
    first: StoredVersion
    second: StoredVersion

    def samples(self, finished: pb.FinishedGroup) -> list[Sample]:
        """The rows of a finished group."""
        blobs = BlobStore(self.root, sync=False)
        return decode_group(blobs.get(wire.blob_from_proto(finished.blob)))


def named(record: StoredVersion) -> sample_pb2.WeightVersion:
    return sample_pb2.WeightVersion(version=record.version, digest=record.digest)


@contextlib.asynccontextmanager
async def running_router(**values: Any) -> AsyncIterator[RouterProcess]:
    process = RouterProcess(parse_config(RouterConfig, {"server": SERVER, **values}))
    await process.start()
    try:
        yield process
    finally:
        await process.server.stop()
        await process.close()


@contextlib.asynccontextmanager
async def running_rollout(store: Store, **values: Any) -> AsyncIterator[RolloutProcess]:
    """A rollout process; `router` is an address or absent."""
    base = {"store": str(store.root), "store_sync": False, "server": SERVER, "engine": ENGINE}
    process = RolloutProcess(parse_config(RolloutConfig, {**base, **values}))
    await process.start()
    try:
        yield process
    finally:
        await process.server.stop()
        await process.close()


async def load_weights(client: EngineClient, record: StoredVersion) -> None:
    await client.prepare_weights(named(record))
    await client.commit_weights(named(record))


def hold_after(process: RolloutProcess, tokens: int) -> None:
    """The engine pauses in place once it drew so many more tokens, while some sample runs.

    On its own thread, between two steps: however late the test is, the sample does not end.
    """
    assert isinstance(process.engine, ReferenceEngine)
    core = process.engine._core
    step, limit = core.step, core.drawn_tokens + tokens

    def step_and_hold() -> None:
        step()
        if core.drawn_tokens >= limit and core.running_count:
            core.step = step  # type: ignore[method-assign]
            core.pause(PauseMode.IN_PLACE)

    core.step = step_and_hold  # type: ignore[method-assign]


@dataclass
class Episodes:
    """Router, engine and episode worker, and a way to talk to each."""

    store: Store
    router: RouterProcess
    engine: EngineClient
    client: RolloutClient
    worker: RolloutProcess

    async def finished(self, request: pb.RolloutRequest) -> dict[str, pb.FinishedGroup]:
        """All groups of a rollout; none may fail."""
        events = [event async for event in self.client.rollout(request)]
        assert not [event for event in events if event.HasField("failed")], events
        return {event.finished.group_id: event.finished for event in events}

    async def failed(self, request: pb.RolloutRequest) -> dict[str, pb.FailedGroup]:
        """All groups of a rollout; none may finish."""
        events = [event async for event in self.client.rollout(request)]
        assert not [event for event in events if event.HasField("finished")], events
        return {event.failed.group_id: event.failed for event in events}


async def wait_for_engines(address: str, count: int) -> list[router_pb.Engine]:
    """Until the router leases so many engines."""
    async with RouterClient(address) as client, asyncio.timeout(PATIENCE):
        while True:
            try:
                engines = await client.list_engines(router_pb.ROLE_ENGINE)
            except RemoteError as error:
                if error.code is not grpc.StatusCode.UNAVAILABLE:
                    raise
                engines = []  # grpc lets channels of a process share that nobody was there before
            active = [e for e in engines if e.state == router_pb.ENGINE_STATE_ACTIVE]
            if len(active) == count:
                return active
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running_episodes(
    store: Store,
    model: Path,
    *,
    split: bool = False,
    server: Mapping[str, Any] = SERVER,
    engine: Mapping[str, Any] = ENGINE,
    rollout: Mapping[str, Any] | None = None,
    **episodes: Any,
) -> AsyncIterator[Episodes]:
    """Everything a rollout needs; with `split` the roles are two servers.

    `rollout`: further settings of these.
    """
    async with contextlib.AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router())
        common = {
            "router": router.server.address,
            "server": server,
            "engine": engine,
            "tokenizer": str(model),
            "episodes": {"environments": {"grim": grim.PATH}, **episodes},
            **(rollout or {}),
        }
        roles = [["engine"], ["episodes"]] if split else [["episodes", "engine"]]
        processes = [
            await stack.enter_async_context(
                running_rollout(store, roles=each, engine_id=f"rollout-{i}", **common)
            )
            for i, each in enumerate(roles)
        ]
        direct = await stack.enter_async_context(EngineClient(processes[0].server.address))
        client = await stack.enter_async_context(RolloutClient(processes[-1].server.address))
        await load_weights(direct, store.first)
        await wait_for_engines(router.server.address, 1)
        yield Episodes(store, router, direct, client, processes[-1])


def rollout_request(
    rows: Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]],
    *,
    environment: str = "prompts",
    settings: Mapping[str, Any] | None = None,
    sample_count: int = 4,
    max_new_tokens: int = 5,
    **fields: Any,
) -> pb.RolloutRequest:
    """A request for groups `g0`, `g1` ..., or named as the mapping says."""
    named_rows = rows if isinstance(rows, Mapping) else {f"g{i}": r for i, r in enumerate(rows)}
    request = pb.RolloutRequest(
        request_id=new_request_id(),
        environment=pb.EnvironmentSpec(name=environment),
        sampling=engine_pb.SamplingParams(max_new_tokens=max_new_tokens),
        sample_count=sample_count,
        **fields,
    )
    json_format.ParseDict(dict(settings or {}), request.environment.settings)
    for group_id, row in named_rows.items():
        group = request.groups.add(group_id=group_id)
        if "index" in row:
            group.index = row["index"]
        else:
            json_format.ParseDict(dict(row), group.row)
    return request


def copy_rows(count: int) -> list[dict[str, str]]:
    """Copy four digits."""
    return [{"prompt": f"{i:04d}=", "answer": f"{i:04d}"} for i in range(count)]
