"""Reinforcement learning written with Tinker's client alone: adapters are to copy four digits.

`python examples/tinker_loop.py URL MODEL [--steps 60]`, with `pip install tinker`: URL of a
gateway, MODEL as its configuration has it, which is that of `python -m examples.models.tiny_qwen3`.
Where the gateway has a token, TINKER_API_KEY is `tml-` and that.

Embedding and head of that are random and frozen, so adapters learn where to end, and little more: a
reward of 0.2 for 0.07. Nothing here knows of Sluice. The last line is
`tinker: first=<reward> last=<reward> steps=<n>`.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator, Sequence
from statistics import fmean

import tinker
from tinker import types

DIGITS, EQUALS, END = 4, 10, 11  # tokens 0 to 9 are the digits
PROMPTS, SAMPLES = 32, 16


def reward(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """The share of places that are right: the digits as they stand, then the end."""
    wanted = [*prompt[:DIGITS], END]
    right = sum(a == b for a, b in zip(answer, wanted, strict=False))
    return right / max(len(answer), len(wanted))


def datum(
    prompt: Sequence[int], sequence: types.SampledSequence, advantage: float
) -> types.Datum | None:
    """A sample as it is trained on; None without log-probs."""
    if sequence.logprobs is None:
        return None
    tokens, observed = [*prompt, *sequence.tokens], len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * observed + sequence.logprobs,
            "advantages": [0.0] * observed + [advantage] * len(sequence.tokens),
        },
    )


def train(url: str, model: str, steps: int) -> Iterator[float]:
    """Yields the mean reward of each step."""
    key = os.environ.get("TINKER_API_KEY", "tml-none")
    service = tinker.ServiceClient(base_url=url, api_key=key)
    training = service.create_lora_training_client(model, rank=16, seed=0).result()
    rng = random.Random(0)
    for step in range(steps):
        sampler = training.save_weights_and_get_sampling_client().result()
        prompts = [[*rng.choices(range(10), k=DIGITS), EQUALS] for _ in range(PROMPTS)]
        futures = [
            sampler.sample(
                types.ModelInput.from_ints(prompt),
                SAMPLES,
                types.SamplingParams(max_tokens=DIGITS + 1, seed=(step * PROMPTS + i) * SAMPLES),
            )
            for i, prompt in enumerate(prompts)
        ]
        data, rewards = [], list[float]()
        for prompt, future in zip(prompts, futures, strict=True):
            sequences = future.result().sequences
            scores = [reward(prompt, sequence.tokens) for sequence in sequences]
            for sequence, score in zip(sequences, scores, strict=True):
                one = datum(prompt, sequence, score - fmean(scores))
                data += [] if one is None else [one]
            rewards += scores
        passed = training.forward_backward(data, "importance_sampling")
        training.optim_step(types.AdamParams(learning_rate=4e-3))
        passed.result()
        yield fmean(rewards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    rewards = []
    for step, mean in enumerate(train(options.url, options.model, options.steps), 1):
        rewards.append(mean)
        print(f"step {step:3d}  reward {mean:.3f}", flush=True)
    first, last = fmean(rewards[:5]), fmean(rewards[-5:])
    print(f"tinker: first={first:.3f} last={last:.3f} steps={options.steps}")


if __name__ == "__main__":
    main()
