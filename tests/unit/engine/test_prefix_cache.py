"""Prompts that begin alike are encoded once, and come out as if encoded alone."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.engine.interface import Delta
from services.rollout.engine.reference.attention import BLOCK, PrefillPrompt, PrefixCache
from services.rollout.engine.reference.core import EngineCore
from services.rollout.engine.reference.loading import open_model
from tests.contract.engine.cases import Model, build_model, request_of

CreateCore = Callable[..., EngineCore]
SHARED = [random.Random(0).randrange(97) for _ in range(40)]


def answers(core: EngineCore) -> dict[int, Delta]:
    while core.has_work:
        core.step()
    found = dict(core.take_outbox())
    assert all(isinstance(outcome, Delta) for outcome in found.values())
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("chunk", [512, 7])
def test_what_prompts_share_is_encoded_once_even_when_they_come_together(
    qwen3: Model, create_core: CreateCore, chunk: int
) -> None:
    core = create_core(qwen3.directory, prefill_chunk_tokens=chunk)
    prompts = {key: [*SHARED, key, key + 1, key + 2] for key in range(1, 9)}
    for key, prompt in prompts.items():
        core.submit(key, request_of(str(key), prompt, max_new_tokens=6))
    found = answers(core)
    # Blocks of 16: the first prompt whole, then 32 of its tokens serve each of the others.
    assert core.prefill_tokens == 43 + 7 * (43 - 32)
    assert core.prefix_hit_tokens == 7 * 32
    for key, prompt in prompts.items():
        expected = qwen3.logprobs(prompt, found[key].token_ids)
        assert found[key].logprobs == pytest.approx(expected, abs=1e-4)


def test_the_next_turn_begins_with_the_last(qwen3: Model, create_core: CreateCore) -> None:
    core = create_core(qwen3.directory)
    core.submit(1, request_of("a", SHARED, max_new_tokens=6))
    first = answers(core)[1]
    turn = [*SHARED, *first.token_ids, 5, 6, 7]
    core.submit(2, request_of("b", turn, max_new_tokens=6))
    second = answers(core)[2]
    assert core.prefix_hit_tokens == 32
    assert second.logprobs == pytest.approx(qwen3.logprobs(turn, second.token_ids), abs=1e-4)


def test_other_weights_share_nothing_with_the_old(
    qwen3: Model, create_core: CreateCore, tmp_path
) -> None:
    other = build_model(tmp_path / "other", "qwen3", seed=1)
    core = create_core(qwen3.directory)
    core.submit(1, request_of("a", SHARED, max_new_tokens=6))
    answers(core)
    assert core.model is not None
    core.serve(core.model, open_model(other.directory, torch.float32, torch.device("cpu"))[1])
    core.submit(2, request_of("b", SHARED, max_new_tokens=6))
    found = answers(core)[2]
    assert core.prefix_hit_tokens == 0
    assert found.logprobs == pytest.approx(other.logprobs(SHARED, found.token_ids), abs=1e-4)


def test_an_aborted_opening_does_not_hold_back_those_that_waited_for_it(
    qwen3: Model, create_core: CreateCore
) -> None:
    core = create_core(qwen3.directory, prefill_chunk_tokens=20)
    core.submit(1, request_of("a", [*SHARED, 1]))
    core.submit(2, request_of("b", [*SHARED, 2]))
    core.step()
    core.abort(["a"])
    assert len(answers(core)[2].token_ids) == 8


def entry(tokens: list[int], cache: PrefixCache) -> PrefillPrompt:
    ids = torch.tensor(tokens)
    prompt = PrefillPrompt(ids, len(tokens))
    prompt.chain = cache.chain(prompt)
    prompt.kv = ids.float()[None, None, None, :, None].expand(1, 2, 1, -1, 3).contiguous()
    return prompt


class Plain:
    """The same promise, by search over lists: least recently used first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.kept: list[list[int]] = []

    def find(self, tokens: list[int]) -> int:
        """Tokens shared in whole blocks, one being left over; uses the entry it finds."""
        shared = [self._shared(tokens, entry) for entry in self.kept]
        longest = max(shared, default=0)
        if longest:
            newest = max(i for i, length in enumerate(shared) if length == longest)
            self.kept.append(self.kept.pop(newest))
        return longest

    def insert(self, tokens: list[int]) -> None:
        whole = len(tokens) // BLOCK * BLOCK
        known = any(entry[:whole] == tokens[:whole] for entry in self.kept)
        if whole and len(tokens) <= self.limit and not known:
            self.kept.append(tokens)
        while sum(map(len, self.kept)) > self.limit:
            self.kept.pop(0)

    def _shared(self, tokens: list[int], entry: list[int]) -> int:
        blocks = 0
        while tokens[blocks:][:BLOCK] == entry[blocks:][:BLOCK] and blocks + BLOCK < len(tokens):
            if len(entry) < blocks + BLOCK:
                break
            blocks += BLOCK
        return blocks


PROMPTS = st.builds(
    lambda bits, tail: [bit for bit in bits for _ in range(BLOCK)] + [9] * tail,
    st.lists(st.integers(0, 1), min_size=0, max_size=5),
    st.sampled_from([0, 1, 5]),
).filter(len)


@settings(max_examples=50)
@given(
    prompts=st.lists(PROMPTS, min_size=4, max_size=20),
    limit=st.sampled_from([0, 70, 130, 10**6]),
)
def test_the_longest_prefix_kept_is_found_and_the_least_used_goes_first(
    prompts: list[list[int]], limit: int
) -> None:
    cache, plain = PrefixCache(limit), Plain(limit)
    for tokens in prompts:
        ids = torch.tensor(tokens)
        prompt = PrefillPrompt(ids, len(tokens))
        prompt.chain = cache.chain(prompt)
        assert cache.adopt(prompt) == (prompt.done > 0)
        assert prompt.done == plain.find(tokens)
        if prompt.done:
            assert prompt.kv is not None
            assert prompt.kv[0, 0, 0, : prompt.done, 0].tolist() == tokens[: prompt.done]
        prompt.kv = ids.float()[None, None, None, :, None].expand(1, 2, 1, -1, 3).contiguous()
        cache.insert(prompt)
        plain.insert(tokens)
        assert sum(map(len, plain.kept)) <= limit
