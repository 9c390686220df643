"""Recorded calls on the disk, so that they outlive the worker and any worker may go on.

<store>/records/<group>.open      JSON lines; see group_record.py. The first, {"born": <random>},
                                  tells it from another file of this name, which inodes do not
<store>/records/<group>.closed    its samples are a blob, pinned by `record/<group>`
<store>/records/.lock             held for moments
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from services.rollout.config import OpenAIConfig
from services.rollout.engine.interface import FinishReason
from services.rollout.openai.generation import Answer
from services.rollout.openai.group_record import GroupRecord, Line
from services.rollout.openai.prompts import Earlier, Prompt
from services.rollout.openai.requests import ApiError, Record
from sluice.durable import locked
from sluice.samples.arrow import encode_group
from sluice.samples.blobs import BlobStore
from sluice.samples.sample import validate_sample
from sluice.samples.tokenizer import TextTokenizer

OPEN, CLOSED = ".open", ".closed"
REMEMBERED = 256  # groups kept in memory; others are read again

T = TypeVar("T")


@dataclass(frozen=True)
class _Known:
    """A group as far as its file was read; `birth` is its first line, b"" before there is one."""

    group: GroupRecord
    birth: bytes = b""
    offset: int = 0


class Recorder:
    """The recorded groups of a store. The disk is waited for in threads."""

    def __init__(
        self,
        store: Path,
        blobs: BlobStore,
        tokenizer: TextTokenizer,
        config: OpenAIConfig,
    ) -> None:
        self._root = store / "records"
        self._root.mkdir(parents=True, exist_ok=True)
        self._blobs, self._tokenizer, self._config = blobs, tokenizer, config
        self._known: OrderedDict[str, _Known] = OrderedDict()

    async def earlier(self, record: Record) -> list[Earlier]:
        """What the next prompt of a session may go on from. Raises ApiError."""
        return await self._locked(
            lambda: self._open(record.group, make=True).earlier(record.session)
        )

    async def add(self, record: Record, prompt: Prompt, answers: Sequence[Answer]) -> None:
        """Record a call; durable when it returns. Raises ApiError for a group that is closed."""
        endings = [self._endings(answer) for answer in answers]

        def write() -> None:
            group = self._open(record.group, make=True)
            self._append(group, group.lines(record.session, prompt, answers, endings))

        await self._locked(write)

    async def reward(self, name: str, rewards: dict[str, float]) -> dict[str, Any]:
        """Set or change rewards by session. Raises ApiError."""

        def write() -> dict[str, Any]:
            group = self._open(name)
            for session in rewards:
                if session not in group.sessions:
                    raise ApiError(404, "session_not_found", f"no session {session!r}", session)
            lines = [{"session": s, "reward": reward} for s, reward in rewards.items()]
            self._append(group, lines)
            return group.describe()

        return await self._locked(write)

    async def close(self, name: str) -> dict[str, Any]:
        """Make a group of samples of what was recorded. Raises ApiError while a reward lacks."""

        def write() -> dict[str, Any]:
            group = self._read(name)
            if group.blob is None:
                self._seal(group)
            path = self._root / quote(name)
            if (opened := path.with_name(path.name + OPEN)).exists():
                opened.rename(path.with_name(path.name + CLOSED))
            for old in self._list(CLOSED)[: -self._config.kept_groups]:
                self._forget(old)
            return group.describe()

        return await self._locked(write)

    async def describe(self, name: str) -> dict[str, Any]:
        """Raises ApiError for a group that is not there."""
        return await self._locked(lambda: self._read(name).describe())

    async def names(self) -> dict[str, list[str]]:
        """Open and closed groups."""
        return await self._locked(lambda: {"open": self._list(OPEN), "closed": self._list(CLOSED)})

    async def delete(self, name: str) -> None:
        """Forget a group; its blob may then be collected. Raises ApiError."""

        def remove() -> None:
            self._read(name)
            self._forget(name)

        await self._locked(remove)

    def _endings(self, answer: Answer) -> list[str]:
        """As a caller may send an answer back: as it is, or as shown, closed by its stop token.

        One that a stop string cut off stands for more than was shown.
        """
        token_ids = answer.delta.token_ids
        whole, last = self._tokenizer.decode([token_ids, token_ids[-1:]], special=True)
        if answer.cut:
            return [whole]
        closing = last if answer.delta.finish_reason is FinishReason.STOP else ""
        return list(dict.fromkeys((whole, answer.text + closing)))

    async def _locked(self, work: Callable[[], T]) -> T:
        def run() -> T:
            with locked(self._root / ".lock"):
                return work()

        try:
            return await asyncio.to_thread(run)
        except OSError as error:
            raise ApiError(503, "store_failed", str(error)) from error

    def _open(self, name: str, *, make: bool = False) -> GroupRecord:
        group = self._read(name, make=make)
        if group.blob is not None:
            raise ApiError(409, "group_closed", f"group {name!r} is closed", "sluice_record")
        return group

    def _read(self, name: str, *, make: bool = False) -> GroupRecord:
        """A group as it is on the disk now, where other workers may have written too."""
        path = self._find(name)
        if path is None:
            if not make:
                raise ApiError(404, "group_not_found", f"no group {name!r} was recorded")
            self._check_room()
            return self._remember(_Known(GroupRecord(name)))
        with path.open("rb") as file:
            birth = file.readline()
            known = self._known.get(name)
            if known is None or known.birth != birth:
                known = _Known(GroupRecord(name), birth)
            file.seek(known.offset)
            data = file.read()
        whole = data.rfind(b"\n") + 1  # a crash may have cut off the last line
        for line in data[:whole].splitlines():
            known.group.apply(json.loads(line))
        return self._remember(replace(known, offset=known.offset + whole))

    def _append(self, group: GroupRecord, lines: Sequence[Line]) -> None:
        known = self._known[group.group_id]
        birth, offset = known.birth, known.offset
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        if not offset:
            birth = json.dumps({"born": secrets.token_hex(16)}).encode() + b"\n"
            data = birth + data
        with (self._root / f"{quote(group.group_id)}{OPEN}").open("ab") as file:
            file.truncate(offset)
            file.write(data)
            file.flush()
            if self._blobs.sync:
                os.fsync(file.fileno())
        for line in lines:
            group.apply(line)
        self._remember(_Known(group, birth, offset + len(data)))

    def _seal(self, group: GroupRecord) -> None:
        if not group.sessions:
            raise ApiError(409, "group_empty", "nothing was recorded")
        if missing := group.unrewarded:
            raise ApiError(
                409, "reward_missing", f"no reward for: {', '.join(missing)}", missing[0]
            )
        samples = group.samples()
        for sample in samples:
            validate_sample(sample)
        metadata = {"environment": "openai", "sessions": json.dumps(group.sessions)}
        blob = self._blobs.put(encode_group(samples, metadata))
        self._blobs.pin(_owner(group.group_id), [blob.digest])
        self._append(group, [{"closed": {"digest": blob.digest, "size": blob.size}}])

    def _forget(self, name: str) -> None:
        self._blobs.unpin(_owner(name))
        self._known.pop(name, None)
        if (path := self._find(name)) is not None:
            path.unlink()

    def _find(self, name: str) -> Path | None:
        paths = (self._root / f"{quote(name)}{ending}" for ending in (OPEN, CLOSED))
        return next((path for path in paths if path.exists()), None)

    def _list(self, ending: str) -> list[str]:
        """Oldest first."""
        found = [entry for entry in os.scandir(self._root) if entry.name.endswith(ending)]
        found.sort(key=lambda entry: (entry.stat().st_mtime, entry.name))
        return [unquote(entry.name.removesuffix(ending)) for entry in found]

    def _check_room(self) -> None:
        if len(self._list(OPEN)) >= self._config.open_groups:
            raise ApiError(429, "too_many_groups", "close or delete recorded groups first")

    def _remember(self, known: _Known) -> GroupRecord:
        name = known.group.group_id
        self._known[name] = known
        self._known.move_to_end(name)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return known.group


def _owner(group_id: str) -> str:
    return f"record/{group_id}"
