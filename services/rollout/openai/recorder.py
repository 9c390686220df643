"""Records calls on the disk, so that they outlive the worker and any worker may go on.

<store>/records/<group>.open      JSON lines: one answer, a reward, or the end; after a tab the
                                  xxh3 of each. The first, {"born": <random>}, tells it from
                                  another file of this name, which inodes do not
<store>/records/<group>.closed    its samples are a blob, pinned by `record/<group>`, as are the
                                  images of open groups too
<store>/records/.lock             locked for moments

A call whose prompt goes on from the tokens of an earlier answer of its session extends that
trajectory; any other begins a new one.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import numpy as np

from services.rollout.config import OpenAIConfig
from services.rollout.engine.interface import Delta, FinishReason, Numbers, Sampling
from services.rollout.environments.environment import Reward
from services.rollout.episodes.trajectory import Trajectory
from services.rollout.openai.generation import Answer
from services.rollout.openai.prompts import Prompt
from services.rollout.openai.requests import Record
from sluice.api.common.v1.sample_pb2 import RoutedExperts
from sluice.durable import decode_line, encode_line, locked
from sluice.runtime import wire
from sluice.runtime.http import ApiError
from sluice.samples.arrow import encode_group
from sluice.samples.blobs import BlobNotFoundError, BlobReference, Blobs
from sluice.samples.sample import MediaSpan, Sample, VersionSpan, validate_sample
from sluice.samples.tokenizer import TextTokenizer

OPEN, CLOSED = ".open", ".closed"

T = TypeVar("T")
Line = Mapping[str, Any]


@dataclass
class _Thread:
    """A trajectory with its tokens, which each call reads, and texts callers may have for it."""

    trajectory: Trajectory
    token_ids: tuple[int, ...]
    texts: list[str]


@dataclass
class _Session:
    threads: list[_Thread] = field(default_factory=list)
    calls: dict[str, str] = field(default_factory=dict)
    reward: float | None = None


@dataclass(frozen=True)
class Earlier:
    """What a prompt of a session may go on from, and sampled texts by the ids of their calls."""

    prompts: Sequence[Prompt] = ()
    calls: Mapping[str, str] = field(default_factory=dict)


NOTHING_EARLIER = Earlier()


class GroupRecord:
    """Folds the lines of a group's journal: its sessions, in the order in which they began."""

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.blob: BlobReference | None = None  # once closed
        self._sessions: dict[str, _Session] = {}

    @property
    def sessions(self) -> list[str]:
        return list(self._sessions)

    @property
    def unrewarded(self) -> list[str]:
        """Sessions without a reward."""
        return [name for name, session in self._sessions.items() if session.reward is None]

    def earlier(self, name: str) -> Earlier:
        """Returns what a prompt of this session may go on from."""
        session = self._sessions.get(name, _Session())
        prompts = [
            Prompt(text, thread.token_ids, thread.trajectory.media)
            for thread in session.threads
            for text in thread.texts
        ]
        return Earlier(prompts, dict(session.calls))

    def lines(
        self,
        session: str,
        prompt: Prompt,
        answers: Sequence[Answer],
        endings: Sequence[Sequence[str]],
        calls: Sequence[Sequence[str]],
    ) -> list[Line]:
        """Returns what to write of a call. `endings`: texts that each answer may come back as.

        calls: ids of the tool calls in each answer.

        The first answer extends the longest trajectory that the prompt goes on from. The others
        stand alone, so that no token is trained on twice.
        """
        threads = self._sessions.get(session, _Session()).threads
        fresh = itertools.count(len(threads))
        extended = _extended(threads, prompt)
        lines: list[Line] = []
        for answer, texts, call_ids in zip(answers, endings, calls, strict=True):
            if extended is None:
                place, base, seen, before = next(fresh), None, 0, ""
            else:
                place, thread = extended, threads[extended]
                seen = len(thread.token_ids)
                base, before = _base(thread.texts, prompt.text)
                extended = None
            new = [span for span in prompt.media if span.first_token >= seen]
            media = [vars(span.placed(-seen, 0)) for span in new]
            line = {
                "session": session,
                "thread": place,
                "observed": list(prompt.token_ids[seen:]),
                "base": base,
                "text": prompt.text[len(before) :],
                "endings": list(texts),
            }
            if media:
                line |= {"media": media}
            if call_ids:
                line |= {"calls": list(call_ids), "said": answer.text}
            sampling = None if answer.sampling is None else asdict(answer.sampling)
            lines.append(line | _delta_to_json(answer.delta) | {"sampling": sampling})
        return lines

    def apply(self, line: Line) -> None:
        """Take a line that was written."""
        if "born" in line:
            return
        if "closed" in line:
            self.blob = BlobReference(**line["closed"])
        elif "reward" in line:
            self._sessions[line["session"]].reward = line["reward"]
        else:
            self._apply_answer(self._sessions.setdefault(line["session"], _Session()), line)

    def trajectories(self, name: str) -> list[Trajectory]:
        """Returns those of a session, empty where it is not there."""
        session = self._sessions.get(name, _Session())
        return [thread.trajectory for thread in session.threads]

    def samples(self) -> list[Sample]:
        """Makes a row per trajectory; those of one session share its reward and its episode."""
        rows: list[Sample] = []
        for episode, session in enumerate(self._sessions.values()):
            assert session.reward is not None
            reward = Reward(reward=session.reward, raw_reward=session.reward)
            for thread in session.threads:
                rows.append(thread.trajectory.to_sample(self.group_id, len(rows), reward, episode))
        return rows

    def describe(self) -> dict[str, Any]:
        """Returns what callers may see of it, as JSON values."""
        sessions = {
            name: {
                "reward": session.reward,
                "samples": [
                    {
                        "prompt_tokens": len(thread.trajectory.prompt_token_ids),
                        "response_tokens": len(thread.trajectory.response),
                        "sampled_tokens": thread.trajectory.sampled_count,
                        "calls": len(thread.trajectory.answers),
                    }
                    for thread in session.threads
                ],
            }
            for name, session in self._sessions.items()
        }
        blob = self.blob
        named = None if blob is None else {"digest": blob.digest, "size_bytes": blob.size}
        return {"group": self.group_id, "closed": blob is not None, "blob": named} | {
            "sessions": sessions
        }

    def _apply_answer(self, session: _Session, line: Line) -> None:
        delta = _delta_from_json(line)
        media = [
            MediaSpan(**{**span, "grid_thw": tuple(span["grid_thw"])})
            for span in line.get("media", ())
        ]
        if line["thread"] == len(session.threads):
            session.threads.append(_Thread(Trajectory(line["observed"], media=media), (), []))
            thread = session.threads[-1]
        else:
            thread = session.threads[line["thread"]]
            if line["observed"]:
                thread.trajectory.add_observation(line["observed"], media)
        sampling = line.get("sampling")  # lines of older versions say nothing of it
        thread.trajectory.add_sampled(delta, Sampling(**sampling) if sampling else None)
        thread.token_ids += (*line["observed"], *delta.token_ids)
        before = "" if line["base"] is None else thread.texts[line["base"]]
        thread.texts = [before + line["text"] + ending for ending in line["endings"]]
        session.calls |= dict.fromkeys(line.get("calls", ()), line.get("said", ""))


