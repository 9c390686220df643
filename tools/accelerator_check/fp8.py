"""Training steps of Megatron with products in 8 bits beside those in bfloat16, where there are any.

Needs Transformer Engine and a device that has them; elsewhere the reason is what it finds.
"""

from __future__ import annotations

import math
import time

from services.trainer.backend import LayoutError, Mesh, create_backend
from services.trainer.config import OptimConfig, TrainerConfig
from sluice import platform
from sluice.algo.spec import LossSpec
from sluice.config import parse_config
from tools.accelerator_check.backends import alone, even_rows
from tools.accelerator_check.models import random_model, shape_of
from tools.accelerator_check.work import StepWork

STEPS, WARM_UP = 6, 2
GOAL = 0.05  # between losses, of the first


def run(work: StepWork) -> None:
    """Losses of some steps on the same rows, and how long a step takes."""
    model = random_model(work, "0.5b")
    rows = even_rows(shape_of(work, "0.5b").vocabulary, 2, 16, 48 if work.small else 2032)
    losses: dict[str, list[float]] = {}
    for name, megatron in (("bf16", {}), ("fp8", {"fp8": "hybrid"})):
        values = {
            "model": str(model),
            "store": work.directory,
            "backend": "megatron",
            "megatron": {"dtype": "bfloat16", **megatron},
            "optim": OptimConfig(learning_rate=1e-4),
            "durable": False,
        }
        config = parse_config(TrainerConfig, values)
        with alone(work.directory):
            try:
                backend = create_backend("megatron", config, Mesh(rank=0, world_size=1))
            except LayoutError as error:
                work.note(str(error))
                work.record(**{f"{name}_step_ms": math.nan})
                continue
            losses[name], seconds = [], []
            for _ in range(STEPS):
                began = time.perf_counter()
                losses[name].append(backend.forward_backward([rows], LossSpec(name="sft")).loss)
                backend.step(normalizer=float(len(rows)), learning_rate=None)
                platform.current().synchronize()
                seconds.append(time.perf_counter() - began)
            backend.close()
            work.record(**{f"{name}_step_ms": min(seconds[WARM_UP:]) * 1e3})
    if "fp8" not in losses:
        return
    apart = max(abs(a - b) for a, b in zip(losses["fp8"], losses["bf16"], strict=True))
    work.record(loss_difference=apart / losses["bf16"][0])
    if not apart <= GOAL * losses["bf16"][0]:
        work.fail(f"losses are apart by {apart / losses['bf16'][0]:.2g}, more than {GOAL:g}")
