"""The same figures on the device as on the CPU, of one backend, on one rank.

The CPU's are made in a process of its own, at the same time:
`python -m tools.accelerator_check.parity OUT FORM STEP FILE`, with SLUICE_DEVICE=cpu.
"""

from __future__ import annotations

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from services.trainer.backend import ModelName, TrainingBackend
from services.trainer.config import OptimConfig
from sluice import platform
from sluice.algo.spec import LossSpec
from tools.accelerator_check.backends import alone, backend_of, joined, ragged_rows
from tools.accelerator_check.models import random_model, shape_of
from tools.accelerator_check.steps import PACKAGE, STEPS
from tools.accelerator_check.work import StepWork

STEP_COUNT = 5
LOSS = LossSpec(name="ppo_clip", clip_low=0.2)
# So large an epsilon makes a step of AdamW, lr * g / (|g| + epsilon), the gradient itself.
AS_GRADIENT = OptimConfig(learning_rate=1e4, epsilon=1e4, max_grad_norm=0.0)
TRAINING = OptimConfig(learning_rate=5e-5)  # larger ones make much of rounding
ADAPTERS = OptimConfig(learning_rate=2e-3)  # whose one factor begins at zero
FP32_GOAL, BF16_GOAL = 1e-4, 0.05
CPU_SECONDS = 60.0


def run(work: StepWork, backend: str, *options: str) -> None:
    """Compare, record, and fail where the goals are missed."""
    model = random_model(work, "parity", dtype=torch.float32, spread=0.05)
    on_cpu = platform.current() is platform.CPU
    if on_cpu:  # there is nothing else to compare with: what follows is a rehearsal
        expected = found = measure(work, backend, model, *options)
    else:
        file = work.directory / "cpu.safetensors"
        command = (f"{PACKAGE}.parity", str(work.out), work.form, work.step.name, str(file))
        hidden = {platform.DEVICE_VARIABLE: platform.CPU.device_type}
        hidden[platform.current().visible_env] = ""
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(work.part, *command, seconds=CPU_SECONDS, **hidden)
            found = measure(work, backend, model, *options)
            other.result()
        expected = load_file(file)
    compare(work, found, expected, rehearsal=on_cpu)


def measure(work: StepWork, backend: str, model: Path, *options: str) -> dict[str, torch.Tensor]:
    """Log-probs, loss, gradient, five steps in fp32; log-probs in bf16. All on the host.

    options: `lora` trains adapters, which are what is published then.
    """
    adapters = "lora" in options
    training = ADAPTERS if adapters else TRAINING
    backend_here = partial(backend_of, backend, model, adapters=adapters)
    shape = shape_of(work, "parity")
    rows = ragged_rows(shape.vocabulary, groups=3 if work.small else 8, longest=96)
    normalizer = float(sum(row.response_length for row in rows))
    place = work.directory / platform.current().device_type
    place.mkdir(exist_ok=True)
    found: dict[str, torch.Tensor] = {}

    def logprobs(of: TrainingBackend, by: ModelName = "policy") -> torch.Tensor:
        return joined(of.compute_logprobs([rows], model=by, temperature=1.0), rows)

    with alone(place):
        with backend_here(place, half=False, optim=AS_GRADIENT) as policy:
            found["logprobs"] = logprobs(policy)
            before = _weights(policy, place / "before")
            loss = policy.forward_backward([rows], LOSS).loss
            found["loss"] = torch.tensor(loss, dtype=torch.float64)
            policy.step(normalizer=normalizer, learning_rate=AS_GRADIENT.learning_rate)
            found["gradient"] = before - _weights(policy, place / "after")
        with backend_here(place, half=False, optim=training) as policy:
            losses = []
            for _ in range(STEP_COUNT):
                losses.append(policy.forward_backward([rows], LOSS).loss)
                policy.step(normalizer=normalizer, learning_rate=training.learning_rate)
            found["losses"] = torch.tensor(losses, dtype=torch.float64)
            found["logprobs_after"] = logprobs(policy)
        with backend_here(place, half=True, optim=training) as policy:
            found["logprobs_bf16"] = logprobs(policy)
            found["reference_bf16"] = logprobs(policy, "reference")  # of the same weights
    return found


def _weights(backend: TrainingBackend, directory: Path) -> torch.Tensor:
    """All that the backend publishes, by name, as one float64 vector."""
    directory.mkdir(exist_ok=True)
    for old in directory.iterdir():
        old.unlink()
    tensors: dict[str, torch.Tensor] = {}
    for shard in backend.write_shards(directory):
        tensors |= load_file(directory / shard.file_name)
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def compare(
    work: StepWork,
    found: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    *,
    rehearsal: bool,
) -> None:
    """Record how far the device's figures are from the CPU's; fail where it is too far.

    A rehearsal, of one and the same figures, has no fp32 figure.
    """
    scale = expected["losses"].abs().max()
    parts = {
        "logprob_max": _most(found["logprobs"] - expected["logprobs"]),
        "loss": _most((found["loss"] - expected["loss"]) / expected["loss"]),
        "gradient": float(
            (found["gradient"] - expected["gradient"]).norm() / expected["gradient"].norm()
        ),
        "losses_of_steps": _most((found["losses"] - expected["losses"]) / scale),
        "logprob_max_after": _most(found["logprobs_after"] - expected["logprobs_after"]),
    }
    bf16 = max(
        float((found[name] - expected["logprobs"]).abs().mean())
        for name in ("logprobs_bf16", "reference_bf16")
    )
    moved = _most(expected["logprobs_after"] - expected["logprobs"])
    worst = max(parts.values())
    work.record(fp32=math.nan if rehearsal else worst, bf16=bf16, **parts, moved_by_steps=moved)
    values = [worst, bf16, moved, float(expected["gradient"].norm())]
    if not all(math.isfinite(value) for value in values):
        work.fail("a figure is not finite")
    if not (moved > 0.01 and expected["gradient"].norm() > 0):
        work.fail(f"five steps moved log-probs by {moved:.2g} only: nothing was compared")
    if worst > FP32_GOAL:
        work.fail(f"fp32 differs by {worst:.2g}, more than {FP32_GOAL:g}")
    if bf16 > BF16_GOAL:
        work.fail(f"bf16 log-probs differ by {bf16:.2g} on average, more than {BF16_GOAL:g}")


def _most(difference: torch.Tensor) -> float:
    return float(difference.abs().max())


def main() -> None:
    out, form, name, file = sys.argv[1:5]
    step = next(step for step in STEPS if step.name == name)
    work = StepWork(step, Path(out), "small" if form == "small" else "full")
    model = random_model(work, "parity", dtype=torch.float32, spread=0.05)
    save_file(measure(work, step.arguments[0], model, *step.arguments[1:]), file)


if __name__ == "__main__":
    main()
