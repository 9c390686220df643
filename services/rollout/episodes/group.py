"""Runs one group from its task to its blob."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from services.rollout import metrics
from services.rollout.engine.interface import Delta, Sampling, TokenScores
from services.rollout.engine.wire import VersionBounds
from services.rollout.environments.environment import (
    EnvironmentFailedError,
    InvalidRewardError,
    Response,
    Reward,
    Task,
    TaskError,
    TaskRequest,
    rewards_from,
)
from services.rollout.environments.runner import Runner
from services.rollout.episodes.engines import NO_HINTS, Hints
from services.rollout.episodes.episode import Episode, encode_prompt, take_steps
from services.rollout.episodes.images import NO_IMAGES, Images, Passage, SampleImages
from services.rollout.episodes.sampler import EngineError, Sampler, SamplingPrompt
from services.rollout.episodes.spool import Spool, owner_of
from services.rollout.episodes.trajectory import (
    Timeline,
    Trajectory,
    answered_samples,
    response_of,
)
from sluice.api.rollout.v1 import trace_pb2
from sluice.client import RemoteError
from sluice.json_values import shown
from sluice.runtime.errors import DeadlineError, InvalidFieldError
from sluice.runtime.idempotency import all_of
from sluice.runtime.waits import Waits
from sluice.samples.blobs import BlobReference
from sluice.samples.sample import (
    SCORE_PREFIX,
    InvalidSampleError,
    Sample,
    find_column,
    top_columns,
    validate_sample,
)
from sluice.samples.tokenizer import TextTokenizer, off_loop


class GroupTimeoutError(DeadlineError):
    """A group took longer than its rollout allows."""

    reason = "GROUP_TIMED_OUT"


class TeacherSeesNoImagesError(InvalidFieldError):
    """Engines score text alone; a trainer process as teacher sees the images of a sample."""

    def __init__(self, sample_id: str, pool: str) -> None:
        super().__init__(
            "teacher_pool",
            f"sample {sample_id} shows images, which the engines of pool {pool} do not score; "
            "let a trainer be the teacher",
        )


class TeacherTopError(InvalidFieldError):
    """A teacher does not name as many tokens: its vocabulary has fewer, or it names none."""

    def __init__(self, sample_id: str, pool: str, count: int) -> None:
        super().__init__(
            "teacher_top_count",
            f"the engines of pool {pool} did not name {count} tokens at each place of sample "
            f"{sample_id}",
        )


TEACHER = "teacher_logprobs"


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """One group: its task, a seed per sample or none, and the pool of its teacher or empty.

    teacher_top_count: tokens that the teacher names at each place.
    """

    group_id: str
    task: TaskRequest
    seeds: tuple[int, ...] = ()
    teacher_pool: str = ""
    teacher_top_count: int = 0


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
    trace: trace_pb2.GroupTrace


class SampleRow(NamedTuple):
    """A trajectory that is to be a sample, and what the reward sees of it.

    episode: its index where an episode may have several samples.
    """

    trajectory: Trajectory
    response: Response
    episode: int | None = None


@dataclass(frozen=True)
class GroupTools:
    """What every group of the worker works with."""

    tokenizer: TextTokenizer
    sampler: Sampler
    spool: Spool
    waits: Waits
    images: Images = NO_IMAGES.images


class GroupRunner:
    """Runs groups of one environment."""

    def __init__(self, runner: Runner, tools: GroupTools) -> None:
        self._runner, self._tokenizer = runner, tools.tokenizer
        self._sampler, self._spool, self._waits = tools.sampler, tools.spool, tools.waits
        self._images = tools.images

    async def run(self, group: GroupSpec, settings: GroupSettings) -> GroupResult:
        """Sample, reward and store a group.

        Raises TaskError and the ServiceErrors of what it takes; DeadlineError after `timeout`.
        """
        timeline = Timeline(settings.sample_count)
        try:
            async with asyncio.timeout(settings.timeout):
                samples, task = await self._sample(group, settings, timeline)
        except TimeoutError:
            raise GroupTimeoutError(
                f"group {group.group_id} took longer than {settings.timeout:g} s",
                group_id=group.group_id,
            ) from None
        metadata = {"environment": settings.environment, "answer": task.answer}
        metadata["sampling"] = json.dumps(vars(settings.sampling) | {"seeds": group.seeds})
        if task.state:
            metadata["state"] = json.dumps(task.state)
        blob = await self._spool.put(settings.request_id, samples, metadata)
        timeline.mark(trace_pb2.SPAN_KIND_STORE, "store")
        metrics.GROUP_SECONDS.observe(timeline.now())
        return GroupResult(samples, blob, timeline.to_proto())

    async def _sample(
        self, group: GroupSpec, settings: GroupSettings, timeline: Timeline
    ) -> tuple[list[Sample], Task]:
        with self._waits.waiting(f"task of group {group.group_id}", on=[settings.environment]):
            task = await self._runner.make_task(group.task)
        images = SampleImages(self._images, owner_of(settings.request_id))
        passage = await tokenise(self._tokenizer, images, task)
        prompt = SamplingPrompt(
            group_id=group.group_id,
            token_ids=tuple(passage.token_ids),
            media=passage.media,
            sample_count=settings.sample_count,
            sampling=replace(settings.sampling, seeds=group.seeds),
            bounds=settings.bounds,
            pool=settings.pool,
            timeline=timeline,
            hints=Hints.of_conversations(settings.sample_count)
            if self._runner.has_steps
            else NO_HINTS,
        )
        timeline.mark(trace_pb2.SPAN_KIND_TASK, settings.environment)
        is_plain = self._runner.generate is None and not self._runner.has_steps
        answers, rows = list[Delta](), list[SampleRow]()
        try:
            with metrics.GENERATE_SECONDS.time():
                if is_plain:
                    answers = await self._sampler.sample(prompt)
                    responses = await self._responses(answers)
                else:
                    rows = await self._play(task, prompt, settings, images)
                    responses = [row.response for row in rows]
        finally:
            self._sampler.leave(prompt)
        timeline.mark(trace_pb2.SPAN_KIND_SIBLINGS, settings.environment)
        own = [row.trajectory.reward for row in rows] or [None] * len(answers)
        rewards = await self._reward(task, prompt.group_id, responses, own, settings.environment)
        timeline.mark(trace_pb2.SPAN_KIND_REWARD, settings.environment)
        if is_plain:
            samples = answered_samples(
                group.group_id, prompt.token_ids, answers, rewards, prompt.sampling, prompt.media
            )
        else:
            samples = [
                row.trajectory.to_sample(group.group_id, index, reward, row.episode)
                for index, (row, reward) in enumerate(zip(rows, rewards, strict=True))
            ]
        if group.teacher_pool:
            samples = await all_of(self._taught(sample, group) for sample in samples)
            timeline.mark(trace_pb2.SPAN_KIND_TEACHER, group.teacher_pool)
        if not is_plain or prompt.media:
            for sample in samples:
                _check(sample)
        return samples, task

    async def _play(
        self, task: Task, prompt: SamplingPrompt, settings: GroupSettings, images: SampleImages
    ) -> list[SampleRow]:
        """Plays the episodes; returns what is to be a sample, in order."""
        name, episodes = settings.environment, self._episodes(task, prompt, settings, images)
        if self._runner.generate is not None:
            parts = await all_of(self._generate(episode, name) for episode in episodes)
            return [row for part in parts for row in part]
        deltas = await self._sampler.sample(prompt)
        first = [
            Trajectory.of(prompt.token_ids, delta, prompt.sampling, prompt.media)
            for delta in deltas
        ]
        responses = await all_of(
            take_steps(*pair, self._runner, self._waits, name)
            for pair in zip(episodes, first, strict=True)
        )
        return [
            SampleRow(trajectory, response)
            for trajectory, response in zip(first, responses, strict=True)
        ]

    def _episodes(
        self, task: Task, prompt: SamplingPrompt, settings: GroupSettings, images: SampleImages
    ) -> list[Episode]:
        name = settings.environment
        return [
            Episode(index, task, prompt, self._sampler, self._tokenizer, name, images)
            for index in range(prompt.sample_count)
        ]

    async def _generate(self, episode: Episode, environment: str) -> list[SampleRow]:
        """Returns the samples that a generate function makes of an episode."""
        assert self._runner.generate is not None
        waiting = self._waits.waiting(f"generate function of {episode.group_id}", on=[environment])
        with waiting:
            trajectories = await self._runner.generate(episode)
        episode.mark_step()
        if not isinstance(trajectories, Sequence) or not all(
            isinstance(trajectory, Trajectory) for trajectory in trajectories
        ):
            raise EnvironmentFailedError("the generate function gave no list of trajectories")
        if not trajectories or not all(trajectory.answers for trajectory in trajectories):
            raise EnvironmentFailedError(
                f"the generate function sampled nothing in episode {episode.index}"
            )
        responses = await self._responses([trajectory.answers[-1] for trajectory in trajectories])
        return [
            SampleRow(
                trajectory, replace(response, finish_reason=trajectory.finish_reason), episode.index
            )
            for trajectory, response in zip(trajectories, responses, strict=True)
        ]

    async def _reward(
        self,
        task: Task,
        group_id: str,
        responses: Sequence[Response],
        own: Sequence[Reward | None],
        environment: str,
    ) -> list[Reward]:
        """Returns one reward per response, its `own` if it has one; the environment sees the
        others, all at once."""
        unrewarded = [each for each, reward in zip(responses, own, strict=True) if reward is None]
        waiting = self._waits.waiting(f"reward of group {group_id}", on=[environment])
        new_rewards: list[Reward] = []
        if unrewarded:
            with metrics.REWARD_SECONDS.time(), waiting:
                new_rewards = await self._runner.reward(task, unrewarded)
        try:
            rewards = rewards_from(new_rewards, len(unrewarded))
            if len(unrewarded) < len(own):
                rest = iter(rewards)
                merged = [next(rest) if reward is None else reward for reward in own]
                rewards = rewards_from(merged, len(own))
        except InvalidRewardError as error:
            raise EnvironmentFailedError(f"{environment}: {error}") from None
        for name in dict.fromkeys(chain.from_iterable(reward.scores for reward in rewards)):
            if find_column(f"{SCORE_PREFIX}{name}") is None:
                raise EnvironmentFailedError(
                    f"{environment} gave a score named {shown(name)}: names have 1 to 64 ASCII "
                    "letters, digits, _, . and -"
                )
        return rewards

    async def _taught(self, sample: Sample, group: GroupSpec) -> Sample:
        """Returns the sample with what a teacher makes of its response."""
        pool, count = group.teacher_pool, group.teacher_top_count
        if sample.media:
            raise TeacherSeesNoImagesError(sample.sample_id, pool)
        scores = TokenScores(logprobs=(), top=())
        if sample.response_length:
            tokens = sample.token_ids.tolist()
            try:
                scores = await self._sampler.score(
                    tokens, sample.prompt_length, count, VersionBounds(), pool
                )
            except RemoteError as error:
                raise EngineError(error, 1) from None
        columns = {**sample.columns, TEACHER: np.asarray(scores.logprobs, dtype=np.float32)}
        if count:
            columns |= _top_of(scores, count, sample, pool)
        return replace(sample, columns=columns)

    async def _responses(self, deltas: Sequence[Delta]) -> list[Response]:
        texts = [""] * len(deltas)
        if self._runner.needs_text:
            ids = [delta.token_ids for delta in deltas]
            texts = await off_loop(sum(map(len, ids)), partial(self._tokenizer.decode, ids))
        return [response_of(delta, text) for delta, text in zip(deltas, texts, strict=True)]


async def tokenise(tokenizer: TextTokenizer, images: SampleImages, task: Task) -> Passage:
    """Raises TaskError for a task of two prompts, and for messages that are no chat."""
    if task.messages and task.prompt:
        raise TaskError("prompt", "stands beside messages: a task has one of the two")
    if task.messages:
        return await encode_prompt(tokenizer, images, task.messages, task.tools, task.template)
    encode = partial(tokenizer.encode, task.prompt, special=True)
    return images.images.expand(await off_loop(len(task.prompt), encode), ())


def _top_of(
    scores: TokenScores, count: int, sample: Sample, pool: str
) -> dict[str, np.ndarray | float]:
    """Raises TeacherTopError where the engines named more or fewer tokens, or for fewer places."""
    if len(scores.top) != sample.response_length or any(
        len(place) != count for place in scores.top
    ):
        raise TeacherTopError(sample.sample_id, pool, count)
    ids = [[token for token, _ in place] for place in scores.top]
    logprobs = [[value for _, value in place] for place in scores.top]
    names, shape = top_columns(count), (-1, count)
    return {
        names[0]: np.array(ids, np.int32).reshape(shape),
        names[1]: np.array(logprobs, np.float32).reshape(shape),
    }


def _check(sample: Sample) -> None:
    try:
        validate_sample(sample)
    except InvalidSampleError as error:
        raise EnvironmentFailedError(str(error)) from None
