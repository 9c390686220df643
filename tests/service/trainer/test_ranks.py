"""Two and four data-parallel ranks: the numbers of one, and what happens when one stops or dies.

The tests share one trainer, which each leaves active.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from sluice.algo.spec import AdvantageSpec
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.client import RemoteError, TrainerClient, typed_errors
from tests.patience import PATIENCE
from tests.service.trainer.harness import (
    ACTIVE,
    PPO,
    RESTART_SECONDS,
    RunningTrainer,
    end,
    make_groups,
    poll,
    process_exists,
    running_trainer,
    train_step,
    until,
    upload,
)
from tools.fault_network import part_processes

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, model: Path, trainer: RunningTrainer
) -> Iterator[RunningTrainer]:
    """Two ranks that share the store of the session's trainer."""
    root = tmp_path_factory.mktemp("pair")
    ranks = {
        "count": 2,
        "heartbeat_seconds": 0.5,
        "silent_seconds": 2.0,
        "lost_seconds": 10 * PATIENCE,
        "command_timeout": 10 * PATIENCE,
        "restart_backoff": RESTART_SECONDS,
    }
    settings = {"store": str(trainer.store), "name": "pair", "ranks": ranks}
    with running_trainer(root, model, **settings) as running:
        yield running


@pytest.fixture
async def both(pair: RunningTrainer) -> AsyncIterator[TrainerClient]:
    async with pair.client() as client:
        await until(client, lambda now: now.state == ACTIVE)
        yield client
        if (await client.get()).state == ACTIVE:
            await client.discard_gradients()
            for batch in (await client.get()).batches:
                await client.delete_batch(batch)


@pytest.fixture(scope="module")
def quartet(
    tmp_path_factory: pytest.TempPathFactory, model: Path, trainer: RunningTrainer
) -> Iterator[RunningTrainer]:
    """Four ranks that share the store of the session's trainer."""
    settings = {"store": str(trainer.store), "name": "quartet", "ranks": {"count": 4}}
    with running_trainer(tmp_path_factory.mktemp("quartet"), model, **settings) as running:
        yield running


async def numbers(client: TrainerClient, spec: AdvantageSpec) -> dict[str, Any]:
    """All that a step says: columns, loss, gradient norm and the weights after it."""
    samples = make_groups("dp", count=5, seed=77)
    response = await client.upload_batch("dp", len(samples), samples=samples)
    scored = await client.compute_logprobs(response.batch)
    scalars = await client.compute_advantages(response.batch, spec)
    columns = await client.get_columns(response.batch, ["advantages", "old_logprobs"])
    step = (await client.get()).step
    passed = await client.forward_backward(response.batch, PPO, expected_step=step, part_id="whole")
    stepped = await client.step_optimizer(step, ["whole"])
    after = await client.compute_logprobs(response.batch)
    await client.delete_batch(response.batch)
    return {
        "mean": scored.mean,
        "mismatch": scored.rollout_mismatch_mean,
        "reward": scalars.reward_mean,
        "advantage": scalars.advantage_abs_mean,
        "silent": scalars.silent_group_count,
        "loss": passed.loss,
        "tokens": passed.token_count,
        "ratio": passed.metrics["ratio"],
        "norm": stepped.grad_norm,
        "after": after.mean,
        "columns": np.concatenate([row[name] for row in columns.values() for name in sorted(row)]),
    }


async def test_two_and_four_ranks_equal_one(
    client: TrainerClient, both: TrainerClient, quartet: RunningTrainer
) -> None:
    """Also: a checkpoint of one rank loads into two and four. Siblings lie on several ranks."""
    await client.save_checkpoint("for-all")
    async with quartet.client() as four:
        await until(four, lambda now: now.state == ACTIVE)
        for each, size in ((both, 2), (four, 4)):
            await each.load_checkpoint("checkpoints/for-all")
            assert (await each.get()).layout.data == size
        for name in ("reinforce_plus_plus", "grpo", "rloo", "reinforce_plus_plus_baseline"):
            one = await numbers(client, AdvantageSpec(name=name))
            expected = one.pop("columns")
            for each in (both, four):
                found = await numbers(each, AdvantageSpec(name=name))
                # AdamW's first steps go by signs of gradients: rounding shows in the next ones
                np.testing.assert_allclose(found.pop("columns"), expected, atol=1e-4)
                assert found == pytest.approx(one, rel=1e-4, abs=1e-5), name


async def test_both_ranks_hold_rows_and_publish_one_version(both: TrainerClient) -> None:
    batch = await upload(both, "publish", make_groups("publish", count=4, seed=5))
    outcome = await train_step(both, batch)
    again = await both.publish_weights()
    assert again.weights.digest == outcome.digest
    ranks = (await both.get()).ranks
    assert [(rank.rank, rank.data_rank) for rank in ranks] == [(0, 0), (1, 1)]


