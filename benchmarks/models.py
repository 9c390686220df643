"""Resident memory of trainer ranks: load, two steps, a checkpoint, a publication.

`python -m benchmarks.models [--ranks 1 2 4] [--backends fsdp megatron] [--expert 1] [--experts 8]
[--optimizer muon]`

A random Qwen3-MoE of 59 million parameters, 8 experts a layer, in float32. Each rank is a process
of its own; what it held before the model was loaded (imports, process groups) is subtracted. A peak
is the kernel's high-water mark, which is started anew before each part. glibc raises by itself the
size from which freed memory goes back to the kernel, and would keep what layers were gathered in:
it is told not to. One line a count of ranks and backend, in bytes per parameter of the whole model,
of the rank that has the most; `save` and `export` are what comes on top of what is resident before.
Last line: the same of `fsdp`, in short, and what Megatron's ranks take. `async` is a checkpoint
whose state is copied before it is written, as a save that other calls overtake has it. Of `fsdp`,
whose ranks `--expert` spreads experts over: `gathered` is the most of gathered weights that there
is at once in a pass with its backward, `fetched` how much is gathered in one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
MEGATRON = {"dtype": "float32", "max_shard_bytes": 32 << 20}
ROWS, LENGTH, PROMPT = 4, 32, 8  # of each rank
SECONDS = 500
RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "SLUICE_DEVICE": "cpu",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
}
PARTS = ("load", "step", "gathered", "fetched", "save", "async", "export")
MIB = 2**20


@dataclass
class Meter:
    """Resident bytes of this process; Linux only."""

    base: int = 0

    @staticmethod
    def read(name: str) -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        lines = dict(line.split(":", 1) for line in status)
        return int(lines[name].split()[0]) * 1024

    def start(self) -> int:
        """Begin a new peak; what is resident now."""
        Path("/proc/self/clear_refs").write_text("5")
        return self.read("VmRSS")

    def peak(self) -> int:
        return self.read("VmHWM")


def build(directory: Path, experts: int) -> int:
    """Write the model, of so many experts a layer; how many parameters it has."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, "num_experts": experts}))
    model.save_pretrained(directory, max_shard_size="64MB")
    return sum(parameter.numel() for parameter in model.parameters())


def rank_main(flags: argparse.Namespace) -> int:
    """One rank: prints what it measured as JSON."""
    import torch
    import torch.distributed as dist

    from services.trainer.backend import Mesh, create_backend
    from services.trainer.config import TrainerConfig
    from sluice.algo.spec import LossSpec
    from sluice.config import parse_config

    torch.set_num_threads(1)
    rank, world = flags.rank, flags.world
    store = f"file://{flags.folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    dist.all_reduce(torch.zeros(1))
    own = {"dtype": "float32", "expert": flags.expert}
    options = MEGATRON if flags.backend == "megatron" else own
    values = {
        "model": str(flags.model),
        "store": flags.folder,
        "backend": flags.backend,
        flags.backend: options,
        "optim": {"kind": flags.optimizer, "learning_rate": 1e-4},
        "durable": False,
    }
    config = parse_config(TrainerConfig, values)
    mesh = Mesh(rank=rank, world_size=world, data_rank=rank, data_size=world)
    if flags.backend == "megatron":
        from services.trainer.backends.megatron.layout import mesh_of

        mesh = mesh_of(config.megatron, rank, world)
    create_backend_module(flags.backend)
    meter, found = Meter(), {}
    base = meter.start()
    backend = create_backend(flags.backend, config, mesh)
    found["load"] = meter.peak() - base
    rows, loss = draw_rows(rank), LossSpec(name="sft")
    meter.start()
    for _ in range(2):
        backend.forward_backward([rows], loss)
        backend.step(normalizer=ROWS * world * (LENGTH - PROMPT), learning_rate=None)
    found["step"] = meter.peak() - base
    if flags.backend == "fsdp":
        found |= gather_sizes(backend, lambda: backend.forward_backward([rows], loss))
        backend.discard_gradients()
    for name in ("checkpoint", "overtaken", "published"):
        (flags.folder / name).mkdir(exist_ok=True)
    before = meter.start()
    backend.save_checkpoint(flags.folder / "checkpoint")
    found["save"] = meter.peak() - before
    before = meter.start()
    staged = backend.stage_checkpoint(flags.folder / "overtaken")
    staged.keep()
    staged.write()
    found["async"] = meter.peak() - before
    del staged
    before = meter.start()
    shards = backend.write_shards(flags.folder / "published")
    found["export"] = meter.peak() - before
    sizes = [bytes_of(entry.dtype, entry.shape) for s in shards for entry in s.tensors.values()]
    found["tensor"] = max(sizes, default=0)
    print(json.dumps(found))
    backend.close()
    dist.destroy_process_group()
    return 0