def _delta_to_json(delta: Delta) -> dict[str, Any]:
    return {
        "sampled": list(delta.token_ids),
        "logprobs": list(delta.logprobs),
        "logprobs_t1": list(delta.logprobs_t1),
        "spans": [
            [span.version, span.digest, span.first_token, span.last_token, span.base_digest]
            for span in delta.spans
        ],
        "finish": delta.finish_reason or "",
        "experts": _experts_to_text(delta.routed_experts),
    }


def _delta_from_json(line: Line) -> Delta:
    spans = [
        VersionSpan(
            version=version,
            digest=digest,
            first_token=first,
            last_token=last,
            base_digest=base[0] if base else "",  # older releases write none
        )
        for version, digest, first, last, *base in line["spans"]
    ]
    return Delta(
        index=0,
        token_ids=tuple(line["sampled"]),
        logprobs=Numbers(np.array(line["logprobs"], np.float32)),
        logprobs_t1=Numbers(np.array(line["logprobs_t1"], np.float32)),
        spans=tuple(spans),
        finish_reason=FinishReason(line["finish"]) if line["finish"] else None,
        routed_experts=_experts_from_text(line.get("experts", "")),
    )


def _experts_to_text(experts: np.ndarray | None) -> str:
    message = wire.experts_to_proto(experts)
    return "" if message is None else base64.b64encode(message.SerializeToString()).decode()


