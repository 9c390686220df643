"""What an engine draws, and what it says about it. transformers is the oracle."""

from __future__ import annotations

import asyncio
import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.rollout.engine.interface import FinishReason
from services.rollout.errors import NoMinTokensError, NoTokenizerError
from sluice.runtime.errors import InvalidFieldError
from tests.contract.engine.cases import (
    Model,
    StartEngine,
    complete,
    gather,
    request_of,
    text_of,
    write_letters,
)

PROMPTS = [[5], [1, 2, 3], list(range(40)), [7] * 19]


async def test_greedy_tokens_are_those_of_generate(model: Model, start_engine: StartEngine) -> None:
    engine = await start_engine(model=str(model.directory))
    requests = [
        request_of(str(i), prompt, max_new_tokens=20, temperature=0)
        for i, prompt in enumerate(PROMPTS)
    ]
    answers = await asyncio.gather(*[complete(engine, request) for request in requests])
    for prompt, (answer,) in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([prompt])
        expected = model.module.generate(
            ids, max_new_tokens=20, do_sample=False, attention_mask=torch.ones_like(ids)
        )
        assert list(answer.token_ids) == expected[0, len(prompt) :].tolist()
        assert answer.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
async def test_logprobs_are_those_of_the_tempered_distribution_and_of_temperature_1(
    model: Model, start_engine: StartEngine, temperature: float
) -> None:
    engine = await start_engine(model=str(model.directory))
    requests = [
        request_of(str(i), prompt, 3, max_new_tokens=12, temperature=temperature, top_k=5 * i)
        for i, prompt in enumerate(PROMPTS)
    ]
    answers = await asyncio.gather(*[complete(engine, request) for request in requests])
    for prompt, samples in zip(PROMPTS, answers, strict=True):
        for sample in samples:
            expected = model.logprobs(prompt, sample.token_ids, temperature)
            assert sample.logprobs == pytest.approx(expected, abs=1e-4)
            if sample.logprobs_t1 or temperature == 1.0:  # not every engine measures both
                assert sample.logprobs_t1 == pytest.approx(
                    model.logprobs(prompt, sample.token_ids), abs=1e-4
                )


async def test_an_engine_that_measures_both_does_so_at_any_temperature(
    qwen3: Model, start_seeded_engine: StartEngine
) -> None:
    engine = await start_seeded_engine(model=str(qwen3.directory))
    (sample,) = await complete(engine, request_of("a", [1, 2], temperature=0.6))
    expected = qwen3.logprobs([1, 2], sample.token_ids)
    assert sample.logprobs_t1 == pytest.approx(expected, abs=1e-4)


async def test_score_is_teacher_forced(model: Model, start_engine: StartEngine) -> None:
    engine = await start_engine(model=str(model.directory), prefill_chunk_tokens=7)
    text = [int(token) for token in torch.randint(97, (50,))]
    for context in (1, 7, 8, 49):
        expected = model.logprobs(text[:context], tuple(text[context:]))
        assert await engine.score(text, context) == pytest.approx(expected, abs=1e-4)


async def test_the_likeliest_tokens_are_named_beside_the_scores(
    model: Model, start_engine: StartEngine
) -> None:
    engine = await start_engine(model=str(model.directory))
    text = [int(token) for token in torch.randint(97, (20,))]
    scores = await engine.score_top(text, 3, 2)
    logits = model.module(torch.tensor([text])).logits[0, 2:-1].double()
    likeliest, tokens = logits.log_softmax(-1).topk(2)
    assert scores.logprobs == pytest.approx(model.logprobs(text[:3], tuple(text[3:])), abs=1e-4)
    assert [[token for token, _ in place] for place in scores.top] == tokens.tolist()
    found = [value for place in scores.top for _, value in place]
    assert found == pytest.approx(likeliest.flatten().tolist(), abs=1e-4)


async def test_of_tokens_that_are_alike_the_lowest_are_named(
    qwen3: Model, start_seeded_engine: StartEngine, tmp_path: Path
) -> None:
    """As a trainer that teaches does."""
    model = copy.deepcopy(qwen3.module)
    model.get_output_embeddings().weight.data.zero_()
    model.save_pretrained(tmp_path)
    engine = await start_seeded_engine(model=str(tmp_path))
    scores = await engine.score_top([1, 2, 3, 4], 2, 5)
    assert [[token for token, _ in place] for place in scores.top] == [[0, 1, 2, 3, 4]] * 2


