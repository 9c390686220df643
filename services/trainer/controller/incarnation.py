"""The rank processes of one launch: their streams, and the commands they work on together."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc

from services.trainer import metrics
from services.trainer.config import RanksConfig
from services.trainer.errors import (
    CommandTooLargeError,
    RankError,
    RankLostError,
    RanksPartedError,
)
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.api.trainer.v1 import worker_service_pb2_grpc as pb_grpc
from sluice.runtime.errors import InvalidFieldError, ServiceError
from sluice.runtime.waits import Waits
from sluice.runtime.wire import timestamp_of

logger = logging.getLogger(__name__)

MAX_COMMAND_BYTES = 1 << 20
EXIT_GRACE = 1.0  # seconds in which a process's end explains the end of its stream
ERROR_GRACE = 30.0  # seconds that ranks have to answer once another one has failed
NAMED_PLACES = 4  # in an explanation
HELLO_SECONDS = 30.0  # for a rank to say who it is

Build = Callable[[int], pb.FollowResponse]  # a command for one data-parallel rank


@dataclass(eq=False)
class RankLink:
    """A rank that said hello.

    `data_rank`, `layout`, `reports`, `operations` and `alone`, commands in which it waits for no
    other rank, hold once it is ready. `loss` is set once its stream has ended.
    """

    rank: int
    process_id: int
    host: str
    outgoing: asyncio.Queue[pb.FollowResponse | None] = field(default_factory=asyncio.Queue)
    layout: trainer_pb.ParallelLayout | None = None
    data_rank: int = 0
    reports: bool = False
    operations: Mapping[str, str] = field(default_factory=dict)
    alone: Collection[str] = ()
    activity: str = "loading"
    where: str = ""  # it stands within that
    heard: float = field(default_factory=time.monotonic)
    spoke: asyncio.Event = field(default_factory=asyncio.Event)
    loss: ServiceError | None = None

    @property
    def silence(self) -> float:
        """Return the seconds since the last sign of life."""
        return time.monotonic() - self.heard

    def hear(self) -> None:
        self.heard = time.monotonic()
        self.spoke.set()

    def describe_silence(self) -> str:
        return f"rank {self.rank} silent for {self.silence:.1f} s, last in {self.doing}"

    @property
    def doing(self) -> str:
        """Say what it does and where it stands, as of its last heartbeat."""
        at = f" at {self.where}" if self.where else ""
        return f"{self.activity or 'idle'}{at}"

    def to_proto(self) -> trainer_pb.Rank:
        return trainer_pb.Rank(
            rank=self.rank,
            process_id=self.process_id,
            host=self.host,
            activity=self.activity,
            where=self.where,
            data_rank=self.data_rank,
            heartbeat_time=timestamp_of(time.time() - self.silence),
        )


@dataclass(eq=False)
class _Pending:
    """A command under way."""

    activity: str
    waiting: set[int]
    results: dict[int, pb.CommandResult] = field(default_factory=dict)
    done: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def errors(self) -> list[RankError]:
        """Return what ranks answered in place of results, in their order."""
        return [
            RankError(rank, result.error)
            for rank, result in sorted(self.results.items())
            if result.HasField("error")
        ]


class RankIncarnation:
    """The ranks of one launch. `lost` ends with the error that ended it, once and for all."""

    def __init__(self, number: int, world_size: int, config: RanksConfig, waits: Waits) -> None:
        loop = asyncio.get_running_loop()
        self.number, self.world_size = number, world_size
        self.meeting = f"{number}-{secrets.token_hex(8)}"  # of no other one of any controller
        self.links: dict[int, RankLink] = {}
        self.ready: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[ServiceError] = loop.create_future()
        self._config, self._waits = config, waits
        self._pending: dict[int, _Pending] = {}
        self._behind: dict[int, _Pending] = {}  # what goes on beside later commands
        self._sequence = 0
        self._stuck = 0  # commands and ranks that are
        self.on_stuck: Callable[[bool], None] = lambda is_stuck: None
        self._watchers: list[asyncio.Task[None]] = []

    def join(self, link: RankLink) -> None:
        """Take a rank in; its heartbeats are watched from now on."""
        self.links[link.rank] = link
        self._watchers.append(asyncio.create_task(self._watch(link)))

    def leave(self, link: RankLink) -> None:
        """Note that a rank's stream ended. Its process may still tell why."""
        detail = f"closed its stream, last in {link.activity or 'idle'}"
        link.loss = RankLostError(link.rank, detail)
        asyncio.get_running_loop().call_later(EXIT_GRACE, self.fail, link.loss)

    def fail(self, error: ServiceError) -> None:
        """End the incarnation: all commands fail with `error`. The first call counts."""
        if self.lost.done():
            return
        self.lost.set_result(error)
        for pending in (*self._pending.values(), *self._behind.values()):
            if not pending.done.done():
                pending.done.set_exception(error)
                pending.done.exception()  # it may be that nobody waits for it yet

    def close(self, *, orderly: bool = False) -> None:
        """Close all streams and stop watching. Ranks count an end as failure unless `orderly`."""
        for link in self.links.values():
            if orderly:
                link.outgoing.put_nowait(pb.FollowResponse(shutdown=pb.ShutdownCommand()))
            link.outgoing.put_nowait(None)
        for watcher in self._watchers:
            watcher.cancel()

    def hear(self, link: RankLink, event: pb.FollowRequest) -> None:
        """Take in what a rank says."""
        link.hear()
        kind = event.WhichOneof("event")
        if kind == "heartbeat":
            link.activity, link.where = event.heartbeat.activity, event.heartbeat.where
        elif kind == "ready":
            self._take_ready(link, event.ready)
        elif kind == "result":
            self._take_result(link, event.result)
        elif kind == "written":
            self._take_written(link, event.written)

    async def run(self, command: pb.FollowResponse | Build) -> list[pb.CommandResult]:
        """Give every rank the command, or its own, and wait for all answers in rank order.

        Raises the error of the lowest rank that answered with one, and RankLostError when a
        rank dies or is not done in time; the latter ends the incarnation, as does an answer that
        ranks are parted from each other.
        """
        sequence, pending = self._send(command)
        try:
            await self._gather(pending, self._config.command_timeout)
        finally:
            del self._pending[sequence]
        return self._results_of(pending)

    async def run_behind(self, command: pb.FollowResponse) -> Awaitable[list[pb.CommandResult]]:
        """As `run`, where ranks go on beside later commands: await their second answers, too.

        It raises as `run` does. Where ranks do not all begin, the incarnation ends: those that did
        would wait for the others.
        """
        sequence, pending = self._send(command)
        behind = self._behind[sequence] = _Pending(pending.activity, set(self.links))
        try:
            await self._gather(pending, self._config.command_timeout)
            self._results_of(pending)
        except BaseException as error:
            del self._behind[sequence]
            if isinstance(error, ServiceError):
                self.fail(error)
            raise
        finally:
            del self._pending[sequence]
        return self._gather_behind(sequence, behind)

    def _send(self, command: pb.FollowResponse | Build) -> tuple[int, _Pending]:
        """Put a command into the queue of every rank."""
        if self.lost.done():
            raise self.lost.result()
        data_ranks = {link.data_rank for link in self.links.values()}
        commands = {data: command(data) if callable(command) else command for data in data_ranks}
        activity = commands[0].WhichOneof("command") or ""
        if (size := max(each.ByteSize() for each in commands.values())) > MAX_COMMAND_BYTES:
            raise CommandTooLargeError(f"{activity} would take {size} bytes", size=size)
        self._sequence += 1
        sequence = self._sequence
        pending = self._pending[sequence] = _Pending(activity, set(self.links))
        for link in self.links.values():
            commands[link.data_rank].sequence = sequence
            link.activity, link.where = activity, ""
            link.outgoing.put_nowait(commands[link.data_rank])
        return sequence, pending

    async def _gather_behind(self, sequence: int, behind: _Pending) -> list[pb.CommandResult]:
        seconds = self._config.command_timeout
        try:
            with self._waits.waiting(
                f"{behind.activity} beside other work",
                on=lambda: [f"rank {rank}" for rank in sorted(behind.waiting)],
                timeout=seconds,
            ):
                done, _ = await asyncio.wait([behind.done], timeout=seconds)
            if not done:
                slowest = min(behind.waiting)
                detail = f"did not end {behind.activity} within {seconds:g} s"
                self.fail(RankLostError(slowest, detail))
            await behind.done
        finally:
            del self._behind[sequence]
        return self._results_of(behind)

    def _results_of(self, pending: _Pending) -> list[pb.CommandResult]:
        """Return the answers in rank order. Raises the error of the lowest rank with one.

        One that lacked memory comes before others, which may follow from it.
        """
        errors = pending.errors
        for error in errors:
            if error.reason == RanksPartedError.reason:
                self.fail(error)
                raise error
        if errors:
            raise _cause_of(errors)
        return [result for _, result in sorted(pending.results.items())]

    def reporting(self, results: Sequence[pb.CommandResult]) -> list[pb.CommandResult]:
        """Choose of the answers of `run` one for each data-parallel rank, in the order of those."""
        ranks = sorted(self.links.values(), key=lambda link: link.rank)
        chosen = {
            link.data_rank: result
            for link, result in zip(ranks, results, strict=True)
            if link.reports
        }
        return [result for _, result in sorted(chosen.items())]

    async def _gather(self, pending: _Pending, seconds: float) -> None:
        with self._waits.waiting(
            f"{pending.activity} on all ranks",
            on=lambda: [f"rank {rank}" for rank in sorted(pending.waiting)],
            timeout=seconds,
            explain=lambda: self._explain(pending),
        ):
            stuck_after = min(seconds, self._config.stuck_seconds)
            done, _ = await asyncio.wait([pending.done], timeout=stuck_after)
            if not done and stuck_after < seconds:
                late = pending.activity, stuck_after, self._explain(pending)
                logger.error("%s takes more than %g s, so it is not ready: %s", *late)
                with self._being_stuck():
                    done, _ = await asyncio.wait([pending.done], timeout=seconds - stuck_after)
        if not done:
            detail = f"did not end {pending.activity} within {seconds:g} s"
            where = self._explain(pending)
            self.fail(RankLostError(self._suspect(pending), f"{detail}: {where}"))
        await pending.done

    @contextmanager
    def _being_stuck(self) -> Iterator[None]:
        """While the block runs the trainer is not ready."""
        self._stuck += 1
        self.on_stuck(True)
        try:
            yield
        finally:
            self._stuck -= 1
            self.on_stuck(self._stuck > 0)

    def _suspect(self, pending: _Pending) -> int:
        """Name one whom the others may wait for: a silent rank, or one that is elsewhere."""
        links = [self.links[rank] for rank in sorted(pending.waiting)]
        if silent := self._silent(links):
            return silent[0].rank
        return min(places_of(links).values(), key=len)[0]

    def _silent(self, links: Sequence[RankLink]) -> list[RankLink]:
        return [link for link in links if link.silence > self._config.silent_seconds]

    def _explain(self, pending: _Pending) -> str:
        links = [self.links[rank] for rank in sorted(pending.waiting)]
        silent = self._silent(links)
        if silent:
            return "; ".join(link.describe_silence() for link in silent)
        return describe_places(links)

    def _take_ready(self, link: RankLink, ready: pb.RankReady) -> None:
        if ready.HasField("error"):
            self.fail(RankError(link.rank, ready.error))
            return
        link.layout, link.data_rank = ready.layout, ready.data_rank
        link.reports, link.activity = ready.reports, ""
        link.operations, link.alone = dict(ready.operations), frozenset(ready.alone)
        are_ready = [other.layout is not None for other in self.links.values()]
        if all(are_ready) and len(are_ready) == self.world_size and not self.ready.done():
            self.ready.set_result(None)
            metrics.OPERATIONS.clear()
            for other in self.links.values():
                for operation, name in other.operations.items():
                    metrics.OPERATIONS.labels(operation, name).inc()

    def _take_result(self, link: RankLink, result: pb.CommandResult) -> None:
        pending = self._pending.get(result.sequence)
        if pending is None or link.rank not in pending.waiting:
            return
        pending.waiting.remove(link.rank)
        link.activity = link.where = ""
        pending.results[link.rank] = result
        if not pending.waiting:
            if not pending.done.done():
                pending.done.set_result(None)
        elif result.HasField("error") and pending.activity not in link.alone:
            # the others may wait for it in a collective
            asyncio.get_running_loop().call_later(ERROR_GRACE, self._give_up, pending)

    def _take_written(self, link: RankLink, result: pb.CommandResult) -> None:
        behind = self._behind.get(result.sequence)
        if behind is None or link.rank not in behind.waiting:
            return
        behind.waiting.remove(link.rank)
        behind.results[link.rank] = result
        if not behind.waiting and not behind.done.done():
            behind.done.set_result(None)

    def _give_up(self, pending: _Pending) -> None:
        """End a command that ranks still wait in for one that has failed: all of them restart.

        Its caller is told why that one failed, which a later try would meet again.
        """
        if pending.waiting and not pending.done.done():
            cause = _cause_of(pending.errors)
            detail = f"failed in {pending.activity}: {cause.said}; {self._explain(pending)}"
            pending.done.set_exception(cause)
            self.fail(RankLostError(cause.rank, detail, lacked_memory=cause.lacked_memory))

    async def _watch(self, link: RankLink) -> None:
        """List a silent rank among the waits, and give it up after `lost_seconds`.

        Counted from when it is first found silent: where this process was stopped, and perhaps its
        ranks with it, nobody could be heard meanwhile.
        """
        config = self._config
        left = max(config.heartbeat_seconds, config.lost_seconds - config.silent_seconds)
        while not self.lost.done():
            if link.silence < config.silent_seconds:
                await asyncio.sleep(config.silent_seconds - link.silence)
                continue
            link.spoke.clear()
            with (
                self._being_stuck(),
                self._waits.waiting(
                    f"heartbeat of rank {link.rank}",
                    on=[f"rank {link.rank}"],
                    timeout=left,
                    explain=link.describe_silence,
                ),
            ):
                try:
                    async with asyncio.timeout(left):
                        await link.spoke.wait()
                except TimeoutError:
                    silent = f"was silent for {link.silence:.1f} s, last in {link.doing}"
                    self.fail(RankLostError(link.rank, silent))


