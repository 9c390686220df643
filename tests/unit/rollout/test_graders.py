"""What graders find right, and what they refuse."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.environments import alarm
from services.rollout.environments.environment import (
    InvalidRewardError,
    Placement,
    Response,
    Reward,
    SettingError,
    Task,
    TaskError,
    rewards_from,
)
from services.rollout.environments.graders.grader import (
    GRADERS,
    create_grader,
    last_boxed,
    place_grader,
)
from services.rollout.environments.graders.texts import overlap, words
from tests.patience import growing

HERE = "tests.unit.rollout.test_graders"


def graded(name: str, task: Task | str, texts: Sequence[str], **values: Any) -> list[float]:
    task = Task(answer=task) if isinstance(task, str) else task
    rewards = create_grader(name, values).grade(task, [Response(text=text) for text in texts])
    assert isinstance(rewards, list)
    return [reward.reward for reward in rewards]


def test_exact_match_takes_the_marked_answer_and_nothing_else() -> None:
    assert graded("exact_match", " 2 ", ["2", "2\n", "It is 2.", "", "22"]) == [1, 1, 0, 0, 0]
    tagged = ["<answer>1</answer> no, <answer> 2 </answer>", "2", "<answer>2", "2</answer>"]
    assert graded("exact_match", "2", tagged, answer_tag="answer") == [1, 0, 0, 0]
    assert graded("exact_match", "{2}", [r"so \boxed{{2}}", "{2}"], boxed=True) == [1, 0]
    assert graded("exact_match", "Paris", ["paris", "PARIS "], ignore_case=True) == [1, 1]
    assert graded("exact_match", "Paris", ["paris"]) == [0]
    several = Task(answer="2", state={"answers": ["2", "two"]})
    assert graded("exact_match", several, ["two", "2", "three"]) == [1, 1, 0]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{", ""),
        ("none", ""),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_closed_box_counts(text: str, found: str) -> None:
    assert last_boxed(text) == found


@given(st.lists(st.sampled_from(["{", "}", "\\boxed{", "1"]), max_size=14))
def test_the_last_closed_box_is_found_as_by_trying_every_start(parts: list[str]) -> None:
    text, found = "".join(parts), ""
    for start in range(len(text)):
        if text.startswith("\\boxed{", start):
            inner = text[start + 7 :]
            for end in (index for index, brace in enumerate(inner) if brace == "}"):
                if inner[:end].count("{") == inner[:end].count("}"):
                    found = inner[:end]
                    break
    assert last_boxed(text) == found


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("exact_match", "\\boxed{" * 100_000, {"boxed": True}),
        ("exact_match", "\\boxed{" * 100_000 + "}", {"boxed": True}),
        ("exact_match", "<answer>" * 100_000, {"answer_tag": "answer"}),
        ("choice", "answer" + " !" * 400_000, {}),
        ("choice", "the answer is" + "。" * 800_000, {}),
        ("choice", "answer option " * 100_000, {}),
    ],
)
def test_a_model_that_repeats_itself_takes_no_more_than_it_wrote(
    name: str, text: str, values: dict[str, Any]
) -> None:
    """An hour, where every start was tried to the end."""
    assert graded(name, "B", [text], **values) == [0]


def test_f1_is_word_overlap_with_the_best_answer() -> None:
    texts = ["The Eiffel Tower!", "tower", "an apple", "", "the tower of London"]
    found = graded("f1", "Eiffel tower", texts)
    assert found == pytest.approx([1.0, 2 / 3, 0.0, 0.0, 2 * (1 / 3) * (1 / 2) / (5 / 6)])
    several = Task(answer="x", state={"answers": ["x", "eiffel tower"]})
    assert graded("f1", several, ["eiffel tower"]) == [1.0]
    (partly,) = create_grader("f1", {}).grade(Task(answer="a b"), [Response(text="b c")])
    assert partly.raw_reward == 0.0 and partly.reward > 0


@given(st.text(alphabet="ab ,.", max_size=12), st.text(alphabet="ab ,.", max_size=12))
@settings(max_examples=50)
def test_overlap_is_symmetric_and_one_for_the_same_words(a: str, b: str) -> None:
    first, second = words(a), words(b)
    assert overlap(first, second) == pytest.approx(overlap(second, first))
    assert 0 <= overlap(first, second) <= 1
    assert overlap(first, first) == 1
    assert (overlap(first, second) == pytest.approx(1)) == (sorted(first) == sorted(second))


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("The answer is B", "B"),
        ("Answer: (b)", "B"),
        ("**Answer:** B", "B"),
        ("The correct answer is option C.", "C"),
        ("A would be wrong, C too. Answer: D", "D"),
        ("answer A? No. Final answer: C", "C"),
        ("The answer is B, since the answer is a prime", "B"),
        ("My answer is C: choice a is wrong", "C"),
        ("The answer is a.", "A"),
        ("The answer is A because", "A"),
        ("A or B", ""),
        ("A beautiful mind", "A"),
        ("I cannot say", ""),
        ("E", ""),
        ("Because", ""),
        ("", ""),
    ],
)
def test_choice_finds_the_letter(text: str, letter: str) -> None:
    assert graded("choice", letter or "A", [text]) == [float(bool(letter))]


def test_choice_knows_the_letters_of_the_task() -> None:
    assert graded("choice", "(e)", ["E", "D"], letters="ABCDE") == [1, 0]


@pytest.mark.parametrize(
    ("name", "answers", "values"),
    [
        ("choice", ["E"], {}),
        ("choice", ["3"], {}),
        ("choice", ["B) Paris"], {}),
        ("choice", ["A", ""], {}),
        ("exact_match", [" "], {"boxed": True}),
        ("f1", ["Paris", ""], {"answer_tag": "answer"}),
    ],
)
def test_a_task_whose_answer_nobody_or_silence_would_give_is_refused(
    name: str, answers: list[str], values: dict[str, Any]
) -> None:
    task = Task(answer=answers[0], state={"answers": answers})
    with pytest.raises(TaskError, match=r"is none of the letters ABCD|is empty") as caught:
        graded(name, task, ["", "C"], **values)
    assert caught.value.key == "row.answer"


def test_math_compares_values() -> None:
    texts = [r"It is $\frac{2}{4}$.", "0.5", r"so \boxed{1/2}", "1/3", "no idea", ""]
    assert graded("math", r"\frac{1}{2}", texts) == [1, 1, 1, 0, 0, 0]
    assert graded("math", "1/2", texts[:3], boxed=True) == [0, 0, 1]
    assert graded("math", "$x^2$", [r"$x \cdot x$", "$2x$"]) == [1, 0]
    assert place_grader("math") is Placement.PROCESS
    with pytest.raises(SettingError, match="3600"):
        graded("math", "2", ["2"], seconds=2**31)
    with pytest.raises(TaskError, match="cannot be read as mathematics"):
        graded("math", "", ["1"])


def test_an_answer_to_be_read_as_mathematics_that_takes_too_long_is_told_as_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(alarm, "SHORTEST_SECONDS", 1e-6)
    with pytest.raises(TaskError, match="'4' took too long to read as mathematics"):
        graded("math", "4", ["4"], group_seconds=1e-6)


def test_mathematics_that_takes_for_ever_costs_its_own_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = [r"\boxed{9^{9^{9^{9}}}}"] * 3 + [r"\boxed{4}"]
    found = list[float]()
    for seconds in growing(alarm.SHORTEST_SECONDS):
        monkeypatch.setattr(alarm, "SHORTEST_SECONDS", seconds)
        with contextlib.suppress(TaskError):  # not even the answer of the task was read in it
            found = graded("math", "4", texts, seconds=3600, group_seconds=0.1)
        if found and found[-1]:  # read in that time
            break
    assert found == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("name", "values", "key"),
    [
        ("exact", {}, "reward"),
        ("exact_match", {"ignore": True}, "reward_settings.ignore"),
        ("exact_match", {"answer_tag": "a", "boxed": True}, "reward_settings"),
        ("choice", {"letters": "abc"}, "reward_settings.letters"),
        ("position_match", {}, "reward"),
        ("remote", {}, "reward_settings.url"),
        ("remote", {"url": "ftp://x"}, "reward_settings.url"),
        (f"{HERE}:nothing", {}, "reward"),
        ("no.such:thing", {}, "reward"),
        (f"{HERE}:longest", {"limit": 1}, "reward_settings"),
    ],
)
def test_a_wrong_setting_is_named(name: str, values: dict[str, Any], key: str) -> None:
    with pytest.raises(SettingError) as caught:
        create_grader(name, values)
    assert caught.value.key == key


def longest(task: Task, responses: Sequence[Response], *, bonus: float = 1.0) -> list[Any]:
    """Sees the whole group: only the longest answer is rewarded."""
    best = max(len(response.text) for response in responses)
    return [bonus if len(response.text) == best else 0 for response in responses]


def test_a_users_function_sees_the_whole_group() -> None:
    assert place_grader(f"{HERE}:longest") is Placement.PROCESS
    assert graded(f"{HERE}:longest", "", ["a", "abc", "ab"], bonus=2.0) == [0, 2, 0]


async def longest_in_time(
    task: Task, responses: Sequence[Response], *, bonus: float
) -> list[float | Reward]:
    await asyncio.sleep(0)
    return longest(task, responses, bonus=bonus)


def test_a_users_function_may_be_a_coroutine() -> None:
    name = f"{HERE}:longest_in_time"
    assert graded(name, "", ["a", "abc", "ab"], bonus=2.0) == [0, 2, 0]


def test_rewards_come_as_numbers_objects_or_rewards_each_with_what_it_has() -> None:
    mixed = [
        1,
        {"reward": 0.5, "raw_reward": 1, "scores": {"format": 1}},
        {"reward": 0.25},
        Reward(reward=0.0, trained=False),
    ]
    found = rewards_from(mixed, 4)
    assert [reward.raw_reward for reward in found] == [1.0, 1.0, None, None]
    assert [dict(reward.scores) for reward in found] == [{}, {"format": 1.0}, {}, {}]
    assert [reward.trained for reward in found] == [True, True, True, False]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "must be a list"),
        ("11", "must be a list"),
        ([1], "1 rewards for 2"),
        ([1, "1"], r"rewards\[1\] is '1'"),
        ([1, None], r"rewards\[1\] is None"),
        ([1, float("nan")], "finite"),
        ([1, {"raw_reward": 1}], "has no reward"),
        ([1, {"reward": 1, "socre": 2}], "unknown keys: socre"),
        ([1, {"reward": 1, "scores": [2]}], r"rewards\[1\]\.scores is \[2\] \(list\)"),
        ([1, {"reward": 1, "scores": {"a": True}}], r"rewards\[1\]\.scores\.a is True \(bool\)"),
        ([1, {"reward": 1, "scores": {3: 1}}], r"rewards\[1\]\.scores has 3 \(int\)"),
        ([1, {"reward": 1, "trained": "no"}], r"rewards\[1\]\.trained is 'no' \(str\)"),
        ([1, {"reward": 1, "raw_reward": "1"}], r"rewards\[1\]\.raw_reward is '1' \(str\)"),
        ([1, {"reward": 1, 7: 2, "b": 3}], "unknown keys: 7, b"),
        ([1, Reward(reward="1")], r"rewards\[1\]\.reward is '1' \(str\)"),  # type: ignore[arg-type]
        ([1, True], r"rewards\[1\] is True \(bool\)"),
        ([1, np.bool_(True)], r"rewards\[1\] is True \(bool\)"),
        ([1, [1]], r"rewards\[1\] is \[1\] \(list\)"),
        ([1, np.ones(1)], r"rewards\[1\] is .* \(ndarray\)"),
        ([1, 1j], r"rewards\[1\] is 1j \(complex\)"),
        ([1, 10**400], r"rewards\[1\] is .* up to 1e\+30"),
        ([1, -(10**5000)], r"rewards\[1\] is a long int, .* up to 1e\+30"),
        ([1, np.float64("inf")], r"rewards\[1\] is inf"),
        ([1, 1e300], "up to 1e"),
        ([1, {"reward": 1, "scores": {"a": None}}], r"scores\.a is None"),
    ],
)
def test_what_is_no_reward_is_refused(values: Any, message: str) -> None:
    with pytest.raises(InvalidRewardError, match=message):
        rewards_from(values, 2)


def test_scalars_of_libraries_are_numbers() -> None:
    scalars = [np.float32(0.5), np.int64(2), np.array(3.0), torch.tensor(4.0), Fraction(1, 4)]
    found = rewards_from(scalars, 5)
    assert [reward.reward for reward in found] == [0.5, 2.0, 3.0, 4.0, 0.25]
    assert {type(reward.reward) for reward in found} == {float}


def test_every_grader_named_is_there() -> None:
    for name in GRADERS:
        assert place_grader(name) in Placement