async def test_streamed_deltas_add_up_to_the_answer(
    qwen3: Model, start_engine: StartEngine
) -> None:
    engine = await start_engine(model=str(qwen3.directory))
    plain = await complete(engine, request_of("a", [1, 2], 3, temperature=0))
    streamed = await gather(engine, request_of("b", [1, 2], 3, temperature=0, stream=True))
    for whole, deltas in zip(plain, streamed, strict=True):
        assert len(deltas) == 8
        assert sum((delta.token_ids for delta in deltas), ()) == whole.token_ids
        logprobs = sum((delta.logprobs for delta in deltas), ())
        assert logprobs == pytest.approx(whole.logprobs, abs=1e-5)
        assert [delta.finish_reason for delta in deltas] == [None] * 7 + [FinishReason.LENGTH]
        places = [(span.first_token, span.last_token) for d in deltas for span in d.spans]
        assert places == [(i, i) for i in range(8)]


async def test_a_seed_gives_the_same_sample_whoever_runs_beside(
    qwen3: Model, start_seeded_engine: StartEngine
) -> None:
    engine = await start_seeded_engine(model=str(qwen3.directory))
    request = request_of("a", [1, 2, 3], 2, seeds=(11, 12), max_new_tokens=24)
    alone = await complete(engine, request)
    noise = [request_of(str(i), [i] * (i + 1), max_new_tokens=5 * i + 1) for i in range(9)]
    crowd = await asyncio.gather(*[complete(engine, item) for item in [*noise, request]])
    assert [s.token_ids for s in crowd[-1]] == [s.token_ids for s in alone]
    assert alone[0].token_ids != alone[1].token_ids


async def test_without_seeds_samples_differ(qwen3: Model, start_engine: StartEngine) -> None:
    engine = await start_engine(model=str(qwen3.directory))
    samples = await complete(engine, request_of("a", [1], 8, temperature=3.0))
    assert len({sample.token_ids for sample in samples}) == 8


async def test_a_sample_continued_by_its_tokens_draws_as_if_never_cut(
    qwen3: Model, start_seeded_engine: StartEngine
) -> None:
    engine = await start_seeded_engine(model=str(qwen3.directory))
    (whole,) = await complete(engine, request_of("a", [1, 2], seeds=(9,), max_new_tokens=20))
    (first,) = await complete(engine, request_of("b", [1, 2], seeds=(9,), max_new_tokens=7))
    prompt = [1, 2, *first.token_ids]
    (rest,) = await complete(engine, request_of("c", prompt, seeds=(9,), max_new_tokens=13))
    assert first.token_ids + rest.token_ids == whole.token_ids


async def test_a_stop_token_ends_a_sample_and_belongs_to_it(
    qwen3: Model, start_engine: StartEngine
) -> None:
    engine = await start_engine(model=str(qwen3.directory))
    (free,) = await complete(engine, request_of("a", [4], temperature=0, max_new_tokens=12))
    stop = free.token_ids[5]
    first = free.token_ids.index(stop)
    stops = (stop, 0) if 0 not in free.token_ids[:first] else (stop,)
    request = request_of("b", [4], temperature=0, max_new_tokens=12, stop_token_ids=stops)
    other = request_of("c", [4], temperature=0, max_new_tokens=12)
    (cut,), (beside,) = await asyncio.gather(complete(engine, request), complete(engine, other))
    assert cut.token_ids == free.token_ids[: first + 1]
    assert cut.finish_reason is FinishReason.STOP
    assert beside.token_ids == free.token_ids


async def test_with_the_models_end_ignored_stop_tokens_end_a_sample_all_the_same(
    qwen3: Model, start_engine: StartEngine
) -> None:
    engine = await start_engine(model=str(qwen3.directory))
    settings: dict[str, Any] = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    (free,) = await complete(engine, request_of("a", [4], **settings))
    assert (len(free.token_ids), free.finish_reason) == (24, FinishReason.LENGTH)
    stop = free.token_ids[9]
    whole = free.token_ids.index(stop) + 1
    request = request_of("b", [4], stop_token_ids=(stop, 96), **settings)
    (cut,) = await complete(engine, request)
    assert cut.token_ids == free.token_ids[:whole]
    assert cut.finish_reason is FinishReason.STOP
    (pieces,) = await gather(engine, replace(request, request_id="c", stream=True))
    assert [token for piece in pieces for token in piece.token_ids] == [*cut.token_ids]
    load = engine.status().rank_loads[0]
    assert (load.running_count, load.waiting_count, load.used_tokens) == (0, 0, 0)


async def test_the_models_own_end_is_drawn_and_passed_over_where_it_is_ignored(
    qwen3: Model, start_seeded_engine: StartEngine, tmp_path: Path
) -> None:
    free, ends = await _with_an_end(qwen3, start_seeded_engine, tmp_path)
    engine = await start_seeded_engine(model=str(tmp_path / "ends"))
    settings: dict[str, Any] = {"temperature": 0, "max_new_tokens": 20}
    (cut,) = await complete(engine, request_of("a", [4], **settings))
    assert cut.token_ids == free[: free.index(ends) + 1]
    (passed,) = await complete(engine, request_of("b", [4], ignore_eos=True, **settings))
    assert passed.token_ids == free
    assert passed.logprobs == pytest.approx(qwen3.logprobs([4], free), abs=1e-4)