async def test_a_stopped_rank_is_named(both: TrainerClient) -> None:
    """SIGSTOP: ListWaits names the rank, with and without a command under way."""
    batch = await upload(both, "stop", make_groups("stop", seed=6))
    before = await both.get()
    step, stopped = before.step, before.ranks[1].process_id
    end(stopped, signal.SIGSTOP)
    passing = asyncio.create_task(
        both.forward_backward(batch, PPO, expected_step=step, part_id="slow")
    )

    async def is_named() -> bool:
        waits = await both.list_waits()
        named = {wait.what: wait for wait in waits if list(wait.on) == ["rank 1"]}
        command = named.get("forward_backward on all ranks")
        return (
            command is not None
            and command.explanation.startswith("rank 1 silent for ")
            and "heartbeat of rank 1" in named
        )

    try:
        await poll(is_named)
    finally:
        end(stopped, signal.SIGCONT)
    assert (await passing).token_count > 0, "it goes on once the rank does"

    async def is_quiet() -> bool:
        return not await both.list_waits()

    await poll(is_quiet)
    assert (await both.get()).restart_count == before.restart_count


async def test_a_killed_rank_is_reported_and_the_group_restarts(both: TrainerClient) -> None:
    samples = make_groups("kill", seed=8)
    batch = await upload(both, "kill", samples)
    saved = await both.save_checkpoint("before-kill")
    before = await both.get()
    expected = await train_step(both, batch)
    await both.forward_backward(batch, PPO, expected_step=saved.step + 1, part_id="doomed")
    ranks = {rank.rank: rank.process_id for rank in (await both.get()).ranks}
    end(ranks[0], signal.SIGSTOP)  # so that the pass is still under way when rank 1 dies
    call = pb.ForwardBackwardRequest(
        batch=batch,
        loss={"name": "ppo_clip", "clip_low": 0.2},
        expected_step=saved.step + 1,
        part_id="lost",
        request_id="lost-with-the-rank",
    )
    token = grpc.aio.Metadata(("authorization", "Bearer a secret"))
    async with grpc.aio.insecure_channel(both.address, [("grpc.enable_retries", 0)]) as channel:
        method = channel.unary_unary(
            "/sluice.api.trainer.v1.TrainerService/ForwardBackward",
            request_serializer=pb.ForwardBackwardRequest.SerializeToString,
            response_deserializer=pb.ForwardBackwardResponse.FromString,
        )
        passing = asyncio.ensure_future(method(call, timeout=2 * PATIENCE, metadata=token))

        async def is_under_way() -> bool:
            return any("forward_backward" in wait.what for wait in await both.list_waits())

        await poll(is_under_way)
        end(ranks[1], signal.SIGKILL)
        with pytest.raises(RemoteError) as caught, typed_errors():
            await passing
    assert (caught.value.code, caught.value.reason) == (UNAVAILABLE, "RANK_LOST")
    assert str(caught.value).endswith("rank 1 was killed by SIGKILL")
    assert caught.value.metadata == {"rank": "1"}

    restarted = await until(
        both, lambda now: now.state == ACTIVE and now.restart_count == before.restart_count + 1
    )
    assert restarted.failure == "rank 1 was killed by SIGKILL"
    assert not process_exists(ranks[0]), "the others are ended"
    assert restarted.step == saved.step, "back to the checkpoint"
    assert restarted.weights == before.weights, "whose parent the next version names"
    assert list(restarted.part_ids) == [], "gradients are gone"
    assert list(restarted.batches) == [batch], "batches came back"
    with pytest.raises(RemoteError) as stale:
        await both.forward_backward(batch, PPO, expected_step=saved.step + 1, part_id="stale")
    assert stale.value.reason == "STEP_MISMATCH"
    assert stale.value.metadata == {
        "expected": str(saved.step + 1),
        "actual": str(saved.step),
        "undone_step": str(saved.step + 1),
        "cause": "rank 1 was killed by SIGKILL",
    }
    with pytest.raises(RemoteError) as other:  # of no step that was lost
        await both.forward_backward(batch, PPO, expected_step=saved.step + 2, part_id="stale")
    assert set(other.value.metadata) == {"expected", "actual"}
    with pytest.raises(RemoteError, match="COLUMN_MISSING"):  # but not what was computed
        await both.forward_backward(batch, PPO, expected_step=saved.step, part_id="again")
    await both.compute_advantages(batch, AdvantageSpec(name="grpo"))
    assert (await train_step(both, batch)) == expected, "the same step again, to the bit"


async def test_ranks_that_are_cut_from_each_other_are_lost(both: TrainerClient) -> None:
    """A caller hears what it hears of a rank that died, and goes back; nothing is left broken."""
    batch = await upload(both, "cut", make_groups("cut", count=4, seed=9))
    before = await until(both, lambda now: now.state == ACTIVE)
    undo = part_processes(*(rank.process_id for rank in before.ranks), "cut")
    assert undo is not None
    with pytest.raises(RemoteError) as caught:
        await train_step(both, batch)
    undo()
    assert (caught.value.code, caught.value.reason) == (UNAVAILABLE, "RANK_LOST")
    await until(
        both,
        lambda now: now.state == ACTIVE and now.restart_count == before.restart_count + 1,
    )
    await both.compute_advantages(batch, AdvantageSpec(name="grpo"))
    await train_step(both, batch)


async def test_ranks_die_with_the_front(tmp_path: Path, model: Path) -> None:
    with running_trainer(tmp_path, model, ranks={"count": 2}) as trainer:
        async with trainer.client() as client:
            active = await until(client, lambda now: now.state == ACTIVE)
        ranks = [rank.process_id for rank in active.ranks]
        assert len(ranks) == 2 and all(process_exists(rank) for rank in ranks)
        trainer.process.kill()

        async def are_gone() -> bool:
            return not any(process_exists(rank) for rank in ranks)

        await poll(are_gone)
