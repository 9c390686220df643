"""What callers did in the sessions of one group: a fold over the lines of its journal.

A line holds one answer, a reward, or the end; the first one tells the file from others of its
name. A call whose prompt goes on from the tokens of an earlier answer of its session extends that
trajectory; any other begins a new one.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.rollout.engine.interface import Delta, FinishReason
from services.rollout.environments.environment import Reward
from services.rollout.episodes.trajectory import Trajectory
from services.rollout.openai.generation import Answer
from services.rollout.openai.prompts import Earlier, Prompt
from sluice.api.common.v1.sample_pb2 import RoutedExperts
from sluice.runtime import wire
from sluice.samples.blobs import BlobReference
from sluice.samples.sample import Sample, VersionSpan

Line = Mapping[str, Any]


@dataclass
class _Thread:
    """A trajectory, and the texts that callers may have for it."""

    trajectory: Trajectory
    texts: list[str]


@dataclass
class _Session:
    threads: list[_Thread] = field(default_factory=list)
    reward: float | None = None


class GroupRecord:
    """Sessions in the order in which they began."""

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

    def earlier(self, session: str) -> list[Earlier]:
        """What a prompt of this session may go on from."""
        known = self._sessions.get(session)
        threads = [] if known is None else known.threads
        return [
            Earlier(text, thread.trajectory.token_ids)
            for thread in threads
            for text in thread.texts
        ]

    def lines(
        self,
        session: str,
        prompt: Prompt,
        answers: Sequence[Answer],
        endings: Sequence[Sequence[str]],
    ) -> list[Line]:
        """What to write of a call. `endings`: texts that each answer may come back as.

        The first answer extends the longest trajectory that the prompt goes on from. The others
        stand alone, so that no token is trained on twice.
        """
        threads = self._sessions.get(session, _Session()).threads
        fresh = itertools.count(len(threads))
        extended = _extended(threads, prompt.token_ids)
        lines: list[Line] = []
        for answer, texts in zip(answers, endings, strict=True):
            if extended is None:
                place, base, seen, known = next(fresh), None, 0, ""
            else:
                place, thread = extended, threads[extended]
                seen = len(thread.trajectory.token_ids)
                base, known = _base(thread.texts, prompt.text)
                extended = None
            line = {
                "session": session,
                "thread": place,
                "observed": list(prompt.token_ids[seen:]),
                "base": base,
                "text": prompt.text[len(known) :],
                "endings": list(texts),
            }
            lines.append(line | _delta_to_json(answer.delta))
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

    def samples(self) -> list[Sample]:
        """A row per trajectory; those of one session share its reward and its episode."""
        rows: list[Sample] = []
        for episode, session in enumerate(self._sessions.values()):
            assert session.reward is not None
            reward = Reward(reward=session.reward, raw_reward=session.reward)
            for thread in session.threads:
                rows.append(thread.trajectory.to_sample(self.group_id, len(rows), reward, episode))
        return rows

    def describe(self) -> dict[str, Any]:
        """For callers."""
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
        if line["thread"] == len(session.threads):
            session.threads.append(_Thread(Trajectory(line["observed"]), []))
            thread = session.threads[-1]
        else:
            thread = session.threads[line["thread"]]
            if line["observed"]:
                thread.trajectory.add_observation(line["observed"])
        thread.trajectory.add_sampled(delta)
        before = "" if line["base"] is None else thread.texts[line["base"]]
        thread.texts = [before + line["text"] + ending for ending in line["endings"]]


def _delta_to_json(delta: Delta) -> dict[str, Any]:
    return {
        "sampled": list(delta.token_ids),
        "logprobs": list(delta.logprobs),
        "logprobs_t1": list(delta.logprobs_t1),
        "spans": [
            [span.version, span.digest, span.first_token, span.last_token] for span in delta.spans
        ],
        "finish": delta.finish_reason or "",
        "experts": _experts_to_text(delta.routed_experts),
    }


def _delta_from_json(line: Line) -> Delta:
    spans = [
        VersionSpan(version=version, digest=digest, first_token=first, last_token=last)
        for version, digest, first, last in line["spans"]
    ]
    return Delta(
        index=0,
        token_ids=tuple(line["sampled"]),
        logprobs=tuple(line["logprobs"]),
        logprobs_t1=tuple(line["logprobs_t1"]),
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


def _base(texts: Sequence[str], text: str) -> tuple[int | None, str]:
    """The longest text that this one goes on from, and its place; none where only tokens agree."""
    fitting = [(len(each), place) for place, each in enumerate(texts) if text.startswith(each)]
    if not fitting:
        return None, ""
    _, place = max(fitting)
    return place, texts[place]


def _extended(threads: Sequence[_Thread], token_ids: tuple[int, ...]) -> int | None:
    """The longest trajectory that these tokens begin with."""
    found = [
        (len(thread.trajectory.token_ids), place)
        for place, thread in enumerate(threads)
        if token_ids[: len(thread.trajectory.token_ids)] == thread.trajectory.token_ids
    ]
    return max(found)[1] if found else None
