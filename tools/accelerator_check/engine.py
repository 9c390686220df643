"""Tokens/s of the reference engine beside transformers' `generate`, many requests at once.

Prompts of one length, responses of many (lognormal), greedy, no end-of-sequence token. `generate`
takes all requests as one batch, lets each row end at its own length, and is done with the longest.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import Engine, Generation, Sampling, create_engine
from sluice import platform
from tools.accelerator_check.models import random_model, shape_of
from tools.accelerator_check.work import StepWork

ROUNDS = 2  # the first warms up


@dataclass(frozen=True)
class RequestLoad:
    """Prompts of one length, and how many tokens each wants."""

    prompts: list[list[int]]
    lengths: list[int]

    @classmethod
    def draw(
        cls, count: int, vocabulary: int, *, prompt: int, median: int, longest: int
    ) -> RequestLoad:
        rng = random.Random(count)
        return cls(
            [[rng.randrange(vocabulary) for _ in range(prompt)] for _ in range(count)],
            [
                min(longest, max(4, round(rng.lognormvariate(math.log(median), 0.7))))
                for _ in range(count)
            ],
        )

    @property
    def wanted(self) -> int:
        return sum(self.lengths)


class OwnLength(StoppingCriteria):
    """Each row ends at its own length."""

    def __init__(self, prompt: int, lengths: list[int], device: torch.device) -> None:
        self._ends = torch.tensor(lengths, device=device) + prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends


def run(work: StepWork) -> None:
    """Both sides at every number of requests."""
    counts = (4, 8) if work.small else (64, 256)
    sizes = (
        {"prompt": 8, "median": 8, "longest": 16}
        if work.small
        else {"prompt": 64, "median": 64, "longest": 160}
    )
    vocabulary = shape_of(work, "0.5b").vocabulary
    loads = [RequestLoad.draw(count, vocabulary, **sizes) for count in counts]
    model = random_model(work, "0.5b")
    engine = asyncio.run(_engine(work, model, loads, sum(sizes.values())))
    generate = _generate(work, model, loads)
    ratios = [ours / theirs for ours, theirs in zip(engine, generate, strict=True)]
    for count, ratio in zip(counts, ratios, strict=True):
        work.record(**{f"vs_generate_{count}": ratio})
    work.record(vs_generate=min(ratios))


def _dtype(work: StepWork) -> str:
    return "float32" if work.small else "bfloat16"


async def _engine(
    work: StepWork, model: Path, loads: list[RequestLoad], max_length: int
) -> list[float]:
    settings = {
        "model": str(model),
        "dtype": _dtype(work),
        "max_running": max(len(load.lengths) for load in loads),
        "max_model_length": max_length,
        "prefill_chunk_tokens": 512 if work.small else 8192,
    }
    engine = create_engine("reference", EngineConfig.model_validate(settings))
    await engine.start()
    speeds = []
    try:
        for load in loads:
            seconds = math.inf
            for number in range(ROUNDS):
                began = time.perf_counter()
                await asyncio.gather(
                    *(_one(engine, load, number, index) for index in range(len(load.lengths)))
                )
                seconds = time.perf_counter() - began
            speeds.append(load.wanted / seconds)
            work.record(**{f"engine_{len(load.lengths)}_tokens_per_s": speeds[-1]})
    finally:
        await engine.close()
    return speeds


async def _one(engine: Engine, load: RequestLoad, number: int, index: int) -> None:
    generation = Generation(
        request_id=f"{len(load.lengths)}-{number}-{index}",
        prompt_token_ids=load.prompts[index],
        sampling=Sampling(max_new_tokens=load.lengths[index], temperature=0),
    )
    drawn = 0
    async for delta in engine.generate(generation):
        drawn += len(delta.token_ids)
    if drawn != load.lengths[index]:
        raise AssertionError(f"{drawn} tokens came, {load.lengths[index]} were asked for")


def _generate(work: StepWork, model: Path, loads: list[RequestLoad]) -> list[float]:
    current = platform.current()
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, _dtype(work)))
    policy = policy.to(current.device()).eval()
    speeds = []
    for load in loads:
        prompts = torch.tensor(load.prompts, device=current.device())
        own = OwnLength(prompts.shape[1], load.lengths, current.device())
        config = GenerationConfig(
            max_new_tokens=max(load.lengths), do_sample=False, eos_token_id=None, pad_token_id=0
        )
        seconds = math.inf
        for _ in range(ROUNDS):
            began = time.perf_counter()
            policy.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([own]),
            )
            current.synchronize()
            seconds = time.perf_counter() - began
        speeds.append(load.wanted / seconds)
        work.record(**{f"generate_{len(load.lengths)}_tokens_per_s": speeds[-1]})
    return speeds
