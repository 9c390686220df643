"""Training speed of the Megatron backend beside the reference backend, on random weights.

    python benchmarks/training.py --size 0.6b --dtype bfloat16        # one accelerator
    torchrun --nproc-per-node 8 benchmarks/training.py --backend megatron --layout '{"tensor": 8}'
    python benchmarks/training.py --size tiny --dtype float32 --tokens 512     # any machine

One step is forward, backward and optimizer over packed rows, half of each a prompt, after two
steps of warm-up. Each backend runs in a process of its own. tokens/s counts all tokens of all
ranks. MFU is (6 x parameters + 6 x layers x heads x head size x row length) FLOP a token over
--peak-tflops of every rank (dense, of the dtype; known accelerators have a default). Peak memory
is the device's high-water mark; on a CPU that of the process.

Last line: the Megatron figures, and its tokens/s over the reference's where both ran.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.trainer.backend import Mesh, Row, TrainingBackend, create_backend
from services.trainer.backends.megatron.config import MegatronConfig
from services.trainer.backends.megatron.layout import mesh_of
from services.trainer.config import TrainerConfig
from sluice import platform
from sluice.algo.spec import LossSpec

SIZES = {  # hidden, layers, heads, KV heads, head size, feed-forward, vocabulary
    "tiny": (128, 4, 4, 2, 32, 384, 1024),
    "0.6b": (1024, 28, 16, 8, 128, 3072, 151936),  # Qwen3-0.6B
    "1.7b": (2048, 28, 16, 8, 128, 6144, 151936),
    "4b": (2560, 36, 32, 8, 128, 9728, 151936),
}
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0}  # dense bfloat16
WARM_UP_STEPS = 2
RUN_SECONDS = 1800


def build_model(directory: Path, size: str) -> int:
    """Write a random Qwen3 of `size`; returns its parameters, the embedding counted once."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, layers, heads, kv_heads, head, feed_forward, vocabulary = SIZES[size]
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=feed_forward,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
        )
    )
    model.to(torch.bfloat16).save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def make_rows(options: argparse.Namespace, vocabulary: int, data_rank: int) -> list[list[Row]]:
    """Micro-batches of rows of `--length` tokens, the second half of each trained on."""
    generator = torch.Generator().manual_seed(data_rank)
    response = options.length // 2
    batches = []
    for batch in range(options.micro_batches):
        rows = []
        for index in range(max(1, options.tokens // options.length)):
            noise = torch.randn((2, response), generator=generator)
            rows.append(
                Row(
                    sample_id=f"{data_rank}/{batch}/{index}",
                    group_id=f"{data_rank}/{batch}/{index}",
                    token_ids=torch.randint(vocabulary, (options.length,), generator=generator),
                    prompt_length=options.length - response,
                    loss_mask=torch.ones(response, dtype=torch.bool),
                    columns={"advantages": noise[0], "rollout_logprobs": noise[1] - 12.0},
                )
            )
        batches.append(rows)
    return batches


def create(options: argparse.Namespace, directory: Path) -> TrainingBackend:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    megatron = options.backend == "megatron"
    layout = MegatronConfig()
    if megatron:
        layout = MegatronConfig(dtype=options.dtype, **json.loads(options.layout))
    config = TrainerConfig(
        model=str(directory),
        store=directory,
        backend=options.backend,
        megatron=layout,
        autocast=options.dtype == "bfloat16" and not megatron,
    )
    platform.current().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if world > 1 or megatron:
        store = None if "MASTER_ADDR" in os.environ else f"file://{directory}/group"
        dist.init_process_group(
            platform.current().collective, init_method=store, rank=rank, world_size=world
        )
    mesh = (
        mesh_of(layout, rank, world)
        if megatron
        else Mesh(rank=rank, world_size=world, data_rank=rank, data_size=world)
    )
    return create_backend(options.backend, config, mesh)


def measure(options: argparse.Namespace, directory: Path, parameters: int) -> dict[str, Any]:
    backend = create(options, directory)
    mesh, device = backend.mesh, platform.current()
    batches = make_rows(options, SIZES[options.size][-1], mesh.data_rank)
    tokens = sum(len(row.token_ids) for rows in batches for row in rows) * mesh.data_size
    spec = LossSpec(name="ppo_clip", clip_low=0.2)
    seconds = []
    for _ in range(WARM_UP_STEPS + options.steps):
        started = time.perf_counter()
        backend.forward_backward(batches, spec)
        backend.step(normalizer=float(tokens), learning_rate=1e-6)
        device.synchronize()
        seconds.append(time.perf_counter() - started)
    each = sorted(seconds[WARM_UP_STEPS:])[options.steps // 2]
    _, layers, heads, _, head, _, _ = SIZES[options.size]
    flops = (6 * parameters + 6 * layers * heads * head * options.length) * tokens / each
    peak = options.peak_tflops or _known_peak()
    backend.close()
    return {
        "backend": options.backend,
        "tokens_per_s": tokens / each,
        "seconds": each,
        "mfu": flops / (peak * 1e12 * mesh.world_size) if peak else None,
        "peak_gib": device.memory().peak / 2**30,
    }


def _known_peak() -> float:
    name = platform.current().describe()["name"]
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), 0.0)


def run_apart(options: argparse.Namespace, backend: str, directory: Path, parameters: int) -> Any:
    command = [sys.executable, *sys.argv, "--backend", backend, "--model", str(directory)]
    command += ["--parameters", str(parameters)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="0.6b")
    parser.add_argument("--backend", choices=("both", "megatron", "reference"), default="both")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--layout", default="{}", help="fields of MegatronConfig, JSON")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--peak-tflops", type=float, default=0.0)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--parameters", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.length = min(options.length, options.tokens)
    if options.model:
        print(json.dumps(measure(options, options.model, options.parameters)))
        return
    with tempfile.TemporaryDirectory() as root:
        parameters = build_model(Path(root), options.size)
        names = ["megatron", "reference"] if options.backend == "both" else [options.backend]
        found = {name: run_apart(options, name, Path(root), parameters) for name in names}
    if os.environ.get("RANK", "0") != "0":
        return
    print(f"{options.size}: {parameters / 1e6:.0f} M parameters, {options.dtype}")
    for name, row in found.items():
        mfu = "unknown" if row["mfu"] is None else f"{row['mfu']:.3f}"
        print(
            f"{name:<10} {row['tokens_per_s']:>12.0f} tokens/s  {row['seconds']:.3f} s a step  "
            f"mfu {mfu}  peak {row['peak_gib']:.2f} GiB"
        )
    first = found[names[0]]
    mfu = "unknown" if first["mfu"] is None else f"{first['mfu']:.3f}"
    line = f"tokens_per_s={first['tokens_per_s']:.0f} mfu={mfu} peak_gib={first['peak_gib']:.2f}"
    if len(found) > 1:
        line += f" over_reference={first['tokens_per_s'] / found[names[1]]['tokens_per_s']:.2f}"
    print(f"{names[0]}: {line}")


if __name__ == "__main__":
    main()
