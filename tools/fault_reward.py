"""The reward of the fault matrix: a user's function, so that processes of their own compute it."""

from __future__ import annotations

from collections.abc import Sequence

from services.rollout.environments.environment import Response, Reward, Task


def matched(task: Task, responses: Sequence[Response]) -> list[Reward]:
    """The share of the answer's characters that stand in their places."""
    rewards = []
    for response in responses:
        pairs = zip(task.answer, response.text, strict=False)
        share = sum(one == other for one, other in pairs) / len(task.answer)
        rewards.append(Reward(reward=share, raw_reward=share))
    return rewards
