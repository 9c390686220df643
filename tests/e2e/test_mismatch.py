"""A stale engine must show: the difference of log-probs between rollout and trainer."""

import json

from examples.grpo_loop import ADVANTAGE, LOSS, rollout_request, update_engine
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.client import EngineClient, RolloutClient, RouterClient, TrainerClient
from sluice.runtime import wire


async def roll_out(stack, rollout: RolloutClient, step: int):
    rows = [json.loads(line) for line in (stack.run_dir / "prompts.jsonl").open()][:4]
    request = rollout_request(step, rows)
    for index, group in enumerate(request.groups):
        group.group_id = f"mismatch{step}-{index}"
    return [
        wire.blob_from_proto(response.finished.blob) async for response in rollout.rollout(request)
    ]


async def train(trainer: TrainerClient, blobs, name: str) -> float:
    """One step on the blobs; the mismatch it measured."""
    step = (await trainer.get()).step
    upload = await trainer.upload_batch(name, 16 * len(blobs), blobs=blobs)
    await trainer.compute_advantages(upload.batch, ADVANTAGE)
    answer = await trainer.forward_backward(upload.batch, LOSS, expected_step=step, part_id=name)
    await trainer.step_optimizer(step, [name])
    await trainer.delete_batch(upload.batch)
    return answer.metrics["rollout_mismatch"]


async def test_a_stale_engine_raises_the_mismatch(stack):
    async with RouterClient(stack.services["router"]["address"]) as router:
        (engine_entry,) = await router.list_engines(router_pb.ROLE_ENGINE)
        (worker_entry,) = await router.list_engines(router_pb.ROLE_EPISODES)
    async with (
        TrainerClient(stack.services["trainer"]["address"]) as trainer,
        RolloutClient(worker_entry.address) as rollout,
        EngineClient(engine_entry.address) as engine,
    ):
        await update_engine(trainer, engine)
        fresh = await train(trainer, await roll_out(stack, rollout, 0), "mismatch-fresh")
        for index in range(3):  # the trainer moves on, the engine does not
            await train(trainer, await roll_out(stack, rollout, 1 + index), f"mismatch-{index}")
        stale = await train(trainer, await roll_out(stack, rollout, 4), "mismatch-stale")
        await update_engine(trainer, engine)
        again = await train(trainer, await roll_out(stack, rollout, 5), "mismatch-again")
    assert max(fresh, again) <= 1e-4
    assert stale > 100 * max(fresh, again)
