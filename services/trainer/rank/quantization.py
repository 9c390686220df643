"""Weights that are published quantised, as HF checkpoints of that kind hold them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from services.trainer.errors import UnquantizableWeightsError
from sluice.weights.convert.quantization import quantize
from sluice.weights.convert.quantized_layout import QuantizedLayout
from sluice.weights.shards import Casts, PendingShard, ShardWrite


def quantizing(
    write: ShardWrite, layout: QuantizedLayout, through: torch.dtype | None = None
) -> ShardWrite:
    """Return what writes shards as `write` does, in a layout.

    That is done from what the trainer has, and not from what it would cast. `through`: the dtype
    that passes have weights in, to which they are rounded first, so that what is stored is what
    passes computed with. Raises UnquantizableWeightsError.
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
            if refusal := layout.refusal(name, shape):
                raise UnquantizableWeightsError(refusal, tensor=name)
            if not layout.quantizes(name, shape):
                made[name] = tensor
                continue
            if not torch.isfinite(tensor).all():
                raise UnquantizableWeightsError(
                    f"{name!r} has numbers that are infinite, or none", tensor=name
                )
            rounded = tensor.detach().to(through or tensor.dtype)
            made.update(zip(layout.names(name), quantize(rounded, layout), strict=True))
        left = {n: dtype for n, dtype in casts.items() if made.get(n) is tensors[n]}
        return write(directory, file_name, made, left)

    return write_quantized
