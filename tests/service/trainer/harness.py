"""Trainers as real processes, and rows to train them on."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from sluice import faults
from sluice.algo.spec import AdvantageSpec, LossSpec
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.client import RemoteError, TrainerClient, typed_errors
from sluice.runtime.security import SecurityConfig
from sluice.samples.sample import Sample
from tests.patience import PATIENCE

PPO = LossSpec(name="ppo_clip", clip_low=0.2)
GRPO = AdvantageSpec(name="grpo")
RESTART_SECONDS = 2.0  # clients that try again on their own hear of a loss before it is over
ACTIVE, FAILED = pb.Trainer.STATE_ACTIVE, pb.Trainer.STATE_FAILED


@dataclass
class RunningTrainer:
    """A controller process; ranks are its children."""

    process: subprocess.Popen[bytes]
    address: str
    store: Path
    security: SecurityConfig

    def client(self) -> TrainerClient:
        return TrainerClient(self.address, self.security)


@contextmanager
def running_trainer(root: Path, model: Path, **settings: Any) -> Iterator[RunningTrainer]:
    """A trainer whose ranks may still be loading; ended with SIGTERM."""
    root.mkdir(parents=True, exist_ok=True)
    values = {
        "model": str(model),
        "store": str(root / "store"),
        "durable": False,
        "log_level": "WARNING",
        "optim": {"learning_rate": 0.01},
        "server": {
            "address_file": str(root / "address.json"),
            "drain_seconds": 1.0,
            "security": {"token_file": str(root / "token")},  # for clients and ranks alike
        },
    }
    (root / "token").write_text("a secret")
    values.update(settings)
    file = root / "trainer.yaml"
    file.write_text(yaml.safe_dump(values))
    environment = {key: value for key, value in os.environ.items() if "SLUICE_" not in key}
    process = subprocess.Popen(
        [sys.executable, "-m", "services.trainer", "--config", str(file)],
        env={
            **environment,
            "SLUICE_DEVICE": "cpu",
            "OMP_NUM_THREADS": "1",
            faults.VARIABLE: str(root / "faults"),
        },
    )
    try:
        address = await_address(process, root / "address.json")
        security = SecurityConfig(token_file=root / "token")
        yield RunningTrainer(process, address, Path(values["store"]), security)
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        finally:
            process.kill()
            process.wait()


def await_address(process: subprocess.Popen[bytes], file: Path) -> str:
    """What a service that starts writes into its address file."""
    deadline = time.monotonic() + PATIENCE
    while not file.exists():
        assert process.poll() is None, f"it exited with {process.returncode}"
        assert time.monotonic() < deadline, f"no {file} came: it does not listen"
        time.sleep(0.02)
    address: str = json.loads(file.read_text())["address"]
    return address


async def until(
    client: TrainerClient, condition: Callable[[pb.Trainer], bool], seconds: float = PATIENCE
) -> pb.Trainer:
    """The trainer once `condition` holds of it; a controller that starves may be slower to answer
    than the deadline of the client's own `get`."""
    async with asyncio.timeout(seconds):
        while True:
            with typed_errors():
                answer = await client.stub.GetTrainer(pb.GetTrainerRequest(), timeout=PATIENCE)
            if condition(answer.trainer):
                return answer.trainer
            await asyncio.sleep(0.05)


async def poll(
    condition: Callable[[], Awaitable[bool]], seconds: float = PATIENCE, interval: float = 0.1
) -> None:
    """Until `condition` holds, at most `seconds`."""
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(interval)


def make_group(
    group_id: str, *, size: int = 4, seed: int = 0, rewards: Sequence[float] | None = None
) -> list[Sample]:
    """Samples of one prompt for the tiny model, of unequal lengths."""
    random = np.random.default_rng(seed)
    prompt = random.integers(0, 11, size=int(random.integers(2, 6)))
    samples = []
    for index in range(size):
        response = random.integers(0, 12, size=int(random.integers(1, 7)))
        samples.append(
            Sample(
                sample_id=f"{group_id}/{index}",
                group_id=group_id,
                token_ids=np.concatenate([prompt, response]).astype(np.int32),
                prompt_length=len(prompt),
                finish_reason="stop",
                columns={
                    "rollout_logprobs": random.normal(-2.5, 0.2, len(response)).astype(np.float32),
                    "reward": float(random.random() if rewards is None else rewards[index]),
                },
            )
        )
    return samples