async def _with_an_end(
    model: Model, start: StartEngine, folder: Path
) -> tuple[tuple[int, ...], int]:
    """20 greedy tokens after [4], and the one of them that ends samples of the model at `ends`."""
    engine = await start(model=str(model.directory))
    (free,) = await complete(engine, request_of("a", [4], temperature=0, max_new_tokens=20))
    ending = copy.deepcopy(model.module)
    token = free.token_ids[4]
    ending.config.eos_token_id = ending.generation_config.eos_token_id = token
    ending.save_pretrained(folder / "ends")
    return tuple(free.token_ids), token


@pytest.mark.parametrize("deterministic", [False, True])
async def test_before_its_least_tokens_nothing_ends_a_sample(
    qwen3: Model, start_seeded_engine: StartEngine, tmp_path: Path, *, deterministic: bool
) -> None:
    """transformers' own generation with `min_new_tokens` is the oracle; log-probs are of all."""
    _, ends = await _with_an_end(qwen3, start_seeded_engine, tmp_path)
    folder = tmp_path / "ends"
    engine = await start_seeded_engine(model=str(folder), deterministic=deterministic)
    for least in (0, 1, 5, 12, 20):
        requests = [
            request_of(
                f"{least}/{i}",
                prompt,
                max_new_tokens=20,
                temperature=0,
                min_new_tokens=least,
                stop_token_ids=(7, 11),
            )
            for i, prompt in enumerate(PROMPTS)
        ]
        beside = request_of(f"{least}/beside", [4], max_new_tokens=20, temperature=0)
        *answers, (other,) = await asyncio.gather(
            *[complete(engine, request) for request in [*requests, beside]]
        )
        for prompt, (answer,) in zip(PROMPTS, answers, strict=True):
            ids = torch.tensor([prompt])
            expected = qwen3.module.generate(
                ids,
                max_new_tokens=20,
                min_new_tokens=least or None,
                do_sample=False,
                attention_mask=torch.ones_like(ids),
                eos_token_id=[ends, 7, 11],
                pad_token_id=0,
            )
            assert list(answer.token_ids) == expected[0, len(prompt) :].tolist()
            assert len(answer.token_ids) >= least
            logprobs = qwen3.logprobs(prompt, answer.token_ids)
            assert answer.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert other.token_ids[-1] == ends, "a neighbour ends as ever"


async def test_a_sample_with_least_tokens_is_continued_as_if_never_cut(
    qwen3: Model, start_seeded_engine: StartEngine
) -> None:
    engine = await start_seeded_engine(model=str(qwen3.directory))
    stops = tuple(range(60))
    settings: dict[str, Any] = {"seeds": (9,), "stop_token_ids": stops}
    (whole,) = await complete(
        engine, request_of("a", [1, 2], max_new_tokens=20, min_new_tokens=11, **settings)
    )
    assert not set(whole.token_ids[:11]) & set(stops)
    (first,) = await complete(
        engine, request_of("b", [1, 2], max_new_tokens=7, min_new_tokens=7, **settings)
    )
    prompt = [1, 2, *first.token_ids]
    (rest,) = await complete(
        engine, request_of("c", prompt, max_new_tokens=13, min_new_tokens=4, **settings)
    )
    assert first.token_ids + rest.token_ids == whole.token_ids


async def test_a_stop_string_ends_a_sample_from_its_least_tokens_on(
    qwen3: Model, tmp_path: Path, start_seeded_engine: StartEngine
) -> None:
    letters = write_letters(tmp_path / "letters")
    engine = await start_seeded_engine(model=str(qwen3.directory), tokenizer=letters)
    settings: dict[str, Any] = {"temperature": 0, "max_new_tokens": 24}
    (free,) = await complete(engine, request_of("a", [4], **settings))
    text = text_of(letters, free.token_ids)
    stop = text[3]
    ends = [n for n in range(1, 25) if text_of(letters, free.token_ids[:n]).endswith(stop)]
    for least in (ends[0], ends[0] + 1):
        (cut,) = await complete(
            engine, request_of(f"b{least}", [4], stop=(stop,), min_new_tokens=least, **settings)
        )
        whole = next((n for n in ends if n >= least), 24)
        assert cut.token_ids == free.token_ids[:whole]


