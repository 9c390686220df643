"""Kernels of torch-npu by their names and signatures, in plain torch."""

from __future__ import annotations

import torch

from .watch import count


def npu_rms_norm(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    count("kernel.npu_rms_norm")
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (x.float() * scale).to(x.dtype) * gamma, scale


def npu_swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    count("kernel.npu_swiglu")
    first, second = torch.chunk(x, 2, dim)
    return first * torch.sigmoid(first) * second


def npu_rotary_mul(x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor) -> torch.Tensor:
    count("kernel.npu_rotary_mul")
    half = x.shape[-1] // 2
    return x * r1 + torch.roll(x, half, -1) * r2 * torch.tensor([-1.0, 1.0]).repeat_interleave(half)


def npu_fusion_attention(*args: object, **kwargs: object) -> None:
    """transformers imports it wherever torch_npu is installed; plain attention never calls it."""
    raise NotImplementedError("the fake NPU has no fused attention; use sdpa or eager")
