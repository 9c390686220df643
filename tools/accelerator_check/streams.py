"""Passes and a publication with side streams and without: the same figures, and milliseconds.

`python -m tools.accelerator_check.streams MODEL FOLDER FORM` is one side, in a process of its own.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from services.trainer.config import OptimConfig
from sluice import platform
from sluice.algo.spec import LossSpec
from sluice.weights.shards import PublishedShards
from tools.accelerator_check.backends import alone, backend_of, ragged_rows
from tools.accelerator_check.models import random_model, shape_of
from tools.accelerator_check.steps import PACKAGE
from tools.accelerator_check.work import StepWork

ROUNDS = 3  # the first warms up
GOAL = 1e-3  # of losses and gradients, whose sums some kernels add up in any order
SECONDS = 70.0
SMALL_SECONDS = 240.0  # of a machine that may be busy


def run(work: StepWork) -> None:
    """Both sides, one after the other."""
    model = random_model(work, "0.5b")
    found = {}
    for side in ("on", "off"):
        folder = work.directory / side
        folder.mkdir(exist_ok=True)
        work.part(
            *(f"{PACKAGE}.streams", str(model), str(folder), work.form),
            str(shape_of(work, "0.5b").vocabulary),
            seconds=SMALL_SECONDS if work.small else SECONDS,
            SLUICE_SIDE_STREAMS=side,
        )
        found[side] = json.loads((folder / "found.json").read_text())
        for name in ("pass_ms", "publish_ms"):
            work.record(**{f"{side}_{name}": found[side][name]})
    on, off = found["on"], found["off"]
    apart = abs(on["loss"] - off["loss"]) / abs(off["loss"])
    apart = max(apart, abs(on["norm"] - off["norm"]) / off["norm"])
    work.record(
        pass_speedup=off["pass_ms"] / on["pass_ms"],
        publish_speedup=off["publish_ms"] / on["publish_ms"],
        relative_difference=apart,
    )
    if not apart <= GOAL:
        work.fail(f"losses or gradients are apart by {apart:.2g}, more than {GOAL:g}")
    if on["digest"] != off["digest"]:
        work.fail("the published files are not the same")


def _measure(model: Path, folder: Path, small: bool, vocabulary: int) -> dict[str, float | str]:
    current = platform.current()
    rows = ragged_rows(vocabulary, groups=4 if small else 64, longest=32 if small else 512)
    size = max(1, len(rows) // 8)
    parts = [rows[first : first + size] for first in range(0, len(rows), size)]
    with (
        alone(folder),
        backend_of("reference", model, folder, half=True, optim=OptimConfig()) as backend,
    ):
        passes, loss = [], 0.0
        for _ in range(ROUNDS):
            current.synchronize()
            began = time.perf_counter()
            loss = backend.forward_backward(parts, LossSpec(name="sft")).loss
            current.synchronize()
            passes.append(time.perf_counter() - began)
            norm = backend.step(normalizer=1.0, learning_rate=0.0).grad_norm
    publish, digest = _publish(model, folder)
    return {
        "pass_ms": min(passes[1:]) * 1e3,
        "publish_ms": publish * 1e3,
        "loss": loss,
        "norm": norm,
        "digest": digest,
    }


def _publish(model: Path, folder: Path) -> tuple[float, str]:
    """Seconds, and the digest, of a file of the model's tensors, cast on their way."""
    device = platform.current().device()
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        tensors |= load_file(file, device=str(device))
    casts = dict.fromkeys(tensors, torch.float16)
    fastest, digest = float("inf"), ""
    for number in range(ROUNDS):
        shards = PublishedShards(keep=False, sync=False)
        shards.begin(None)
        began = time.perf_counter()
        digest = shards.write(folder, f"{number}.safetensors", tensors, casts).digest
        fastest = min(fastest, time.perf_counter() - began)
        (folder / f"{number}.safetensors").unlink()
    return fastest, digest


def main() -> None:
    model, folder, form, vocabulary = sys.argv[1:5]
    platform.current().set_device(0)
    found = _measure(Path(model), Path(folder), form == "small", int(vocabulary))
    (Path(folder) / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
