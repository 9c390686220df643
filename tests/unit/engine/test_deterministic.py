"""With `deterministic`, a sample is the same to the bit alone and in any crowd."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig, LlamaForCausalLM

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import Delta, Generation, Sampling
from services.rollout.engine.reference.core import EngineCore

VOCABULARY = 500
Drawn = dict[tuple[str, int], tuple[object, ...]]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that are no multiples of a vector register, and grouped heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.15,
        eos_token_id=3,
    )
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def generation(rng: random.Random, name: str, length: int, count: int, **sampling) -> Generation:
    return Generation(
        request_id=name,
        prompt_token_ids=[rng.randrange(4, VOCABULARY) for _ in range(length)],
        sampling=Sampling(**{"max_new_tokens": 20, **sampling}),
        sample_count=count,
    )


def run(core: EngineCore, generations: list[Generation], steps_between: int) -> Drawn:
    drawn: Drawn = {}
    pending = list(enumerate(generations))
    while pending or core.has_work:
        arriving = [pending.pop(0)] if steps_between and pending else pending
        for key, one in arriving:
            core.submit(key, one)
        pending = pending if steps_between else []
        for _ in range(max(1, steps_between)):
            core.step()
        for key, delta in core.take_outbox():
            assert isinstance(delta, Delta)
            place = (generations[key].request_id, delta.index)
            drawn[place] = (delta.token_ids, delta.logprobs, delta.logprobs_t1)
    return drawn


@pytest.mark.parametrize(("dtype", "max_running"), [("float32", 5), ("bfloat16", 20)])
def test_alone_and_in_a_crowd(
    directory: Path, create_core: Callable[..., EngineCore], dtype: str, max_running: int
) -> None:
    core = create_core(
        directory,
        dtype=dtype,
        max_running=max_running,
        deterministic=True,
        prefill_chunk_tokens=16,
    )
    rng = random.Random(0)
    targets = [
        generation(rng, "plain", 5, 2, seeds=(1, 2)),
        generation(rng, "cut", 33, 1, seeds=(3,), temperature=0.7, top_p=0.9),
        generation(rng, "top", 16, 3, seeds=(4, 5, 6), top_k=20),
        generation(rng, "greedy", 70, 1, temperature=0),
    ]
    alone: Drawn = {}
    for target in targets:
        alone |= run(core, [target], 0)
    for steps_between in (0, 2):
        noise = [
            generation(rng, str(i), rng.randrange(1, 60), rng.randrange(1, 4), top_p=0.8)
            for i in range(6)
        ]
        crowd = [*targets, *noise]
        rng.shuffle(crowd)
        drawn = run(core, crowd, steps_between)
        assert {place: drawn[place] for place in alone} == alone


def test_more_than_one_thread_is_refused() -> None:
    with pytest.raises(ValidationError, match="deterministic needs 1"):
        EngineConfig(deterministic=True, threads=2)
