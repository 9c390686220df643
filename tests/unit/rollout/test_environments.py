"""What environments make and reward."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.rollout.environments import alarm
from services.rollout.environments.environment import (
    EnvironmentFailedError,
    Response,
    SettingError,
    TaskError,
    TaskRequest,
    UserCode,
)
from services.rollout.environments.prompts import PromptsEnvironment
from services.rollout.environments.reasoning_gym import ReasoningGymEnvironment
from services.rollout.environments.registry import ENVIRONMENTS, Allowed, create_environment
from tests.patience import growing

END = 11


class DigitTokenizer:
    """Digits are their own ids."""

    end_token_id: int | None = END

    def encode(self, text: str, *, special: bool) -> list[int]:
        return [int(digit) for digit in text]


def prompts(**values: Any) -> PromptsEnvironment:
    environment = create_environment(ENVIRONMENTS["prompts"], values, DigitTokenizer())
    assert isinstance(environment, PromptsEnvironment)
    return environment


def reasoning_gym(**values: Any) -> ReasoningGymEnvironment:
    values = {"dataset": "chain_sum", "size": 10, "seed": 3, **values}
    environment = create_environment(ENVIRONMENTS["reasoning_gym"], values)
    assert isinstance(environment, ReasoningGymEnvironment)
    return environment


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"rewrd": "exact_match"}, "rewrd"),
        ({"reward": "fuzzy"}, "reward"),
        ({"system_prompt": "be brief"}, "system_prompt"),
    ],
)
def test_a_wrong_setting_is_named(values: dict[str, Any], key: str) -> None:
    with pytest.raises(SettingError) as caught:
        prompts(**values)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("row", "key"),
    [
        (None, "row"),
        ({"answer": "1"}, "row.prompt"),
        ({"prompt": "", "answer": "1"}, "row.prompt"),
        ({"prompt": 5, "answer": "1"}, "row.prompt"),
        ({"prompt": "1="}, "row.answer"),
        ({"prompt": ["1="], "answer": "1"}, "row.prompt[0]"),
        ({"messages": "hello", "answer": "1"}, "row.messages"),
        ({"messages": [{"role": "user"}], "answer": "1"}, "row.messages[0]"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "row.prompt[0]"),
        ({"prompt": [], "answer": "1"}, "row.prompt"),
        ({"prompt": "12=", "answer": math.nan}, "row.answer"),
        ({"prompt": "12=", "answer": [1, math.inf]}, "row.answer[1]"),
    ],
)
def test_a_malformed_row_is_named(row: dict[str, Any] | None, key: str) -> None:
    environment = prompts()
    with pytest.raises(TaskError) as caught:
        environment.make_task(TaskRequest(row=row))
    assert caught.value.key == key
    with pytest.raises(TaskError):
        environment.check(environment.settings_type(), TaskRequest(row=row))


@pytest.mark.parametrize(
    ("answer", "text"),
    [(2, "2"), (2.0, "2"), (0.1, "0.1"), (-3.5, "-3.5"), (1e-7, "0.0000001"), (2**60, str(2**60))],
)
def test_a_number_is_the_answer_that_people_write(answer: float, text: str) -> None:
    task = prompts().make_task(TaskRequest(row={"prompt": "1=", "answer": answer}))
    assert task.answer == text


def test_rows_become_text_or_chat() -> None:
    row = {"prompt": "12=", "answer": 12}
    plain = prompts().make_task(TaskRequest(row=row))
    assert (plain.prompt, plain.messages, plain.answer) == ("12=", (), "12")
    chat = prompts(chat=True, system_prompt="Add.").make_task(TaskRequest(row=row))
    assert [turn["role"] for turn in chat.messages] == ["system", "user"]
    turns = [{"role": "user", "content": "hi"}]
    given_chat = prompts().make_task(TaskRequest(row={"messages": turns, "answer": "x"}))
    assert given_chat.messages == tuple(turns)
    listed = prompts().make_task(TaskRequest(row={"prompt": turns, "answer": "x"}))
    assert listed.messages == tuple(turns)


def test_variables_of_the_template_are_of_chats_alone() -> None:
    row, options = {"prompt": "12=", "answer": 12}, {"enable_thinking": False}
    turns = {"messages": [{"role": "user", "content": "hi"}], "answer": "x"}
    assert prompts(chat=True).make_task(TaskRequest(row=row)).template == {}
    for made, each in (
        (prompts(chat=True, template=options), row),
        (prompts(template=options), turns),
    ):
        assert made.make_task(TaskRequest(row=each)).template == options
    assert reasoning_gym(template=options).make_task(TaskRequest(index=0)).template == options
    with pytest.raises(TaskError, match="is no chat") as caught:
        prompts(template=options).make_task(TaskRequest(row=row))
    assert caught.value.key == "row.prompt"


def test_keys_reach_into_objects_of_a_row() -> None:
    """As data sets of verl have them; a key that is there as it stands comes first."""
    turns = [{"role": "user", "content": "1+1"}]
    row = {"prompt": turns, "reward_model": {"style": "rule", "ground_truth": "2"}}
    made = prompts(answer_key="reward_model.ground_truth")
    task = made.make_task(TaskRequest(row=row))
    assert (task.messages, task.answer) == (tuple(turns), "2")
    both = {**row, "reward_model.ground_truth": "3"}
    assert made.make_task(TaskRequest(row=both)).answer == "3"
    inner = {"extra_info": {"question": "12=", "answers": ["12", 13]}}
    settings = {"prompt_key": "extra_info.question", "answer_key": "extra_info.answers"}
    task = prompts(**settings).make_task(TaskRequest(row=inner))
    assert (task.prompt, task.state["answers"]) == ("12=", ["12", "13"])
    for missing in (
        {"prompt": turns},
        {**row, "reward_model": "rule"},
        {**row, "reward_model": {}},
    ):
        with pytest.raises(TaskError) as caught:
            made.make_task(TaskRequest(row=missing))
        assert caught.value.key == "row.reward_model.ground_truth"


def test_exact_match_takes_nothing_but_the_answer() -> None:
    environment = prompts()
    task = environment.make_task(TaskRequest(row={"prompt": "1+1=", "answer": " 2 "}))
    texts = ["2", " 2\n", "The answer is 2.", "22", ""]
    rewards = environment.reward(task, [Response(text=text) for text in texts])
    assert [reward.reward for reward in rewards] == [1, 1, 0, 0, 0]


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.lists(st.integers(0, 11), max_size=8),
)
@example([1, 2], [1, 2, END, 3])
@example([1, 2], [1, 2, END])
@settings(max_examples=50)
def test_position_match_is_the_share_of_right_places(answer: list[int], ids: list[int]) -> None:
    environment = prompts(reward="position_match")
    row = {"prompt": "0=", "answer": "".join(map(str, answer))}
    task = environment.make_task(TaskRequest(row=row))
    (reward,) = environment.reward(task, [Response(token_ids=tuple(ids))])
    target = [*answer, END]
    padded = [*ids, *[None] * len(target)][: len(target)]
    expected = sum(a == b for a, b in zip(padded, target, strict=True)) / len(target)
    assert reward.reward == pytest.approx(expected, abs=1e-12)
    assert reward.raw_reward == float(ids == target)


def test_position_match_needs_an_end_token() -> None:
    class Endless(DigitTokenizer):
        end_token_id = None

    with pytest.raises(SettingError):
        create_environment(ENVIRONMENTS["prompts"], {"reward": "position_match"}, Endless())


def test_reasoning_gym_is_strict_unless_told_otherwise() -> None:
    environment = reasoning_gym()
    task = environment.make_task(TaskRequest(index=4))
    texts = [task.answer, f" {task.answer}\n", f"The answer is {task.answer}.", ""]
    responses = [Response(text=text) for text in texts]
    assert [r.reward for r in environment.reward(task, responses)] == [1, 1, 0, 0]
    lenient = reasoning_gym(partial_credit=True)
    hidden = lenient.reward(task, responses)[2].reward
    assert 0 < hidden < 1, "the library's partial credit"


def test_reasoning_gym_trusts_the_library_where_many_answers_are_right() -> None:
    environment = reasoning_gym(dataset="rubiks_cube", size=2)
    task = environment.make_task(TaskRequest(index=0))
    assert task.answer == ""
    rewards = environment.reward(task, [Response(text="no idea"), Response(text="")])
    assert [reward.reward for reward in rewards] == [0, 0]


def test_an_answer_that_the_library_cannot_take_is_wrong_and_fails_no_group() -> None:
    for dataset, text in (("prime_factorization", "two"), ("boxnet", "0"), ("coin_flip", "1e999")):
        environment = reasoning_gym(dataset=dataset, size=2, partial_credit=True)
        task = environment.make_task(TaskRequest(index=0))
        assert [r.reward for r in environment.reward(task, [Response(text=text)])] == [0]


def test_answers_that_take_for_ever_cost_their_own_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endless = [Response(text="9**9**9**9")] * 3
    environment = reasoning_gym(
        dataset="countdown", size=2, partial_credit=True, seconds=3600, group_seconds=0.1
    )
    task = environment.make_task(TaskRequest(index=0))
    for seconds in growing(alarm.SHORTEST_SECONDS):
        monkeypatch.setattr(alarm, "SHORTEST_SECONDS", seconds)
        rewards = environment.reward(task, [*endless, Response(text=task.answer)])
        if rewards[-1].reward:  # judged in that time
            break
    assert rewards[-1].reward == 1
    assert max(reward.reward for reward in rewards[:-1]) < 0.1


def test_reasoning_gym_tasks_depend_on_seed_and_index_alone() -> None:
    first, again = reasoning_gym(), reasoning_gym(shots=2)
    other = reasoning_gym(seed=4)
    assert first.make_task(TaskRequest(index=7)).answer == again._entry(7)["answer"]
    tasks = [first.make_task(TaskRequest(index=i)).messages for i in range(10)]
    assert tasks == [reasoning_gym().make_task(TaskRequest(index=i)).messages for i in range(10)]
    assert tasks != [other.make_task(TaskRequest(index=i)).messages for i in range(10)]


def test_shots_are_solved_turns_that_no_task_repeats() -> None:
    environment = reasoning_gym(shots=2, system_prompt="Only the number.", answer_tag="answer")
    messages = environment.make_task(TaskRequest(index=0)).messages
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    assert [turn["role"] for turn in messages] == roles
    assert messages[2]["content"].startswith("<answer>")
    questions = {reasoning_gym()._entry(i)["question"] for i in range(10)}
    shown = [turn["content"] for turn in messages[1:-1] if turn["role"] == "user"]
    assert not questions & set(shown)


def test_the_last_tagged_answer_counts() -> None:
    environment = reasoning_gym(answer_tag="answer")
    task = environment.make_task(TaskRequest(index=1))
    right = f"I think <answer>0.5</answer>, no: <answer> {task.answer} </answer> done"
    texts = [right, task.answer, f"<answer>{task.answer}", f"{task.answer}</answer>"]
    rewards = environment.reward(task, [Response(text=text) for text in texts])
    assert [reward.reward for reward in rewards] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"dataset": "no_such_set"}, "dataset"),
        ({"config": {"no_such_option": 1}}, "config"),
        ({"config": {"min_terms": 0}}, "config"),
        ({"config": {"seed": 1}}, "config.seed"),
        ({"size": 0}, "size"),
    ],
)
def test_reasoning_gym_names_a_wrong_setting(values: dict[str, Any], key: str) -> None:
    with pytest.raises(SettingError) as caught:
        reasoning_gym(**values)
    assert caught.value.key == key


@pytest.mark.parametrize("request_", [TaskRequest(index=10), TaskRequest(index=-1), TaskRequest()])
def test_an_index_outside_the_data_set_is_refused(request_: TaskRequest) -> None:
    environment = reasoning_gym()
    with pytest.raises(TaskError) as caught:
        environment.check(environment._settings, request_)
    assert caught.value.key == "index"


@pytest.mark.parametrize(
    "path",
    [
        "//rewards.example/v1/../admin",
        "//rewards.example/v1/%2e%2e/admin",
        "//rewards.example/v1/.%2E/admin",
        "//rewards.example/v1/..%2fadmin",
        "//rewards.example/v1/..%5cadmin",
        "//rewards.example/v2",
        "//rewards.example:x/v1",
        "//rewards.example:99999/v1",
        "//[::1/v1",
    ],
)
def test_no_way_of_writing_an_address_leads_out_of_the_allowed_ones(path: str) -> None:
    allowed = Allowed(urls=("http://rewards.example/v1",))
    allowed.check_url("http://rewards.example:81/v1/%7Ejudge..", "url")
    with pytest.raises(SettingError) as caught:
        allowed.check_url(f"http:{path}", "url")
    assert caught.value.key == "url"


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("error", [RuntimeError("x" * 10_000_000), SpeechlessError()])
def test_what_code_of_users_raises_is_told_in_a_line_with_its_place(error: Exception) -> None:
    with pytest.raises(EnvironmentFailedError) as caught, UserCode("mine"):
        raise error
    told = str(caught.value)
    assert told.startswith(f"mine: {type(error).__name__}: ")
    assert f", at {__file__}:" in told and len(told) < 1000
