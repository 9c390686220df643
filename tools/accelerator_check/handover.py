"""A version from one process to another of the same device: by handles, and through the store."""

from __future__ import annotations

import math
import shutil
import subprocess
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from services.rollout.engine.reference.loading import VersionLoader, open_model
from sluice import platform
from sluice.weights.checkpoint import companion_files
from sluice.weights.shards import PublishedShards
from sluice.weights.store import WeightStore
from sluice.weights.transfer.plan import HANDLES
from tools.accelerator_check.collective import buckets_of, pair
from tools.accelerator_check.models import random_model
from tools.accelerator_check.work import StepWork

FILE = "model-00001-of-00001.safetensors"


def run(work: StepWork) -> None:
    """Seconds of both. With handles every tensor is checked as well, and nothing is written."""
    model = random_model(work, "0.5b")
    version, seconds = _through_store(work, model)
    size = sum(bucket.size for bucket in buckets_of(version))
    work.record(gb=size / 1e9, store_ms=seconds * 1e3)
    folder = work.directory / HANDLES
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        handles = pair(work, HANDLES, version, folder)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        said = sorted({file.read_text() for file in folder.glob("*.reason")})
        work.record(handles_ms=math.nan)
        work.fail("; ".join(said) or f"{type(error).__name__}: {error}")
        return
    work.record(
        handles_ms=handles * 1e3,
        handles_gbs=size / handles / 1e9,
        handles_over_store=handles / seconds,
    )


def _through_store(work: StepWork, model: Path) -> tuple[Path, float]:
    """A version's directory, and seconds to write, sync, read and check it."""
    device = platform.current().device()
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        tensors |= load_file(file, device=str(device))
    root = work.directory / "store"
    shutil.rmtree(root, ignore_errors=True)
    store, shards = WeightStore(root), PublishedShards(keep=False, sync=True)
    loader = VersionLoader(torch.bfloat16, device)
    loader.model, _ = open_model(model, torch.bfloat16, device)
    began = time.perf_counter()
    staging = store.allocate(None)
    shards.begin(None)
    shard = shards.write(staging.directory, FILE, tensors)
    shards.finish(staging.version)
    record = store.commit(staging, [shard], companion_files(model), 0)
    assert record.directory is not None, "the store is a directory"
    loader.load(record.version, record.digest, record.directory)
    platform.current().synchronize()
    seconds = time.perf_counter() - began
    loader.close()
    return record.directory, seconds
