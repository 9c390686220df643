"""AdamW over one flat gradient buffer: reduced, clipped and applied once a step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from services.trainer.backend import StepOutcome
from services.trainer.config import OptimConfig

NON_FINITE = "non-finite gradient norm"
CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


class FlatOptimizer:
    """Parameters whose gradients are views of one float32 buffer.

    Backward passes add into the buffer; `step` is the only place that divides.
    """

    def __init__(self, model: torch.nn.Module, optim: OptimConfig) -> None:
        self._max_norm = optim.max_grad_norm
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        first = next(iter(self.parameters.values()))
        size = sum(p.numel() for p in self.parameters.values())
        self.gradients = torch.zeros(size, dtype=first.dtype, device=first.device)
        offset = 0
        for parameter in self.parameters.values():
            view = self.gradients[offset : offset + parameter.numel()]
            parameter.grad = view.view_as(parameter)
            offset += parameter.numel()
        decayed = [p for p in self.parameters.values() if p.ndim > 1]
        plain = [p for p in self.parameters.values() if p.ndim <= 1]
        groups = [
            {"params": decayed, "weight_decay": optim.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=optim.learning_rate,
            betas=optim.betas,
            eps=optim.epsilon,
            fused=True if first.device.type == "cpu" else None,  # elsewhere torch chooses
        )

    def step(
        self, normalizer: float, rate: float, reduce: Callable[[torch.Tensor], None]
    ) -> StepOutcome:
        """Sum gradients over ranks with `reduce`, divide, clip, apply, clear."""
        reduce(self.gradients)
        total = torch.linalg.vector_norm(self.gradients, dtype=torch.float64).item()
        norm = total / normalizer
        if not math.isfinite(norm):
            self.clear()
            return StepOutcome(grad_norm=norm, learning_rate=rate, skipped_reason=NON_FINITE)
        clip = min(1.0, self._max_norm / (norm + CLIP_EPSILON)) if self._max_norm else 1.0
        self.gradients.mul_(clip / normalizer)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.clear()
        return StepOutcome(grad_norm=norm, learning_rate=rate)

    def clear(self) -> None:
        self.gradients.zero_()
