"""Weight updates of a 135M model: bytes of a delta, time to encode, apply, prepare and swap in.

Two models of SmolLM2's shape (30 layers; hidden size 576, then 192), randomly initialised, with
float32 master weights and bfloat16 published, take AdamW steps at learning rate 1e-6 on random
tokens. Every step is published as a delta, made whole on the host, prepared and committed by
the reference engine while it generates. Medians of STEPS steps; one thread.

The last line is `sync: delta_bytes/full=<x> pause_ms=<p> prepare_ms=<q>`, of the large model.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import Generation, PauseMode, Sampling
from services.rollout.engine.reference.engine import ReferenceEngine
from sluice.weights.checkpoint import companion_files
from sluice.weights.host_cache import HostCache
from sluice.weights.shards import PublishedShards
from sluice.weights.store import WeightStore

STEPS = 3
RATE = 1e-6
LARGE, SMALL = 576, 192  # hidden sizes
FILE = "model-00001-of-00001.safetensors"


@dataclass(frozen=True)
class Step:
    """What one update came to; seconds and bytes."""

    full: int
    delta: int
    density: float
    encode: float
    publish: float
    apply: float
    prepare: float
    pause: float


class Trainer:
    """Master weights in float32, published in bfloat16."""

    def __init__(self, hidden: int, directory: Path) -> None:
        config = LlamaConfig(
            vocab_size=49152,
            hidden_size=hidden,
            intermediate_size=hidden * 8 // 3,
            num_hidden_layers=30,
            num_attention_heads=9 if hidden % 9 == 0 else 3,
            num_key_value_heads=3,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            eos_token_id=None,
            bos_token_id=None,
        )
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(config)
        self.model.save_pretrained(directory)
        self._adam = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.0)

    def step(self) -> None:
        tokens = torch.randint(0, 49152, (1, 64))
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self._adam.step()
        self._adam.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            name: parameter.detach().to(torch.bfloat16)
            for name, parameter in self.model.named_parameters()
        }


@contextlib.asynccontextmanager
async def generating(engine: ReferenceEngine) -> Iterator[None]:  # type: ignore[misc]
    """Samples are decoded meanwhile."""

    async def generate() -> None:
        for number in range(10_000):
            sampling = Sampling(max_new_tokens=1024)
            request = Generation(
                request_id=f"background-{number}", prompt_token_ids=[1, 2, 3], sampling=sampling
            )
            async for _ in engine.generate(request):
                pass

    task = asyncio.create_task(generate())
    try:
        while not engine.status().rank_loads[0].running_count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def update(
    trainer: Trainer, shards: PublishedShards, store: WeightStore, cache: HostCache, engine, base
) -> tuple[Step, int]:
    """One step of the optimizer, all the way to the engine."""
    await asyncio.to_thread(trainer.step)
    tensors = trainer.tensors()
    began = time.perf_counter()
    staging = store.allocate(base)
    shards.begin(base)
    shard = shards.write(staging.directory, FILE, tensors)
    shards.finish(staging.version)
    companions = companion_files(Path(store.location).parent / "model")
    record = store.commit(staging, [shard], companions, 0, base=base)
    published = time.perf_counter() - began
    del tensors
    began = time.perf_counter()
    held = await asyncio.to_thread(cache.take, record.version)
    applied = time.perf_counter() - began
    await engine.prepare(record.version, record.digest, held.directory)
    prepared = time.perf_counter() - began
    pause = await engine.commit(record.version, PauseMode.IN_PLACE)
    held.release()
    delta = shard.delta
    step = Step(
        full=shard.size,
        delta=delta.size if delta else shard.size,
        density=delta.changed / delta.elements if delta else 1.0,
        encode=shards.encode_seconds,
        publish=published,
        apply=applied,
        prepare=prepared,
        pause=pause,
    )
    return step, record.version


async def measure(hidden: int, root: Path) -> list[Step]:
    trainer = Trainer(hidden, root / "model")
    store = WeightStore(root / "store", durable=False)
    cache = HostCache(root / "cache", store)
    shards = PublishedShards(keep=True, sync=False)
    config = EngineConfig(
        model=str(root / "model"), threads=1, dtype="bfloat16", max_running=4, max_model_length=2048
    )
    engine = ReferenceEngine(config)
    await engine.start()
    steps, base = [], None
    try:
        async with generating(engine):
            for _ in range(STEPS + 2):  # the first is whole, the second warms up
                step, base = await update(trainer, shards, store, cache, engine, base)
                steps.append(step)
                store.retain(1)
    finally:
        await engine.close()
    return steps[2:]


def report(hidden: int, steps: list[Step]) -> dict[str, float]:
    found = {
        name: statistics.median(getattr(step, name) for step in steps)
        for name in Step.__dataclass_fields__
    }
    gigabytes = found["full"] / 1e9
    print(
        f"hidden {hidden}: full {found['full'] / 1e6:.1f} MB, delta {found['delta'] / 1e6:.2f} MB, "
        f"changed {found['density']:.2%}, "
        f"encode {gigabytes / found['encode']:.2f} GB/s, "
        f"apply {gigabytes / found['apply']:.2f} GB/s, "
        f"publish {found['publish'] * 1e3:.0f} ms, prepare {found['prepare'] * 1e3:.0f} ms, "
        f"pause {found['pause'] * 1e3:.2f} ms",
        flush=True,
    )
    return found


def main() -> None:
    torch.set_num_threads(1)
    found = {}
    for hidden in (SMALL, LARGE):
        with tempfile.TemporaryDirectory(prefix="sync-") as root:
            steps = asyncio.run(measure(hidden, Path(root)))
            found[hidden] = report(hidden, steps)
        gc.collect()
    small, large = found[SMALL], found[LARGE]
    print(
        f"{large['full'] / small['full']:.1f} times the bytes: "
        f"{large['pause'] / small['pause']:.2f} times the pause"
    )
    print(
        f"sync: delta_bytes/full={large['delta'] / large['full']:.4f} "
        f"pause_ms={large['pause'] * 1e3:.2f} prepare_ms={large['prepare'] * 1e3:.0f}"
    )


if __name__ == "__main__":
    main()
