"""The learning rate of a step."""

from __future__ import annotations

import math

from services.trainer.config import OptimConfig


def learning_rate(optim: OptimConfig, step: int) -> float:
    """Rate of the optimizer step taken when `step` steps are done."""
    if step < optim.warmup_steps:
        return optim.learning_rate * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.learning_rate
    span = optim.decay_steps - optim.warmup_steps
    progress = min(1.0, (step - optim.warmup_steps) / span)
    left = 1 - progress if optim.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return optim.learning_rate * (optim.minimum_ratio + (1 - optim.minimum_ratio) * left)
