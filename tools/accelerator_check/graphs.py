"""The reference engine with decode passes replayed and plain: the same tokens, and tokens/s."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path

import torch

from services.rollout import metrics
from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import Engine, Generation, Sampling, create_engine
from services.rollout.engine.reference.graphs import obstacle
from tools.accelerator_check.models import random_model, shape_of
from tools.accelerator_check.work import StepWork

ROUNDS = 3  # the first ones capture
GOAL = 0.98  # of tokens; sums of other lengths round otherwise, and a near tie falls otherwise
LOGPROB_GOAL = 0.05


def run(work: StepWork) -> None:
    """Plain, then replayed; where nothing is captured the reason."""
    model = random_model(work, "0.5b")
    plain = asyncio.run(_generate(work, model, "off"))
    if reason := obstacle(None):
        work.note(reason)
        work.record(replayed_tokens_per_s=math.nan, speedup=math.nan)
        return
    before = metrics.DECODE_PASSES.labels("replayed")._value.get()
    replayed = asyncio.run(_generate(work, model, "on"))
    count = metrics.DECODE_PASSES.labels("replayed")._value.get() - before
    firsts = [
        next((i for i, (a, b) in enumerate(zip(x[0], y[0], strict=True)) if a != b), len(x[0]))
        for x, y in zip(plain[1], replayed[1], strict=True)
    ]
    same = sum(firsts) / sum(len(x[0]) for x in plain[1])
    apart = max(
        (
            abs(a - b)
            for first, x, y in zip(firsts, plain[1], replayed[1], strict=True)
            for a, b in zip(x[1][:first], y[1][:first], strict=True)
        ),
        default=0.0,
    )
    work.record(
        replayed_passes=count,
        speedup=replayed[0] / plain[0],
        same_tokens=same,
        logprob_difference=apart,
    )
    if not count:
        work.fail("no pass was replayed")
    if not apart <= LOGPROB_GOAL:
        work.fail(f"log-probs are apart by {apart:.2g}, more than {LOGPROB_GOAL:g}")
    if work.small and not same >= GOAL:
        work.fail(f"only {same:.3f} of the tokens come before the first that differs")


Answers = list[tuple[list[int], list[float]]]


async def _generate(work: StepWork, model: Path, graphs: str) -> tuple[float, Answers]:
    """Tokens/s of the last round, and what each request drew, greedily."""
    count, wanted = (4, 24) if work.small else (64, 128)
    settings = {
        "model": str(model),
        "dtype": "float32" if work.small else "bfloat16",
        "max_running": count,
        "max_model_length": 64 if work.small else 512,
        "decode_graphs": graphs,
        "prefill_chunk_tokens": 8192,
    }
    engine = create_engine("reference", EngineConfig.model_validate(settings))
    await engine.start()
    try:
        for number in range(ROUNDS):
            began = time.perf_counter()
            answers = await asyncio.gather(
                *(_one(work, engine, number, index, wanted) for index in range(count))
            )
            seconds = time.perf_counter() - began
    finally:
        await engine.close()
    speed = count * wanted / seconds
    name = "plain" if graphs == "off" else "replayed"
    work.record(**{f"{name}_tokens_per_s": speed})
    return speed, list(answers)


async def _one(
    work: StepWork, engine: Engine, number: int, index: int, wanted: int
) -> tuple[list[int], list[float]]:
    vocabulary = shape_of(work, "0.5b").vocabulary
    generator = torch.Generator().manual_seed(index)
    generation = Generation(
        request_id=f"{number}-{index}",
        prompt_token_ids=torch.randint(vocabulary, (8 + index,), generator=generator).tolist(),
        sampling=Sampling(max_new_tokens=wanted, temperature=0),
    )
    tokens: list[int] = []
    logprobs: list[float] = []
    async for delta in engine.generate(generation):
        tokens.extend(delta.token_ids)
        logprobs.extend(delta.logprobs)
    return tokens, logprobs
