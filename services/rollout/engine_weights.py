"""Which weight versions an engine holds: prepared by number, pinned while in use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from services.rollout import metrics
from services.rollout.engine import Engine, PauseMode
from services.rollout.errors import DigestMismatchError, VersionNotPreparedError
from sluice import faults
from sluice.runtime.errors import NotFoundError
from sluice.weights.errors import VersionNotFoundError, WeightStoreError
from sluice.weights.store import VersionRecord, WeightStore


class EngineWeights:
    """Prepares and commits versions of the store.

    A version is pinned in the store, under `owner`, from before it is read until it neither
    serves nor lies ready. `on_commit` is awaited before a commit is answered.
    """

    def __init__(
        self,
        engine: Engine,
        store: WeightStore,
        owner: str,
        on_commit: Callable[[], Awaitable[None]],
    ) -> None:
        self._engine, self._store, self._owner = engine, store, owner
        self._on_commit = on_commit
        self._preparations: dict[tuple[int, str], asyncio.Task[float]] = {}
        self._committing = asyncio.Lock()

    async def prepare(self, version: int, digest: str) -> float:
        """Seconds until the version lay ready; the same call again joins it or is free.

        The preparation goes on when the caller goes away. Raises NotFoundError,
        DigestMismatchError and what the engine raises.
        """
        status = self._engine.status()
        if (status.version, status.digest) == (version, digest):
            return 0.0
        key = (version, digest)
        task = self._preparations.get(key)
        if task is None:
            task = self._preparations[key] = asyncio.ensure_future(self._prepare(version, digest))
            task.add_done_callback(lambda _: self._preparations.pop(key, None))
        return await asyncio.shield(task)

    async def commit(self, version: int, digest: str, mode: PauseMode) -> float:
        """Seconds without decoding; 0 when the version serves already."""
        async with self._committing:
            status = self._engine.status()
            if (status.version, status.digest) == (version, digest):
                return 0.0
            if version not in status.prepared_versions:
                raise VersionNotPreparedError(
                    f"version {version} is not prepared",
                    version=version,
                    prepared=list(status.prepared_versions),
                )
            await self._check_digest(version, digest)
            pause = await self._engine.commit(version, mode)
            metrics.PAUSE_SECONDS.observe(pause)
            faults.point("engine.swapped")
            await self._unpin_unused()
            await self._on_commit()
            return pause

    async def close(self) -> None:
        """Stop preparing and let go of all pins."""
        running = list(self._preparations.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.to_thread(self._unpin_all_but, frozenset())

    async def forget_old_pins(self) -> None:
        """Unpin what an earlier process of this name held."""
        await self._unpin_unused()

    async def _prepare(self, version: int, digest: str) -> float:
        start = time.monotonic()
        try:
            record = await self._check_digest(version, digest, pin=True)
            await self._engine.prepare(version, digest, record.directory)
            faults.point("engine.prepared")
        finally:
            await self._unpin_unused(besides=(version, digest))
        seconds = time.monotonic() - start
        metrics.PREPARE_SECONDS.observe(seconds)
        return seconds

    async def _check_digest(self, version: int, digest: str, *, pin: bool = False) -> VersionRecord:
        """The version, after a look at its manifest."""
        record = await asyncio.to_thread(self._open, version, pin)
        if record.digest != digest:
            raise DigestMismatchError(
                f"version {version} has digest {record.digest}, not {digest}",
                version=version,
                expected=digest,
                actual=record.digest,
            )
        return record

    def _open(self, version: int, pin: bool) -> VersionRecord:
        try:
            if pin:
                self._store.pin(version, self._owner)
            return self._store.get(version)
        except VersionNotFoundError:
            raise NotFoundError("weight version", str(version)) from None
        except WeightStoreError as error:
            raise DigestMismatchError(str(error), version=version) from None

    async def _unpin_unused(self, besides: tuple[int, str] | None = None) -> None:
        """`besides` is a preparation that ends with this call."""
        status = self._engine.status()
        used = {version for version, _ in self._preparations.keys() - {besides}}
        used |= {status.version or 0, *status.prepared_versions}
        await asyncio.to_thread(self._unpin_all_but, frozenset(used))

    def _unpin_all_but(self, used: frozenset[int]) -> None:
        for version, owners in self._store.pins().items():
            if self._owner in owners and version not in used:
                self._store.unpin(version, self._owner)
