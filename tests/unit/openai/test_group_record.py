"""However a session's calls relate, every sampled token is trained on exactly once."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.engine.interface import Delta, FinishReason, Sampling
from services.rollout.openai.generation import Answer
from services.rollout.openai.prompts import Prompt
from services.rollout.openai.recorder import GroupRecord
from sluice.samples.sample import SEVERAL, VersionSpan, validate_sample

Call = tuple[int, int, int, int]  # session, which earlier thread to go on from, tokens, choices


def prompt_of(token_ids: tuple[int, ...]) -> Prompt:
    return Prompt("".join(chr(97 + token) for token in token_ids), token_ids)


def answer_of(prompt: Prompt, token_ids: tuple[int, ...], version: int) -> Answer:
    tokens = len(prompt.token_ids) + len(token_ids) - 1
    delta = Delta(
        index=0,
        token_ids=token_ids,
        logprobs=tuple(-token / 7 for token in token_ids),
        logprobs_t1=tuple(-token / 7 for token in token_ids),
        spans=(VersionSpan(version=version, digest="d", first_token=0, last_token=0),)
        if len(token_ids) == 1
        else (
            VersionSpan(version=version, digest="d", first_token=0, last_token=0),
            VersionSpan(
                version=version + 1, digest="e", first_token=1, last_token=len(token_ids) - 1
            ),
        ),
        finish_reason=FinishReason.STOP,
        routed_experts=np.full((tokens, 2, 1), version, np.int16),
    )
    return Answer(delta, prompt_of(token_ids).text)


def record(
    calls: list[Call], check: Callable[[GroupRecord], None]
) -> tuple[GroupRecord, list[tuple[int, ...]]]:
    """The group after these calls, and each prompt with its answer; `check` sees every state."""
    group, fresh = GroupRecord("g"), itertools.count()
    sampled: list[tuple[int, ...]] = []
    written: list[str] = []
    for number, (session, thread, length, choices) in enumerate(calls):
        earlier = group.earlier(str(session)).prompts
        before = earlier[thread % len(earlier)].token_ids if earlier and thread else ()
        prompt = prompt_of((*before, *(next(fresh) % 26 for _ in range(2))))
        answers = [
            answer_of(prompt, tuple(next(fresh) % 26 for _ in range(length)), number)
            for _ in range(choices)
        ]
        sampled += [(*prompt.token_ids, *answer.delta.token_ids) for answer in answers]
        lines = group.lines(
            str(session), prompt, answers, [[a.text] for a in answers], [()] * len(answers)
        )
        written += [json.dumps(line) for line in lines]
        for line in lines:
            group.apply(json.loads(json.dumps(line)))
        check(group)
    again = GroupRecord("g")  # as another worker reads it
    for line in written:
        again.apply(json.loads(line))
    for session_name in again.sessions:
        for each in (group, again):
            each.apply({"session": session_name, "reward": 1.0})
    assert again.describe() == group.describe()
    return again, sampled


calls = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(1, 4), st.integers(1, 3)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=50)
@given(calls)
def test_every_sampled_token_is_trained_on_once(made: list[Call]) -> None:
    group, sampled = record(made, lambda _: None)
    trained, rows = 0, group.samples()
    for row in rows:
        validate_sample(row)
        assert row.routed_experts is not None
        mask = row.columns.get("loss_mask", np.ones(row.response_length, np.bool_))
        trained += int(np.sum(mask))
        tokens = row.token_ids[row.prompt_length :][mask]
        np.testing.assert_allclose(row.columns["rollout_logprobs"][mask], -tokens / 7, rtol=1e-6)
        covered = [i for span in row.spans for i in range(span.first_token, span.last_token + 1)]
        assert covered == np.flatnonzero(mask).tolist()
        assert row.columns["reward"] == 1.0
    assert trained == sum(length * choices for _, _, length, choices in made)
    whole = [tuple(row.token_ids.tolist()) for row in rows]
    for each in sampled:  # in the very context that it was sampled in
        assert any(row[: len(each)] == each for row in whole)


@settings(max_examples=50)
@given(calls)
def test_texts_and_tokens_of_a_conversation_stay_together(made: list[Call]) -> None:
    """What a prompt goes on from by text is what it goes on from by tokens."""

    def check(group: GroupRecord) -> None:
        for session in group.sessions:
            for earlier in group.earlier(session).prompts:
                assert earlier.text == prompt_of(earlier.token_ids).text

    record(made, check)


def test_a_prompt_that_goes_on_extends_the_longest_conversation() -> None:
    group, _ = record([(0, 0, 2, 1), (0, 1, 2, 1), (0, 1, 1, 1)], lambda _: None)
    (row,) = group.samples()
    assert row.columns["loss_mask"].tolist() == [True] * 2 + [False] * 2 + [True] * 2 + [
        False,
        False,
        True,
    ]


def test_a_record_tells_how_its_tokens_were_sampled() -> None:
    """Lines of older versions do not; an agent may change its mind between two calls."""

    def lines_of(group: GroupRecord, tokens: tuple[int, ...], temperature: float) -> list[str]:
        answer = answer_of(prompt_of(tokens), (1, 2), 1)
        sampling = Sampling(max_new_tokens=4, temperature=temperature, top_p=0.9)
        answers = [replace(answer, sampling=sampling)]
        made = group.lines("s", prompt_of(tokens), answers, [["x"]], [()])
        return [json.dumps(line) for line in made]

    for temperatures, forgets, expected in (
        ([0.7], False, {"temperature": 0.7, "top_p": 0.9}),
        ([0.7, 0.7], False, {"temperature": 0.7, "top_p": 0.9}),
        ([0.7, 0.2], False, {"temperature": SEVERAL, "top_p": 0.9}),
        ([0.7, 0.7], True, {}),
    ):
        group, tokens = GroupRecord("g"), (5, 6)
        for temperature in temperatures:
            for text in lines_of(group, tokens, temperature):
                line = json.loads(text)
                if forgets:
                    del line["sampling"]
                group.apply(line)
            tokens = (*tokens, 1, 2, 7)
        group.apply({"session": "s", "reward": 1.0})
        (row,) = group.samples()
        found = {name: row.columns[name] for name in row.columns.keys() & expected.keys()}
        assert found == expected
        assert ("temperature" in row.columns) == (not forgets)


def test_tokens_of_earlier_calls_are_put_together_once() -> None:
    """Each call of a session reads those of all before it."""
    group = GroupRecord("g")
    for number in range(3):
        prompt = prompt_of((number, 20))
        answer = answer_of(prompt, (1, 2), number)
        for line in group.lines("s", prompt, [answer], [[answer.text]], [()]):
            group.apply(line)
    first, again = group.earlier("s").prompts, group.earlier("s").prompts
    assert [each.token_ids for each in first] == [(number, 20, 1, 2) for number in range(3)]
    assert all(one.token_ids is other.token_ids for one, other in zip(first, again, strict=True))
