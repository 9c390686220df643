"""Memory and time of `sluice.algo` log-probs and entropy, forward and backward, beside plain torch.

    python benchmarks/logprob.py [--tokens 8192] [--vocabulary 32000] [--hidden 256]

Each variant runs in a process of its own. Peak extra memory is what the process held at most
during forward and during backward, less the inputs, and in backward less the gradients of the
inputs too (in forward there are none yet that could hide a temporary). It is measured twice
and the larger counts: by the kernel (VmHWM of /proc/self/status, which also sees buffers of the
matrix library) and by the allocator (memory events of the torch profiler, which see every
temporary inside an operator). Both are given in units of a chunk: chunk rows x vocabulary x 4
bytes. Time is the better of two runs without the profiler; the ratio is of processor seconds,
which other work on the machine stretches less than the wall clock, and by default of one thread,
because threads that wait for each other burn them too. The plain formula is a
log_softmax of float32 logits with the entropy under no_grad.

Last line: the worst peak / chunk and the worst time / plain of the two fused functions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sluice.algo.logprobs import DEFAULT_CHUNK_ROWS, linear_logprobs, token_logprobs

VARIANTS = ("logits-plain", "logits-fused", "linear-plain", "linear-fused")
VARIANT_SECONDS = 900


def plain_logprobs(
    logits_TV: torch.Tensor, targets_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    log_TV = logits_TV.log_softmax(-1)
    with torch.no_grad():
        entropy_T = -(log_TV.exp() * log_TV).sum(-1)
    return log_TV.gather(1, targets_T[:, None]).squeeze(1), entropy_T


def create_forward(
    variant: str, tokens: int, vocabulary: int, hidden: int, chunk_rows: int
) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """(forward to a scalar, its inputs that require gradients)."""
    targets_T = torch.randint(0, vocabulary, (tokens,))
    if variant.startswith("logits"):
        inputs = [torch.empty(tokens, vocabulary).normal_().requires_grad_()]
    else:
        weight_VH = torch.empty(vocabulary, hidden).normal_(std=hidden**-0.5)
        inputs = [
            torch.empty(tokens, hidden).normal_().requires_grad_(),
            weight_VH.requires_grad_(),
        ]
    functions: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
        "logits-plain": lambda: plain_logprobs(inputs[0], targets_T),
        "logits-fused": lambda: token_logprobs(inputs[0], targets_T, chunk_rows=chunk_rows),
        "linear-plain": lambda: plain_logprobs(inputs[0] @ inputs[1].t(), targets_T),
        "linear-fused": lambda: linear_logprobs(
            inputs[0], inputs[1], targets_T, chunk_rows=chunk_rows
        ),
    }
    return lambda: functions[variant]()[0].sum(), inputs


def resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def profile_held(run: Callable[[], None]) -> tuple[int, int]:
    """(most, last) bytes the torch allocator held above its start during `run`."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak, held


def allocator_peak(forward: Callable[[], torch.Tensor], gradients: int) -> int:
    losses: list[torch.Tensor] = []
    peak, kept = profile_held(lambda: losses.append(forward()))
    most, _ = profile_held(lambda: losses.pop().backward())
    return max(peak, kept + most - gradients)


def kernel_peak(forward: Callable[[], torch.Tensor], gradients: int) -> int:
    before = resident_bytes("VmRSS:")
    loss = forward()
    peak = resident_bytes("VmHWM:") - before
    loss.backward()
    return max(peak, resident_bytes("VmHWM:") - before - gradients)


def measure(variant: str, options: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(options.threads)
    warm, _ = create_forward(variant, 64, 512, 64, 32)
    warm().backward()  # threads and library buffers are there now
    forward, inputs = create_forward(
        variant, options.tokens, options.vocabulary, options.hidden, options.chunk_rows
    )
    gradients = sum(tensor.numel() * tensor.element_size() for tensor in inputs)
    chunk = options.chunk_rows * options.vocabulary * 4
    peaks = {}
    wall, processor = [], []
    for name, run in (
        ("kernel", lambda: kernel_peak(forward, gradients)),
        ("none", lambda: forward().backward()),
        ("allocator", lambda: allocator_peak(forward, gradients)),
    ):
        for tensor in inputs:
            tensor.grad = None
        started = time.perf_counter(), time.process_time()
        peaks[name] = run()
        wall.append(time.perf_counter() - started[0])
        processor.append(time.process_time() - started[1])
    return {
        "kernel": peaks["kernel"] / chunk,
        "allocator": peaks["allocator"] / chunk,
        "wall": min(wall[:2]),
        "processor": min(processor[:2]),
    }


def run_variant(variant: str) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        env={**os.environ, "KINETO_LOG_LEVEL": "99"},  # the profiler says nothing
        text=True,
        check=True,
        timeout=VARIANT_SECONDS,
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--chunk-rows", type=int, default=DEFAULT_CHUNK_ROWS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measure(options.variant, options)))
        return
    print(
        f"{options.tokens} tokens x {options.vocabulary} vocabulary, hidden {options.hidden}, "
        f"chunk {options.chunk_rows} rows, float32, {options.threads} thread(s)"
    )
    results = {variant: run_variant(variant) for variant in VARIANTS}
    columns = ("kernel", "allocator", "wall", "processor")
    print(f"{'':<14}{'peak/chunk by':>24}{'seconds':>24}")
    print(f"{'variant':<14}" + "".join(f"{column:>12}" for column in columns))
    for name, row in results.items():
        print(f"{name:<14}" + "".join(f"{row[column]:>12.3f}" for column in columns))
    kinds = ("logits", "linear")
    fused = [results[f"{kind}-fused"] for kind in kinds]
    peak = max(max(row["kernel"], row["allocator"]) for row in fused)
    slowest = max(
        row["processor"] / results[f"{kind}-plain"]["processor"]
        for row, kind in zip(fused, kinds, strict=True)
    )
    print(f"logprob: peak/chunk={peak:.3f} time/plain={slowest:.2f}")


if __name__ == "__main__":
    main()
