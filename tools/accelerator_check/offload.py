"""Steps of Megatron whose optimizer state waits on the host beside those on the device.

Losses are the same, memory of the device is less, and a step takes longer by the copies.
"""

from __future__ import annotations

import gc
import math
import time
from pathlib import Path

from services.trainer.backend import Mesh, Row, create_backend
from services.trainer.config import OptimConfig, TrainerConfig
from sluice import platform
from sluice.algo.spec import LossSpec
from sluice.config import parse_config
from tools.accelerator_check.backends import alone, even_rows
from tools.accelerator_check.models import random_model, shape_of
from tools.accelerator_check.work import StepWork

STEPS, WARM_UP = 5, 2
GOAL = 1e-3  # of losses, between which some kernels add up in any order
FREED = 0.8  # of 12 bytes a parameter, at least
GIB = 2**30


def run(work: StepWork) -> None:
    """Both, one after the other, in bfloat16."""
    model, shape = random_model(work, "0.5b"), shape_of(work, "0.5b")
    rows = even_rows(shape.vocabulary, 2, 16, 48)
    current = platform.current()
    losses: dict[str, list[float]] = {}
    held: dict[str, int] = {}
    with alone(work.directory):
        for name, share in (("device", 0.0), ("host", 1.0)):
            losses[name], held[name] = _train(work, name, model, rows, share)
    apart = max(abs(a - b) / a for a, b in zip(losses["device"], losses["host"], strict=True))
    state, freed = 12 * shape.parameters, held["device"] - held["host"]
    on_cpu = current is platform.CPU  # whose memory is that of all the process has ever loaded
    work.record(loss_difference=apart, freed_of_state=math.nan if on_cpu else freed / state)
    if not apart <= GOAL:
        work.fail(f"losses are apart by {apart:.2g}, more than {GOAL:g}")
    if losses["device"][0] == losses["device"][-1]:
        work.fail("the loss has not moved: nothing was compared")
    if not on_cpu and freed < FREED * state:
        work.fail(f"{freed / GIB:.2f} GiB are free, of a state of {state / GIB:.2f}")


def _train(
    work: StepWork, name: str, model: Path, rows: list[Row], share: float
) -> tuple[list[float], int]:
    """Losses of some steps on the same rows, and the bytes that are held behind them."""
    current = platform.current()
    values = {
        "model": str(model),
        "store": work.directory,
        "backend": "megatron",
        "megatron": {"dtype": "bfloat16", "optimizer_offload": share},
        "optim": OptimConfig(learning_rate=1e-4),
        "durable": False,
    }
    gc.collect()
    current.release_memory()
    before = current.memory().allocated
    config = parse_config(TrainerConfig, values)
    backend = create_backend("megatron", config, Mesh(rank=0, world_size=1))
    losses, seconds = [], []
    for _ in range(STEPS):
        losses.append(backend.forward_backward([rows], LossSpec(name="sft")).loss)
        current.synchronize()
        began = time.perf_counter()
        backend.step(normalizer=float(len(rows)), learning_rate=None)
        current.synchronize()
        seconds.append(time.perf_counter() - began)
    memory = current.memory()
    backend.close()
    work.record(
        **{
            f"{name}_step_ms": min(seconds[WARM_UP:]) * 1e3,
            f"{name}_held_gib": (memory.allocated - before) / GIB,
            f"{name}_peak_gib": (memory.peak - before) / GIB,
        }
    )
    return losses, memory.allocated - before
