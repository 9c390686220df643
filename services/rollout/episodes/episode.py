"""Plays an episode: an engine's answers, and observations of the environment between them.

Tokens of an answer are never made again; observations are tokenised to go on after them.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import xxhash

from services.rollout.engine.interface import Delta
from services.rollout.environments.environment import (
    EnvironmentFailedError,
    Response,
    Step,
    Task,
    TaskError,
    Turn,
)
from services.rollout.environments.isolation import on_loop
from services.rollout.environments.runner import Runner
from services.rollout.episodes.images import NO_IMAGES, Passage, SampleImages
from services.rollout.episodes.sampler import EngineError, Sampler, SamplingPrompt
from services.rollout.episodes.trajectory import Trajectory, response_of
from sluice.api.rollout.v1 import trace_pb2
from sluice.runtime.waits import Waits
from sluice.samples.chat_template import ChatTemplateError
from sluice.samples.messages import template_messages, text_of
from sluice.samples.sample import MediaSpan
from sluice.samples.tokenizer import TextTokenizer, off_loop

_ANSWER = uuid.uuid4().hex  # stands where the answer is, so that what follows it is found


class Conversation:
    """Keeps the chat messages of one episode so far; none for a plain prompt."""

    def __init__(self, task: Task) -> None:
        self._is_chat = bool(task.messages)
        self._messages: list[Mapping[str, Any]] = [*template_messages(task.messages)]
        self._tools, self._template = task.tools, task.template

    def encode(
        self, tokenizer: TextTokenizer, answer: str, last_token: int | None, step: Step
    ) -> list[int]:
        """Returns tokens from the end of `answer`, at `last_token`, to where the next one begins.

        Every image of the observation is one placeholder.
        Raises TaskError for an observation of the wrong kind, or that the template refuses.
        """
        self.check(step)
        if not self._is_chat:
            return tokenizer.encode(step.text, special=False)
        shown = template_messages(step.messages)
        ids = tokenizer.encode(self._suffix(tokenizer, shown), special=False)
        self._messages += ({"role": "assistant", "content": answer}, *shown)
        # The template closes the answer, which the model mostly did itself.
        return ids[1:] if ids and ids[0] == last_token else ids

    def check(self, step: Step) -> None:
        """Raise TaskError for an observation of the wrong kind."""
        is_text = isinstance(step.text, str) and bool(step.text)
        is_messages = bool(step.messages) and all(isinstance(m, Mapping) for m in step.messages)
        if (is_messages, is_text) != (self._is_chat, not self._is_chat):
            wanted = "messages" if self._is_chat else "text"
            raise TaskError("step", f"this prompt takes observations as {wanted}, never empty")

    def length(self, step: Step) -> int:
        """Counts the characters that `encode` has to read."""
        if not self._is_chat:
            return len(step.text)
        return sum(len(text_of(message)) for message in (*self._messages, *step.messages))

    def _suffix(self, tokenizer: TextTokenizer, shown: Sequence[Mapping[str, Any]]) -> str:
        """Returns what the template writes after an answer. Former ones it may shorten."""
        turns = [*self._messages, {"role": "assistant", "content": _ANSWER}, *shown]
        try:
            text = tokenizer.chat_template.render(
                turns, tools=self._tools or None, options=self._template
            )
        except ChatTemplateError as error:
            raise TaskError("step.messages", str(error)) from None
        _, found, suffix = text.rpartition(_ANSWER)
        if not found:
            raise TaskError("step.messages", "the chat template leaves the answer out")
        return suffix


def observation_text(step: Step) -> str:
    """Returns an observation as text, for the reward and for readers."""
    return step.text or "\n".join(text_of(message) for message in step.messages)


class Episode:
    """Plays episode `index` of a group. Every trajectory may sample `max_new_tokens` in all.

    A generate function begins trajectories, has them sampled, adds observations, and returns
    those that are to become samples of the group; each may have a reward of its own.
    """

    def __init__(
        self,
        index: int,
        task: Task,
        prompt: SamplingPrompt,
        sampler: Sampler,
        tokenizer: TextTokenizer,
        environment: str = "",
        images: SampleImages = NO_IMAGES,
    ) -> None:
        """`prompt` is that of the group. `environment` is for the timeline.

        Call it on the worker's event loop.
        """
        self._environment = environment
        self.home = asyncio.get_running_loop()
        self.index, self.tokenizer, self.images = index, tokenizer, images
        self.task = deepcopy(task)  # what code of users changes in it is no other episode's
        self.group_id, self.prompt_token_ids = prompt.group_id, prompt.token_ids
        self.max_new_tokens = prompt.sampling.max_new_tokens
        self.sampling, self.sample_count = prompt.sampling, prompt.sample_count
        self.bounds = prompt.bounds
        seeds = prompt.sampling.seeds
        self.seed = seeds[index] if seeds else None
        self._prompt, self._sampler = prompt, sampler
        self._begun = 0

    def begin(
        self, prompt_token_ids: Sequence[int] | None = None, media: Iterable[MediaSpan] = ()
    ) -> Trajectory:
        """Begin a trajectory from the group's prompt, or another one; each draws its own way.

        `media`: of another prompt, as `encode` gives them.
        """
        self._begun += 1
        number = self._begun - 1
        if prompt_token_ids is None:
            return Trajectory(self.prompt_token_ids, number, self._prompt.media)
        return Trajectory(prompt_token_ids, number, media)

    async def encode(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Passage:
        """Returns a conversation as tokens, its images stored, with the task's `template`.

        May be called from the thread of a generate function. Raises TaskError, and what
        `Images.show` raises.
        """
        options = self.task.template
        encoding = encode_prompt(self.tokenizer, self.images, messages, tools, options)
        return await on_loop(self.home, encoding)

    async def sample(self, trajectory: Trajectory, max_new_tokens: int | None = None) -> str:
        """Adds the engine's next answer to the trajectory and returns its text.

        Empty, with the finish reason `length`, when tokens or the engine's room have run out.
        May be called from the thread of a generate function. Raises EngineError, and
        EnvironmentFailedError where something else was added to the trajectory meanwhile.
        """
        return await on_loop(self.home, self._sample(trajectory, max_new_tokens))

    async def _sample(self, trajectory: Trajectory, max_new_tokens: int | None) -> str:
        self.mark_step()
        left = self.max_new_tokens - trajectory.sampled_count
        wanted = left if max_new_tokens is None else min(left, max_new_tokens)
        if wanted <= 0:
            trajectory.end_full()
            return ""
        seeds = () if self.seed is None else (_nth_seed(self.seed, trajectory.number),)
        prompt = replace(
            self._prompt,
            token_ids=trajectory.token_ids,
            media=trajectory.media,
            sample_count=1,
            first_episode=self.index,
            hints=self._prompt.hints.of([self.index]).with_cache(trajectory.length),
            sampling=replace(
                self._prompt.sampling,
                seeds=seeds,
                max_new_tokens=wanted,
                min_new_tokens=min(self._prompt.sampling.min_new_tokens, wanted),
            ),
        )
        try:
            (delta,) = await self._sampler.sample(prompt)
        except EngineError as error:
            if error.reason != "PROMPT_TOO_LONG" or trajectory.last_token is None:
                raise
            trajectory.end_full()
            return ""
        if trajectory.length != len(prompt.token_ids):
            raise EnvironmentFailedError(
                "a trajectory was added to while it was sampled from: each of several answers "
                "needs one of its own"
            )
        trajectory.add_sampled(delta, self._prompt.sampling)
        return self.text_of(delta)

    def mark_step(self) -> None:
        """Note that a step of the environment ended, or what a generate function did by itself."""
        self._prompt.mark(trace_pb2.SPAN_KIND_TOOL, self._environment, [self.index])

    def text_of(self, delta: Delta) -> str:
        """Decodes an answer, without special tokens."""
        (text,) = self.tokenizer.decode([delta.token_ids])
        return text


async def encode_prompt(
    tokenizer: TextTokenizer,
    images: SampleImages,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    options: Mapping[str, Any] | None = None,
) -> Passage:
    """Returns a conversation up to where the assistant begins.

    Raises TaskError for messages or options that the chat template refuses, and what
    `Images.show` raises.
    """
    shown = await images.show(messages)

    def encode() -> list[int]:
        try:
            return tokenizer.encode_chat(template_messages(messages), tools, options)
        except ChatTemplateError as error:
            raise TaskError("messages", str(error)) from None

    length = sum(len(text_of(message)) for message in messages)
    return images.images.expand(await off_loop(length, encode), shown)


def _nth_seed(seed: int, number: int) -> int:
    """Returns the episode's seed for its first trajectory; others must not repeat it."""
    return seed if not number else xxhash.xxh3_64_intdigest(f"{seed}/{number}".encode()) >> 1


