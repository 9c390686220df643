"""One step of your own, over the API alone: sample, reward here, train, publish, read a metric.

`python -m examples.own_reward runs/example/services.json`

No episode worker takes part: prompts go to an engine as token ids, samples to the trainer as rows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

import numpy as np

from examples import access
from sluice.algo.spec import AdvantageSpec, LossSpec
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.client import EngineClient, TrainerClient, new_request_id
from sluice.exit_code import exit_code
from sluice.runtime.security import SecurityConfig
from sluice.samples.sample import Sample
from sluice.samples.tokenizer import TextTokenizer
from sluice.supervise import read_services

SAMPLES = 16


def to_row(group: str, index: int, prompt: list[int], completion: engine_pb.Completion) -> Sample:
    """Prompt and response in one sequence; log-probs are the engine's, the reward is ours."""
    nines = list(completion.token_ids).count(9)  # the tokens of this model are its digits
    return Sample(
        sample_id=f"{group}/{index}",  # unique in the batch
        group_id=group,  # samples of one prompt: what GRPO compares
        token_ids=np.array([*prompt, *completion.token_ids], np.int32),
        prompt_length=len(prompt),
        columns={
            "rollout_logprobs": np.array(completion.logprobs, np.float32),
            "reward": nines / max(1, len(completion.token_ids)),
        },
    )


async def one_step(trainer: TrainerClient, engine: EngineClient, tokenizer: TextTokenizer) -> None:
    step, run = (await trainer.get()).step, new_request_id()
    published = await trainer.publish_weights()
    await engine.prepare_weights(published.weights)  # loaded beside what serves
    await engine.commit_weights(published.weights)  # swapped in
    rows: list[Sample] = []
    for text in ("1234=", "5678="):
        prompt = tokenizer.encode(text, special=True)
        found = await engine.generate(prompt, max_new_tokens=5, sample_count=SAMPLES)
        rows += [to_row(f"{run}-{text}", i, prompt, one) for i, one in enumerate(found)]
    upload = await trainer.upload_batch(run, len(rows), samples=rows)
    await trainer.compute_advantages(upload.batch, AdvantageSpec(name="grpo"))
    loss = LossSpec(name="ppo_clip", clip_low=0.2)
    # sums of gradients: as many parts as you like, on the step that was read above, ...
    await trainer.forward_backward(upload.batch, loss, expected_step=step, part_id=run)
    done = await trainer.step_optimizer(step, [run])  # ... applied once, by name
    await trainer.delete_batch(upload.batch)
    reward = sum(float(row.columns["reward"]) for row in rows) / len(rows)
    print(f"step {done.step}  reward {reward:.3f}  gradient norm {done.grad_norm:.3f}")


def print_step_number(services: Path, security: SecurityConfig) -> None:
    """Out of the metrics page of the trainer."""
    address = json.loads(services.read_text())["trainer"]["metrics_address"]
    lines = access.read_metrics_page(address, security).splitlines()
    print(*(line for line in lines if line.startswith("sluice_trainer_step_number")), sep="\n")


async def main(services: Path, security: SecurityConfig) -> None:
    addresses = read_services(services)
    tokenizer = TextTokenizer(services.parent / "model")
    async with (
        TrainerClient(addresses["trainer"], security) as trainer,
        EngineClient(addresses["rollout"], security) as engine,
    ):
        await one_step(trainer, engine, tokenizer)
    await asyncio.to_thread(print_step_number, services, security)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("services", type=Path, help="services.json of `sluice up`")
    access.add_flags(parser)
    flags = parser.parse_args()
    sys.exit(exit_code(main(flags.services, access.security_of(flags))))
