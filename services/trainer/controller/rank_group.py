"""The ranks of a trainer: one launch of them after the other, within bounds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from services.trainer import metrics
from services.trainer.config import RanksConfig
from services.trainer.controller.incarnation import RankIncarnation, RankLink
from services.trainer.errors import (
    RankError,
    RankLostError,
    TrainerFailedError,
)
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.runtime.errors import InvalidFieldError, LoadingError, ServiceError
from sluice.runtime.waits import Waits

logger = logging.getLogger(__name__)


OnExit = Callable[[RankLostError], None]


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
        """Wait until the ranks take commands, or do not: they are lost, or one is stuck."""
        await (self._active if active else self._inactive).wait()

    async def wait_given_up(self) -> None:
        """Wait until no more ranks are launched. Raises what nobody expected to end that.

        `state` is FAILED then for a model that no rank can load, which another process could not
        either; after too many losses of ranks that had loaded it is not, and another process may
        do better.
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
        incarnation.on_stuck = self._note_stuck
        self._launched.set()

        try:
            await self._launcher.launch(number, controller, incarnation.fail)
            await self._load(incarnation)
        except OSError as error:  # the host may lack processes or disk for a while
            loss: ServiceError = LoadingError(f"the ranks cannot be launched: {error}")
        except ServiceError as error:
            loss = error
        else:
            self.state = trainer_pb.Trainer.STATE_ACTIVE
            self._tell_active(True)
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
            explain=lambda: _unheard(incarnation),
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

    def _note_stuck(self, is_stuck: bool) -> None:
        if self.state == trainer_pb.Trainer.STATE_ACTIVE:
            self._tell_active(not is_stuck)

    def _tell_active(self, active: bool) -> None:
        now, over = (self._active, self._inactive) if active else (self._inactive, self._active)
        over.clear()
        now.set()

    def _note_loss(self, error: ServiceError) -> None:
        logger.error("the ranks are lost: %s", error)
        self._launched.clear()
        self._last_error = error
        self.failure = str(error)
        self.state = trainer_pb.Trainer.STATE_LOADING
        self._tell_active(False)

    def _is_final(self, error: ServiceError) -> bool:
        """Too many restarts, or a model that no rank can load.

        Ranks of this host that were lost so often, and never loaded it, cannot either: they take
        too much memory, or crash. Of others it is not known that they have begun.
        """
        is_last = self._restarts_in_a_row >= self._config.max_restarts
        crashes = is_last and self._config.launch == "local"
        never_ran = not self._settled.is_set()
        if never_ran and (crashes or (self.restart_count == 0 and isinstance(error, RankError))):
            if self.restart_count:
                self.failure += f", {self.restart_count + 1} times in a row before it was loaded"
            self.state = trainer_pb.Trainer.STATE_FAILED
            return True
        return is_last


def _unready(incarnation: RankIncarnation) -> list[str]:
    ready = {rank for rank, link in incarnation.links.items() if link.layout is not None}
    return [f"rank {rank}" for rank in range(incarnation.world_size) if rank not in ready]


def _unheard(incarnation: RankIncarnation) -> str:
    unheard = [f"{rank}" for rank in range(incarnation.world_size) if rank not in incarnation.links]
    return f"nothing was heard yet of rank {', '.join(unheard)}" if unheard else ""