def _experts_from_text(text: str) -> np.ndarray | None:
    if not text:
        return None
    return wire.experts_from_proto(RoutedExperts.FromString(base64.b64decode(text)), "experts")


def _is_whole(data: bytes) -> bool:
    """Whether these bytes are a line with its digest."""
    try:
        return b"\t" in data and bool(decode_line(data))
    except ValueError:
        return False


def _base(texts: Sequence[str], text: str) -> tuple[int | None, str]:
    """Finds the longest text that this one goes on from, and its place, if any."""
    fitting = [(len(each), place) for place, each in enumerate(texts) if text.startswith(each)]
    if not fitting:
        return None, ""
    _, place = max(fitting)
    return place, texts[place]


def _extended(threads: Sequence[_Thread], prompt: Prompt) -> int | None:
    """Finds the longest trajectory that a prompt begins with: its tokens, and what they show."""
    found = [
        (len(thread.token_ids), place)
        for place, thread in enumerate(threads)
        if _goes_on(prompt, thread)
    ]
    return max(found)[1] if found else None


def _goes_on(prompt: Prompt, thread: _Thread) -> bool:
    digests = [span.digest for span in thread.trajectory.media]
    return (
        prompt.token_ids[: len(thread.token_ids)] == thread.token_ids
        and prompt.shown[: len(digests)] == digests
    )


@dataclass(frozen=True)
class _GroupFile:
    """A group as far as its file was read; `birth` is its first line, b"" before there is one."""

    group: GroupRecord
    birth: bytes = b""
    offset: int = 0


