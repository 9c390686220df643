"""Devices that are shared: what a trainer gives up to sleep, and how weights reach the engine.

Two stacks of real processes (router, trainer, engine) with one model of more than 60 M parameters
in float32, whose versions of weights lie in memory of the host in one, and in its store, on the
disk and synced as ever, in the other. After an optimizer step both hand over ROUNDS times, in
turns, as a colocated run does: the engine sleeps, the trainer wakes and publishes, the trainer
sleeps, the engine wakes and commits. Half of the rounds begin with the one, half with the other.

The last line is `colocated: state_mib=<parameters, gradients and moments> freed_mib=<resident
memory of the rank that is free once it sleeps, the least> handover_ms=<through memory: to publish a
version, and for the engine that woke to serve it> handover/disk=<that over the same through the
store>`. Medians. To fall asleep and to wake are lines of their own: they take as long with either,
and on a CPU are a file's, which an accelerator does not write.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sluice import logs
from sluice.algo.spec import AdvantageSpec, LossSpec
from sluice.client import EngineClient, RemoteError, TrainerClient
from sluice.config import parse_config
from sluice.durable import scratch
from sluice.loop.training import wait_for_trainer
from sluice.samples.sample import Sample
from sluice.stack import UpConfig
from sluice.supervise import Supervisor, read_services, supervised

ROUNDS = 10
START_SECONDS = 600.0
MIB = 1 << 20
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "bos_token_id": None,
}


def build_model(directory: Path) -> int:
    """Writes a random model; its parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def rows() -> list[Sample]:
    """Two samples of one prompt that were rewarded otherwise."""
    return [
        Sample(
            sample_id=f"g/{index}",
            group_id="g",
            token_ids=np.arange(1, 9, dtype=np.int32) + index,
            prompt_length=4,
            finish_reason="stop",
            columns={
                "rollout_logprobs": np.full(4, -9.0, dtype=np.float32),
                "reward": float(index),
            },
        )
        for index in range(2)
    ]


@dataclass
class Stack:
    """One trainer and one engine."""

    trainer: TrainerClient
    engine: EngineClient

    async def step(self) -> None:
        """An optimizer step, so that there are moments."""
        samples = rows()
        batch = (await self.trainer.upload_batch("b", len(samples), samples=samples)).batch
        await self.trainer.compute_advantages(batch, AdvantageSpec(name="grpo"))
        loss = LossSpec(name="ppo_clip", clip_low=0.2)
        await self.trainer.forward_backward(batch, loss, expected_step=0, part_id="p")
        await self.trainer.step_optimizer(0, ["p"])
        await self.trainer.delete_batch(batch)

    async def stage(self, version: int) -> None:
        """Have the engine read the version that is written, if it can while it sleeps."""
        with contextlib.suppress(RemoteError):
            await self.engine.stage_weights(version, START_SECONDS)

    async def hand_over(self) -> dict[str, float]:
        """Seconds of each part, and bytes of sleep."""
        await self.engine.pause()
        times = [time.perf_counter()]

        async def timed(work: Any) -> Any:
            result = await work
            times.append(time.perf_counter())
            return result

        await timed(self.engine.sleep())
        await timed(self.trainer.wake())
        staging: list[asyncio.Task[None]] = []

        def note(version: int) -> None:
            staging.append(asyncio.create_task(self.stage(version)))

        published = await timed(self.trainer.publish_weights(on_allocated=note))
        slept = await timed(self.trainer.sleep())
        await timed(self.engine.wake())
        await timed(self.engine.prepare_weights(published.weights))
        await asyncio.gather(*staging)
        await timed(self.engine.commit_weights(published.weights))
        await self.engine.resume()
        parts = [b - a for a, b in itertools.pairwise(times)]
        names = ("engine_sleeps", "wake", "publish", "sleep", "engine_wakes", "prepare", "commit")
        found = dict(zip(names, parts, strict=True))
        found["handover"] = sum(found[n] for n in ("publish", "engine_wakes", "prepare", "commit"))
        found["state"], found["freed"] = slept.state_bytes, slept.freed_bytes
        found["bytes"] = published.full_byte_count
        return found


@contextlib.asynccontextmanager
async def running(root: Path, model: Path, weights: str) -> AsyncIterator[Stack]:
    engine = {"max_running": 4, "max_model_length": 64, "threads": 1}
    up = {
        "run_dir": root,
        "start_timeout_seconds": START_SECONDS,
        "services": {
            "router": {"kind": "router"},
            "trainer": {"kind": "trainer", "config": {"model": str(model), "weights": weights}},
            "engine": {"kind": "rollout", "config": {"roles": ["engine"], "engine": engine}},
        },
    }
    async with supervised(Supervisor(parse_config(UpConfig, up))):
        addresses = read_services(root / "services.json")
        async with (
            TrainerClient(addresses["trainer"]) as trainer,
            EngineClient(addresses["engine"]) as client,
        ):
            await wait_for_trainer(trainer, START_SECONDS)
            yield Stack(trainer, client)


async def measure(root: Path, memory: Path) -> dict[str, list[dict[str, float]]]:
    """By where weights lie, what each hand-over came to; the first is not counted."""
    parameters = build_model(root / "model")
    print(f"{parameters / 1e6:.1f} M parameters in float32", flush=True)
    found: dict[str, list[dict[str, float]]] = {"memory": [], "disk": []}
    async with (
        running(root / "memory", root / "model", str(memory / "weights")) as first,
        running(root / "disk", root / "model", "") as second,
    ):
        stacks = {"memory": first, "disk": second}
        for stack in stacks.values():
            await stack.step()
            await stack.hand_over()
        for number in range(ROUNDS):
            order = list(stacks) if number % 2 else list(reversed(stacks))
            for name in order:
                found[name].append(await stacks[name].hand_over())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--directory", type=Path, help="on the disk of the store (default: a temporary one)"
    )
    flags = parser.parse_args()
    logs.configure("WARNING")
    memory = Path("/dev/shm")
    if not memory.is_dir():
        print("there is no /dev/shm: weights would go through a disk")
        return 1
    with (
        tempfile.TemporaryDirectory(dir=flags.directory) as root,
        scratch("sluice-bench-", memory) as shared,
    ):
        found = asyncio.run(measure(Path(root), shared))
    middle = {
        place: {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        for place, rows in found.items()
    }
    for place, row in middle.items():
        parts = " ".join(
            f"{name}_ms={row[name] * 1e3:.0f}"
            for name in row
            if name not in ("state", "freed", "bytes")
        )
        print(f"{place}: weights_mib={row['bytes'] / MIB:.0f} {parts}")
    state = middle["memory"]["state"] / MIB
    freed = min(row["freed"] for rows in found.values() for row in rows) / MIB
    ratio = middle["memory"]["handover"] / middle["disk"]["handover"]
    print(
        f"colocated: state_mib={state:.0f} freed_mib={freed:.0f} "
        f"handover_ms={middle['memory']['handover'] * 1e3:.0f} handover/disk={ratio:.2f}"
    )
    return 0 if freed >= 0.8 * state and ratio <= 0.5 else 1


if __name__ == "__main__":
    sys.exit(main())