def gather_sizes(backend: Any, run: Callable[[], Any]) -> dict[str, int]:
    """Bytes of gathered weights at once, and in all, while `run` runs."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    modules = [m for m in backend._policy.root.modules() if isinstance(m, FSDPModule)]
    groups = [g for each in modules for g in each._get_fsdp_state()._fsdp_param_groups]
    kind: Any = FSDPParamGroup
    proper, most, fetched = kind.wait_for_unshard, 0, 0

    def bytes_there(of: list[Any]) -> int:
        outputs = [t for g in of for p in g.fsdp_params for t in p.all_gather_outputs]
        return sum(tensor.untyped_storage().nbytes() for tensor in outputs)

    def wait(group: Any) -> None:
        nonlocal most, fetched
        came = group._all_gather_result is not None
        proper(group)
        most, fetched = max(most, bytes_there(groups)), fetched + came * bytes_there([group])

    kind.wait_for_unshard = wait
    try:
        run()
    finally:
        kind.wait_for_unshard = proper
    return {"gathered": most, "fetched": fetched}


def create_backend_module(name: str) -> None:
    """Import it before anything is measured."""
    import importlib

    from services.trainer.backend import BACKENDS

    importlib.import_module(BACKENDS[name].partition(":")[0])


def bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    from math import prod

    from sluice.weights.checkpoint import BITS

    return prod(shape) * BITS[dtype] // 8


def draw_rows(rank: int) -> list[Any]:
    import torch

    from services.trainer.backend import Row

    generator = torch.Generator().manual_seed(rank)
    return [
        Row(
            sample_id=f"{rank}/{index}",
            group_id=f"{rank}/{index}",
            token_ids=torch.randint(SIZES["vocab_size"], (LENGTH,), generator=generator),
            prompt_length=PROMPT,
            loss_mask=torch.ones(LENGTH - PROMPT, dtype=torch.bool),
        )
        for index in range(ROWS)
    ]


def measure(backend: str, world: int, model: Path, expert: int, optimizer: str) -> dict[str, int]:
    """Start the ranks; the most of each over them."""
    with tempfile.TemporaryDirectory(prefix="sluice-models-") as folder:
        command = [sys.executable, "-m", "benchmarks.models", "--model", str(model)]
        command += ["--backend", backend, "--world", str(world), "--folder", folder]
        command += ["--expert", str(expert)]
        command += ["--optimizer", optimizer]
        environment = {**os.environ, **RANK_ENVIRONMENT}
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
            for rank in range(world)
        ]
        try:
            answers = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        found = [json.loads(answer.splitlines()[-1]) for answer in answers]
        return {name: max(each[name] for each in found) for name in found[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--backends", nargs="+", default=["fsdp", "megatron"])
    parser.add_argument("--expert", type=int, default=1)
    parser.add_argument("--experts", type=int, default=SIZES["num_experts"])
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    for name, kind in {"rank": int, "world": int, "backend": str}.items():
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    for name in ("model", "folder"):
        parser.add_argument(f"--{name}", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.rank is not None:
        return rank_main(flags)
    with tempfile.TemporaryDirectory(prefix="sluice-models-") as folder:
        model = Path(folder) / "model"
        count = build(model, flags.experts)
        found: dict[tuple[str, int], dict[str, int]] = {}
        for backend in flags.backends:
            for world in flags.ranks:
                each = found[backend, world] = measure(
                    backend, world, model, flags.expert, flags.optimizer
                )
                parts = [f"{n}={each[n] / count:.1f}" for n in PARTS if n in each]
                print(
                    f"{backend} ranks={world} {' '.join(parts)} (bytes per parameter)", flush=True
                )
    own, megatron = (
        {world: each for (backend, world), each in found.items() if backend == name}
        for name in ("fsdp", "megatron")
    )
    last = own[max(own)]
    parts = [f"fsdp{w}_load={own[w]['load'] / count:.1f}" for w in (2, 4) if w in own]
    parts += [f"fsdp2_step={own[2]['step'] / count:.1f}"] if 2 in own else []
    parts += [
        f"megatron{world}_{name}={megatron[world][name] / count:.1f}"
        for world in (2, 4)
        if world in megatron
        for name in ("load", "step")
    ]
    print(
        f"memory: {' '.join(parts)} save_extra={last['save'] / count:.2f} "
        f"async_extra={last['async'] / count:.2f} export_extra_mib={last['export'] / MIB:.0f} "
        f"largest_tensor_mib={last['tensor'] / MIB:.0f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
