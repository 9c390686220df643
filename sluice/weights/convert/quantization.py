"""What quantised checkpoints store of matrices, and the numbers that it stands for.

FP8: a block's largest number is 448, the largest of float8_e4m3fn. INT4: a group's largest is 7.
A block or group of zeros has scale 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from sluice.weights.convert.quantized_layout import (
    PER_MX_BLOCK,
    Fp8Blocks,
    Int4Groups,
    Mxfp4Blocks,
    QuantizedLayout,
)
from sluice.weights.dtypes import DTYPE_NAMES
from sluice.weights.errors import InvalidCheckpointError

LARGEST_FP8, LARGEST_INT4 = 448.0, 7.0
LEAST_INT4 = -8  # the codes of others may have it
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits; the fourth is the sign
E8M0_BIAS = 127
_LEAST = torch.finfo(torch.float32).tiny  # below it a quotient may be 0, and 0 / 0 no number


def quantize(weight: torch.Tensor, layout: QuantizedLayout) -> tuple[torch.Tensor, ...]:
    """Return what is stored of a matrix [rows, inputs], in the order of the layout's parts."""
    if isinstance(layout, Fp8Blocks):
        return _quantize_fp8(weight, layout)
    assert isinstance(layout, Int4Groups)
    codes, scale = _round_to_int4(weight, layout.size)
    rows, inputs = weight.shape
    packed = _pack(codes.view(rows, inputs))
    return packed, scale, torch.tensor([rows, inputs], dtype=torch.int64)