def make_groups(prefix: str, count: int = 3, seed: int = 0) -> list[Sample]:
    return [
        sample
        for index in range(count)
        for sample in make_group(f"{prefix}-{index}", seed=seed + index)
    ]


def long_rows(count: int, length: int) -> list[Sample]:
    """Rows of prompts of their own with `length` tokens of response each, which learn nothing."""
    random = np.random.default_rng(0)
    return [
        Sample(
            sample_id=f"long-{row}/0",
            group_id=f"long-{row}",
            token_ids=random.integers(0, 12, size=length + 4).astype(np.int32),
            prompt_length=4,
            finish_reason="length",
        )
        for row in range(count)
    ]


async def upload(client: TrainerClient, batch_id: str, samples: Sequence[Sample]) -> str:
    """Upload with GRPO advantages; returns the batch's name."""
    response = await client.upload_batch(batch_id, len(samples), samples=samples)
    await client.compute_advantages(response.batch, GRPO)
    return str(response.batch)


@dataclass(frozen=True)
class Outcome:
    """What one training step came to."""

    loss: float
    grad_norm: float
    digest: str


async def train_step(client: TrainerClient, batch: str, loss: LossSpec = PPO) -> Outcome:
    step = (await client.get()).step
    passed = await client.forward_backward(batch, loss, expected_step=step, part_id="whole")
    stepped = await client.step_optimizer(step, ["whole"])
    published = await client.publish_weights()
    return Outcome(passed.loss, stepped.grad_norm, published.weights.digest)


async def killed_in_a_pass(client: TrainerClient, batch: str) -> None:
    """Rank 1 dies while rank 0 holds the pass up; waits until all ranks are back."""
    step = (await client.get()).step
    ranks = {rank.rank: rank.process_id for rank in (await client.get()).ranks}
    end(ranks[0], signal.SIGSTOP)
    passing = asyncio.create_task(
        client.forward_backward(batch, PPO, expected_step=step, part_id="lost")
    )

    async def is_under_way() -> bool:
        return any("forward_backward" in wait.what for wait in await client.list_waits())

    await poll(is_under_way)
    stands = await until(client, lambda now: "called by" in now.ranks[1].where)
    assert stands.ranks[1].activity == "forward_backward"
    end(ranks[1], signal.SIGKILL)
    with pytest.raises(RemoteError):
        await passing
    again = await until(client, lambda now: now.state == ACTIVE and now.restart_count == 1)
    assert again.step == step - 1


ROOM = 10_000  # bytes of a file on a disk that is nearly full


@contextmanager
def full_disk(process_id: int, room: int = ROOM) -> Iterator[None]:
    """Files that the process writes end at `room` bytes."""
    soft, hard = resource.prlimit(process_id, resource.RLIMIT_FSIZE)
    resource.prlimit(process_id, resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.prlimit(process_id, resource.RLIMIT_FSIZE, (soft, hard))


async def check_full_disk(client: TrainerClient) -> None:
    """The last rank's disk is full: calls that write say so by the file, and nothing is lost."""
    before = await client.get()
    with full_disk(before.ranks[-1].process_id):
        for write in (client.publish_weights, partial(client.save_checkpoint, "full")):
            with pytest.raises(RemoteError, match="File too large") as caught:
                await write()
            assert caught.value.reason == "STORE_FAILED"
            assert Path(caught.value.metadata["file"]).name.startswith(("model-00001", "__1_"))
    await client.publish_weights()
    await client.save_checkpoint("full")
    after = await client.get()
    assert (after.step, after.restart_count) == (before.step, before.restart_count)


async def rows_of(samples: Sequence[Sample]) -> AsyncIterator[Sample]:
    for sample in samples:
        yield sample


def process_exists(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
        return Path(f"/proc/{process_id}/stat").read_text().split(") ")[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def end(process_id: int, number: signal.Signals) -> None:
    os.kill(process_id, number)
