"""The members of a simulated fleet: engines, episode workers and ranks that compute nothing.

They speak the protocols of the real ones, over gRPC, on ports of their own, and live in one event
loop. Samples are arrays of drawn lengths in real files, leased one by one from the router. Some
members are slow, and some die and come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import safetensors.numpy
import xxhash

from services.rollout.episodes.rollouts import finished_event
from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import engine_service_pb2_grpc as engine_grpc
from sluice.api.rollout.v1 import rollout_service_pb2 as rollout_pb
from sluice.api.rollout.v1 import rollout_service_pb2_grpc as rollout_grpc
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.api.router.v1 import router_service_pb2_grpc as router_grpc
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.api.trainer.v1 import worker_service_pb2_grpc as pb_grpc
from sluice.router_client import Lease, LeaseClient, LeaseDemand
from sluice.runtime.wire import seconds_of
from sluice.samples.arrow import encode_group
from sluice.samples.blob_store import BlobStore
from sluice.samples.sample import Sample, VersionSpan

DP_RANKS = 8  # of an engine
RUNNING = 8  # samples of a dp rank at a time: half of a step's wait for the other half
PROMPT, VOCABULARY = 512, 151_936
LONGEST, MEDIAN, SPREAD = 8192, 1500, 0.8  # response tokens: log-normal, cut at the longest
SLOW_SECONDS = 0.5  # by which samples and weights of a slow host are late
DOWN_SECONDS = 1.0  # of a host that died
HOSTS_PER_FAULT = 64  # one of so many is slow, and one of so many dies in a step
TENSORS = 4  # of a rank
MISS_SECONDS = 0.2  # until a rank that lost its controller tries again


def connect(address: str) -> grpc.aio.Channel:
    """A channel with a connection of its own, as that of another process has."""
    return grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])


class Work:
    """Seconds in which at least one member was at work of its own, that is not the control's."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._count, self._since = 0, 0.0

    @contextlib.contextmanager
    def done(self) -> Iterator[None]:
        if not self._count:
            self._since = time.perf_counter()
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self.seconds += time.perf_counter() - self._since


