"""A loop of reinforcement learning, written with the public client alone, climbs."""

from __future__ import annotations

import random
import time
from statistics import fmean

from tinker import types

from tests.tinker.base import EQUALS_ID
from tests.tinker.conftest import Gateway, datum
from tests.tinker.learned import LEARNED

STEPS, PROMPTS, SAMPLES = 30, 16, 16


def reward(prompt: list[int], answer: list[int]) -> float:
    """The share of places that are right: the digits as they stand, then the end."""
    wanted = [*prompt[:2], 11]
    return sum(a == b for a, b in zip(answer, wanted, strict=False)) / max(len(answer), 3)


def test_a_loop_on_the_client_learns_to_copy(gateway: Gateway) -> None:
    """The base writes digits in the other order, and its head is frozen: hence the temperature."""
    rng, rewards = random.Random(0), []
    service = gateway.service()
    training = service.create_lora_training_client(str(gateway.model), rank=8, seed=0).result()
    began = time.monotonic()
    for step in range(STEPS):
        sampler = training.save_weights_and_get_sampling_client().result()
        prompts = [[rng.randrange(10), rng.randrange(10), EQUALS_ID] for _ in range(PROMPTS)]
        futures = []
        for index, prompt in enumerate(prompts):
            seed = (step * PROMPTS + index) * SAMPLES
            params = types.SamplingParams(max_tokens=4, temperature=0.5, seed=seed)
            futures.append(sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, params))
        data, all_rewards = [], []
        for prompt, future in zip(prompts, futures, strict=True):
            sequences = future.result().sequences
            scores = [reward(prompt, sequence.tokens) for sequence in sequences]
            all_rewards += scores
            baseline = fmean(scores)
            for sequence, score in zip(sequences, scores, strict=True):
                if score == baseline:
                    continue
                observed, sampled = len(prompt) - 1, len(sequence.tokens)
                data.append(
                    datum(
                        [*prompt, *sequence.tokens],
                        logprobs=[0.0] * observed + sequence.logprobs,
                        advantages=[0.0] * observed + [score - baseline] * sampled,
                    )
                )
        rewards.append(fmean(all_rewards))
        passed = training.forward_backward(data, "importance_sampling")
        training.optim_step(types.AdamParams(learning_rate=5e-3))
        passed.result()
    LEARNED["first"], LEARNED["last"] = fmean(rewards[:2]), fmean(rewards[-3:])
    LEARNED["seconds_per_step"] = (time.monotonic() - began) / STEPS
    assert LEARNED["last"] > LEARNED["first"] + 0.2
