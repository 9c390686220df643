"""Observations go on after an answer, whatever the chat template does with what came before."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.rollout.engine.interface import Delta, FinishReason, Numbers, Sampling
from services.rollout.engine.wire import VersionBounds
from services.rollout.environments.environment import Response, Reward, Step, Task, TaskError
from services.rollout.environments.runner import InlineRunner
from services.rollout.episodes.episode import Conversation, Episode, take_steps
from services.rollout.episodes.images import NO_IMAGES
from services.rollout.episodes.sampler import SamplingPrompt
from services.rollout.episodes.trajectory import Trajectory, answered_samples
from sluice.runtime.waits import Waits
from sluice.samples.sample import SEVERAL, VersionSpan, validate_sample
from sluice.samples.tokenizer import TextTokenizer
from tests.service.rollout.talk import TalkEnvironment, TalkSettings

SAMPLED_AT = {"temperature", "top_p", "top_k"}
CHATML = (
    "{% if tools %}tools{% for t in tools %}{{ t.function.name }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: what an assistant thought is left out once somebody spoke after it.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('~')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen's: answers of tools that follow one another are one turn of the user.
GROUPED = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n~{{ m.content }}~"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ONE_SYSTEM_TURN = CHATML.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}",
    1,
)
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 \n~?.!"
SPECIAL = ["<|im_start|>", "<|im_end|>"]


def tokenizer(directory: Path, template: str = CHATML) -> TextTokenizer:
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *ALPHABET])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(SPECIAL)
    made.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return TextTokenizer(directory)


TASK = Task(messages=({"role": "user", "content": "what is 1 and 1?"},))
ASK = ({"role": "tool", "content": "2"},)


def said(made: TextTokenizer, text: str, *, ended: bool = True) -> list[int]:
    return made.encode(text + ("<|im_end|>" if ended else ""), special=False)


@pytest.mark.parametrize("template", [CHATML, GROUPED])
def test_turns_add_up_to_the_whole_conversation(template: str, tmp_path: Path) -> None:
    made = tokenizer(tmp_path, template)
    conversation, messages = Conversation(TASK), list(TASK.messages)
    ids = made.encode_chat(TASK.messages)
    for answer, observation in (("let me see", ASK), ("so it is", ASK * 3), ("2!", ASK)):
        tokens = said(made, answer)
        ids += tokens
        ids += conversation.encode(made, answer, tokens[-1], Step(messages=observation))
        messages += [{"role": "assistant", "content": answer}, *observation]
        assert ids == made.encode_chat(messages), "as if rendered at once"


def test_an_answer_that_did_not_close_its_turn_is_closed_for_it(tmp_path: Path) -> None:
    made = tokenizer(tmp_path)
    tokens = said(made, "let me see", ended=False)
    observation = Conversation(TASK).encode(made, "let me see", tokens[-1], Step(messages=ASK))
    whole = [*TASK.messages, {"role": "assistant", "content": "let me see"}, *ASK]
    assert made.encode_chat(TASK.messages) + tokens + observation == made.encode_chat(whole)


def test_tokens_of_answers_are_kept_though_the_template_forgets_them(tmp_path: Path) -> None:
    """Rendering the conversation again would give the model another past than it had."""
    made = tokenizer(tmp_path, FORGETFUL)
    conversation = Conversation(TASK)
    ids = made.encode_chat(TASK.messages)
    for answer in ("hm hm~first", "well well~second"):
        tokens = said(made, answer)
        ids += tokens
        ids += conversation.encode(made, answer, tokens[-1], Step(messages=ASK))
    (text,) = made.decode([ids])
    assert "hm hm~first" in text and "well well~second" in text
    assert text.count("tool") == text.count("assistant\n") - 1 == 2


def test_tools_of_the_task_are_shown_in_the_prompt_and_not_again(tmp_path: Path) -> None:
    made = tokenizer(tmp_path)
    task = Task(messages=TASK.messages, tools=({"function": {"name": "add"}},))
    assert made.decode([made.encode_chat(task.messages, task.tools)])[0].startswith("toolsadd")
    observation = Conversation(task).encode(made, "x", said(made, "x")[-1], Step(messages=ASK))
    assert "toolsadd" not in made.decode([observation])[0]


def test_variables_of_the_template_hold_for_every_turn(tmp_path: Path) -> None:
    opening = "assistant\n{% if quick %}!{% endif %}"
    made = tokenizer(tmp_path, CHATML.replace("assistant\n", opening))
    task = Task(messages=TASK.messages, template={"quick": True})
    tokens = said(made, "x")
    ids = made.encode_chat(task.messages, options=task.template) + tokens
    ids += Conversation(task).encode(made, "x", tokens[-1], Step(messages=ASK))
    (text,) = made.decode([ids])
    assert text.count("assistant\n!") == 2
    plain = Conversation(TASK).encode(made, "x", tokens[-1], Step(messages=ASK))
    assert "!" not in made.decode([plain])[0]


@pytest.mark.parametrize(
    ("task", "step"),
    [
        (TASK, Step(text="2")),
        (TASK, Step()),
        (TASK, Step(messages=ASK, text="2")),
        (Task(prompt="1"), Step(messages=ASK)),
        (Task(prompt="1"), Step()),
        (TASK, Step(messages=("2",))),  # type: ignore[arg-type]
        (Task(prompt="1"), Step(text=7)),  # type: ignore[arg-type]
    ],
)
def test_observations_are_of_the_kind_of_the_prompt(tmp_path: Path, task: Task, step: Step) -> None:
    with pytest.raises(TaskError) as caught:
        Conversation(task).encode(tokenizer(tmp_path), "x", None, step)
    assert caught.value.key == "step"


def test_a_template_that_refuses_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no tools"):
        Conversation(TASK).encode(
            tokenizer(tmp_path, ONE_SYSTEM_TURN), "x", None, Step(messages=ASK)
        )


def test_plain_prompts_take_plain_text(tmp_path: Path) -> None:
    made = tokenizer(tmp_path)
    ids = Conversation(Task(prompt="1")).encode(made, "x", None, Step(text="ab"))
    assert ids == made.encode("ab", special=False)


def answer(*token_ids: int, reason: FinishReason = FinishReason.STOP) -> Delta:
    last = len(token_ids) - 1
    return Delta(
        index=0,
        token_ids=token_ids,
        logprobs=tuple(-float(token) for token in token_ids),
        logprobs_t1=tuple(-2.0 * token for token in token_ids),
        spans=(VersionSpan(version=3, digest="d", first_token=0, last_token=last),),
        finish_reason=reason,
    )


def row(trajectory: Trajectory, **reward: Any):
    sample = trajectory.to_sample("g", 4, Reward(reward=1.0, **reward), 2)
    validate_sample(sample)
    return sample


def test_a_row_is_aligned_whatever_came_in_which_order() -> None:
    trajectory = Trajectory([7, 8])
    trajectory.add_sampled(answer(1, 2))
    trajectory.add_observation([9])
    trajectory.add_observation([9, 9])
    trajectory.add_sampled(answer(3))
    sample = row(trajectory, raw_reward=0.5, scores={"format": 1.0})
    assert sample.token_ids.tolist() == [7, 8, 1, 2, 9, 9, 9, 3]
    assert sample.columns["loss_mask"].tolist() == [True, True, False, False, False, True]
    assert sample.columns["rollout_logprobs"].tolist() == [-1, -2, 0, 0, 0, -3]
    assert sample.columns["rollout_logprobs_t1"].tolist() == [-2, -4, 0, 0, 0, -6]
    assert [(span.first_token, span.last_token) for span in sample.spans] == [(0, 1), (5, 5)]
    assert (sample.sample_id, sample.columns["episode"]) == ("g/4", 2.0)
    assert (sample.columns["raw_reward"], sample.columns["score/format"]) == (0.5, 1.0)
    assert trajectory.sampled_count == 3


def test_a_plain_answer_has_no_mask_and_what_is_absent_stays_absent() -> None:
    sample = row(Trajectory.of([7], answer(1, 2)))
    assert sample.columns.keys() == {
        "rollout_logprobs",
        "rollout_logprobs_t1",
        "reward",
        "episode",
    }
    untrained = row(Trajectory.of([7], answer(1, 2)), trained=False)
    assert untrained.columns["loss_mask"].tolist() == [False, False]


def test_rows_of_one_answer_each_are_what_each_of_them_is_alone() -> None:
    same = (-0.5, -1.5)
    answers = [
        answer(1, 2),
        answer(3, reason=FinishReason.LENGTH),
        answer(4, 5)._replace(logprobs=same, logprobs_t1=same),
        answer(6, 7)._replace(logprobs_t1=()),
        answer(8, 9)._replace(routed_experts=np.arange(3 * 2, dtype=np.int16).reshape(3, 1, 2)),
        answer(1, 9)._replace(
            token_ids=Numbers(np.array([1, 9], np.int64)),
            logprobs=Numbers(np.array([-1.0, -9.0], np.float32)),
            logprobs_t1=Numbers(np.array([-2.0, -18.0], np.float64)),
        ),
        answer()._replace(finish_reason=None, spans=()),
        answer(2, 1),
    ]
    rewards = [
        Reward(reward=1.0),
        Reward(reward=0.5, raw_reward=0.0, scores={"format": 1.0, "judge": 2.0}),
        Reward(reward=0.0),
        *[Reward(reward=float(number)) for number in range(4)],
        Reward(reward=0.25, trained=False),
    ]
    sampling = Sampling(max_new_tokens=2, temperature=0.7, top_k=5)
    samples = answered_samples("g", [7, 8], answers, rewards, sampling)
    assert [sample.token_ids.tolist() for sample in samples] == [
        [7, 8, *each.token_ids] for each in answers
    ]
    for index, (sample, one, reward) in enumerate(zip(samples, answers, rewards, strict=True)):
        alone = Trajectory.of([7, 8], one, sampling).to_sample("g", index, reward, None)
        assert vars(sample).keys() == vars(alone).keys()
        for name, value in vars(alone).items():
            found = getattr(sample, name)
            assert type(found) is type(value)
            assert getattr(found, "dtype", None) == getattr(value, "dtype", None)
            if name == "columns":
                assert found.keys() == value.keys()
                for column, held in value.items():
                    assert type(found[column]) is type(held)
                    np.testing.assert_array_equal(found[column], held)
            else:
                np.testing.assert_equal(found, value)
        validate_sample(sample)


@pytest.mark.parametrize(
    ("settings", "columns"),
    [
        ([{}, {}], {"temperature": 1.0}),
        ([{"temperature": 0.7}, {"temperature": 0.7}], {"temperature": 0.7}),
        ([{"temperature": 0.7}, {"temperature": 0.8}], {"temperature": SEVERAL}),
        ([{"temperature": 0.0}, {"temperature": 1.0}], {"temperature": 1.0}),  # of the log-probs
        ([{"temperature": 0.0}, {"temperature": 0.7}], {"temperature": SEVERAL}),
        ([{"top_p": 0.9}, {"top_k": 5}], {"temperature": 1.0, "top_p": 0.9, "top_k": 5.0}),
        ([{"top_k": 9}, {"top_k": 5}], {"temperature": 1.0, "top_k": 5.0}),
        ([{"temperature": 0.7}, None], {}),
    ],
)
def test_a_row_tells_how_it_was_sampled_where_that_is_known(
    settings: list[dict[str, Any] | None], columns: dict[str, float]
) -> None:
    trajectory = Trajectory([7])
    for token, each in enumerate(settings):
        known = None if each is None else Sampling(max_new_tokens=3, **each)
        trajectory.add_sampled(answer(token), known)
    found = row(trajectory).columns
    assert {name: found[name] for name in found.keys() & SAMPLED_AT} == columns


def test_an_observation_nobody_answered_is_left_out() -> None:
    trajectory = Trajectory.of([7], answer(1, 2))
    trajectory.add_observation([9, 9])
    trajectory.end_full()
    sample = row(trajectory)
    assert sample.token_ids.tolist() == [7, 1, 2] and sample.finish_reason == "length"


class Walked(tuple[int, ...]):
    """Tells when somebody goes over all of its tokens."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("went over every token")