class Draw:
    """Samples of groups: slices of common arrays, of lengths that depend on the group alone."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self._tokens = random.integers(0, VOCABULARY, PROMPT + 2 * LONGEST, dtype=np.int32)
        self._logprobs = -random.random(LONGEST, dtype=np.float32)

    def lengths(self, group_id: str, count: int) -> list[int]:
        random = np.random.default_rng(xxhash.xxh3_64_intdigest(group_id.encode()))
        drawn = random.lognormal(np.log(MEDIAN), SPREAD, count)
        return [int(length) for length in np.clip(drawn, 1, LONGEST)]

    def group(self, group_id: str, lengths: Sequence[int], version: int) -> list[Sample]:
        start = xxhash.xxh3_64_intdigest(group_id.encode()) % LONGEST
        return [
            Sample(
                sample_id=f"{group_id}/{index}",
                group_id=group_id,
                token_ids=self._tokens[start : start + PROMPT + length],
                prompt_length=PROMPT,
                finish_reason="stop" if length < LONGEST else "length",
                columns={
                    "rollout_logprobs": self._logprobs[:length],
                    "reward": float(index % 2),
                },
                spans=(
                    VersionSpan(
                        version=version, digest="0" * 32, first_token=0, last_token=length - 1
                    ),
                ),
            )
            for index, length in enumerate(lengths)
        ]


@dataclass
class Host:
    """A rollout process: one engine and one episode worker behind a port."""

    fleet: RolloutFleet
    number: int
    port: int = 0
    weights: sample_pb2.WeightVersion | None = None
    _server: grpc.aio.Server | None = None
    _channel: grpc.aio.Channel | None = None
    _leases: LeaseClient | None = None
    _heart: asyncio.Task[None] | None = None
    _incarnation: str = ""

    @property
    def name(self) -> str:
        return f"host-{self.number:04d}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def is_alive(self) -> bool:
        return self._server is not None

    async def start(self) -> None:
        self.weights, self._incarnation = None, uuid.uuid4().hex
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        engine_grpc.add_EngineServiceServicer_to_server(EngineStandIn(self), self._server)
        rollout_grpc.add_RolloutServiceServicer_to_server(WorkerStandIn(self), self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        self._channel = connect(self.fleet.router)
        self._leases = LeaseClient(self._channel)
        self._leases.start()
        self._heart = asyncio.create_task(self._beat(), name=f"heart of {self.name}")

    async def stop(self) -> None:
        """End as a process does that is killed: nobody is told."""
        if self._server is None:
            return
        server, self._server = self._server, None
        assert self._heart is not None
        assert self._channel is not None
        assert self._leases is not None
        self._heart.cancel()
        await server.stop(None)
        await self._channel.close()
        with contextlib.suppress(Exception):  # it cannot reach its router any more
            await self._leases.close()

    async def die(self) -> None:
        await self.stop()
        await asyncio.sleep(DOWN_SECONDS)
        await self.start()

    @contextlib.asynccontextmanager
    async def late(self) -> AsyncIterator[None]:
        if self.number in self.fleet.slow:
            with self.fleet.work.done():
                await asyncio.sleep(SLOW_SECONDS)
        yield

    async def announce(self) -> float:
        """Register both roles; seconds until the next time."""
        assert self._channel is not None
        stub = router_grpc.RouterServiceStub(self._channel)
        engine = router_pb.Engine(
            engine_id=self.name,
            address=self.address,
            role=router_pb.ROLE_ENGINE,
            dp_size=DP_RANKS,
            max_running_count=RUNNING,
            weights=self.weights,
            incarnation=self._incarnation,
        )
        loads = [engine_pb.RankLoad(running_count=1) for _ in range(DP_RANKS)]
        worker = router_pb.Engine(
            engine_id=f"{self.name}-episodes",
            address=self.address,
            role=router_pb.ROLE_EPISODES,
            incarnation=self._incarnation,
        )
        answer = await stub.RegisterEngine(router_pb.RegisterEngineRequest(engine=engine))
        await stub.ReportLoad(router_pb.ReportLoadRequest(engine_id=self.name, rank_loads=loads))
        await stub.RegisterEngine(router_pb.RegisterEngineRequest(engine=worker))
        return seconds_of(answer.heartbeat_interval) / 3

    async def _beat(self) -> None:
        while True:
            try:
                seconds = await self.announce()
            except grpc.aio.AioRpcError:
                seconds = 0.5
            await asyncio.sleep(seconds)

    async def roll_out(self, group_id: str, count: int, version: int) -> rollout_pb.RolloutResponse:
        """Sample a group on leased engines and store it."""
        fleet, leases = self.fleet, self._leases
        assert leases is not None
        lengths = fleet.draw.lengths(group_id, count)
        wanted = LeaseDemand(count=count, exact_version=version, groups=[(group_id, count)])
        futures = await leases.request(wanted)
        await asyncio.gather(
            *(
                self._sample(leases, future, length, wanted)
                for future, length in zip(futures, lengths, strict=True)
            )
        )
        with fleet.work.done():
            samples = fleet.draw.group(group_id, lengths, version)
            blob = await asyncio.to_thread(lambda: fleet.blobs.put(encode_group(samples)))
        return finished_event(samples, blob)

    async def _sample(
        self,
        leases: LeaseClient,
        future: asyncio.Future[Lease],
        length: int,
        wanted: LeaseDemand,
    ) -> None:
        """On the engine of the lease; on another one where that one is gone."""
        single = LeaseDemand(count=1, exact_version=wanted.exact_version)
        while True:
            lease = await future
            engine = self.fleet.hosts_by_name[lease.engine_id]
            async with engine.late():
                if engine.is_alive:
                    leases.release([lease], router_pb.OUTCOME_OK, [length])
                    return
            self.fleet.lost_samples += 1
            leases.release([lease], router_pb.OUTCOME_CONNECT_ERROR)
            (future,) = await leases.request(single)


class EngineStandIn(engine_grpc.EngineServiceServicer):
    """Takes every version of weights."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def GetEngine(
        self, request: engine_pb.GetEngineRequest, context: object
    ) -> engine_pb.GetEngineResponse:
        return engine_pb.GetEngineResponse(
            weights=self._host.weights, engine_id=self._host.name, backend="stand-in"
        )

    async def StageWeights(
        self, request: engine_pb.StageWeightsRequest, context: object
    ) -> engine_pb.StageWeightsResponse:
        return engine_pb.StageWeightsResponse()

    async def PrepareWeights(
        self, request: engine_pb.PrepareWeightsRequest, context: object
    ) -> engine_pb.PrepareWeightsResponse:
        async with self._host.late():
            return engine_pb.PrepareWeightsResponse()

    async def CommitWeights(
        self, request: engine_pb.CommitWeightsRequest, context: object
    ) -> engine_pb.CommitWeightsResponse:
        self._host.weights = request.weights
        await self._host.announce()
        return engine_pb.CommitWeightsResponse()


