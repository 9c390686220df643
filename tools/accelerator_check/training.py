"""Training speed of the backends beside a bare PyTorch loop and the device's own peak.

One step is two micro-batches of packed rows, forward and backward in bfloat16, and AdamW in
float32. The bare loop is the transformers model with PyTorch's attention over a padded batch,
here without padding as all rows are of one length, under autocast. All do the same work, logits of
response tokens alone, but for the head: its logits are rounded to bfloat16 in the bare loop and are
float32 in the backends. Each backend runs once more with the attention of PyTorch over packs.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from services.trainer.backend import Row
from services.trainer.config import OptimConfig
from sluice import platform
from sluice.algo.spec import LossSpec
from sluice.operations import OPERATIONS, Usage, capability_of
from tools.accelerator_check.backends import alone, backend_of, even_rows
from tools.accelerator_check.models import Qwen3Shape, random_model, shape_of
from tools.accelerator_check.peaks import data_sheet_tflops, matmul_tflops
from tools.accelerator_check.work import StepWork

MICRO_BATCHES = 2
WARM_UP_STEPS = 2
RATE = 1e-6
NAMED = 10  # operations of a step that take most of its time
VARLEN = "torch_varlen"
BACKENDS = ("reference", "fsdp", "megatron")  # Megatron last: on a CPU it changes torch


def run(work: StepWork, size: str) -> None:
    """One side after the other; one that fails does not end those after it."""
    shape = shape_of(work, size)
    length, tokens = (128, 256) if work.small else (1024, 16384)
    rows = even_rows(shape.vocabulary, tokens // length, length // 8, length - length // 8)
    model = random_model(work, size)
    steps = 1 if work.small else 5
    measured = matmul_tflops(256 if work.small else 8192)
    sheet = data_sheet_tflops()
    work.record(parameters=shape.parameters, matmul_tflops=measured, data_sheet_tflops=sheet)
    bare = partial(_bare, work, model, rows, steps)
    speeds = {"bare": _guarded(work, "bare", shape, rows, bare)}
    if reason := _varlen_obstacle(shape):
        work.note(f"{VARLEN}: {reason}")
    for name in BACKENDS:
        measure = partial(_backend, work, name, model, rows, steps)
        speeds[name] = _guarded(work, name, shape, rows, measure)
        if not reason:
            asked = partial(measure, operations={"attention": VARLEN})
            speeds[f"{name}_varlen"] = _guarded(work, f"{name}_varlen", shape, rows, asked)
    best = max((speed for name, speed in speeds.items() if name != "bare"), default=math.nan)
    scored = sum(row.response_length for row in rows)
    flops_of_token = shape.training_flops(tokens, scored, length) / tokens
    # of a CPU there is no data sheet, and a share of what one product takes says nothing
    peak = measured if math.isnan(sheet) else sheet
    on_cpu = platform.current() is platform.CPU
    work.record(
        vs_bare=best / speeds["bare"] if speeds["bare"] else math.nan,
        mfu=math.nan if on_cpu else best * flops_of_token / (peak * 1e12),
        mfu_of_measured=math.nan if on_cpu else best * flops_of_token / (measured * 1e12),
    )


def _varlen_obstacle(shape: Qwen3Shape) -> str:
    """Why PyTorch's own kernel, which nothing takes unasked, cannot run; empty if it can."""
    (kernel,) = (each for each in OPERATIONS["attention"] if each.name == VARLEN)
    kind = platform.current().device_type
    usage = Usage(
        device_type=kind,
        dtype="bfloat16",
        heads=(shape.head, shape.head),
        capability=capability_of(kind),
    )
    return kernel.obstacle(usage)


def _guarded(
    work: StepWork,
    name: str,
    shape: Qwen3Shape,
    rows: list[Row],
    measure: Callable[[], list[float]],
) -> float:
    """tokens/s by the median step; 0 where it failed, with the reason kept."""
    device = platform.current()
    gc.collect()
    device.release_memory()
    try:
        each = statistics.median(measure()[WARM_UP_STEPS:])
    except (RuntimeError, ValueError, AssertionError, ImportError) as error:  # memory is one
        work.fail(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
        return 0.0
    tokens = MICRO_BATCHES * sum(len(row.token_ids) for row in rows)
    scored = MICRO_BATCHES * sum(row.response_length for row in rows)
    flops = shape.training_flops(tokens, scored, len(rows[0].token_ids))
    work.record(
        **{
            f"{name}_tokens_per_s": tokens / each,
            f"{name}_step_ms": each * 1e3,
            f"{name}_tflops": flops / each / 1e12,
            f"{name}_peak_gib": device.memory().peak / 2**30,
        }
    )
    return tokens / each


def _timed(step: Callable[[], None], steps: int) -> list[float]:
    seconds = []
    for _ in range(WARM_UP_STEPS + steps):
        began = time.perf_counter()
        step()
        platform.current().synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds


def _backend(
    work: StepWork,
    name: str,
    model: Path,
    rows: list[Row],
    steps: int,
    *,
    operations: Mapping[str, str] | None = None,
) -> list[float]:
    loss, optim = LossSpec(name="sft"), OptimConfig(learning_rate=RATE)
    normalizer = float(MICRO_BATCHES * sum(row.response_length for row in rows))
    with (
        alone(work.directory),
        backend_of(
            name, model, work.directory, half=True, optim=optim, operations=operations
        ) as backend,
    ):

        def step() -> None:
            backend.forward_backward([rows] * MICRO_BATCHES, loss)
            backend.step(normalizer=normalizer, learning_rate=RATE)

        found = _timed(step, steps)
        _note_operations(work, name if operations is None else f"{name}_varlen", step)
        return found


def _note_operations(work: StepWork, name: str, step: Callable[[], None]) -> None:
    """Where the time of a step goes: on the device, or on a CPU that is none beside a device."""
    current = platform.current()
    with current.profiler(stacks=False, memory=False) as profile:
        step()
        current.synchronize()
    if not hasattr(profile, "key_averages"):  # the vendor's
        return
    which = "self_cpu_time_total"
    averages = profile.key_averages()
    work.note(f"{name}: {sum(getattr(each, which) for each in averages) / 1e3:.1f} ms on the host")
    if current is not platform.CPU:
        which = "self_device_time_total"
    for each in sorted(averages, key=lambda each: -getattr(each, which))[:NAMED]:
        took = getattr(each, which) / 1e3
        work.note(f"{name}: {took:.1f} ms in {each.count} of {each.key[:100]}")


def _bare(work: StepWork, model: Path, rows: list[Row], steps: int) -> list[float]:
    current = platform.current()
    device = current.device()
    policy = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="sdpa"
    ).to(device)
    adam = torch.optim.AdamW(
        policy.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    tokens = torch.stack([row.token_ids for row in rows]).to(device)
    prompt = rows[0].prompt_length
    normalizer = MICRO_BATCHES * tokens[:, prompt:].numel()

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                hidden = policy.model(input_ids=tokens, use_cache=False).last_hidden_state
                logits = policy.lm_head(hidden[:, prompt - 1 : -1])
            loss = cross_entropy(
                logits.flatten(0, 1).float(), tokens[:, prompt:].flatten(), reduction="sum"
            )
            (loss / normalizer).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        adam.step()
        adam.zero_grad()

    found = _timed(step, steps)
    _note_operations(work, "bare", step)
    return found
