"""What is remembered of a prompt's answers."""

from __future__ import annotations

from services.rollout.episodes.sampler import PromptHistory


def test_the_latest_group_counts_half_and_other_prompts_not_at_all():
    history = PromptHistory()
    assert history.expected((1, 2)) == 0.0
    history.learn((1, 2), [10, 30])
    assert history.expected((1, 2)) == 20.0
    history.learn((1, 2), [40, 40])
    assert history.expected((1, 2)) == 30.0
    assert history.expected((2, 1)) == 0.0


def test_prompts_not_asked_for_longest_are_forgotten():
    history = PromptHistory(capacity=3)
    for prompt in range(3):
        history.learn((prompt,), [7])
    history.learn((0,), [7])
    history.learn((9,), [7])
    assert [prompt for prompt in (0, 1, 2, 9) if history.expected((prompt,))] == [0, 2, 9]
