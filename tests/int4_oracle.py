"""INT4 groups in numpy and float64 alone: what is stored for a matrix, and what that stands for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounded to the nearest of bfloat16, to the even one of two; as float64."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))
    upper = (bits & np.uint64(0xFFFF0000)).astype(np.uint32)
    return upper.view(np.float32).astype(np.float64)


def scales(weight: np.ndarray, size: int) -> np.ndarray:
    """Of each group its largest size over 7, 1 for zeros: [rows, groups]."""
    groups = np.abs(weight.astype(np.float64)).reshape(len(weight), -1, size)
    largest = groups.max(-1)
    return bfloat16(np.where(largest > 0, largest / 7, 1.0))


def codes(packed: np.ndarray) -> np.ndarray:
    """int64[rows, inputs] of int32[rows, inputs / 8]: number i in bits 4 i and on, 8 too large."""
    words = packed.astype(np.int64) & 0xFFFFFFFF
    return np.stack([(words >> (4 * i)) & 15 for i in range(8)], -1).reshape(len(packed), -1) - 8


def numbers(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """What is stored stands for, float64[rows, inputs]."""
    found = codes(packed)
    return found * np.repeat(scale.astype(np.float64), found.shape[1] // scale.shape[1], axis=1)


def least_errors(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """How far each number is from the nearest of those at its scale, of -7 to 7 times it."""
    wide = np.repeat(scale.astype(np.float64), weight.shape[1] // scale.shape[1], axis=1)
    grid = wide[..., None] * np.arange(-7, 8)
    return np.abs(weight.astype(np.float64)[..., None] - grid).min(-1)


def plain(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint as a plain one has them, matrices that were packed in float64."""
    found = {}
    for name, tensor in stored.items():
        weight, _, part = name.rpartition("_")
        if part == "packed":
            scale = stored[f"{weight}_scale"].double().numpy()
            found[weight] = torch.from_numpy(numbers(tensor.numpy(), scale))
        elif not (part in ("scale", "shape") and f"{weight}_packed" in stored):
            found[name] = tensor
    return found
