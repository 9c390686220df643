"""A stale engine must show: the difference of log-probs between rollout and trainer."""

import json

from examples.grpo_loop import ADVANTAGE, LOSS, rollout_request, update_engine
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.client import EngineClient, RolloutClient, RouterClient, TrainerClient
from sluice.runtime import wire
from tests.patience import PATIENCE


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


def test_a_run_ends_at_a_gap_beyond_its_limit_and_before_its_first_step(stack):
    """No two kernels agree to the last bit: that is beyond this limit."""
    training = stack.train("gap", max_mismatch=1e-12, sampling={"max_new_tokens": 5, "top_p": 0.9})
    output, _ = training.process.communicate(timeout=PATIENCE)
    assert training.process.returncode == 2
    assert training.rows() == []
    last = output.strip().splitlines()[-1]
    for named in ("max_mismatch 1e-12", "temperature", "weights", "tokenizer or model family"):
        assert named in last
    assert "top_p, top_k or min_new_tokens cuts tokens off" in output


def test_a_run_that_takes_older_samples_for_its_own_says_so(stack):
    loss = {"name": "ppo_clip", "clip_low": 0.2, "old_logprobs": "old"}
    told = "nothing corrects the difference"
    for name, more in (("unaware", {}), ("aware", {"importance": {"high": 2.0}})):
        algorithm = {"loss": {**loss, **more}}
        training = stack.train(name, steps=1, max_staleness=1, algorithm=algorithm)
        output, _ = training.process.communicate(timeout=PATIENCE)
        assert training.process.returncode == 0, output
        assert (told in output) == (name == "unaware")


def test_one_temperature_leaves_nothing_clipped_at_the_first_step(stack):
    sampling = {"max_new_tokens": 5, "temperature": 0.7}
    training = stack.train("tempered", sampling=sampling, steps=1)
    training.finish()
    (row,) = training.rows()
    assert row["rollout_mismatch"] < 1e-4
    assert row["clipped_low"] == row["clipped_high"] == 0


def test_groups_of_another_temperature_are_sampled_again_when_a_run_is_resumed(stack):
    training = stack.train("cooled", steps=2, dies_at=("gradients", 2))
    training.died()
    (left_over,) = {group.blob.digest for group in training.groups("generated")[:1]}
    sampling = {"max_new_tokens": 5, "temperature": 0.7}
    stack.train("cooled", steps=2, sampling=sampling, resume=True).finish()
    rows = training.rows()
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[-1]["rollout_mismatch"] < 1e-4
    consumed = training.groups("consumed")
    assert len(consumed) == 8
    assert left_over not in {group.blob.digest for group in consumed}


def test_prompts_may_stand_under_another_key(stack):
    rows = [json.loads(line) for line in (stack.run_dir / "prompts.jsonl").open()]
    renamed = stack.run_dir / "questions.jsonl"
    renamed.write_text(
        "\n".join(json.dumps({"question": r["prompt"], "answer": r["answer"]}) for r in rows)
    )
    settings = {"reward": "position_match", "prompt_key": "question"}
    training = stack.train(
        "questions",
        prompts={"file": str(renamed)},
        environment={"name": "prompts", "settings": settings},
        steps=1,
    )
    training.finish()
    assert len(training.rows()) == 1
