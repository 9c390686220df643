"""Has the servers of an engine record passes, and finds the files that their ranks write."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import os
import re
import tempfile
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from services.rollout.engine.interface import EngineProfile, ProfileOrder
from services.rollout.engine.sglang.client import (
    CONTROL_SECONDS,
    Capabilities,
    SglangClient,
    SGLangRefusedError,
)
from services.rollout.errors import NoProfileError
from sluice.runtime.idempotency import cancel_all

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
STOP_SECONDS = 600.0  # for what is dropped to be written
_BLOCK = 1 << 20
_PICKLE_END = b"."


class ServerProfiles:
    """The profile that an engine's servers were asked for last.

    Servers count their passes themselves, each copy its own, and stop at the pass after the last
    one: what is to come is told as a whole, until all ranks have written all files.
    """

    def __init__(self) -> None:
        self.profile: EngineProfile | None = None
        self._files: _RankFiles | None = None  # of one that records
        self._looking: asyncio.Task[None] | None = None

    async def begin(
        self, client: SglangClient, server: Capabilities, order: ProfileOrder
    ) -> EngineProfile:
        """Has all ranks record, in place of what they record.

        Raises NoProfileError; EngineFailedError where the servers do not answer.
        """
        if not server.can_profile:
            raise NoProfileError(f"SGLang {server.release} on {server.device} records no passes")
        await self._stop(client)
        profile = EngineProfile(
            name=order.name, directory=order.directory, left_count=order.pass_count
        )
        has_device = server.device != "cpu"
        has_memory = order.options.memory and has_device
        files = _RankFiles(order, server.rank_count, has_memory=has_memory)
        try:
            await asyncio.to_thread(files.prepare)  # where it cannot write, SGLang ends
            await client.post(
                "/start_profile",
                {
                    "output_dir": str(order.directory),
                    "num_steps": order.pass_count,
                    "activities": ["CPU", *["GPU"] * has_device, *["MEM"] * has_memory],
                    "with_stack": order.options.stacks,
                    "record_shapes": True,
                    "profile_prefix": order.prefix,
                },
                CONTROL_SECONDS,
            )
        except (OSError, SGLangRefusedError) as error:
            return self._fail(profile, f"{type(error).__name__}: {error}")
        self.profile, self._files = profile, files
        self._looking = asyncio.create_task(self._look(files, profile), name="profile")
        return profile

    async def lose(self, why: str) -> None:
        """Takes that those who record have ended."""
        files = self._files
        await self._look_no_more()
        if files is not None and self.profile is not None:
            self._fail(self.profile, why)

    async def close(self) -> None:
        await self._look_no_more()

    async def _stop(self, client: SglangClient) -> None:
        """Has what is recorded dropped. SGLang writes it nevertheless."""
        files = self._files
        await self.lose("another profile was asked for")
        if files is None:
            return
        with contextlib.suppress(SGLangRefusedError):  # it has just stopped by itself
            await client.post("/stop_profile", {}, STOP_SECONDS)
        await asyncio.to_thread(files.remove)

    async def _look_no_more(self) -> None:
        looking, self._looking, self._files = self._looking, None, None
        if looking is not None:
            await cancel_all([looking])

    async def _look(self, files: _RankFiles, profile: EngineProfile) -> None:
        """Returns once all is written."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                names = await asyncio.to_thread(files.whole)
            except OSError as error:
                self._fail(profile, f"{type(error).__name__}: {error}")
                return
            if names is not None:
                break
        self._files = None
        self.profile = replace(profile, left_count=0, files=names)
        logger.info("profile %s is in %s", profile.name, profile.directory)

    def _fail(self, profile: EngineProfile, failure: str) -> EngineProfile:
        logger.warning("profile %s: %s", profile.name, failure)
        self._files = None
        self.profile = replace(profile, left_count=0, failure=failure)
        return self.profile


class _RankFiles:
    """The files of one profile, as SGLang names them: by time and rank behind the prefix."""

    def __init__(self, order: ProfileOrder, rank_count: int, *, has_memory: bool) -> None:
        self._directory = order.directory
        self._count = rank_count * (1 + has_memory)
        self._known = re.compile(
            rf"{re.escape(order.prefix)}-[\d.]+-TP-\d+(-(DP|PP|EP)-\d+)*"
            r"(\.trace\.json\.gz|-memory\.pickle)"
        )
        self._before: frozenset[str] = frozenset()  # of a profile of the same name
        self._sizes: dict[str, int] = {}  # when they were looked at last
        self._whole: set[str] = set()

    def prepare(self) -> None:
        """Raises OSError where nothing can be written."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._directory):
            self._before = frozenset(self._names())

    def whole(self) -> tuple[str, ...] | None:
        """Returns what was written, sorted, once nothing is to come."""
        names = sorted({*self._names()} - self._before)
        sizes = {name: (self._directory / name).stat().st_size for name in names}
        still = [name for name in names if self._sizes.get(name) == sizes[name]]
        self._sizes = sizes
        for name in {*still} - self._whole:
            if _is_whole(self._directory / name):
                self._whole.add(name)
        return tuple(names) if len(self._whole) == len(names) == self._count else None

    def remove(self) -> None:
        for name in {*self._names()} - self._before:
            (self._directory / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others have files in it
            self._directory.rmdir()

    def _names(self) -> Iterable[str]:
        with contextlib.suppress(FileNotFoundError):
            return [name for name in os.listdir(self._directory) if self._known.fullmatch(name)]
        return []


def _is_whole(path: Path) -> bool:
    """Whether a trace, or what holds memory, ends as such a file does."""
    if path.suffix == ".pickle":
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 1))
            return file.read() == _PICKLE_END
    try:
        with gzip.open(path) as trace:
            while trace.read(_BLOCK):
                pass
    except (EOFError, gzip.BadGzipFile, zlib.error):
        return False
    return path.stat().st_size > 0
