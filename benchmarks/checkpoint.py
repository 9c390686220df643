"""Memory and time of checkpoints of the Megatron backend: 60 M parameters, two data ranks.

`python -m benchmarks.checkpoint [--repeats 3] [--directory DIR]`

Both ranks are processes of their own. After an optimizer step each resets its high-water mark
(`5` into /proc/self/clear_refs), saves or loads as a rank does (files digested, and synced to the
disk of DIR), and takes VmHWM less the VmRSS before it. Bytes a parameter are of the whole model's
parameters, of the worse rank and the worst repeat.

A checkpoint that is written beside training copies what is not written yet when the optimizer is
about to step. `async_bytes_per_param` is of a step that follows at once, so that all is copied.
`async_wait` are the seconds by which training is held up, of staging and that copy, where the step
follows a pass forward and backward over 512 tokens; `sync` are those of a whole save that training
waits for. Both are medians of the repeats, of the slower rank.

What was saved by two data ranks is then loaded by two tensor ranks, and by one rank. The weights
that each of them publishes must be those of the ranks that saved, by the digests of all tensors.

Last line: as said above.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.trainer.backend import Row, TrainingBackend, create_backend
from services.trainer.backends.megatron.config import MegatronConfig
from services.trainer.backends.megatron.layout import mesh_of
from services.trainer.config import TrainerConfig
from services.trainer.rank import executor
from sluice.algo.spec import LossSpec
from sluice.weights.manifest import FileEntry

SIZES = {
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 14,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
WORLD = 2
PASS_TOKENS = 512
OTHERS = [(2, {"tensor": 2}), (1, {})]  # ranks and layout of those that load it too
RUN_SECONDS = 900


def build_model(directory: Path) -> int:
    """Write a random Qwen3; returns the count of its parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def open_backend(model: Path, layout: dict[str, Any]) -> TrainingBackend:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    megatron = MegatronConfig(dtype="float32", **layout)
    config = TrainerConfig(model=str(model), store=model, backend="megatron", megatron=megatron)
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=world
    )
    torch.set_num_threads(1)
    return create_backend("megatron", config, mesh_of(megatron, rank, world))


