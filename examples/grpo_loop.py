"""A whole RL loop over the client library: GRPO on the services of `sluice up`.

`python -m examples.grpo_loop runs/example/services.json examples/copy_digits.jsonl [steps]`

`sluice train` does the same with a ledger, recovery, schedules and reports.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from google.protobuf.struct_pb2 import Struct

from examples import access
from sluice.algo.spec import AdvantageSpec, LossSpec
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.client import (
    EngineClient,
    RolloutClient,
    RouterClient,
    TrainerClient,
    new_request_id,
)
from sluice.exit_code import exit_code
from sluice.runtime import wire
from sluice.runtime.security import SecurityConfig
from sluice.samples.blobs import BlobReference
from sluice.supervise import read_services

GROUPS, SAMPLES = 32, 16
ADVANTAGE = AdvantageSpec(name="grpo")
LOSS = LossSpec(name="ppo_clip", clip_low=0.2)


def rollout_request(step: int, rows: list[dict[str, str]]) -> pb.RolloutRequest:
    """One group a row; the answer is in the row, the environment scores against it."""
    request = pb.RolloutRequest(
        request_id=new_request_id(),
        environment={"name": "prompts"},
        sampling={"max_new_tokens": 5},
        sample_count=SAMPLES,
    )
    request.environment.settings.update({"reward": "position_match"})
    for index, row in enumerate(rows):
        fields = Struct()
        fields.update(row)
        request.groups.append(pb.GroupRequest(group_id=f"step{step}-{index}", row=fields))
    return request


async def update_engine(trainer: TrainerClient, engine: EngineClient) -> None:
    """New weights: loaded and verified while the engine serves, swapped in one short pause."""
    published = await trainer.publish_weights()
    await engine.prepare_weights(published.weights)
    await engine.commit_weights(published.weights)


async def one_step(
    trainer: TrainerClient, rollout: RolloutClient, rows: list[dict[str, str]]
) -> float:
    """Roll out, train, and return the mean reward."""
    step = (await trainer.get()).step
    blobs: list[BlobReference] = []
    rewards: list[float] = []
    async for response in rollout.rollout(rollout_request(step, rows)):
        if response.HasField("failed"):
            raise RuntimeError(response.failed.error.message)
        blobs.append(wire.blob_from_proto(response.finished.blob))
        rewards += response.finished.rewards
    upload = await trainer.upload_batch(f"step-{step}", len(rewards), blobs=blobs)
    await trainer.compute_advantages(upload.batch, ADVANTAGE)
    part = f"part-{step}"
    await trainer.forward_backward(upload.batch, LOSS, expected_step=step, part_id=part)
    await trainer.step_optimizer(step, [part])
    await trainer.delete_batch(upload.batch)
    return sum(rewards) / len(rewards)


async def main(
    services: Path, rows: list[dict[str, str]], steps: int, security: SecurityConfig
) -> None:
    addresses = read_services(services)
    async with RouterClient(addresses["router"], security) as router:
        (engine_entry,) = await router.list_engines(router_pb.ROLE_ENGINE)
        (worker_entry,) = await router.list_engines(router_pb.ROLE_EPISODES)
    async with (
        TrainerClient(addresses["trainer"], security) as trainer,
        RolloutClient(worker_entry.address, security) as rollout,
        EngineClient(engine_entry.address, security) as engine,
    ):
        await update_engine(trainer, engine)
        for step in range(steps):
            reward = await one_step(trainer, rollout, random.sample(rows, GROUPS))
            await update_engine(trainer, engine)
            print(f"step {step:3}  reward {reward:.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("services", type=Path, help="services.json of `sluice up`")
    parser.add_argument("rows", type=argparse.FileType(), help="JSONL of `prompt` and `answer`")
    parser.add_argument("steps", type=int, nargs="?", default=100)
    access.add_flags(parser)
    flags = parser.parse_args()
    lines = [json.loads(line) for line in flags.rows]
    security = access.security_of(flags)
    sys.exit(exit_code(main(flags.services, lines, flags.steps, security)))
