"""Gathers what an episode's tokens are and where its time goes, while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from services.rollout.engine.interface import Delta, FinishReason, Sampling, as_array
from services.rollout.engine.wire import join_experts
from services.rollout.environments.environment import Response, Reward, Turn
from sluice.api.rollout.v1 import trace_pb2 as pb
from sluice.runtime.wire import timestamp_of
from sluice.samples.sample import SCORE_PREFIX, SEVERAL, MediaSpan, Sample, VersionSpan

ALL = -1  # in place of an episode
SHORTEST_SECONDS = 1e-6  # what is shorter counts for the next span
_PARTS = (pb.SPAN_KIND_QUEUE, pb.SPAN_KIND_PREFILL, pb.SPAN_KIND_DECODE)  # as Timing has them


class Timeline:
    """Measures spans of time: each one begins where the episode's last one ended.

    So the spans of an episode add up to its time from the begin of the group to its last mark.
    """

    def __init__(self, episode_count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start_time, self._zero = time.time(), clock()
        self._ends = [0.0] * episode_count
        self._places: dict[str, int] = {}
        self._kinds: list[pb.SpanKind] = []
        self._episodes: list[int] = []
        self._spots: list[int] = []
        self._starts: list[float] = []
        self._durations: list[float] = []

    def now(self) -> float:
        """Seconds since the group began."""
        return self._clock() - self._zero

    def mark(self, kind: pb.SpanKind, place: str, episodes: Iterable[int] | None = None) -> None:
        """Note what these episodes (default: all) did until now."""
        every = range(len(self._ends)) if episodes is None else episodes
        self._add(kind, place, dict.fromkeys(every, self.now()), together=True)

    def sampled(self, place: str, deltas: Mapping[int, Delta]) -> None:
        """Note that answers of episodes came from the engine `place`, where they were since their
        last mark.

        What the engine does not account for is left to the next mark.
        """
        now = self.now()
        timings = {e: timing for e, delta in deltas.items() if (timing := delta.timing)}
        if len(timings) < len(deltas):
            untimed = dict.fromkeys(deltas.keys() - timings, now)
            self._add(pb.SPAN_KIND_GENERATE, place, untimed, together=True)
        if not timings:
            return
        for kind, seconds in zip(_PARTS, zip(*timings.values(), strict=True), strict=True):
            begins = self._ends
            ends = [begins[e] + more for e, more in zip(timings, seconds, strict=True)]
            if max(ends) > now:
                ends = [min(now, end) for end in ends]
            self._add(kind, place, dict(zip(timings, ends, strict=True)))

    def to_proto(self) -> pb.GroupTrace:
        return pb.GroupTrace(
            start_time=timestamp_of(self._start_time),
            place_names=self._places,
            kinds=self._kinds,
            episodes=self._episodes,
            places=self._spots,
            starts=self._starts,
            durations=self._durations,
        )

    def _add(
        self, kind: pb.SpanKind, place: str, ends: Mapping[int, float], *, together: bool = False
    ) -> None:
        """Add what each of these episodes did until its end; of all together it is one span.

        together: the ends are one.
        """
        begins = self._ends
        is_all = len(ends) == len(begins) > 0 and begins.count(begins[0]) == len(begins)
        if is_all and (together or len({*ends.values()}) == 1):
            ends = {ALL: next(iter(ends.values()))}
        spans = [
            (e, begin, end - begin)
            for e, end in ends.items()
            for begin in [begins[e]]
            if end - begin >= SHORTEST_SECONDS
        ]
        if not spans:
            return
        long, starts, durations = zip(*spans, strict=True)
        self._kinds += [kind] * len(long)
        self._episodes += long
        self._spots += [self._places.setdefault(place, len(self._places))] * len(long)
        self._starts += starts
        self._durations += durations
        if long[0] == ALL:
            self._ends = [ends[ALL]] * len(begins)
        elif len(long) == len(begins) and together:
            self._ends = [ends[long[0]]] * len(begins)
        else:
            for episode in long:
                begins[episode] = ends[episode]


class Trajectory:
    """Holds a prompt and what followed; `token_ids` are the engine's prompt and the row's tokens.

    Observations are masked and carry no log-probs (zeros stand for them). `media` are what it
    was shown, counted from the start of the prompt.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        number: int = 0,
        media: Iterable[MediaSpan] = (),
    ) -> None:
        """`number` tells the trajectories of an episode apart. `media` are of the prompt."""
        self.prompt_token_ids, self.number = tuple(prompt_token_ids), number
        self.media = tuple(media)
        self._observation_count = 0
        self.finish_reason = ""
        self.reward: Reward | None = None  # set by a generate function that rewards itself
        self._parts: list[tuple[Delta | None, Sequence[int]]] = []  # sampled or not, and tokens
        self._samplings: list[Sampling | None] = []  # of the answers, where known

    @classmethod
    def of(
        cls,
        prompt_token_ids: Sequence[int],
        delta: Delta,
        sampling: Sampling | None = None,
        media: Iterable[MediaSpan] = (),
    ) -> Trajectory:
        """Makes one of a prompt and its first answer."""
        trajectory = cls(prompt_token_ids, media=media)
        trajectory.add_sampled(delta, sampling)
        return trajectory

    @property
    def response(self) -> tuple[int, ...]:
        """What follows the prompt."""
        return tuple(chain.from_iterable(tokens for _, tokens in self._parts))

    @property
    def last_token(self) -> int | None:
        """Of the response; None where there is none."""
        return next((tokens[-1] for _, tokens in reversed(self._parts) if len(tokens)), None)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and response."""
        return (*self.prompt_token_ids, *self.response)

    @property
    def sampled_count(self) -> int:
        """Response tokens that an engine sampled."""
        return sum(len(tokens) for delta, tokens in self._parts if delta is not None)

    @property
    def answers(self) -> list[Delta]:
        """What engines sampled, in order."""
        return [delta for delta, _ in self._parts if delta is not None]

    def add_sampled(self, delta: Delta, sampling: Sampling | None = None) -> None:
        """Add tokens that an engine sampled after `token_ids`, and how, if that is known."""
        self._parts.append((delta, delta.token_ids))
        self._samplings.append(sampling)
        self.finish_reason = "" if delta.finish_reason is None else delta.finish_reason.value

    def add_observation(self, token_ids: Sequence[int], media: Iterable[MediaSpan] = ()) -> None:
        """Add tokens that nobody sampled; they are not trained on.

        `media` count from the start of the observation.
        """
        self._observation_count += 1
        offset = self.length
        self.media += tuple(span.placed(offset, self._observation_count) for span in media)
        self._parts.append((None, tuple(token_ids)))

    def end_full(self) -> None:
        """End for lack of room: drop observations nobody answered."""
        while self._parts and self._parts[-1][0] is None:
            self._parts.pop()
        length = self.length
        self.media = tuple(span for span in self.media if span.end <= length)
        self.finish_reason = FinishReason.LENGTH.value

    def to_sample(self, group_id: str, index: int, reward: Reward, episode: int | None) -> Sample:
        """Makes row `index` of a group; `episode` where one may have several samples."""
        answers = self.answers
        logprobs = self._signal([d.logprobs for d in answers])
        columns: dict[str, np.ndarray | float] = {
            "rollout_logprobs": logprobs,
            **sampling_columns(self._samplings),
        }
        _add_reward(columns, reward)
        if all([d.logprobs_t1 is d.logprobs for d in answers]):  # sampled at temperature 1
            columns["rollout_logprobs_t1"] = logprobs
        elif all([len(d.logprobs_t1) == len(d.token_ids) for d in answers]):
            columns["rollout_logprobs_t1"] = self._signal([d.logprobs_t1 for d in answers])
        if len(answers) < len(self._parts) or not reward.trained:
            mask = self._mask() & reward.trained
            if not mask.all():
                columns["loss_mask"] = mask
        if episode is not None:
            columns["episode"] = float(episode)
        return Sample(
            sample_id=f"{group_id}/{index}",
            group_id=group_id,
            token_ids=self._token_array(),
            prompt_length=len(self.prompt_token_ids),
            finish_reason=self.finish_reason,
            columns=columns,
            spans=self._spans(),
            routed_experts=self._routed_experts(),
            media=self.media,
        )

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_token_ids) + sum(len(tokens) for _, tokens in self._parts)

    def _token_array(self) -> np.ndarray:
        """int32[length]."""
        parts = [as_array(tokens, np.int32) for _, tokens in self._parts]
        return np.concatenate([_prompt_array(self.prompt_token_ids), *parts])

    def _signal(self, values: Sequence[Sequence[float]]) -> np.ndarray:
        """float32[response] from the values of each answer."""
        if len(self._parts) == len(values) == 1:
            return as_array(values[0], np.float32)
        arrays = [as_array(part, np.float32) for part in values]
        mask = self._mask()
        signal = np.zeros(len(mask), dtype=np.float32)
        if arrays:
            signal[mask] = np.concatenate(arrays)
        return signal

    def _routed_experts(self) -> np.ndarray | None:
        """int16[length - 1, layers, chosen]; None unless every answer has them."""
        experts: np.ndarray | None = None
        for delta in self.answers:
            if delta.routed_experts is None:
                return None
            experts = join_experts(experts, delta.routed_experts)
        if experts is None:
            return None
        # Nothing was sampled, and nothing is trained, behind the observations at the end.
        unknown = self.length - 1 - len(experts)
        return np.concatenate([experts, np.repeat(experts[-1:], unknown, axis=0)])

    def _mask(self) -> np.ndarray:
        """bool[response]: sampled."""
        counts = [len(tokens) for _, tokens in self._parts]
        kinds = np.array([delta is not None for delta, _ in self._parts], dtype=np.bool_)
        return np.repeat(kinds, counts)

    def _spans(self) -> tuple[VersionSpan, ...]:
        """Of every answer, counted from the start of the response."""
        if len(self._parts) == 1 and (only := self._parts[0][0]) is not None:
            return tuple(only.spans)
        spans, offset = list[VersionSpan](), 0
        for delta, tokens in self._parts:
            if delta is not None:
                spans += [span.shifted(offset) for span in delta.spans]
            offset += len(tokens)
        return tuple(spans)


def answered_samples(
    group_id: str,
    prompt_token_ids: Sequence[int],
    answers: Sequence[Delta],
    rewards: Sequence[Reward],
    sampling: Sampling,
    media: Iterable[MediaSpan] = (),
) -> list[Sample]:
    """Makes the rows of a group of which each is the prompt and one answer.

    They are what `Trajectory.of` and `to_sample` make of each, at less cost.
    """
    prompt, drawn, media = tuple(prompt_token_ids), sampling_columns([sampling]), tuple(media)
    first = _prompt_array(prompt)
    tokens = [as_array(answer.token_ids, np.int32) for answer in answers]
    together = np.concatenate([part for own in tokens for part in (first, own)])
    samples, end = list[Sample](), 0
    for index, (answer, reward, own) in enumerate(zip(answers, rewards, tokens, strict=True)):
        start, end = end, end + len(first) + len(own)
        if answer.routed_experts is not None or not reward.trained:
            whole = Trajectory.of(prompt, answer, sampling, media)
            samples.append(whole.to_sample(group_id, index, reward, None))
            continue
        logprobs, plain = as_array(answer.logprobs, np.float32), answer.logprobs_t1
        columns: dict[str, np.ndarray | float] = {"rollout_logprobs": logprobs, **drawn}
        _add_reward(columns, reward)
        if plain is answer.logprobs:  # sampled at temperature 1
            columns["rollout_logprobs_t1"] = logprobs
        elif len(plain) == len(own):
            columns["rollout_logprobs_t1"] = as_array(plain, np.float32)
        samples.append(
            Sample(
                sample_id=f"{group_id}/{index}",
                group_id=group_id,
                token_ids=together[start:end],
                prompt_length=len(first),
                finish_reason="" if answer.finish_reason is None else answer.finish_reason.value,
                columns=columns,
                spans=tuple(answer.spans),
                media=media,
            )
        )
    return samples


def _add_reward(columns: dict[str, np.ndarray | float], reward: Reward) -> None:
    columns["reward"] = reward.reward
    if reward.raw_reward is not None:
        columns["raw_reward"] = reward.raw_reward
    if reward.scores:
        for name, value in reward.scores.items():
            columns[f"{SCORE_PREFIX}{name}"] = float(value)


@lru_cache(maxsize=1)  # siblings share their prompt, and become samples one after the other
def _prompt_array(token_ids: tuple[int, ...]) -> np.ndarray:
    """int32[length], not to be written to."""
    return np.array(token_ids, dtype=np.int32)


def response_of(
    delta: Delta, text: str, turns: Sequence[Turn] = (), state: Mapping[str, Any] | None = None
) -> Response:
    """Returns what the reward or the next step sees of an answer."""
    return Response(
        token_ids=delta.token_ids,
        text=text,
        finish_reason=delta.finish_reason or "",
        turns=tuple(turns),
        state=state or {},
    )


def sampling_columns(samplings: Sequence[Sampling | None]) -> dict[str, float]:
    """Makes the columns that say what distribution a sample's tokens come from, if all are known.

    Engines give the log-probs of greedy tokens at temperature 1. Of several the narrowest is named.
    """
    if len(samplings) == 1 and (only := samplings[0]) is not None:
        columns = {"temperature": only.temperature or 1.0}
        if only.top_p < 1:
            columns["top_p"] = only.top_p
        if only.top_k:
            columns["top_k"] = float(only.top_k)
        return columns
    known = [sampling for sampling in samplings if sampling is not None]
    if not known or len(known) < len(samplings):
        return {}
    temperatures = {sampling.temperature or 1.0 for sampling in known}
    columns = {"temperature": temperatures.pop() if len(temperatures) == 1 else SEVERAL}
    if (top_p := min(sampling.top_p for sampling in known)) < 1:
        columns["top_p"] = top_p
    if top_k := min((sampling.top_k for sampling in known if sampling.top_k), default=0):
        columns["top_k"] = float(top_k)
    return columns
