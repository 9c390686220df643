"""Operations in plain torch, for devices without a kernel of their own; see Platform.op."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`weight * x / rms(x)` over the last axis, the statistic in fp32 (Zhang, Sennrich 2019)."""
    wide = x.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return weight * (wide * scale).to(x.dtype)


def native_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` by torch's own operator, one kernel where torch has it."""
    return functional.rms_norm(x, weight.shape, weight, eps)


def swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` for the two halves of the last axis (Shazeer 2020)."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021), halves rotated as in GPT-NeoX and Llama."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **options)


def fused_adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True, **options)