def dequantize(
    parts: Sequence[torch.Tensor], layout: QuantizedLayout, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Compute a matrix as `dtype`. Raises InvalidCheckpointError when its parts do not fit."""
    if isinstance(layout, Fp8Blocks):
        return _dequantize_fp8(parts[0], parts[1], layout, dtype)
    if isinstance(layout, Mxfp4Blocks):
        return _dequantize_mxfp4(parts[0], parts[1], dtype)
    assert isinstance(layout, Int4Groups)
    packed, scale, shape = parts
    rows, inputs = layout.shape_of(tuple(packed.shape))
    if tuple(scale.shape) != (rows, inputs // layout.size) or inputs % layout.size:
        raise InvalidCheckpointError(
            f"scales of shape {tuple(scale.shape)} for a weight of {(rows, inputs)}"
        )
    if shape.tolist() != [rows, inputs]:
        raise InvalidCheckpointError(f"shape {shape.tolist()} for a weight of {(rows, inputs)}")
    codes = _unpack(packed).view(rows, -1, layout.size)
    return (codes.float() * scale.float()[:, :, None]).view(rows, inputs).to(dtype)


def restored(
    tensors: Mapping[str, torch.Tensor], layout: QuantizedLayout, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a quantised checkpoint as a plain one has them, matrices as `dtype`.

    Raises InvalidCheckpointError for a matrix without all of its parts, or with others.
    """
    weights = {
        name: layout.weight_of(name)
        for name, tensor in tensors.items()
        if layout.is_first_part(name, DTYPE_NAMES[tensor.dtype])
    }
    parts = {part for weight in weights.values() for part in layout.names(weight)}
    for name, tensor in tensors.items():
        if (weight := weights.get(name)) is None:
            if name not in parts:
                yield name, tensor
            continue
        if len(layout.shape_of(tuple(tensor.shape))) != layout.dimensions:
            raise InvalidCheckpointError(f"{weight!r} is {layout.label} and no matrix")
        if missing := [part for part in layout.names(weight) if part not in tensors]:
            raise InvalidCheckpointError(f"{weight!r} is {layout.label} and has no {missing[0]!r}")
        if weight != name and weight in tensors:
            raise InvalidCheckpointError(f"{weight!r} is there both plain and as {layout.label}")
        yield weight, dequantize([tensors[part] for part in layout.names(weight)], layout, dtype)


def simulate(weight: torch.Tensor, layout: Int4Groups) -> torch.Tensor:
    """Return the numbers that a quantised weight [..., inputs] would stand for, in its own dtype.

    The gradient is that of the weight itself (straight-through, arXiv 1308.3432).
    """
    simulated: torch.Tensor = _Simulated.apply(weight, layout.size)
    return simulated


class _Simulated(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, weight: torch.Tensor, size: int) -> torch.Tensor:
        codes, scale = _round_to_int4(weight, size)
        return (codes.float() * scale.float()[..., None]).view(weight.shape).to(weight.dtype)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


def _round_to_int4(weight: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8[..., groups, size], bfloat16[..., groups]): the nearest at scales as stored."""
    groups = weight.float().unflatten(-1, (-1, size))
    largest = groups.abs().amax(-1)
    scale = torch.where(largest > 0, (largest / LARGEST_INT4).clamp(min=_LEAST), 1.0)
    scale = scale.to(torch.bfloat16)
    codes = (groups / scale.float()[..., None]).round().clamp(-LARGEST_INT4, LARGEST_INT4)
    return codes.to(torch.int8), scale


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """int32[rows, inputs / 8] of int8[rows, inputs]; hosts and devices are little-endian."""
    nibbles = (codes - LEAST_INT4).to(torch.uint8)
    return (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).contiguous().view(torch.int32)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """int8[rows, inputs] of int32[rows, inputs / 8]."""
    pairs = packed.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).to(torch.int8) + LEAST_INT4


def _quantize_fp8(weight: torch.Tensor, layout: Fp8Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    block = layout.block
    blocks = _as_blocks(weight.float(), layout)
    largest = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(largest > 0, (largest / LARGEST_FP8).clamp(min=_LEAST), 1.0)
    if layout.scale_format == "ue8m0":
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    stored = (blocks / scale[:, None, :, None]).clamp(-LARGEST_FP8, LARGEST_FP8)
    rows, columns = weight.shape
    whole = stored.reshape(blocks.shape[0] * block[0], -1)[:rows, :columns]
    return whole.to(torch.float8_e4m3fn).contiguous(), scale


def _dequantize_fp8(
    stored: torch.Tensor, scale: torch.Tensor, layout: Fp8Blocks, dtype: torch.dtype
) -> torch.Tensor:
    if tuple(scale.shape) != layout.scale_shape(tuple(stored.shape)):
        raise InvalidCheckpointError(
            f"scales of shape {tuple(scale.shape)} for a weight of {tuple(stored.shape)}"
        )
    rows, columns = stored.shape
    spread = scale.float().repeat_interleave(layout.block[0], 0)[:rows]
    spread = spread.repeat_interleave(layout.block[1], 1)[:, :columns]
    return (stored.float() * spread).to(dtype)


def _dequantize_mxfp4(
    blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """[experts, inputs, rows] of [experts, rows, blocks, 16] and [experts, rows, blocks]."""
    if blocks.shape[:-1] != scales.shape or blocks.shape[-1] != PER_MX_BLOCK // 2:
        raise InvalidCheckpointError(
            f"scales of shape {tuple(scales.shape)} for blocks of {tuple(blocks.shape)}"
        )
    if scales.dtype is not torch.uint8:  # float8_e8m0fnu would count as what it stands for
        raise InvalidCheckpointError(f"scales of type {scales.dtype}, where bytes are known alone")
    values = torch.tensor((*E2M1, *(-value for value in E2M1)), device=blocks.device)
    pairs = torch.stack((values[(blocks & 15).int()], values[(blocks >> 4).int()]), -1)
    exponents = scales.int()[..., None] - E8M0_BIAS
    numbers = torch.ldexp(pairs.flatten(-2), exponents).flatten(-2)
    if not numbers.isfinite().all():
        raise InvalidCheckpointError(f"numbers that are not finite, of scales up to {scales.max()}")
    return numbers.transpose(-1, -2).to(dtype).contiguous()


def _as_blocks(weight: torch.Tensor, layout: Fp8Blocks) -> torch.Tensor:
    """[rows, columns] as [blocks down, rows, blocks across, columns], filled up with zeros."""
    block, (down, across) = layout.block, layout.scale_shape(tuple(weight.shape))
    padded = torch.nn.functional.pad(
        weight,
        (0, across * block[1] - weight.shape[1], 0, down * block[0] - weight.shape[0]),
    )
    return padded.reshape(down, block[0], across, block[1])
