"""Block quantisation to FP8 (e4m3): one scale for every block of 128 x 128 weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from sluice.weights.convert.fp8_layout import BLOCK, SCALE, scale_shape
from sluice.weights.convert.options import ScaleFormat
from sluice.weights.errors import InvalidCheckpointError

LARGEST = 448.0  # of float8_e4m3fn


def quantize(
    weight: torch.Tensor, scale_format: ScaleFormat, block: tuple[int, int] = BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """(stored, scale) of a matrix [rows, columns]; a block of zeros has scale 1.

    "ue8m0" rounds scales up to powers of two.
    """
    blocks = _as_blocks(weight.float(), block)
    largest = blocks.abs().amax(dim=(1, 3))
    least = torch.finfo(torch.float32).tiny  # below it a quotient may be 0, and 0 / 0 no number
    scale = torch.where(largest > 0, (largest / LARGEST).clamp(min=least), 1.0)
    if scale_format == "ue8m0":
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    stored = (blocks / scale[:, None, :, None]).clamp(-LARGEST, LARGEST)
    rows, columns = weight.shape
    whole = stored.reshape(blocks.shape[0] * block[0], -1)[:rows, :columns]
    return whole.to(torch.float8_e4m3fn).contiguous(), scale


def dequantize(
    stored: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int] = BLOCK,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Compute the matrix as `dtype`. Raises InvalidCheckpointError when the scales do not fit."""
    if tuple(scale.shape) != scale_shape(tuple(stored.shape), block):
        raise InvalidCheckpointError(
            f"scales of shape {tuple(scale.shape)} for a weight of {tuple(stored.shape)}"
        )
    rows, columns = stored.shape
    spread = scale.float().repeat_interleave(block[0], 0)[:rows]
    spread = spread.repeat_interleave(block[1], 1)[:, :columns]
    return (stored.float() * spread).to(dtype)


def restored(
    tensors: Mapping[str, torch.Tensor], block: tuple[int, int], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an FP8 checkpoint without scales, weights computed as `dtype`.

    Raises InvalidCheckpointError for a weight without its scales, or with others.
    """
    for name, tensor in tensors.items():
        if name.removesuffix(SCALE) in tensors and name.endswith(SCALE):
            continue
        if tensor.dtype != torch.float8_e4m3fn:
            yield name, tensor
        elif (scale := tensors.get(name + SCALE)) is None:
            raise InvalidCheckpointError(f"{name!r} is FP8 and has no scales")
        elif tensor.dim() != 2:
            raise InvalidCheckpointError(f"{name!r} is FP8 and no matrix")
        else:
            yield name, dequantize(tensor, scale, block, dtype)


def _as_blocks(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """[rows, columns] as [blocks down, rows, blocks across, columns], filled up with zeros."""
    down, across = scale_shape(tuple(weight.shape), block)
    padded = torch.nn.functional.pad(
        weight,
        (0, across * block[1] - weight.shape[1], 0, down * block[0] - weight.shape[0]),
    )
    return padded.reshape(down, block[0], across, block[1])