def _cause_of(errors: Sequence[RankError]) -> RankError:
    """Choose the one that others may follow from; of several alike that of the lowest rank."""
    parted = RanksPartedError.reason
    return max(errors, key=lambda error: (error.lacked_memory, error.reason != parted))


def describe_places(links: Sequence[RankLink]) -> str:
    """Say which ranks stand where, the fewest first: one that is elsewhere than all others is
    what those wait for."""
    told = sorted(places_of(links).items(), key=lambda place: len(place[1]))
    more = f"; and at {len(told) - NAMED_PLACES} more places" if len(told) > NAMED_PLACES else ""
    return "; ".join(f"{named(ranks)} in {doing}" for doing, ranks in told[:NAMED_PLACES]) + more


def places_of(links: Sequence[RankLink]) -> dict[str, list[int]]:
    """Return ranks, ascending as they come, by what they do and where they stand."""
    places: dict[str, list[int]] = {}
    for link in links:
        places.setdefault(link.doing, []).append(link.rank)
    return places


def named(ranks: Sequence[int]) -> str:
    """Name ascending ranks, those that follow each other by the first and the last."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return f"rank {', '.join('-'.join(map(str, run)) for run in runs)}"


Admit = Callable[[pb.RankHello], Awaitable[tuple[RankIncarnation, RankLink]]]


class WorkerServicer(pb_grpc.WorkerServiceServicer):
    """Connects the streams of ranks with the incarnation that admits them."""

    def __init__(self, admit: Admit) -> None:
        self._admit = admit

    async def Follow(
        self,
        request_iterator: AsyncIterator[pb.FollowRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[pb.FollowResponse]:
        async with asyncio.timeout(HELLO_SECONDS):
            first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("event") != "hello":
            raise InvalidFieldError("hello", "must come first")
        incarnation, link = await self._admit(first.hello)
        listener = asyncio.create_task(_listen(incarnation, link, request_iterator))
        try:
            if first.hello.generation == 0:
                yield pb.FollowResponse(welcome=pb.RankWelcome(meeting=incarnation.meeting))
            while (command := await link.outgoing.get()) is not None:
                yield command
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)
            incarnation.leave(link)


async def _listen(
    incarnation: RankIncarnation, link: RankLink, events: AsyncIterator[pb.FollowRequest]
) -> None:
    """Take in what the rank says until its stream ends; then end the other direction too."""
    try:
        async for event in events:
            incarnation.hear(link, event)
    finally:
        link.outgoing.put_nowait(None)