async def take_steps(
    episode: Episode, trajectory: Trajectory, runner: Runner, waits: Waits, environment: str
) -> Response:
    """Takes an episode from its first answer to its end by the environment's steps.

    Returns what the reward is to see. An answer that was cut off ends the episode.
    """
    conversation, turns = Conversation(episode.task), list[Turn]()
    state: Mapping[str, Any] = deepcopy(episode.task.state)
    last = trajectory.answers[-1]
    text = episode.text_of(last)
    images = episode.images
    while trajectory.finish_reason == "stop" and not images.ends(trajectory):
        response = response_of(last, text, turns, state)
        with waits.waiting(f"step of {episode.group_id}", on=[environment]):
            step = await runner.step(episode.task, state, response)
        episode.mark_step()
        state = step.state
        if step.done:
            break
        if trajectory.sampled_count >= episode.max_new_tokens:
            trajectory.end_full()
            break
        conversation.check(step)
        shown = await images.show(step.messages, len(trajectory.media))
        last_token = trajectory.last_token
        encode = partial(conversation.encode, episode.tokenizer, text, last_token, step)
        ids = await off_loop(conversation.length(step), encode)
        passage = images.images.expand(ids, shown)
        trajectory.add_observation(passage.token_ids, passage.media)
        before = len(trajectory.answers)
        answer = await episode.sample(trajectory)
        if len(trajectory.answers) == before:
            break
        turns.append(Turn(text=text, observation=observation_text(step)))
        last, text = trajectory.answers[-1], answer
    reason = trajectory.finish_reason
    return replace(response_of(last, text, turns, state), finish_reason=reason)
