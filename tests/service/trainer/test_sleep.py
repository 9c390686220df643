"""A trainer that sleeps: memory is free, nothing is lost, and what needs the model says so."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.client import RemoteError, TrainerClient, new_request_id, typed_errors
from tests.patience import PATIENCE
from tests.service.trainer.harness import (
    ACTIVE,
    GRPO,
    PPO,
    end,
    make_groups,
    poll,
    running_trainer,
    until,
    upload,
)
from tests.service.trainer.sleeping import check_steps, two_steps

BACKENDS: dict[str, dict[str, Any]] = {
    "reference": {"ranks": {"count": 2}},
    "fsdp": {"backend": "fsdp", "ranks": {"count": 2}, "fsdp": {"dtype": "float32"}},
    "adapters": {"lora": {"rank": 4}},
}


@pytest.mark.parametrize(
    ("backend", "least"),
    [
        ("reference", 7.5),  # each rank has parameters, gradients and two moments
        ("fsdp", 2.99),  # of each tensor a part; gradients are none after a step
        ("adapters", 2.99),
    ],
)
async def test_a_trainer_that_sleeps_makes_the_same_steps(
    tmp_path: Path, model: Path, backend: str, least: float
) -> None:
    with running_trainer(tmp_path, model, **BACKENDS[backend]) as running:
        async with running.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            await check_steps(client, least)


async def refusal(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(RemoteError) as caught:
        await call
    return caught.value.code, caught.value.reason


async def test_what_needs_the_model_is_refused_and_rows_are_not(client: TrainerClient) -> None:
    batch, step = await upload(client, "asleep", make_groups("a")), (await client.get()).step
    first = await client.sleep()
    assert await client.sleep() == first  # asked again
    asleep = grpc.StatusCode.FAILED_PRECONDITION, "TRAINER_ASLEEP"
    part: dict[str, Any] = {"expected_step": step, "part_id": "p"}
    assert await refusal(client.compute_logprobs(batch)) == asleep
    assert await refusal(client.forward_backward(batch, PPO, **part)) == asleep
    assert await refusal(client.step_optimizer(step, ["p"])) == asleep
    assert await refusal(client.discard_gradients()) == asleep
    assert await refusal(client.save_checkpoint("none")) == asleep
    assert await refusal(client.load_checkpoint("checkpoints/none")) == asleep
    assert await refusal(client.publish_weights()) == asleep
    other = await upload(client, "meanwhile", make_groups("b"))
    await client.compute_advantages(other, GRPO)
    assert await client.get_columns(other, ["advantages"])
    await client.delete_batch(other)
    assert await client.wake() == await client.wake() == step
    assert not (await client.get()).asleep
    await client.forward_backward(batch, PPO, **part)


async def test_one_request_sleeps_once(client: TrainerClient) -> None:
    request = pb.SleepRequest(request_id=new_request_id())
    with typed_errors():
        first = await client.stub.Sleep(request)
        await client.wake()
        assert await client.stub.Sleep(request) == first  # the answer of then
    assert not (await client.get()).asleep


async def test_sleep_waits_for_its_turn_no_longer_than_its_caller(
    tmp_path: Path, model: Path
) -> None:
    """A rank is stopped within a command: who gave up asking does not find it asleep later."""
    settings = {"ranks": {"heartbeat_seconds": 0.2, "silent_seconds": 10 * PATIENCE}}
    with running_trainer(tmp_path, model, **settings) as running:
        async with running.client() as client:
            trainer = await until(client, lambda now: now.state == ACTIVE)
            batch = await upload(client, "busy", make_groups("b"))
            rank = trainer.ranks[0].process_id
            end(rank, signal.SIGSTOP)
            busy = asyncio.create_task(client.compute_logprobs(batch))
            await poll(lambda: is_computing(client))
            code, _ = await refusal(client.sleep(timeout_seconds=0.5))
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
            end(rank, signal.SIGCONT)
            await busy
            assert not (await client.get()).asleep
            await client.compute_logprobs(batch)  # comes after the turn of who gave up


async def is_computing(client: TrainerClient) -> bool:
    return "compute_logprobs" in [rank.activity for rank in (await client.get()).ranks]


async def test_ranks_that_are_lost_asleep_come_back_asleep_at_their_checkpoint(
    tmp_path: Path, model: Path
) -> None:
    settings = {"ranks": {"count": 2, "restart_backoff": 0.1}}
    with running_trainer(tmp_path, model, **settings) as running:
        async with running.client() as client:
            trainer = await until(client, lambda now: now.state == ACTIVE)
            await client.save_checkpoint("first")
            await two_steps(client, "lost", sleeps=False)
            await client.sleep()
            end(trainer.ranks[1].process_id, signal.SIGKILL)
            back = await until(client, lambda now: now.state == ACTIVE and now.restart_count == 1)
            assert back.asleep and back.step == 0
            assert await client.wake() == 0
            await two_steps(client, "again", sleeps=False)


async def test_a_full_disk_leaves_the_trainer_awake(tmp_path: Path, model: Path) -> None:
    """What waits on the host of a CPU is a file of the store."""
    with running_trainer(tmp_path, model) as running:
        async with running.client() as client:
            trainer = await until(client, lambda now: now.state == ACTIVE)
            limit = psutil.RLIMIT_FSIZE
            rank = psutil.Process(trainer.ranks[0].process_id)
            before = rank.rlimit(limit)
            rank.rlimit(limit, (1000, before[1]))
            with pytest.raises(RemoteError) as caught:
                await client.sleep()
            assert caught.value.reason == "STORE_FAILED", caught.value
            rank.rlimit(limit, before)
            assert not (await client.get()).asleep
            await two_steps(client, "after", sleeps=True)
            assert not any((running.store / "parking").iterdir())  # files without names
