"""FP8 blocks in numpy and float64 alone: what is stored for a matrix, and what that stands for."""

from __future__ import annotations

import numpy as np

BLOCK = 128


def grid() -> np.ndarray:
    """The value of every byte of e4m3fn: exponent of 4 bits (bias 7), mantissa of 3."""
    values = np.empty(256)
    for byte in range(256):
        sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
        if exponent == 15 and mantissa == 7:
            values[byte] = np.nan
            continue
        size = (
            mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        )
        values[byte] = -size if sign else size
    return values


VALUES = grid()


def spread(scales: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """The scale of every element."""
    rows, columns = np.arange(shape[0]) // BLOCK, np.arange(shape[1]) // BLOCK
    return scales.astype(np.float64)[rows][:, columns]


def numbers(stored: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """What bytes and scales stand for."""
    return VALUES[stored] * spread(scales, stored.shape)


def expected_scales(weight: np.ndarray) -> np.ndarray:
    """Of each block its largest size over 448, 1 for zeros."""
    down, across = -(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK)
    scales = np.ones((down, across))
    for i in range(down):
        for j in range(across):
            block = weight[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            if (largest := np.abs(block.astype(np.float64)).max()) > 0:
                scales[i, j] = largest / 448
    return scales


def least_errors(weight: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """How far each element is from the nearest number that there is at its scale."""
    sizes = np.unique(VALUES[np.isfinite(VALUES)])
    wide = spread(scales, weight.shape)
    units = weight.astype(np.float64) / wide
    above = np.clip(np.searchsorted(sizes, units), 1, len(sizes) - 1)
    near = np.minimum(np.abs(sizes[above] - units), np.abs(sizes[above - 1] - units))
    return near * wide
