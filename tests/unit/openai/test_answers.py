"""Answers in OpenAI's form, where tokens look alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, SupportsIndex

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.rollout.engine.interface import Delta, FinishReason, Sampling
from services.rollout.engine.wire import join_deltas
from services.rollout.episodes.images import NO_IMAGES
from services.rollout.openai.completions import Names, Scored, chat_logprobs, completion_logprobs
from services.rollout.openai.generation import AnswerRequest, Generator
from sluice.samples.tokenizer import TextTokenizer


def bytes_tokenizer(directory: Path) -> tuple[TextTokenizer, int, int, int]:
    """A token a byte; two that are parts of characters, and the letter a."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(directory / "tokenizer.json"))
    tokenizer = TextTokenizer(directory)
    first, second = tokenizer.encode("é", special=False)
    (letter,) = tokenizer.encode("a", special=False)
    return tokenizer, first, second, letter


def test_of_tokens_that_look_alike_the_likeliest_is_named(tmp_path: Path) -> None:
    tokenizer, first, second, letter = bytes_tokenizer(tmp_path)
    scored = Scored([second], [-3.0], [[(first, -0.5), (letter, -1.0), (second, -3.0)]])
    found = completion_logprobs(Names(tokenizer, as_ids=False), scored)
    assert found["top_logprobs"] == [{"\N{REPLACEMENT CHARACTER}": -0.5, "a": -1.0}]
    named = completion_logprobs(Names(tokenizer, as_ids=True), scored)
    assert named["tokens"] == [f"token_id:{second}"]
    assert len(named["top_logprobs"][0]) == 3


def test_part_of_a_character_has_no_bytes(tmp_path: Path) -> None:
    tokenizer, first, _, letter = bytes_tokenizer(tmp_path)
    names = Names(tokenizer, as_ids=False)
    content = chat_logprobs(names, Scored([first, letter], [-1.0, -2.0]))["content"]
    assert [entry["bytes"] for entry in content] == [None, [97]]
    assert content[1]["token"] == "a"


def test_the_first_token_of_a_text_has_no_log_probability(tmp_path: Path) -> None:
    tokenizer, _, _, letter = bytes_tokenizer(tmp_path)
    scored = Scored([letter, letter], [None, -2.0], [[], [(letter, -2.0)]])
    found = completion_logprobs(Names(tokenizer, as_ids=False), scored)
    assert found["token_logprobs"] == [None, -2.0]
    assert found["top_logprobs"] == [None, {"a": -2.0}]
    assert found["text_offset"] == [0, 1]


class CountedTokens(tuple[int, ...]):
    """Tokens that count how often they are looked at."""

    looks = 0

    def __len__(self) -> int:
        CountedTokens.looks += 1
        return super().__len__()

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        found = super().__getitem__(key)
        return CountedTokens(found) if isinstance(found, tuple) else found


async def test_an_answer_that_comes_token_by_token_looks_at_each_as_often_as_a_short_one_does(
    tmp_path: Path,
) -> None:
    tokenizer, _, _, letter = bytes_tokenizer(tmp_path)

    def delta_of(tokens: tuple[int, ...], reason: FinishReason | None) -> Delta:
        return Delta(
            index=0,
            token_ids=tokens,
            logprobs=(0.0,),
            logprobs_t1=(),
            spans=(),
            finish_reason=reason,
        )

    class OneByOne:
        async def sample(self, prompt: Any, listener: Callable[[Delta], None]) -> list[Delta]:
            count = prompt.sampling.max_new_tokens
            reasons = [None] * (count - 1) + [FinishReason.LENGTH]
            deltas = [delta_of(CountedTokens([letter]), reason) for reason in reasons]
            for delta in deltas:
                listener(delta)
            return join_deltas(deltas)

    sampler: Any = OneByOne()
    generator = Generator(tokenizer, sampler, "p", NO_IMAGES.images)

    async def looks(count: int) -> int:
        before, sampling = CountedTokens.looks, Sampling(max_new_tokens=count)
        request = AnswerRequest(token_ids=(letter,), sampling=sampling, count=1, stops=("b",))
        (answer,) = await generator.answer(request)
        assert answer.text == "a" * count
        return CountedTokens.looks - before

    assert await looks(200) == 10 * await looks(20)
