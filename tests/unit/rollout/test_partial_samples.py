"""Samples cut off at any token, on any version, end as if they had come in one piece."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.engine.interface import Delta, FinishReason, Sampling
from services.rollout.engine.wire import VersionBounds
from services.rollout.episodes.sampler import PartialSamples, SamplingPrompt
from services.rollout.episodes.trajectory import Trajectory
from sluice.samples.sample import VersionSpan

PROMPT_IDS = (1, 2, 3)


def partial_samples(
    budget: int, samples: int = 1, chunk: int = 0, least: int = 0
) -> PartialSamples:
    prompt = SamplingPrompt(
        group_id="g",
        token_ids=PROMPT_IDS,
        sample_count=samples,
        sampling=Sampling(
            max_new_tokens=budget,
            min_new_tokens=least,
            seeds=tuple(range(100, 100 + samples)),
        ),
        bounds=VersionBounds(),
        pool="",
    )
    return PartialSamples(prompt, chunk)


def delta(tokens: tuple[int, ...], version: int, reason: FinishReason, index: int = 0) -> Delta:
    spans = ()
    if tokens:
        last = len(tokens) - 1
        spans = (
            VersionSpan(version=version, digest=f"d{version}", first_token=0, last_token=last),
        )
    logprobs = tuple(-float(token) for token in tokens)
    return Delta(
        index=index,
        token_ids=tokens,
        logprobs=logprobs,
        logprobs_t1=logprobs,
        spans=spans,
        finish_reason=reason,
    )


@settings(max_examples=50)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), max_size=8),
    budget=st.integers(1, 24),
    chunk=st.integers(0, 5),
    least=st.integers(0, 24),
)
def test_a_sample_cut_off_anywhere_has_its_tokens_and_spans_in_order(pieces, budget, chunk, least):
    least = min(least, budget)
    made = partial_samples(budget, chunk=chunk, least=least)
    drawn: list[tuple[int, int]] = []  # (token, version)
    for size, version in [*pieces, *[(budget, 9)] * (budget + 1)]:
        if not made.missing:
            break
        asked = made.generation([0], dp_rank=0)
        left = budget - len(drawn)
        assert asked.prompt_token_ids == (*PROMPT_IDS, *(token for token, _ in drawn))
        assert asked.sampling.max_new_tokens == (min(left, chunk) if chunk else left)
        owed = max(0, least - len(drawn))
        assert asked.sampling.min_new_tokens == min(owed, asked.sampling.max_new_tokens)
        assert asked.sampling.seeds == (100,)
        count = min(size, asked.sampling.max_new_tokens)
        tokens = tuple(range(1000 + len(drawn), 1000 + len(drawn) + count))
        is_whole = count == asked.sampling.max_new_tokens
        reason = FinishReason.LENGTH if is_whole else FinishReason.ABORTED
        assert made.add(0, delta(tokens, version, reason)) == is_whole
        drawn += [(token, version) for token in tokens]
        assert made.token_count == len(drawn)
    (sample,) = made.ended()
    assert sample.token_ids == tuple(range(1000, 1000 + budget))
    assert sample.logprobs == tuple(-float(token) for token in sample.token_ids)
    assert sample.finish_reason is FinishReason.LENGTH
    versions = [
        span.version for span in sample.spans for _ in range(span.first_token, span.last_token + 1)
    ]
    assert versions == [version for _, version in drawn]
    ends = [span.last_token + 1 for span in sample.spans]
    assert [span.first_token for span in sample.spans] == [0, *ends[:-1]]
    neighbours = zip(sample.spans, sample.spans[1:], strict=False)
    assert all(one.version != other.version for one, other in neighbours)


def test_samples_that_have_not_begun_share_a_request_and_others_go_alone():
    made = partial_samples(budget=8, samples=3)
    assert made.generation([0, 1, 2], dp_rank=1).sample_count == 3
    assert not made.add(1, delta((7, 8), 1, FinishReason.ABORTED))
    assert made.add(2, delta((9,), 1, FinishReason.STOP))
    assert made.missing == [0, 1]
    assert [made.is_begun(index) for index in range(3)] == [False, True, False]
    again = made.generation([1], dp_rank=0)
    assert again.prompt_token_ids == (*PROMPT_IDS, 7, 8)
    assert (again.sample_count, again.sampling.max_new_tokens) == (1, 6)
    assert again.sampling.seeds == (101,)  # its own, so that it draws as if never cut off


def test_a_chunk_that_ends_in_a_stop_token_ends_the_sample():
    made = partial_samples(budget=8, chunk=2)
    assert made.add(0, delta((7, 8), 1, FinishReason.STOP))
    assert made.missing == []


def test_a_stop_string_at_the_end_of_a_chunk_ends_no_sample_that_is_too_short():
    made = partial_samples(budget=8, chunk=2, least=5)
    for _ in range(2):
        assert made.generation([0], dp_rank=0).sampling.min_new_tokens == 2
        assert made.add(0, delta((7, 8), 1, FinishReason.STOP))
        assert made.missing == [0]
    assert made.generation([0], dp_rank=0).sampling.min_new_tokens == 1
    made.add(0, delta((7,), 1, FinishReason.STOP))  # the fifth token may complete one
    (whole,) = made.ended()
    assert whole.token_ids == (7, 8, 7, 8, 7)
    assert whole.finish_reason is FinishReason.STOP


def test_an_engine_that_ends_before_the_chunk_is_full_has_no_more_room():
    made = partial_samples(budget=8, chunk=4)
    assert made.add(0, delta((7, 8), 1, FinishReason.LENGTH))
    assert made.ended()[0].finish_reason is FinishReason.LENGTH


def with_experts(answer: Delta, context: int, mark: int) -> Delta:
    """Of one layer and one choice, all `mark`."""
    count = context + len(answer.token_ids) - 1
    return answer._replace(routed_experts=np.full((count, 1, 1), mark, np.int16))


@pytest.mark.parametrize(("second", "wanted"), [(2, [1] * 4 + [2] * 2), (None, None)])
def test_tokens_keep_the_experts_that_they_were_sampled_by(second, wanted):
    """A sample goes on elsewhere, where its beginning is read again with other experts."""
    cut = partial_samples(budget=4)
    cut.add(0, with_experts(delta((11, 12), 1, FinishReason.ABORTED), 3, 1))
    last = delta((13, 14), 2, FinishReason.LENGTH)
    cut.add(0, last if second is None else with_experts(last, 5, second))
    (whole,) = cut.ended()
    told = whole.routed_experts
    assert (told if told is None else told[:, 0, 0].tolist()) == wanted


def test_an_answer_without_tokens_takes_no_experts_away():
    made = partial_samples(budget=4)
    made.add(0, with_experts(delta((11, 12), 1, FinishReason.ABORTED), 3, 1))
    made.add(0, delta((), 1, FinishReason.ABORTED))
    made.end(0)
    (whole,) = made.ended()
    assert whole.routed_experts is not None and len(whole.routed_experts) == 4
    assert whole.finish_reason is FinishReason.LENGTH


def test_experts_of_several_turns_cover_observations_and_end_before_the_last_token():
    trajectory = Trajectory(PROMPT_IDS)
    trajectory.add_sampled(with_experts(delta((11, 12), 1, FinishReason.STOP), 3, 1))
    trajectory.add_observation((21, 22, 23))
    trajectory.add_sampled(with_experts(delta((13,), 1, FinishReason.STOP), 8, 2))
    trajectory.add_observation((24,))
    experts = trajectory._routed_experts()
    assert experts is not None
    assert experts[:, 0, 0].tolist() == [1] * 4 + [2] * 4 + [2]  # 10 tokens in all
    trajectory.add_sampled(delta((14,), 1, FinishReason.STOP))
    assert trajectory._routed_experts() is None


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_an_answer_that_is_all_of_a_sample_is_kept_as_it_came(reason: FinishReason) -> None:
    made, whole = partial_samples(3), delta((4, 5, 6), 1, reason)
    assert made.add(0, whole)
    assert made.ended()[0] is whole