class Recorder:
    """Keeps the recorded groups of a store. Threads wait for the disk."""

    def __init__(
        self,
        root: Path,
        blobs: Blobs,
        tokenizer: TextTokenizer,
        config: OpenAIConfig,
        *,
        sync: bool = True,
    ) -> None:
        self._root, self._sync = root, sync
        self._root.mkdir(parents=True, exist_ok=True)
        self._blobs, self._tokenizer, self._config = blobs, tokenizer, config
        self._files: OrderedDict[str, _GroupFile] = OrderedDict()

    async def earlier(self, record: Record) -> Earlier:
        """Returns what the next prompt of a session may go on from. Raises ApiError."""
        return await self._locked(
            lambda: self._open(record.group, make=True).earlier(record.session)
        )

    async def add(
        self,
        record: Record,
        prompt: Prompt,
        answers: Sequence[Answer],
        calls: Sequence[Sequence[str]],
    ) -> None:
        """Record a call; durable when it returns. `calls`: ids of the tool calls in each answer.

        Raises ApiError for a group that is closed.
        """
        endings = [self._endings(answer) for answer in answers]

        def write() -> None:
            group = self._open(record.group, make=True)
            if prompt.media:
                self._blobs.pin(_owner(record.group), prompt.shown)
            self._append(group, group.lines(record.session, prompt, answers, endings, calls))

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
            self._files.pop(name)  # it is read again if somebody asks
            closed = sorted(self._list(CLOSED), key=lambda each: each == name)  # it is the latest
            for old in closed[: -self._config.kept_groups]:
                self._forget(old)
            return group.describe()

        return await self._locked(write)

    async def describe(self, name: str) -> dict[str, Any]:
        """Returns what callers may see of a group. Raises ApiError where it is not there."""
        return await self._locked(lambda: self._read(name).describe())

    async def lines(self, name: str) -> list[Line]:
        """Returns what was written of a group, for `GroupRecord.apply`. Raises ApiError."""

        def read() -> list[Line]:
            self._read(name)
            path = self._find(name)
            assert path is not None
            lines = path.read_bytes()
            return [decode_line(line) for line in lines[: lines.rfind(b"\n") + 1].splitlines()]

        return await self._locked(read)

    async def names(self) -> dict[str, list[str]]:
        """Returns the names of open and closed groups."""
        return await self._locked(lambda: {"open": self._list(OPEN), "closed": self._list(CLOSED)})

    async def delete(self, name: str) -> None:
        """Forget a group; its blob may then be collected. Raises ApiError."""

        def remove() -> None:
            if self._find(name) is None:
                raise ApiError(404, "group_not_found", f"no group {name!r} was recorded")
            self._forget(name)

        await self._locked(remove)

    def _endings(self, answer: Answer) -> list[str]:
        """Returns an answer as a caller may send it back: as is, or as shown, with its stop token.

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
        except (OSError, BlobNotFoundError) as error:
            raise ApiError(503, "store_failed", str(error)) from error

    def _open(self, name: str, *, make: bool = False) -> GroupRecord:
        group = self._read(name, make=make)
        if group.blob is not None:
            raise ApiError(409, "group_closed", f"group {name!r} is closed", "sluice_record")
        return group

    def _read(self, name: str, *, make: bool = False) -> GroupRecord:
        """Reads a group as it is on the disk now, where other workers may have written too.

        Raises ApiError for one that is not there, or was damaged.
        """
        path = self._find(name)
        if path is None:
            if not make:
                raise ApiError(404, "group_not_found", f"no group {name!r} was recorded")
            self._check_room()
            return self._remember(_GroupFile(GroupRecord(name)))
        with path.open("rb") as lines:
            birth = lines.readline()
            file = self._files.get(name)
            if file is None or file.birth != birth:
                file = _GroupFile(GroupRecord(name), birth)
            is_cut = os.fstat(lines.fileno()).st_size < file.offset
            lines.seek(file.offset)
            data = lines.read()
        whole = data.rfind(b"\n") + 1  # a crash may have cut off the last line
        try:
            found = [decode_line(line) for line in data[:whole].splitlines()]
            if is_cut or _is_whole(data[whole:-1]):
                raise ValueError
        except ValueError:
            self._files.pop(name, None)
            message = f"{path.name} is not as it was written: delete the group"
            raise ApiError(409, "record_damaged", message) from None
        for line in found:
            file.group.apply(line)
        return self._remember(replace(file, offset=file.offset + whole))

    def _append(self, group: GroupRecord, lines: Sequence[Line]) -> None:
        birth, offset = self._files[group.group_id].birth, self._files[group.group_id].offset
        data = b"".join(encode_line(line) + b"\n" for line in lines)
        if not offset:
            birth = encode_line({"born": secrets.token_hex(16)}) + b"\n"
            data = birth + data
        with (self._root / f"{quote(group.group_id)}{OPEN}").open("ab") as file:
            file.truncate(offset)
            file.write(data)
            file.flush()
            if self._sync:
                os.fsync(file.fileno())
        for line in lines:
            group.apply(line)
        self._remember(_GroupFile(group, birth, offset + len(data)))

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
        self._files.pop(name, None)
        if (path := self._find(name)) is not None:
            path.unlink()

    def _find(self, name: str) -> Path | None:
        paths = (self._root / f"{quote(name)}{ending}" for ending in (OPEN, CLOSED))
        return next((path for path in paths if path.exists()), None)

    def _list(self, ending: str) -> list[str]:
        """Returns names, oldest first."""
        entries = [entry for entry in os.scandir(self._root) if entry.name.endswith(ending)]
        entries.sort(key=lambda entry: (entry.stat().st_mtime, entry.name))
        return [unquote(entry.name.removesuffix(ending)) for entry in entries]

    def _check_room(self) -> None:
        if len(self._list(OPEN)) >= self._config.open_groups:
            raise ApiError(429, "too_many_groups", "close or delete recorded groups first")

    def _remember(self, file: _GroupFile) -> GroupRecord:
        name = file.group.group_id
        self._files[name] = file
        self._files.move_to_end(name)
        if len(self._files) > self._config.open_groups:
            self._files.popitem(last=False)
        return file.group


def _owner(group_id: str) -> str:
    return f"record/{group_id}"
