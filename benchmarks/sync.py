"""Weight updates: bytes of a delta, time to encode, apply, prepare and swap in; then how fast.

First two models of SmolLM2's shape (30 layers; hidden size 576, then 192), randomly initialised,
with float32 master weights and bfloat16 published, take AdamW steps at learning rate 1e-6 on
random tokens. Every step is published as a delta, made whole on the host, prepared and committed
by the reference engine while it generates. Medians of STEPS steps; one thread.

Then a model of WIDE's shape (half a gigabyte in bfloat16) is published whole into a directory that
is synced, ROUNDS times, while the engine stages its files as they are announced. What it is
compared with is `cp` and `fsync` of the same bytes, in between. The least of each; the engine is
idle. The same model, and deltas in which CHANGED of the elements differ, are made whole on the
host, each file as it is announced, and what is left then at the commit: once so, and once all of
it at the commit, as for an engine that comes late. At last the model goes by collective
(`benchmarks/sync_collective.py`) from a trainer's rank to an engine, real processes, written to
the store before that or behind it.

The last line is `sync: delta_bytes/full=<of the first> pause_ms=<of the first> prepare_ms=<of the
first, generating> publish_to_serving/cp=<from the call to the commit in the engine, over cp and
fsync> delta/full_time=<from the commit to a whole version on the host, of deltas over whole ones,
both made ahead> train_wait_ms_async=<what a trainer waits for whose engines prepare beside the
next step>`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.sync_collective import measure_collective, report_collective
from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import Generation, PauseMode, Sampling
from services.rollout.engine.reference.engine import ReferenceEngine
from services.rollout.engine.weights import EngineWeights
from sluice.weights.checkpoint import companion_files
from sluice.weights.host_cache import HostCache
from sluice.weights.manifest import ShardFile
from sluice.weights.shards import PublishedShards
from sluice.weights.store import Announcement, StoredVersion, WeightStore

STEPS = 3
RATE = 1e-6
LARGE, SMALL = 576, 192  # hidden sizes
WIDE = LlamaConfig(
    vocab_size=8192,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=16,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    eos_token_id=None,
    bos_token_id=None,
)
ROUNDS = 5
SHARD_BYTES = 64 << 20  # as the reference trainer cuts them
CHANGED = 0.023
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
async def generating(engine: ReferenceEngine) -> AsyncIterator[None]:
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
    trainer: Trainer,
    shards: PublishedShards,
    store: WeightStore,
    cache: HostCache,
    engine: ReferenceEngine,
    base: int | None,
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


class Wide:
    """Master weights of the large model, cut into the files that are published."""

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(0)
        self.directory = directory
        model = LlamaForCausalLM(WIDE)
        model.to(torch.bfloat16).save_pretrained(directory)
        self.tensors = {name: p.detach().float() for name, p in model.named_parameters()}

    def move(self) -> None:
        """Every tensor moves a little everywhere, as a step does."""
        for tensor in self.tensors.values():
            tensor.mul_(1.01)

    def change(self) -> None:
        """Of each tensor CHANGED of the elements become neighbours in bfloat16."""
        for tensor in self.tensors.values():
            flat = tensor.view(-1)
            at = torch.randint(0, len(flat), (int(CHANGED * len(flat)),))
            flat[at] *= 1 + 2**-7

    def parts(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        part: dict[str, torch.Tensor] = {}
        for number, (name, tensor) in enumerate(self.tensors.items()):
            part[name] = tensor
            if 2 * sum(t.numel() for t in part.values()) > SHARD_BYTES:
                yield f"model-{number:05d}.safetensors", part
                part = {}
        yield "model-rest.safetensors", part


def publish(
    wide: Wide,
    shards: PublishedShards,
    store: WeightStore,
    base: int | None,
    announced: Callable[[Announcement], object] = lambda found: None,
) -> tuple[StoredVersion, list[int]]:
    """As a rank and its controller do; the sizes of the files written."""
    staging = store.allocate(None)
    shards.begin(base)

    def written(shard: ShardFile) -> None:
        store.announce(staging.version, shard, staging.directory, base=base)
        announced(Announcement(staging.version, f"staging/{staging.directory.name}", shard, base))

    pending = [
        shards.submit(staging.directory, name, part, dict.fromkeys(part, torch.bfloat16), written)
        for name, part in wide.parts()
    ]
    found = [wait() for wait in pending]
    shards.finish(staging.version)
    record = store.commit(staging, found, companion_files(wide.directory), 0, base=base)
    return record, [shard.delta.size if shard.delta else shard.size for shard in found]


def copy(directory: Path, target: Path) -> float:
    """Seconds of cp and fsync of all files."""
    began = time.perf_counter()
    target.mkdir()
    for path in directory.glob("*.safetensors"):
        shutil.copyfile(path, target / path.name)
        with (target / path.name).open("rb") as file:
            os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return seconds


async def stream(root: Path, wide: Wide) -> dict[str, float]:
    """Publish whole versions into an engine that follows; least seconds, and bytes."""
    store = WeightStore(root / "store")
    writer = WeightStore(root / "store", durable=True)
    engine = ReferenceEngine(
        EngineConfig(model=str(wide.directory), threads=1, dtype="bfloat16", max_model_length=128)
    )
    await engine.start()

    async def announce() -> None:
        pass

    weights = EngineWeights(
        engine, store, "engine", announce, cache=HostCache(root / "unused", store)
    )
    shards = PublishedShards(keep=False, sync=True)
    rows = []
    try:
        for number in range(ROUNDS + 2):  # two fill what is used again later
            wide.move()
            began, cpu = time.perf_counter(), time.process_time()
            following = asyncio.create_task(weights.stage(number + 1, 600))
            record, sizes = await asyncio.to_thread(publish, wide, shards, writer, None)
            free = time.perf_counter()
            await weights.prepare(record.version, record.digest)
            await weights.commit(record.version, record.digest, PauseMode.IN_PLACE)
            serving = time.perf_counter()
            cpu = time.process_time() - cpu
            files, staged = await following
            assert record.directory is not None
            copied = await asyncio.to_thread(copy, record.directory, root / "copy")
            rows.append(
                {
                    "serving": serving - began,
                    "cp": copied,
                    "wait": free - began,
                    "cpu": cpu,
                    "bytes": float(sum(sizes)),
                    "staged": staged / sum(sizes),
                    "files": float(files),
                }
            )
            await asyncio.to_thread(store.retain, 2)
    finally:
        await weights.close()
        await engine.close()
    return {name: min(row[name] for row in rows[2:]) for name in rows[0]}


class Host(HostCache):
    """Counts the processor seconds of what is made before a commit."""

    ahead = 0.0

    def _stage(self, found: Announcement) -> Path | None:
        began = time.thread_time()
        try:
            return super()._stage(found)
        finally:
            self.ahead += time.thread_time() - began


@dataclass(frozen=True)
class Rebuilt:
    """What a version on the host came to; seconds and bytes."""

    published: float  # from the call to the commit
    left: float  # from there until it is whole on the host
    cpu_left: float
    cpu_ahead: float
    bytes: float

    @property
    def whole(self) -> float:
        return self.published + self.left


def rebuild(root: Path, wide: Wide, *, ahead: bool) -> dict[str, Rebuilt]:
    """Make versions of the host out of whole ones of the store, then out of deltas in a row."""
    store = WeightStore(root / "store", durable=False)
    cache = Host(root / "cache", store)
    shards = PublishedShards(keep=True, sync=False)
    rows: dict[str, list[Rebuilt]] = {"full": [], "delta": []}
    base = None
    for kind in ["full"] * (ROUNDS + 2) + ["delta"] * (ROUNDS + 2):
        if kind == "delta":
            wide.change()
        else:
            wide.move()
        cache.ahead, pending = 0.0, list[Future[Path | None]]()

        def announced(found: Announcement, pending: list[Future[Path | None]] = pending) -> None:
            if ahead:
                pending.append(cache.stage(found))

        began = time.perf_counter()
        record, sizes = publish(wide, shards, store, base if kind == "delta" else None, announced)
        committed, before, cpu = time.perf_counter(), cache.ahead, time.process_time()
        wait(pending)
        cache.take(record.version).release()  # as an engine does that has read it
        rows[kind].append(
            Rebuilt(
                published=committed - began,
                left=time.perf_counter() - committed,
                cpu_left=time.process_time() - cpu,
                cpu_ahead=before,
                bytes=float(sum(sizes)),
            )
        )
        base = record.version
        store.retain(1)
    return {  # two leave what is used again
        kind: min(found[2:], key=lambda row: row.whole) for kind, found in rows.items()
    }


def report_rebuilt(when: str, built: dict[str, Rebuilt]) -> None:
    for kind, row in built.items():
        print(
            f"on the host, {when}: {kind} of {row.bytes / 1e6:.1f} MB, published "
            f"{row.published * 1e3:.0f} ms, whole {row.left * 1e3:.0f} ms later "
            f"({row.cpu_left * 1e3:.0f} processor ms, {row.cpu_ahead * 1e3:.0f} before)",
            flush=True,
        )


def measure_wide() -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="sync-") as name:
        root = Path(name)
        wide = Wide(root / "model")
        found = asyncio.run(stream(root, wide))
        print(
            f"whole: {found['bytes'] / 1e6:.0f} MB, {found['staged']:.0%} of it staged before the "
            f"commit; cp and fsync {found['cp'] * 1e3:.0f} ms, published "
            f"{found['wait'] * 1e3:.0f} ms, serving "
            f"{found['serving'] * 1e3:.0f} ms, {found['cpu']:.2f} processor seconds",
            flush=True,
        )
        gc.collect()
        late = rebuild(root / "late", wide, ahead=False)
        built = rebuild(root / "ahead", wide, ahead=True)
        del wide
        gc.collect()
        report_collective(measure_collective(root / "collective", root / "model"))
        report_rebuilt("at the commit", late)
        report_rebuilt("ahead", built)
    return {
        **found,
        "delta/full": built["delta"].left / built["full"].left,
    }


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
    wide = measure_wide()
    print(
        f"sync: delta_bytes/full={large['delta'] / large['full']:.4f} "
        f"pause_ms={large['pause'] * 1e3:.2f} prepare_ms={large['prepare'] * 1e3:.0f} "
        f"publish_to_serving/cp={wide['serving'] / wide['cp']:.2f} "
        f"delta/full_time={wide['delta/full']:.3f} "
        f"train_wait_ms_async={wide['wait'] * 1e3:.0f}"
    )


if __name__ == "__main__":
    main()
