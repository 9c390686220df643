"""Conversions of a random checkpoint beside `cp` and `sync` of the same bytes.

A copy before each conversion, in three rounds; medians. Before every one of them as many bytes are
written and removed again, so that all begin with memory that was in use: a machine that gets its
memory from a host on first use would otherwise charge it to whoever comes first. Memory is the peak
of resident memory above that before the conversion, in a process of its own. The last line is the
summary.

    python benchmarks/convert.py [--gib 1.1] [--directory DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LAYERS, HIDDEN, FFN, HEADS, GROUPS, HEAD_DIM = 12, 2048, 6144, 16, 8, 128
BYTES_PER_LAYER = 2 * HIDDEN * (HEADS * HEAD_DIM * 2 + GROUPS * HEAD_DIM * 2 + 3 * FFN)
VOCAB = 32_768
ROUNDS = 3
MEASURE = """
import json, sys, time
from pathlib import Path
from sluice.weights.convert.conversion import convert
from sluice.weights.convert.options import ConvertOptions

def resident(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) / 1024

source, target, kind, workers = sys.argv[1:]
options = ConvertOptions(to=kind, workers=int(workers))
Path("/proc/self/clear_refs").write_text("5")
before, start, used = resident("VmRSS"), time.perf_counter(), time.process_time()
result = convert(Path(source), Path(target), options)
seconds = time.perf_counter() - start
used = time.process_time() - used
print(json.dumps({"seconds": seconds, "cpu_seconds": used, "peak_mib": resident("VmHWM") - before,
                  "group_mib": result.largest_group / 2**20, "bytes": result.size}))
"""


def write_checkpoint(directory: Path, gib: float) -> int:
    """A Qwen3 of random bfloat16 numbers in shards of one layer each or so; bytes of its files."""
    import torch

    from sluice.weights.convert.hf import TensorPart, lay_out_hf
    from sluice.weights.convert.pieces import Content
    from sluice.weights.rules.shape import read_shape
    from sluice.weights.rules.weight_map import WeightMap, family_of
    from sluice.weights.shards import write_shard

    rest = 2 * 2 * VOCAB * HIDDEN
    layers = max(1, round((gib * 2**30 - rest) / BYTES_PER_LAYER))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    family = family_of(config)
    shapes = WeightMap(family, read_shape(family, config)).hf_tensors()
    groups = [(n, [TensorPart(n, Content(torch.bfloat16, shape))]) for n, shape in shapes.items()]
    files, laid, texts = lay_out_hf(groups, max_file_bytes=400 << 20)
    generator = torch.Generator().manual_seed(0)
    for file in files:
        tensors = {
            task.name: torch.randint(-(2**15), 2**15, task.content.shape, generator=generator)
            .to(torch.int16)
            .view(torch.bfloat16)
            for group in laid
            for task in group.tasks
            if task.file == file.name
        }
        write_shard(directory, file.name, tensors)
    for name, data in texts.items():
        (directory / name).write_bytes(data)
    return sum(path.stat().st_size for path in directory.iterdir())


def settle(path: Path, size: int) -> None:
    """Use and free as much memory as the next measurement needs."""
    block = bytes(8 << 20)
    with path.open("wb", buffering=0) as file:
        for _ in range(0, size, len(block)):
            file.write(block)
    os.sync()
    path.unlink()
    os.sync()


def copy(source: Path, target: Path) -> float:
    """Seconds of `cp` and `sync` of the copy."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    subprocess.run(["sync", *map(str, target.iterdir())], check=True)
    return time.perf_counter() - start


def convert(source: Path, target: Path, kind: str, workers: int) -> dict[str, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(source), str(target), kind, str(workers)],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.1)
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--directory", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="convert-") as name:
        root = Path(name)
        size = write_checkpoint(root / "hf", arguments.gib)
        os.sync()
        runs: dict[str, list[dict[str, float]]] = {"torch_dist": [], "hf": []}
        copies: dict[str, list[float]] = {"torch_dist": [], "hf": []}
        for number in range(ROUNDS):
            for kind, source, target in (
                ("torch_dist", root / "hf", root / "made"),
                ("hf", root / "made", root / "back"),
            ):
                settle(root / "scratch", size)
                seconds = copy(source, root / "copy")
                shutil.rmtree(root / "copy")
                settle(root / "scratch", size)
                run = convert(source, target, kind, arguments.workers)
                print(
                    f"round {number + 1}: to {kind} {run['seconds']:.2f} s, "
                    f"{run['cpu_seconds']:.2f} of processor; cp and sync {seconds:.2f} s",
                    flush=True,
                )
                copies[kind].append(seconds)
                runs[kind].append(run)
            for path in (root / "made", root / "back"):
                shutil.rmtree(path)
            os.sync()
        measured = [run for kind in runs.values() for run in kind]
        ratios = {
            kind: statistics.median(copies[kind])
            / statistics.median(run["seconds"] for run in runs[kind])
            for kind in runs
        }
        pace = statistics.median(copies["torch_dist"])
        print(f"{size / 2**30:.2f} GiB, cp and sync {size / 2**30 / pace:.2f} GiB/s")
        print(
            f"convert: hf2mcore={ratios['torch_dist']:.2f} mcore2hf={ratios['hf']:.2f} "
            f"peak_mib={max(run['peak_mib'] for run in measured):.0f} "
            f"largest_group_mib={max(run['group_mib'] for run in measured):.0f}"
        )


if __name__ == "__main__":
    main()
