"""The ranks of a trainer: one launch of them after the other, and the commands they work on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.trainer import metrics
from services.trainer.config import RanksConfig
from services.trainer.errors import (
    CommandTooLargeError,
    RankError,
    RankLostError,
    TrainerFailedError,
)
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.runtime.errors import InvalidFieldError, LoadingError, ServiceError
from sluice.runtime.waits import Waits
from sluice.runtime.wire import timestamp_of

logger = logging.getLogger(__name__)

MAX_COMMAND_BYTES = 1 << 20
EXIT_GRACE = 1.0  # seconds in which a process's end explains the end of its stream
ERROR_GRACE = 30.0  # seconds that ranks have to answer once another one has failed

Build = Callable[[int], pb.FollowResponse]  # a command for one data-parallel rank


@dataclass(eq=False)
class RankLink:
    """A rank that said hello. `data_rank`, `layout` and `reports` hold once it is ready.

    `loss` is set once its stream has ended.
    """

    rank: int
    process_id: int
    host: str
    outgoing: asyncio.Queue[pb.FollowResponse | None] = field(default_factory=asyncio.Queue)
    layout: trainer_pb.ParallelLayout | None = None
    data_rank: int = 0
    reports: bool = False
    activity: str = "loading"
    heard: float = field(default_factory=time.monotonic)
    heard_time: float = field(default_factory=time.time)
    spoke: asyncio.Event = field(default_factory=asyncio.Event)
    loss: ServiceError | None = None

    @property
    def silence(self) -> float:
        """Return the seconds since the last sign of life."""
        return time.monotonic() - self.heard

    def hear(self) -> None:
        self.heard, self.heard_time = time.monotonic(), time.time()
        self.spoke.set()

    def describe_silence(self) -> str:
        return (
            f"rank {self.rank} silent for {self.silence:.1f} s, last in {self.activity or 'idle'}"
        )

    def to_proto(self) -> trainer_pb.Rank:
        return trainer_pb.Rank(
            rank=self.rank,
            process_id=self.process_id,
            host=self.host,
            activity=self.activity,
            data_rank=self.data_rank,
            heartbeat_time=timestamp_of(self.heard_time),
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


class RankIncarnation:
    """The ranks of one launch. `lost` ends with the error that ended it, once and for all."""

    def __init__(self, number: int, world_size: int, config: RanksConfig, waits: Waits) -> None:
        loop = asyncio.get_running_loop()
        self.number, self.world_size = number, world_size
        self.links: dict[int, RankLink] = {}
        self.ready: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[ServiceError] = loop.create_future()
        self._config, self._waits = config, waits
        self._pending: dict[int, _Pending] = {}
        self._sequence = 0
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
        for pending in self._pending.values():
            if not pending.done.done():
                pending.done.set_exception(error)

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
            link.activity = event.heartbeat.activity
        elif kind == "ready":
            self._take_ready(link, event.ready)
        elif kind == "result":
            self._take_result(link, event.result)

    async def run(self, command: pb.FollowResponse | Build) -> list[pb.CommandResult]:
        """Give every rank the command, or its own, and wait for all answers in rank order.

        Raises the error of the lowest rank that answered with one, and RankLostError when a
        rank dies or is not done in time; the latter ends the incarnation.
        """
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
            link.activity = activity
            link.outgoing.put_nowait(commands[link.data_rank])
        try:
            await self._gather(pending, self._config.command_timeout)
        finally:
            del self._pending[sequence]
        for rank, result in sorted(pending.results.items()):
            if result.HasField("error"):
                raise RankError(rank, result.error)
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
            done, _ = await asyncio.wait([pending.done], timeout=seconds)
        if not done:
            slowest = min(pending.waiting)
            self.fail(
                RankLostError(slowest, f"did not end {pending.activity} within {seconds:g} s")
            )
        await pending.done

    def _explain(self, pending: _Pending) -> str:
        links = [self.links[rank] for rank in sorted(pending.waiting)]
        silent = [link for link in links if link.silence > self._config.silent_seconds]
        if silent:
            return "; ".join(link.describe_silence() for link in silent)
        return "; ".join(f"rank {link.rank} in {link.activity or 'idle'}" for link in links)

    def _take_ready(self, link: RankLink, ready: pb.RankReady) -> None:
        if ready.HasField("error"):
            self.fail(RankError(link.rank, ready.error))
            return
        link.layout, link.data_rank = ready.layout, ready.data_rank
        link.reports, link.activity = ready.reports, ""
        are_ready = [other.layout is not None for other in self.links.values()]
        if all(are_ready) and len(are_ready) == self.world_size and not self.ready.done():
            self.ready.set_result(None)

    def _take_result(self, link: RankLink, result: pb.CommandResult) -> None:
        pending = self._pending.get(result.sequence)
        if pending is None or link.rank not in pending.waiting:
            return
        pending.waiting.remove(link.rank)
        link.activity = ""
        pending.results[link.rank] = result
        if not pending.waiting:
            if not pending.done.done():
                pending.done.set_result(None)
        elif result.HasField("error"):  # the others may wait for it in a collective
            asyncio.get_running_loop().call_later(ERROR_GRACE, self._give_up, pending)

    def _give_up(self, pending: _Pending) -> None:
        if pending.waiting and not pending.done.done():
            stuck = min(pending.waiting)
            self.fail(RankLostError(stuck, f"hung in {pending.activity} after another rank failed"))

    async def _watch(self, link: RankLink) -> None:
        """List a silent rank among the waits, and give it up after `lost_seconds`."""
        config = self._config
        while not self.lost.done():
            if link.silence < config.silent_seconds:
                await asyncio.sleep(config.silent_seconds - link.silence)
                continue
            link.spoke.clear()
            left = max(0.0, config.lost_seconds - link.silence)
            with self._waits.waiting(
                f"heartbeat of rank {link.rank}",
                on=[f"rank {link.rank}"],
                timeout=left,
                explain=link.describe_silence,
            ):
                try:
                    async with asyncio.timeout(left):
                        await link.spoke.wait()
                except TimeoutError:
                    self.fail(RankLostError(link.rank, f"was silent for {link.silence:.1f} s"))


OnExit = Callable[[int, str], None]  # rank, how it ended


class Launcher:
    """Leaves the ranks to torchrun or a cluster, which start them again when streams close."""

    async def launch(self, generation: int, controller: str, on_exit: OnExit) -> None:
        """Start all ranks; `on_exit` hears of each one that ends before `end` is called."""

    async def end(self) -> None:
        """End those that still run."""

    async def close(self) -> None:
        """End them, and leave nothing behind."""
        await self.end()


Restore = Callable[[RankIncarnation], Awaitable[None]]
State = trainer_pb.Trainer.State


class RankGroup:
    """Incarnations of ranks, one at a time.

    `restore` brings the ranks of a new incarnation to where the lost ones were; no other
    command runs before it has ended.
    """

    def __init__(
        self,
        config: RanksConfig,
        launcher: Launcher,
        waits: Waits,
        restore: Restore,
    ) -> None:
        self.state: State = trainer_pb.Trainer.STATE_LOADING
        self.failure = ""
        self.restart_count = 0
        self._config, self._launcher, self._waits = config, launcher, waits
        self._restore = restore
        self._incarnation: RankIncarnation | None = None
        self._last_error: ServiceError | None = None
        self._restarts_in_a_row = 0
        self._supervisor: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._launched = asyncio.Event()  # set while there are ranks, loading or active
        self._active, self._inactive = asyncio.Event(), asyncio.Event()

    @property
    def incarnation(self) -> RankIncarnation:
        """Return the ranks that take commands. Raises while there are none."""
        if self.state == trainer_pb.Trainer.STATE_FAILED:
            raise TrainerFailedError(f"the ranks are gone: {self.failure}", cause=self.failure)
        if self.state != trainer_pb.Trainer.STATE_ACTIVE or self._incarnation is None:
            raise self._last_error or LoadingError("the ranks are loading the model")
        return self._incarnation

    @property
    def links(self) -> list[RankLink]:
        links = {} if self._incarnation is None else self._incarnation.links
        return [link for _, link in sorted(links.items())]

    @property
    def layout(self) -> trainer_pb.ParallelLayout:
        """Return the mesh; empty before a rank is ready."""
        layouts = [link.layout for link in self.links if link.layout is not None]
        return layouts[0] if layouts else trainer_pb.ParallelLayout()

    def start(self, controller: str) -> None:
        """Launch the ranks, which connect to `controller` (host:port), and keep them running."""
        self._supervisor = asyncio.create_task(self._supervise(controller))

    async def wait_settled(self) -> None:
        """Wait until the first ranks are active or the group has failed."""
        await self._settled.wait()

    async def wait_active(self, active: bool) -> None:
        """Wait until the ranks take commands, or do not."""
        await (self._active if active else self._inactive).wait()

    async def wait_given_up(self) -> None:
        """Wait until no more ranks are launched. Raises what nobody expected to end that.

        `state` is FAILED then for a model that no rank can load, which another process could not
        either; after too many losses it is not, and another process may do better.
        """
        assert self._supervisor is not None, "it has been started"
        await asyncio.shield(self._supervisor)

    async def close(self) -> None:
        """End all ranks."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._incarnation is not None:
            self._incarnation.fail(LoadingError("the trainer shuts down"))
            self._incarnation.close(orderly=True)
        await self._launcher.close()

    def note_progress(self) -> None:
        """Note an optimizer step: earlier losses of ranks do not count against the next."""
        self._restarts_in_a_row = 0

    async def admit(self, hello: pb.RankHello) -> tuple[RankIncarnation, RankLink]:
        """Take in a rank. Raises InvalidFieldError for one that does not belong here.

        Whoever launches ranks may be faster than the restart here: such ranks wait for it.
        """
        if hello.generation == 0 and self.state != trainer_pb.Trainer.STATE_FAILED:
            incarnation = self._incarnation
            before = incarnation and incarnation.links.get(hello.rank)
            if incarnation and before and before.loss:  # it is back before its loss was noted
                incarnation.fail(before.loss)
                self._launched.clear()
            async with asyncio.timeout(self._config.start_timeout):
                await self._launched.wait()
        incarnation = self._incarnation
        if (
            incarnation is None
            or incarnation.lost.done()
            or hello.generation not in (0, incarnation.number)
        ):
            raise InvalidFieldError("generation", f"{hello.generation} has ended")
        if hello.world_size != incarnation.world_size or not 0 <= hello.rank < hello.world_size:
            raise InvalidFieldError(
                "world_size",
                f"is {hello.world_size}, the trainer has {incarnation.world_size} ranks",
            )
        if hello.rank in incarnation.links:
            raise InvalidFieldError("rank", f"{hello.rank} is connected already")
        link = RankLink(hello.rank, hello.process_id, hello.host)
        incarnation.join(link)
        return incarnation, link

    async def _supervise(self, controller: str) -> None:
        try:
            while True:
                error = await self._live(controller)
                self._note_loss(error)
                if self._incarnation is not None:
                    self._incarnation.close()
                await self._launcher.end()
                if self._is_final(error):
                    return
                backoff = self._config.restart_backoff * 2**self._restarts_in_a_row
                self._restarts_in_a_row += 1
                self.restart_count += 1
                metrics.RESTARTS.inc()
                await asyncio.sleep(backoff)
        finally:
            self._settled.set()

    async def _live(self, controller: str) -> ServiceError:
        """Run one incarnation from launch to loss; returns the error that ended it."""
        number = self.restart_count + 1
        incarnation = RankIncarnation(number, self._config.count, self._config, self._waits)
        self._incarnation = incarnation
        self._launched.set()

        def on_exit(rank: int, how: str) -> None:
            incarnation.fail(RankLostError(rank, how))

        try:
            await self._launcher.launch(number, controller, on_exit)
            await self._load(incarnation)
        except OSError as error:  # the host may lack processes or disk for a while
            loss: ServiceError = LoadingError(f"the ranks cannot be launched: {error}")
        except ServiceError as error:
            loss = error
        else:
            self.state = trainer_pb.Trainer.STATE_ACTIVE
            self._inactive.clear()
            self._active.set()
            self._settled.set()
            return await incarnation.lost
        incarnation.fail(loss)
        return loss

    async def _load(self, incarnation: RankIncarnation) -> None:
        timeout = self._config.start_timeout
        with self._waits.waiting(
            "ranks to load the model",
            on=lambda: _unready(incarnation),
            timeout=timeout,
        ):
            either: list[asyncio.Future[Any]] = [incarnation.ready, incarnation.lost]
            await asyncio.wait(
                either,
                timeout=timeout,
                return_when=asyncio.FIRST_COMPLETED,
            )
        if incarnation.lost.done():
            raise incarnation.lost.result()
        if not incarnation.ready.done():
            late = _unready(incarnation)
            raise RankLostError(int(late[0].split()[1]), f"was not ready within {timeout:g} s")
        await self._restore(incarnation)

    def _note_loss(self, error: ServiceError) -> None:
        logger.error("the ranks are lost: %s", error)
        self._launched.clear()
        self._last_error = error
        self.failure = str(error)
        self.state = trainer_pb.Trainer.STATE_LOADING
        self._active.clear()
        self._inactive.set()

    def _is_final(self, error: ServiceError) -> bool:
        """Too many restarts, or a model that no rank can load."""
        never_ran = self.restart_count == 0 and not self._settled.is_set()
        if never_ran and isinstance(error, RankError):
            self.state = trainer_pb.Trainer.STATE_FAILED
            return True
        return self._restarts_in_a_row >= self._config.max_restarts


def _unready(incarnation: RankIncarnation) -> list[str]:
    ready = {rank for rank, link in incarnation.links.items() if link.layout is not None}
    return [f"rank {rank}" for rank in range(incarnation.world_size) if rank not in ready]