class WorkerStandIn(rollout_grpc.RolloutServiceServicer):
    """Rolls out groups, all of a call at once."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def ListEnvironments(
        self, request: rollout_pb.ListEnvironmentsRequest, context: object
    ) -> rollout_pb.ListEnvironmentsResponse:
        return rollout_pb.ListEnvironmentsResponse()

    async def Rollout(
        self, request: rollout_pb.RolloutRequest, context: object
    ) -> AsyncIterator[rollout_pb.RolloutResponse]:
        host, version = self._host, request.versions.exact_version
        running = [
            asyncio.ensure_future(host.roll_out(group.group_id, request.sample_count, version))
            for group in request.groups
        ]
        try:
            for done in asyncio.as_completed(running):
                yield await done
                host.fleet.maybe_kill(host, version)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


@dataclass
class RolloutFleet:
    """All hosts, which of them are slow, and which die in a step."""

    router: str
    blobs: BlobStore
    count: int
    draw: Draw = field(default_factory=Draw)
    work: Work = field(default_factory=Work)
    lost_samples: int = 0
    deaths: int = 0

    def __post_init__(self) -> None:
        self.hosts = [Host(self, number) for number in range(self.count)]
        self.hosts_by_name = {host.name: host for host in self.hosts}
        self.slow = frozenset(range(0, self.count - HOSTS_PER_FAULT + 1, HOSTS_PER_FAULT))
        self._dead: set[tuple[int, int]] = set()  # version and host
        self._dying: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        for host in self.hosts:
            await host.start()

    async def stop(self) -> None:
        for task in self._dying:
            task.cancel()
        await asyncio.gather(*self._dying, return_exceptions=True)
        await asyncio.gather(*(host.stop() for host in self.hosts))

    def doomed(self, version: int) -> set[int]:
        """The hosts that die in the step whose samples are of this version."""
        total, before = (self.count * steps // HOSTS_PER_FAULT for steps in (version, version - 1))
        return {(version * 7 + index * 31 + 1) % self.count for index in range(total - before)}

    def maybe_kill(self, host: Host, version: int) -> None:
        """Have a host die that is to, in the middle of its call."""
        if host.number in self.doomed(version) and (version, host.number) not in self._dead:
            self._dead.add((version, host.number))
            self.deaths += 1
            task = asyncio.create_task(host.die(), name=f"death of {host.name}")
            self._dying.add(task)
            task.add_done_callback(self._dying.discard)


class RankStandIn:
    """One rank of a trainer: answers every command at once, and meets its controller again."""

    def __init__(self, address: str, rank: int, world_size: int) -> None:
        self._address, self._rank, self._world_size = address, rank, world_size
        tensors = {
            f"model.layers.{rank}.{index}.weight": np.zeros(64, np.float16)
            for index in range(TENSORS)
        }
        self._shard = safetensors.numpy.save(tensors)
        digest = xxhash.xxh3_128_hexdigest(bytes(128))
        self._tensors = {
            name: pb.WrittenTensor(dtype="F16", shape=[64], digest=digest) for name in tensors
        }
        self._rows: dict[str, int] = {}  # by batch
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._live(), name=f"rank {self._rank}")

    async def stop(self) -> None:
        """As a process that is killed; `start` is its next one."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _live(self) -> None:
        while True:
            self._rows.clear()
            with contextlib.suppress(grpc.aio.AioRpcError):
                async with connect(self._address) as channel:
                    await self._follow(channel)
            await asyncio.sleep(MISS_SECONDS)

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        outgoing: asyncio.Queue[pb.FollowRequest] = asyncio.Queue()
        hello = pb.RankHello(
            rank=self._rank, world_size=self._world_size, process_id=os.getpid(), host="bench"
        )
        layout = trainer_pb.ParallelLayout(data=self._world_size, context=1, pipeline=1)
        ready = pb.RankReady(layout=layout, data_rank=self._rank, reports=True)
        outgoing.put_nowait(pb.FollowRequest(hello=hello))
        outgoing.put_nowait(pb.FollowRequest(ready=ready))

        async def events() -> AsyncIterator[pb.FollowRequest]:
            while True:
                try:
                    yield await asyncio.wait_for(outgoing.get(), 2.0)
                except TimeoutError:
                    yield pb.FollowRequest(heartbeat=pb.RankHeartbeat())

        stub = pb_grpc.WorkerServiceStub(channel)
        async for command in stub.Follow(events(), timeout=3600):
            result = self._answer(command)
            outgoing.put_nowait(pb.FollowRequest(result=result))
            if command.save.write_behind:
                written = pb.CommandResult(sequence=command.sequence)
                outgoing.put_nowait(pb.FollowRequest(written=written))

    def _answer(self, command: pb.FollowResponse) -> pb.CommandResult:
        result = pb.CommandResult(sequence=command.sequence)
        match command.WhichOneof("command"):
            case "add_rows":
                added = command.add_rows
                rows = sum(len(stored.rows) for stored in added.blobs)
                self._rows[added.batch_id] = self._rows.get(added.batch_id, 0) + rows
            case "drop_batch":
                self._rows.pop(command.drop_batch.batch_id, None)
            case "compute_advantages":
                if command.compute_advantages.scores_only:
                    count = self._rows[command.compute_advantages.batch_id]
                    result.advantages.scores.extend(row % 2 for row in range(count))
            case "forward_backward":
                batches = command.forward_backward.micro_batches
                result.sums.token_count = MEDIAN * sum(len(batch.rows) for batch in batches)
            case "step":
                result.step.grad_norm, result.step.learning_rate = 1.0, 1e-6
            case "publish":
                result.shards.append(self._publish(command.publish))
        return result

    def _publish(self, command: pb.PublishCommand) -> pb.WrittenShard:
        name = f"model-{self._rank:05d}.safetensors"
        Path(command.directory, name).write_bytes(self._shard)
        return pb.WrittenShard(
            file_name=name,
            size_bytes=len(self._shard),
            digest=xxhash.xxh3_128_hexdigest(self._shard),
            tensors=self._tensors,
        )


def start_ranks(address: str, count: int) -> list[RankStandIn]:
    """All ranks of a trainer, on streams of their own."""
    ranks = [RankStandIn(address, rank, count) for rank in range(count)]
    for rank in ranks:
        rank.start()
    return ranks
