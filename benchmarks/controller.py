"""What a training step costs the trainer's controller, whose ranks compute nothing.

Groups of long rows lie in a store, as episode workers leave them. The controller runs as the
process that serves; this one plays its ranks and its client. A step is an upload by reference,
log-probabilities, advantages, gradients, the optimizer and the end of the batch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import psutil

from sluice.algo.spec import AdvantageSpec, LossSpec
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.api.trainer.v1 import worker_service_pb2_grpc as pb_grpc
from sluice.client import TrainerClient
from sluice.ports import free_port
from sluice.samples.arrow import encode_group
from sluice.samples.blob_store import BlobStore
from sluice.samples.blobs import BlobReference
from sluice.samples.sample import Sample, VersionSpan

START_SECONDS = 60.0
PROMPT, VOCABULARY = 512, 151936
MODEL = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def write_groups(
    store: BlobStore, rows: int, group_size: int, length: int
) -> tuple[list[BlobReference], int]:
    """Put groups of rows of about `length` tokens; returns the tokens too."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCABULARY, length * 3, dtype=np.int32)
    logprobs = -random.random(length, dtype=np.float32)
    blobs, total = [], 0
    for group in range(rows // group_size):
        start = group % length
        group_rows = []
        for index in range(group_size):
            size = int(random.integers(length * 7 // 8, length * 9 // 8 + 1))
            response = size - PROMPT
            total += size
            group_rows.append(
                Sample(
                    sample_id=f"step-0/group-{group:06d}/{index}",
                    group_id=f"step-0/group-{group:06d}",
                    token_ids=tokens[start : start + size],
                    prompt_length=PROMPT,
                    finish_reason="stop",
                    columns={
                        "rollout_logprobs": logprobs[:response],
                        "reward": float(index % 2),
                    },
                    spans=(
                        VersionSpan(
                            version=1, digest="0" * 32, first_token=0, last_token=response - 1
                        ),
                    ),
                )
            )
        blobs.append(store.put(encode_group(group_rows)))
    return blobs, total


async def play_rank(address: str, rank: int, world_size: int) -> None:
    """Answer every command at once, until cancelled."""
    outgoing: asyncio.Queue[pb.FollowRequest] = asyncio.Queue()
    hello = pb.RankHello(rank=rank, world_size=world_size, process_id=os.getpid(), host="bench")
    layout = trainer_pb.ParallelLayout(data=world_size, context=1, pipeline=1)
    ready = pb.RankReady(layout=layout, data_rank=rank, reports=True)
    outgoing.put_nowait(pb.FollowRequest(hello=hello))
    outgoing.put_nowait(pb.FollowRequest(ready=ready))

    async def events() -> AsyncIterator[pb.FollowRequest]:
        while True:
            yield await outgoing.get()

    rows = 0
    async with grpc.aio.insecure_channel(address) as channel:
        async for command in pb_grpc.WorkerServiceStub(channel).Follow(events(), timeout=3600):
            result = pb.CommandResult(sequence=command.sequence)
            if command.WhichOneof("command") == "step":
                result.step.grad_norm, result.step.learning_rate = 1.0, 1e-6
            rows += sum(len(stored.rows) for stored in command.add_rows.blobs)
            if command.compute_advantages.scores_only:
                result.advantages.scores.extend(row % 2 for row in range(rows))
            outgoing.put_nowait(pb.FollowRequest(result=result))


class Controller:
    """The controller's process and what it has cost so far."""

    def __init__(self, root: Path, ranks: int) -> None:
        (root / "model").mkdir()
        (root / "model" / "config.json").write_text(json.dumps(MODEL))
        self._address_file = root / "address.json"
        port = free_port("127.0.0.1")
        self.rank_address = f"127.0.0.1:{port}"
        config = root / "trainer.json"
        settings = {
            "model": str(root / "model"),
            "store": str(root / "store"),
            "durable": False,
            "log_level": "WARNING",
            "ranks": {
                "count": ranks,
                "launch": "external",
                "listen_port": port,
                "silent_seconds": 3600,
                "lost_seconds": 7200,
            },
            "server": {"address_file": str(self._address_file)},
        }
        config.write_text(json.dumps(settings))
        self._process = psutil.Popen(
            [sys.executable, "-m", "services.trainer", "--config", str(config)],
            stdin=subprocess.DEVNULL,
        )

    async def address(self) -> str:
        """Where it serves, once it does."""
        async with asyncio.timeout(START_SECONDS):
            while True:
                if self._address_file.exists():
                    address: str = json.loads(self._address_file.read_text())["address"]
                    return address
                await asyncio.sleep(0.05)

    def cpu_seconds(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def resident_mib(self) -> float:
        return self._status("VmRSS")

    def peak_mib(self) -> float:
        """Since `reset_peak`; files that are mapped count."""
        return self._status("VmHWM")

    def reset_peak(self) -> None:
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(START_SECONDS)

    def _status(self, name: str) -> float:
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) / 1024
        raise LookupError(name)


async def wait_active(client: TrainerClient) -> None:
    """Until all ranks have said hello."""
    async with asyncio.timeout(START_SECONDS):
        while True:
            if (await client.get()).state == trainer_pb.Trainer.STATE_ACTIVE:
                return
            await asyncio.sleep(0.05)


async def run_step(client: TrainerClient, blobs: list[BlobReference], rows: int) -> None:
    """One step, from the upload to the end of the batch."""
    uploaded = await client.upload_batch("step", rows, blobs=blobs)
    await client.compute_logprobs(uploaded.batch)
    await client.compute_advantages(uploaded.batch, AdvantageSpec(name="grpo"))
    step = (await client.get()).step
    await client.forward_backward(
        uploaded.batch,
        LossSpec(name="ppo_clip", clip_low=0.2),
        expected_step=step,
        part_id="part",
    )
    await client.step_optimizer(step, ["part"])
    await client.delete_batch(uploaded.batch)


async def measure(options: argparse.Namespace, root: Path) -> str:
    store = BlobStore(root / "store", sync=False)
    blobs, tokens = write_groups(store, options.rows, options.group_size, options.length)
    controller = Controller(root, options.ranks)
    try:
        address = await controller.address()
        ranks = [
            asyncio.create_task(play_rank(controller.rank_address, rank, options.ranks))
            for rank in range(options.ranks)
        ]
        async with TrainerClient(address) as client:
            await wait_active(client)
            controller.reset_peak()
            idle, before = controller.resident_mib(), controller.cpu_seconds()
            began = time.perf_counter()
            await run_step(client, blobs, options.rows)
            seconds = time.perf_counter() - began
            cpu = controller.cpu_seconds() - before
            above = controller.peak_mib() - idle
        for task in ranks:
            task.cancel()
        await asyncio.gather(*ranks, return_exceptions=True)
    finally:
        controller.close()
    print(f"blobs={len(blobs)} idle_mib={idle:.0f} wall_seconds={seconds:.2f}")
    return (
        f"controller: cpu_seconds={cpu:.2f} peak_mib={above:.0f} rows={options.rows} "
        f"tokens={tokens}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=8192, help="tokens of a row, on average")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--directory", type=Path, help="of the store; 1 GiB by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        print(asyncio.run(measure(options, Path(directory))))


if __name__ == "__main__":
    main()
