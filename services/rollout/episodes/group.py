"""One group from its task to its blob."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from services.rollout import metrics
from services.rollout.engine import Delta, Sampling
from services.rollout.environments.environment import (
    Response,
    Reward,
    Task,
    TaskError,
    TaskRequest,
)
from services.rollout.environments.pool import EnvironmentFailedError
from services.rollout.environments.runner import Runner
from services.rollout.episodes.drafts import Prompt
from services.rollout.episodes.sampler import Sampler
from services.rollout.episodes.spool import Spool
from services.rollout.wire import VersionBounds
from sluice.runtime.errors import DeadlineError
from sluice.runtime.waits import Waits
from sluice.samples.blobs import BlobReference
from sluice.samples.chat_template import ChatTemplateError
from sluice.samples.sample import Sample
from sluice.samples.tokenizer import TextTokenizer

THREAD_CHARACTERS = 20_000  # texts longer than this are tokenised off the event loop
THREAD_TOKENS = 20_000


class GroupTimeoutError(DeadlineError):
    """A group took longer than its rollout allows."""

    reason = "GROUP_TIMED_OUT"


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """One group: its task, and a seed per sample or none."""

    group_id: str
    task: TaskRequest
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """What all groups of a rollout have in common."""

    request_id: str
    environment: str
    sampling: Sampling
    sample_count: int
    bounds: VersionBounds
    pool: str
    timeout: float  # seconds


@dataclass(frozen=True)
class GroupResult:
    """A durable group."""

    samples: Sequence[Sample]
    blob: BlobReference


@dataclass(frozen=True)
class GroupTools:
    """What every group of the worker works with."""

    tokenizer: TextTokenizer
    sampler: Sampler
    spool: Spool
    waits: Waits


class GroupRunner:
    """Runs groups of one environment."""

    def __init__(self, runner: Runner, tools: GroupTools) -> None:
        self._runner, self._tokenizer = runner, tools.tokenizer
        self._sampler, self._spool, self._waits = tools.sampler, tools.spool, tools.waits

    async def run(self, group: GroupSpec, settings: GroupSettings) -> GroupResult:
        """Sample, reward and store a group.

        Raises TaskError and the ServiceErrors of what it takes; DeadlineError after `timeout`.
        """
        start = time.monotonic()
        try:
            async with asyncio.timeout(settings.timeout):
                samples, task = await self._sample(group, settings)
        except TimeoutError:
            raise GroupTimeoutError(
                f"group {group.group_id} took longer than {settings.timeout:g} s",
                group_id=group.group_id,
            ) from None
        metadata = {"environment": settings.environment, "answer": task.answer}
        if task.state:
            metadata["state"] = json.dumps(task.state)
        blob = await self._spool.put(settings.request_id, samples, metadata)
        metrics.GROUP_SECONDS.observe(time.monotonic() - start)
        return GroupResult(samples, blob)

    async def _sample(self, group: GroupSpec, settings: GroupSettings) -> tuple[list[Sample], Task]:
        with self._waits.waiting(f"task of group {group.group_id}", on=[settings.environment]):
            task = await self._runner.make_task(group.task)
        prompt = Prompt(
            group_id=group.group_id,
            token_ids=tuple(await self._tokenise(task)),
            sample_count=settings.sample_count,
            sampling=replace(settings.sampling, seeds=group.seeds),
            bounds=settings.bounds,
            pool=settings.pool,
        )
        with metrics.GENERATE_SECONDS.time():
            deltas = await self._sampler.sample(prompt)
        waiting = self._waits.waiting(
            f"reward of group {group.group_id}", on=[settings.environment]
        )
        with metrics.REWARD_SECONDS.time(), waiting:
            rewards = await self._runner.reward(task, await self._responses(deltas))
        if not all(math.isfinite(r.reward) and math.isfinite(r.raw_reward) for r in rewards):
            raise EnvironmentFailedError(f"{settings.environment} gave a reward that is no number")
        return _samples(group.group_id, prompt.token_ids, deltas, rewards), task

    async def _tokenise(self, task: Task) -> list[int]:
        length = len(task.prompt) + sum(len(str(turn["content"])) for turn in task.messages)
        if length > THREAD_CHARACTERS:
            return await asyncio.to_thread(self._encode, task)
        return self._encode(task)

    def _encode(self, task: Task) -> list[int]:
        if task.messages:
            try:
                return self._tokenizer.encode_chat(task.messages)
            except ChatTemplateError as error:
                raise TaskError("messages", str(error)) from None
        return self._tokenizer.encode(task.prompt, special=True)

    async def _responses(self, deltas: Sequence[Delta]) -> list[Response]:
        texts = [""] * len(deltas)
        if self._runner.needs_text:
            ids = [delta.token_ids for delta in deltas]
            if sum(map(len, ids)) > THREAD_TOKENS:
                texts = await asyncio.to_thread(self._tokenizer.decode, ids)
            else:
                texts = self._tokenizer.decode(ids)
        return [
            Response(token_ids=delta.token_ids, text=text, finish_reason=delta.finish_reason or "")
            for delta, text in zip(deltas, texts, strict=True)
        ]


def _samples(
    group_id: str,
    prompt: Sequence[int],
    deltas: Sequence[Delta],
    rewards: Sequence[Reward],
) -> list[Sample]:
    """The rows of a group; they hold the very ids the engine was given."""
    return [
        Sample(
            sample_id=f"{group_id}/{index}",
            group_id=group_id,
            token_ids=np.array((*prompt, *delta.token_ids), dtype=np.int32),
            prompt_length=len(prompt),
            finish_reason=delta.finish_reason or "",
            columns={
                "rollout_logprobs": np.array(delta.logprobs, dtype=np.float32),
                "rollout_logprobs_t1": np.array(delta.logprobs_t1, dtype=np.float32),
                "reward": reward.reward,
                "raw_reward": reward.raw_reward,
            },
            spans=delta.spans,
        )
        for index, (delta, reward) in enumerate(zip(deltas, rewards, strict=True))
    ]
