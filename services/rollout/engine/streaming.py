"""A version in the making, as an engine takes it: file by file, before it is committed."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

from services.rollout.engine.interface import Engine
from services.rollout.errors import NotQuietError
from sluice import faults
from sluice.place import is_bucket
from sluice.runtime.errors import ServiceError
from sluice.weights.errors import WeightStoreError
from sluice.weights.host_cache import HostCache
from sluice.weights.store import Announcement, WeightStore

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.02  # for a file that is announced, at first
SLOW_POLL_SECONDS = 0.05  # of a version that takes long
KEEP_SECONDS = 60.0  # that what was staged waits for its preparation


class WeightStream:
    """Has an engine stage the files of one version at a time, as their writers announce them.

    All of it is forgotten when the version does not come, and when another one is prepared. Files
    that the engine does not read where the store has them, deltas and those of a bucket, are made
    on this host before.
    """

    def __init__(
        self, engine: Engine, store: WeightStore, cache: HostCache, *, in_place: bool
    ) -> None:
        self._engine, self._store, self._cache = engine, store, cache
        self._in_place = in_place and not is_bucket(store.location)
        self._following: asyncio.Task[tuple[int, int]] | None = None
        self._forgetting: asyncio.TimerHandle | None = None
        self._version = 0
        self._committed = asyncio.Event()

    async def follow(self, version: int, seconds: float) -> tuple[int, int]:
        """Stages files until the version is committed; returns how many, and their bytes.

        Raises ServiceError for a file that is not as announced, TimeoutError. Then, and when it
        is cancelled, nothing stays.
        """
        await self.drop()
        self._version = version
        task = self._following = asyncio.ensure_future(self._follow(version))
        try:
            async with asyncio.timeout(seconds):
                found = await asyncio.shield(task)
        except BaseException:
            if self._following is task:
                await self.drop()
            raise
        loop = asyncio.get_running_loop()
        self._forgetting = loop.call_later(KEEP_SECONDS, self._engine.unstage)
        return found

    async def settle(self, version: int) -> None:
        """Waits until no file of a committed version is being staged; forgets any other one."""
        if version != self._version:
            await self.drop()
        elif self._following is not None:
            self._committed.set()
            await asyncio.wait([self._following])

    async def drop(self) -> None:
        """Forgets what was staged."""
        if self._forgetting is not None:
            self._forgetting.cancel()
        version, self._version = self._version, 0
        task, self._following, self._forgetting = self._following, None, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
        self._engine.unstage()
        if version:
            await asyncio.to_thread(self._cache.drop, version)

    async def _follow(self, version: int) -> tuple[int, int]:
        tasks: dict[str, asyncio.Task[int]] = {}
        poll = POLL_SECONDS
        try:
            while True:
                ended, news = await asyncio.to_thread(self._look, version, [*tasks])
                for found in news:
                    work = self._stage(found)
                    tasks[found.shard.file_name] = asyncio.ensure_future(work)
                for task in tasks.values():
                    if task.done():
                        task.result()
                if ended:
                    sizes = await asyncio.gather(*tasks.values())
                    await asyncio.to_thread(self._cache.finish, version)
                    return sum(size > 0 for size in sizes), sum(sizes)
                with suppress(TimeoutError):
                    async with asyncio.timeout(poll):
                        await self._committed.wait()
                    self._committed.clear()  # looked for once
                poll = min(1.1 * poll, SLOW_POLL_SECONDS)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    def _look(self, version: int, known: list[str]) -> tuple[bool, list[Announcement]]:
        """Whether the version is committed, and what has been announced beside what is known."""
        ended = self._store.has(version)  # first: then all of it is announced
        return ended, list(self._store.announced(version, known))

    async def _find(self, found: Announcement) -> Path | None:
        """Returns where a file lies that the engine can read, None where there is none yet."""
        if self._is_in_place(found):
            return await asyncio.to_thread(self._look_up, found)
        return await asyncio.wrap_future(self._cache.stage(found))

    def _is_in_place(self, found: Announcement) -> bool:
        return self._in_place and found.shard.delta is None

    def _look_up(self, found: Announcement) -> Path:
        path = self._store.announced_file(found, Path())  # of a directory: nothing is fetched
        faults.point("engine.found")
        return path

    async def _stage(self, found: Announcement) -> int:
        """Has a file staged; returns its bytes, 0 where it comes with the preparation."""
        try:
            path = await self._find(found)
            try:
                if path is not None:
                    await self._engine.stage(path, found.shard)
            except (ServiceError, OSError):
                if path is None or path.exists():
                    raise
                # its version has been committed since, which moves the file, or was given up
                path = await self._find(found)
                if path is not None:
                    await self._engine.stage(path, found.shard)
        except (WeightStoreError, OSError) as error:
            logger.info("%s is not staged: %s", found.stored_name, error)
            return 0
        except ServiceError as error:
            if isinstance(error, NotQuietError) and not self._is_in_place(found):
                return 0  # the engine sleeps, and will find it on this host
            logger.warning("version %d is not staged: %s", found.version, error)
            raise
        return 0 if path is None else found.shard.size
