"""The tokens of one sample in the making: sampled ones and observations, always aligned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from services.rollout.engine import Delta, FinishReason
from services.rollout.environments.environment import Reward
from services.rollout.wire import join_experts
from sluice.samples.columns import SCORE_PREFIX
from sluice.samples.sample import Sample, VersionSpan


class Trajectory:
    """A prompt and what followed. The engine is asked with `token_ids`; the row holds them.

    Observations are masked and carry no log-probs (zeros stand for them).
    """

    def __init__(self, prompt_token_ids: Sequence[int], number: int = 0) -> None:
        """`number` tells the trajectories of an episode apart."""
        self.prompt_token_ids, self.number = tuple(prompt_token_ids), number
        self.response: list[int] = []
        self.finish_reason = ""
        self.reward: Reward | None = None  # set by a generate function that rewards itself
        self._parts: list[tuple[Delta | None, int]] = []  # sampled or not, and how many tokens

    @classmethod
    def of(cls, prompt_token_ids: Sequence[int], delta: Delta) -> Trajectory:
        """A prompt and its first answer."""
        trajectory = cls(prompt_token_ids)
        trajectory.add_sampled(delta)
        return trajectory

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and response."""
        return (*self.prompt_token_ids, *self.response)

    @property
    def sampled_count(self) -> int:
        """Response tokens that an engine sampled."""
        return sum(count for delta, count in self._parts if delta is not None)

    @property
    def answers(self) -> list[Delta]:
        """What engines sampled, in order."""
        return [delta for delta, _ in self._parts if delta is not None]

    def add_sampled(self, delta: Delta) -> None:
        """Tokens that an engine sampled after `token_ids`."""
        self._parts.append((delta, len(delta.token_ids)))
        self.response.extend(delta.token_ids)
        self.finish_reason = "" if delta.finish_reason is None else delta.finish_reason.value

    def add_observation(self, token_ids: Sequence[int]) -> None:
        """Tokens that nobody sampled; they are not trained on."""
        self._parts.append((None, len(token_ids)))
        self.response.extend(token_ids)

    def end_full(self) -> None:
        """There is no room to go on: drop observations nobody answered."""
        while self._parts and self._parts[-1][0] is None:
            _, count = self._parts.pop()
            del self.response[len(self.response) - count :]
        self.finish_reason = FinishReason.LENGTH.value

    def to_sample(self, group_id: str, index: int, reward: Reward, episode: int | None) -> Sample:
        """Row `index` of a group; `episode` where one may have several samples."""
        columns: dict[str, np.ndarray | float] = {
            "rollout_logprobs": self._signal([d.logprobs for d in self.answers]),
            "reward": reward.reward,
            **_optional_columns(reward),
        }
        if all(len(d.logprobs_t1) == len(d.token_ids) for d in self.answers):
            columns["rollout_logprobs_t1"] = self._signal([d.logprobs_t1 for d in self.answers])
        mask = self._mask()
        if not reward.trained:
            mask[:] = False
        if not mask.all():
            columns["loss_mask"] = mask
        if episode is not None:
            columns["episode"] = float(episode)
        return Sample(
            sample_id=f"{group_id}/{index}",
            group_id=group_id,
            token_ids=np.array(self.token_ids, dtype=np.int32),
            prompt_length=len(self.prompt_token_ids),
            finish_reason=self.finish_reason,
            columns=columns,
            spans=self._spans(),
            routed_experts=self._routed_experts(),
        )

    def _signal(self, values: Sequence[Sequence[float]]) -> np.ndarray:
        """float32[response] from the values of each answer."""
        if len(self._parts) == 1 and values:
            return np.array(values[0], dtype=np.float32)
        signal = np.zeros(len(self.response), dtype=np.float32)
        signal[self._mask()] = [value for part in values for value in part]
        return signal

    def _routed_experts(self) -> np.ndarray | None:
        """int16[length - 1, layers, chosen]; None unless every answer told them."""
        experts: np.ndarray | None = None
        for delta in self.answers:
            if delta.routed_experts is None:
                return None
            experts = join_experts(experts, delta.routed_experts)
        if experts is None:
            return None
        # Nothing was sampled, and nothing is trained, behind the observations at the end.
        unknown = len(self.prompt_token_ids) + len(self.response) - 1 - len(experts)
        return np.concatenate([experts, np.repeat(experts[-1:], unknown, axis=0)])

    def _mask(self) -> np.ndarray:
        """bool[response]: sampled."""
        counts = [count for _, count in self._parts]
        kinds = np.array([delta is not None for delta, _ in self._parts], dtype=np.bool_)
        return np.repeat(kinds, counts)

    def _spans(self) -> tuple[VersionSpan, ...]:
        """Of every answer, counted from the start of the response."""
        spans, offset = list[VersionSpan](), 0
        for delta, count in self._parts:
            if delta is not None:
                spans.extend(_shifted(span, offset) for span in delta.spans)
            offset += count
        return tuple(spans)


def _shifted(span: VersionSpan, offset: int) -> VersionSpan:
    if not offset:
        return span
    return VersionSpan(
        version=span.version,
        digest=span.digest,
        first_token=span.first_token + offset,
        last_token=span.last_token + offset,
    )


def _optional_columns(reward: Reward) -> Mapping[str, float]:
    """What only some samples have; absent is absent."""
    columns = {f"{SCORE_PREFIX}{name}": float(value) for name, value in reward.scores.items()}
    if reward.raw_reward is not None:
        columns["raw_reward"] = reward.raw_reward
    return columns