def gather_gradients(backend: TrainingBackend, length: int) -> None:
    """Pass forward and backward over a row of `length` tokens."""
    generator = torch.Generator().manual_seed(backend.mesh.data_rank)
    row = Row(
        sample_id="a",
        group_id="a",
        token_ids=torch.randint(SIZES["vocab_size"], (length,), generator=generator),
        prompt_length=length // 2,
        loss_mask=torch.ones(length // 2, dtype=torch.bool),
    )
    backend.forward_backward([[row]], LossSpec(name="sft"))


def _status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {name}")


def peak_of(work: Callable[[], float]) -> tuple[int, float]:
    """Bytes above those resident before, at the peak, and what `work` returns."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free is not resident
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    answer = work()
    return _status("VmHWM") - before, answer


def measure(model: Path, out: Path, repeats: int) -> dict[str, Any]:
    """Save and load in all ways, `repeats` times; (bytes, seconds) of each on this rank."""
    backend = open_backend(model, {})
    gather_gradients(backend, PASS_TOKENS)
    backend.step(normalizer=1.0, learning_rate=1e-3)  # there are moments now
    work = RankWork(backend, out)
    work.save(out / "kept")
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, work.files)
    files = {name: entry for part in every for name, entry in part.items()}
    figures: dict[str, list[tuple[int, float]]] = {}
    for repeat in range(repeats):
        ways = {"save": work.save, "copied": work.save_copied, "beside": work.save_beside}
        for name, way in ways.items():
            directory = out / f"{name}-{repeat}"
            figures.setdefault(name, []).append(peak_of(partial(way, directory)))
            dist.barrier()
            if backend.mesh.rank == 0:
                shutil.rmtree(directory)
        loading = peak_of(partial(work.load, out / "kept", files))
        figures.setdefault("load", []).append(loading)
    return {"figures": figures, "digests": published(backend, out / "weights")}


class RankWork:
    """What one rank does, and for how many seconds training waits for it."""

    def __init__(self, backend: TrainingBackend, out: Path) -> None:
        self._backend, self._out = backend, out
        self.files: dict[str, FileEntry] = {}

    def save(self, directory: Path) -> float:
        directory.mkdir(exist_ok=True)
        began = time.perf_counter()
        self.files = self._backend.stage_checkpoint(directory).write()
        return time.perf_counter() - began

    def save_copied(self, directory: Path) -> float:
        directory.mkdir(exist_ok=True)
        began = time.perf_counter()
        staged = self._backend.stage_checkpoint(directory)
        staged.keep()
        waited = time.perf_counter() - began
        staged.write()
        return waited

    def save_beside(self, directory: Path) -> float:
        directory.mkdir(exist_ok=True)
        began = time.perf_counter()
        staged = self._backend.stage_checkpoint(directory)
        waited = time.perf_counter() - began
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(staged.write)
            gather_gradients(self._backend, PASS_TOKENS)
            began = time.perf_counter()
            staged.keep()
            waited += time.perf_counter() - began
            writing.result(RUN_SECONDS)
        self._backend.discard_gradients()
        return waited

    def load(self, directory: Path, files: dict[str, FileEntry]) -> float:
        began = time.perf_counter()
        with executor.checked_beside(directory, files, self._backend.mesh.rank, WORLD):
            self._backend.load_checkpoint(directory)
        return time.perf_counter() - began


def resharded(model: Path, out: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """The weights that ranks of another layout publish once they have loaded."""
    backend = open_backend(model, layout)
    backend.load_checkpoint(out / "kept")
    name = f"weights-{os.environ['WORLD_SIZE']}-{json.dumps(layout)}"
    return {"digests": published(backend, out / name)}


def published(backend: TrainingBackend, directory: Path) -> dict[str, str]:
    directory.mkdir(exist_ok=True)
    shards = backend.write_shards(directory)
    return {name: entry.digest for shard in shards for name, entry in shard.tensors.items()}


def run_ranks(world: int, arguments: list[str], out: Path) -> list[dict[str, Any]]:
    """Run this file as `world` ranks; what each of them prints last."""
    meeting = tempfile.mktemp(dir=out)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.checkpoint", "--directory", str(out), *arguments],
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
            | {"MEETING": meeting, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=RUN_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        sys.exit("a rank failed")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="where the checkpoints are written")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--layout", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        layout = None if options.layout is None else json.loads(options.layout)
        done = (
            measure(options.model, options.directory, options.repeats)
            if layout is None
            else resharded(options.model, options.directory, layout)
        )
        print(json.dumps(done), flush=True)
        dist.barrier()
        os._exit(0)
    with tempfile.TemporaryDirectory(dir=options.directory) as root:
        out = Path(root)
        model = out / "model"
        parameters = build_model(model)
        common = ["--model", str(model), "--repeats", str(options.repeats)]
        ranks = run_ranks(WORLD, common, out)
        size = sum(path.stat().st_size for path in (out / "kept").iterdir())
        print(
            f"{parameters / 1e6:.1f} M parameters, float32, {WORLD} data ranks; "
            f"{size / parameters:.1f} bytes a parameter on disk"
        )
        expected = {name: d for rank in ranks for name, d in rank["digests"].items()}
        for world, layout in OTHERS:
            more = [*common, "--layout", json.dumps(layout)]
            parts = run_ranks(world, more, out)
            found = {name: d for rank in parts for name, d in rank["digests"].items()}
            if found != expected:
                sys.exit(f"{world} ranks of {layout} publish other weights than those that saved")
            print(f"loaded by {world} ranks of {layout}: {len(found)} tensors as saved")
        per_parameter, seconds = {}, {}
        for name in ("save", "copied", "beside", "load"):
            every = [rank["figures"][name] for rank in ranks]
            per_parameter[name] = max(peak for rank in every for peak, _ in rank) / parameters
            seconds[name] = max(statistics.median(s for _, s in rank) for rank in every)
            peaks = [[round(peak / parameters, 2) for peak, _ in rank] for rank in every]
            if name == "beside":  # the pass has memory of its own
                peaks = []
            print(f"{name:<6} training waits {seconds[name]:.3f} s, bytes a parameter {peaks}")
        print(f"copied at once / save: {seconds['copied'] / seconds['save']:.2f}")
    print(
        f"checkpoint: save_bytes_per_param={per_parameter['save']:.2f} "
        f"load_bytes_per_param={per_parameter['load']:.2f} "
        f"async_bytes_per_param={per_parameter['copied']:.2f} "
        f"async_wait/sync={seconds['beside'] / seconds['save']:.2f}"
    )


if __name__ == "__main__":
    main()