def test_whether_an_answer_may_be_followed_is_told_by_its_last_token() -> None:
    """Of a conversation of 100,000 tokens each turn would otherwise cost a hundredth second."""
    trajectory = Trajectory([7])
    assert trajectory.last_token is None and not NO_IMAGES.ends(trajectory)
    for tokens in (Walked([1, 2]), np.array([3, 4], np.int32), Walked([5, 6])):
        trajectory.add_observation([8])
        trajectory.add_sampled(answer(0)._replace(token_ids=tokens))
    assert trajectory.last_token == 6 and not NO_IMAGES.ends(trajectory)
    trajectory.add_observation([])
    assert trajectory.last_token == 6


class Lecture(TalkEnvironment):
    """Says much, once."""

    def step(self, task: Task, state: Mapping[str, Any], response: Response) -> Step:
        if response.turns:
            return Step(done=True)
        if task.messages:
            return Step(messages=({"role": "tool", "content": "7" * 5000},))
        return Step(text="7" * 5000)


@pytest.mark.parametrize("task", [TASK, Task(prompt="1")], ids=["chat", "text"])
async def test_a_long_observation_is_tokenised_off_the_event_loop(
    tmp_path: Path, task: Task
) -> None:
    threads = set[str]()

    class Watched(TextTokenizer):
        def encode(self, text: str, *, special: bool) -> list[int]:
            threads.add(threading.current_thread().name)
            return super().encode(text, special=special)

    tokenizer(tmp_path)
    made = Watched(tmp_path)
    prompt = SamplingPrompt(
        group_id="g",
        token_ids=(1, 2),
        sample_count=1,
        sampling=Sampling(max_new_tokens=9),
        bounds=VersionBounds(),
        pool="",
    )
    episode = Episode(0, task, prompt, Parrot(), made)  # type: ignore[arg-type]
    trajectory = Trajectory.of(prompt.token_ids, (await Parrot().sample(prompt))[0])
    runner = InlineRunner("talk", Lecture(TalkSettings()), TalkSettings())
    response = await take_steps(episode, trajectory, runner, Waits(), "talk")
    assert response.turns[0].observation == "7" * 5000
    assert len(trajectory.response) > 5000
    assert threads and threading.current_thread().name not in threads


class Parrot:
    """In place of engines: always the same answer."""

    async def sample(self, prompt: SamplingPrompt) -> list[Delta]:
        return [
            Delta(
                index=0,
                token_ids=(5, 1),
                logprobs=(-1.0,) * 2,
                logprobs_t1=(-1.0,) * 2,
                spans=(),
                finish_reason=FinishReason.STOP,
            )
        ]