async def test_where_every_token_ends_a_sample_none_can_be_held_back(
    qwen3: Model, start_seeded_engine: StartEngine
) -> None:
    engine = await start_seeded_engine(model=str(qwen3.directory))
    request = request_of("a", [1], min_new_tokens=1, stop_token_ids=tuple(range(97)))
    with pytest.raises(InvalidFieldError):
        await complete(engine, request)
    most = request_of("b", [1], min_new_tokens=8, stop_token_ids=tuple(range(1, 97)))
    (sample,) = await complete(engine, most)
    assert sample.token_ids == (0,) * 8


async def test_an_engine_without_least_tokens_refuses_them_and_says_so_before(
    qwen3: Model, start_engine: StartEngine
) -> None:
    engine = await start_engine(model=str(qwen3.directory))
    request = request_of("a", [1], max_new_tokens=3, min_new_tokens=3)
    if engine.status().takes_min_new_tokens:
        (sample,) = await complete(engine, request)
        assert len(sample.token_ids) == 3
        return
    with pytest.raises(NoMinTokensError):
        await complete(engine, request)


async def test_a_stop_string_ends_a_sample_however_it_is_cut(
    qwen3: Model, tmp_path: Path, start_engine: StartEngine
) -> None:
    letters = write_letters(tmp_path / "letters")
    engine = await start_engine(model=str(qwen3.directory), tokenizer=letters)
    draw = random.Random(3)
    settings: dict[str, Any] = {"temperature": 0, "max_new_tokens": 24}
    for prompt in ([4], [9, 8], [30, 31, 32]):
        name = str(prompt)
        (free,) = await complete(engine, request_of(name, prompt, **settings))
        end = draw.randrange(6, 20)
        inside = text_of(letters, free.token_ids[end - 4 : end]).strip("\ufffd")
        stops = ("no such text", inside, inside + "?")
        whole = next(
            n for n in range(1, 25) if any(s in text_of(letters, free.token_ids[:n]) for s in stops)
        )
        request = request_of(name + "stop", prompt, stop=stops, **settings)
        other = request_of(name + "beside", prompt, **settings)
        (cut,), (beside,) = await asyncio.gather(complete(engine, request), complete(engine, other))
        assert cut.token_ids == free.token_ids[:whole]
        assert cut.logprobs == pytest.approx(free.logprobs[:whole], abs=1e-4)
        assert cut.finish_reason is FinishReason.STOP
        assert cut.spans[-1].last_token == whole - 1
        assert beside.token_ids == free.token_ids
        (pieces,) = await gather(engine, replace(request, request_id="s" + name, stream=True))
        assert [token for piece in pieces for token in piece.token_ids] == [*cut.token_ids]
        assert [piece.finish_reason for piece in pieces][-1] is FinishReason.STOP
        before = free.token_ids[: whole - 1]
        rest = replace(
            request,
            request_id="rest" + name,
            prompt_token_ids=[*prompt, *before],
            sampled_count=len(before),
        )
        (last,) = await complete(engine, rest)
        assert [*before, *last.token_ids] == [*cut.token_ids]
        assert last.finish_reason is FinishReason.STOP
    load = engine.status().rank_loads[0]
    assert (load.running_count, load.waiting_count, load.used_tokens) == (0, 0, 0)


async def test_an_engine_without_a_tokenizer_refuses_stop_strings(
    qwen3: Model, start_engine: StartEngine
) -> None:
    engine = await start_engine(model=str(qwen3.directory))
    with pytest.raises(NoTokenizerError):
        await complete(engine, request_of("a", [4], stop=("a",)))


async def test_the_model_length_ends_a_sample(qwen3: Model, start_engine: StartEngine) -> None:
    engine = await start_engine(model=str(qwen3.directory), max_model_length=32)
    (sample,) = await complete(engine, request_of("a", [1] * 20, max_new_tokens=100))
    assert len(sample.token_ids) == 12
    assert sample.finish_reason is FinishReason.LENGTH


async def test_more_samples_than_slots_and_chunked_prompts_come_out_whole(
    model: Model, start_engine: StartEngine
) -> None:
    engine = await start_engine(
        model=str(model.directory), max_running=3, prefill_chunk_tokens=5, max_cached_tokens=100
    )
    prompts = [[i + 1] * (3 * i + 1) for i in range(6)]
    requests = [request_of(str(i), p, 5, max_new_tokens=9) for i, p in enumerate(prompts)]
    answers = await asyncio.gather(*[complete(engine, request) for request in requests])
    for prompt, samples in zip(prompts, answers, strict=True):
        for sample in samples:
            expected = model.logprobs(prompt, sample.token_ids)
            assert sample.logprobs == pytest.approx(expected, abs=1e-4)
    load = engine.status().rank_loads[0]
    assert (load.running_count, load.waiting_count, load.used_tokens) == (0, 0, 0)
