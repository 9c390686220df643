"""Weights that are published in FP8 blocks, as HF checkpoints of that kind hold them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from services.trainer.errors import UnquantizableWeightsError
from sluice.weights.convert.fp8 import quantize
from sluice.weights.convert.fp8_layout import SCALE, is_quantizable
from sluice.weights.convert.options import ScaleFormat
from sluice.weights.shards import Casts, PendingShard, ShardWrite

STACKED = 3  # dimensions of a tensor of all experts, which FP8 checkpoints hold one by one


def quantizing(write: ShardWrite, scale_format: ScaleFormat) -> ShardWrite:
    """Return what writes shards as `write` does, weights of linear layers quantised.

    That is done from what the trainer has, and not from what it would cast. Raises
    UnquantizableWeightsError.
    """

    def write_quantized(
        directory: Path,
        file_name: str,
        tensors: Mapping[str, torch.Tensor],
        casts: Casts = MappingProxyType({}),
    ) -> PendingShard:
        made: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            if len(shape) == STACKED and "experts" in name and min(shape) > 1:
                raise UnquantizableWeightsError(
                    f"{name!r} has all experts in one tensor, for which FP8 has no layout",
                    tensor=name,
                )
            if not is_quantizable(name, shape):
                made[name] = tensor
                continue
            if not torch.isfinite(tensor).all():
                raise UnquantizableWeightsError(
                    f"{name!r} has numbers that are infinite, or none", tensor=name
                )
            made[name], made[name + SCALE] = quantize(tensor.detach(), scale_format)
        left = {name: dtype for name, dtype in casts.items() if made[name] is tensors[name]}
        return write(directory, file_name, made, left)

    return write_quantized
