"""The versions of an engine that lie on this host: those made ready, and the one to go back to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from services.rollout.backends.sglang.staging import HostStaging, StagedVersion, plain_version
from services.rollout.errors import UnfitWeightsError, VersionNotPreparedError
from sluice.weights.errors import WeightStoreError

T = TypeVar("T")

PREPARED_LIMIT = 2  # versions that lie ready at once; the oldest gives way


class HostVersions:
    """Holds on folders of `HostStaging`, whose work is done in a thread."""

    def __init__(self, root: Path | None) -> None:
        self._staging = HostStaging(root)
        self._disk = ThreadPoolExecutor(1, "engine-staging")
        self._prepared: dict[int, StagedVersion] = {}
        self._in_use: int | None = None
        self.restorable: StagedVersion | None = None  # the last one served from here
        self.prepare_seconds = 0.0

    @property
    def prepared(self) -> list[int]:
        return sorted(self._prepared)

    async def sweep(self) -> None:
        """Remove what engines that were killed have left."""
        await self._on_disk(self._staging.sweep)

    async def open(self, directory: Path) -> StagedVersion:
        """A model directory where it lies. Raises UnfitWeightsError."""
        try:
            return await self._on_disk(partial(plain_version, directory))
        except (WeightStoreError, OSError) as error:
            raise UnfitWeightsError(f"{directory} cannot be read: {error}") from error

    async def prepare(
        self,
        version: int,
        digest: str,
        directory: Path,
        check: Callable[[StagedVersion], None],
    ) -> None:
        """Make a version ready, unless `check`, which may block, raises.

        Raises DigestMismatchError naming the tensor or file, or UnfitWeightsError.
        """
        began = time.monotonic()
        ready = self._prepared.get(version)
        if ready is not None and ready.digest == digest:
            return
        staged = await self._on_disk(partial(self._staging.stage, version, digest, directory))
        try:
            await self._on_disk(partial(check, staged))
        except BaseException:
            await self._release(staged)
            raise
        replaced = self._prepared.pop(version, None)
        self._prepared[version] = staged
        oldest = [old for old in list(self._prepared)[:-PREPARED_LIMIT] if old != self._in_use]
        stale = [self._prepared.pop(old) for old in oldest]
        await self._release(*stale, *([replaced] if replaced else []))
        self.prepare_seconds = time.monotonic() - began

    @contextmanager
    def using(self, version: int) -> Iterator[StagedVersion]:
        """A version that is ready; others made ready meanwhile do not displace it.

        Raises VersionNotPreparedError.
        """
        if version not in self._prepared:
            raise VersionNotPreparedError(
                f"version {version} is not prepared", version=version, prepared=[*self._prepared]
            )
        self._in_use = version
        try:
            yield self._prepared[version]
        finally:
            self._in_use = None

    async def served(self, staged: StagedVersion) -> None:
        """A version that was ready serves: let go of older ones, and of the one before."""
        del self._prepared[staged.version]
        older = [self._prepared.pop(v) for v in list(self._prepared) if v < staged.version]
        before, self.restorable = self.restorable, staged
        await self._release(*older, *([before] if before else []))

    async def close(self) -> None:
        """Let go of all."""
        held = [*self._prepared.values(), *([self.restorable] if self.restorable else [])]
        self._prepared, self.restorable = {}, None
        await self._release(*held)
        self._disk.shutdown(wait=False, cancel_futures=True)

    async def _release(self, *versions: StagedVersion) -> None:
        for staged in versions:
            await self._on_disk(partial(self._staging.release, staged))

    async def _on_disk(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)
