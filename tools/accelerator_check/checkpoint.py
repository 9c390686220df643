"""Saving and loading a training checkpoint of the 0.5B shape: GB/s, and memory at the peak.

Files are written and read as the system does it, through the page cache of the host.
"""

from __future__ import annotations

import gc
import shutil
import time
from pathlib import Path

from services.trainer.config import OptimConfig
from sluice import platform
from sluice.algo.spec import LossSpec
from tools.accelerator_check.backends import alone, backend_of, even_rows
from tools.accelerator_check.models import random_model, shape_of
from tools.accelerator_check.work import StepWork

BACKENDS = ("reference", "megatron")
RATE = 1e-6


def run(work: StepWork) -> None:
    """After a step, so that there are moments to save."""
    model = random_model(work, "0.5b")
    for name in BACKENDS:
        gc.collect()
        platform.current().release_memory()
        _measure(work, name, model)


def _measure(work: StepWork, name: str, model: Path) -> None:
    current = platform.current()
    rows = even_rows(shape_of(work, "0.5b").vocabulary, 2, 16, 48)
    target = work.directory / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    optim = OptimConfig(learning_rate=RATE)
    with (
        alone(work.directory),
        backend_of(name, model, work.directory, half=True, optim=optim) as backend,
    ):
        backend.forward_backward([rows], LossSpec(name="sft"))
        backend.step(normalizer=96.0, learning_rate=RATE)
        current.synchronize()
        began = time.perf_counter()
        backend.save_checkpoint(target)
        saved = time.perf_counter() - began
        size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
        began = time.perf_counter()
        backend.load_checkpoint(target)
        current.synchronize()
        loaded = time.perf_counter() - began
    work.record(
        **{
            f"{name}_gb": size / 1e9,
            f"{name}_save_gbs": size / saved / 1e9,
            f"{name}_load_gbs": size / loaded / 1e9,
            f"{name}_peak_gib": current.memory().peak / 2**30,
        }
    )
    shutil.rmtree(target)
