"""The reference engine beside transformers `generate` and, if there is one, SGLang on CPU.

    python benchmarks/engine.py [--model DIR] [--rounds 5] [--sglang-python VENV/bin/python]

SmolLM2-135M in float32 on one thread, 32 requests at once, greedy, end-of-sequence off, so that
all sides do the same work: `equal` has 32 prompt tokens and 48 new ones each; `mixed` has
lognormal response lengths (median 24, sigma 0.9, 4 to 256). `generate` takes the 32 as one
left-padded batch and ends when the longest does. Rounds are interleaved and a side's figure is
its median. Ratios are of wanted tokens per processor second, which other work on the machine
stretches less than the wall clock; one thread makes them the same on a quiet one.

Last line: engine / generate at equal and at mixed lengths, and engine / SGLang at equal ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from benchmarks.sglang_server import SglangServer, Timing
from examples.models.smollm2 import ensure_smollm2
from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import Engine, Generation, Sampling, create_engine

REQUESTS, PROMPT, EQUAL_LENGTH = 32, 32, 48
MEDIAN, SIGMA, SHORTEST, LONGEST = 24, 0.9, 4, 256


@dataclass(frozen=True)
class Load:
    """Prompts, and how many tokens each wants."""

    name: str
    prompts: list[list[int]]
    lengths: list[int]


Timings = dict[tuple[str, str], list[Timing]]


def create_loads(vocabulary: int, seed: int = 0) -> list[Load]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(1000, vocabulary) for _ in range(PROMPT)] for _ in range(REQUESTS)]
    drawn = [rng.lognormvariate(math.log(MEDIAN), SIGMA) for _ in range(REQUESTS)]
    mixed = [min(LONGEST, max(SHORTEST, round(length))) for length in drawn]
    return [Load("equal", prompts, [EQUAL_LENGTH] * REQUESTS), Load("mixed", prompts, mixed)]


class LengthsReached(StoppingCriteria):
    """Each row ends at its own length, as if it drew its end-of-sequence token there."""

    def __init__(self, prompt: int, lengths: list[int]) -> None:
        self._ends = torch.tensor(lengths) + prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends


def run_generate(model: PreTrainedModel, load: Load) -> None:
    ids = torch.tensor(load.prompts)
    config = GenerationConfig(
        max_new_tokens=max(load.lengths), do_sample=False, eos_token_id=None, pad_token_id=0
    )
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
        stopping_criteria=StoppingCriteriaList([LengthsReached(PROMPT, load.lengths)]),
    )


async def run_engine(engine: Engine, load: Load, round_number: int) -> None:
    async def one(number: int) -> None:
        generation = Generation(
            request_id=f"{load.name}-{round_number}-{number}",
            prompt_token_ids=load.prompts[number],
            sampling=Sampling(max_new_tokens=load.lengths[number], temperature=0),
        )
        async for delta in engine.generate(generation):
            assert len(delta.token_ids) == load.lengths[number], "a request ended early"

    await asyncio.gather(*(one(number) for number in range(REQUESTS)))


def timed(run: Callable[[], object]) -> Timing:
    wall, cpu = time.monotonic(), time.process_time()
    run()
    return Timing(time.process_time() - cpu, time.monotonic() - wall)


async def timed_engine(engine: Engine, load: Load, round_number: int) -> Timing:
    wall, cpu = time.monotonic(), time.process_time()
    await run_engine(engine, load, round_number)
    return Timing(time.process_time() - cpu, time.monotonic() - wall)


def without_stops(directory: Path, target: Path) -> Path:
    """The same model without end-of-sequence tokens; its weights are linked."""
    for source in directory.iterdir():
        if source.name not in ("config.json", "generation_config.json"):
            (target / source.name).symlink_to(source.resolve())
    config = json.loads((directory / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    return target


async def measure(directory: Path, rounds: int, sglang_python: str) -> Timings:
    """Timings by (side, load)."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    config = EngineConfig(model=str(directory), max_running=REQUESTS, threads=1)
    engine = create_engine("reference", config)
    timings: Timings = {}
    async with AsyncExitStack() as stack:
        server: SglangServer | None = None
        if sglang_python:
            server = stack.enter_context(SglangServer(sglang_python, directory))
        await engine.start()
        stack.push_async_callback(engine.close)
        loads = create_loads(model.config.vocab_size)
        for number in range(-1, rounds):  # the first round warms up
            for load in loads:
                found = {
                    "generate": timed(partial(run_generate, model, load)),
                    "engine": await timed_engine(engine, load, number),
                }
                if server is not None:
                    found["sglang"] = server.timed(load.prompts, load.lengths)
                for side, timing in found.items():
                    if number >= 0:
                        timings.setdefault((side, load.name), []).append(timing)
                        print(side, load.name, number, *(f"{x:.2f}" for x in timing), flush=True)
    return timings


def speeds(timings: Timings) -> dict[tuple[str, str], float]:
    """Median wanted tokens per processor second by (side, load)."""
    wanted = {load.name: sum(load.lengths) for load in create_loads(50000)}
    return {
        (side, load): wanted[load] / statistics.median(timing.cpu_seconds for timing in found)
        for (side, load), found in timings.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="HF directory; default: SmolLM2, converted")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sglang-python", default="", help="python of a venv that has SGLang")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        model = without_stops(arguments.model or ensure_smollm2(), Path(work))
        timings = asyncio.run(measure(model, arguments.rounds, arguments.sglang_python))
    speed = speeds(timings)
    for (side, load), value in sorted(speed.items()):
        print(f"{side:9s} {load:6s} {value:7.1f} tokens per processor second")
    sglang = speed.get(("sglang", "equal"))
    versus = f"{speed['engine', 'equal'] / sglang:.2f}" if sglang else "not-run"
    print(
        f"engine: vs_generate_equal={speed['engine', 'equal'] / speed['generate', 'equal']:.2f}"
        f" vs_generate_mixed={speed['engine', 'mixed'] / speed['generate', 'mixed']:.2f}"
        f" vs_sglang={versus}"
    )


if __name__ == "__main__":
    main()
