"""Block quantisation to FP8 (e4m3): one scale for every block of 128 x 128 weights.

The layout is that of DeepSeek-V3's and Qwen3's FP8 checkpoints, which SGLang, vLLM and
transformers read: `weight` in float8_e4m3fn, `weight_scale_inv` in float32 with weight =
stored * scale. https://huggingface.co/deepseek-ai/DeepSeek-V3 (README_WEIGHTS.md)
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from sluice.weights.convert.options import ScaleFormat
from sluice.weights.errors import InvalidCheckpointError

SCALE = "_scale_inv"
BLOCK = (128, 128)
LARGEST = 448.0  # of float8_e4m3fn
_QUANTIZED = re.compile(r"(\w_proj|_proj_with_mqa|\.in_proj_qkv|\.in_proj_z)\.weight$")
_KEPT = re.compile(r"(^|\.)(visual|lm_head|embed_tokens)\.")


def is_quantizable(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether an HF tensor is the weight of a linear layer that FP8 checkpoints quantise."""
    return (
        len(shape) == 2
        and 0 not in shape
        and bool(_QUANTIZED.search(name))
        and not _KEPT.search(name)
    )


def scale_shape(shape: tuple[int, ...], block: tuple[int, int] = BLOCK) -> tuple[int, int]:
    """Return the shape of the scales of a weight: blocks down, blocks across."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


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
    stored: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] = BLOCK
) -> torch.Tensor:
    """Compute the matrix in bfloat16. Raises InvalidCheckpointError when the scales do not fit."""
    if tuple(scale.shape) != scale_shape(tuple(stored.shape), block):
        raise InvalidCheckpointError(
            f"scales of shape {tuple(scale.shape)} for a weight of {tuple(stored.shape)}"
        )
    rows, columns = stored.shape
    spread = scale.float().repeat_interleave(block[0], 0)[:rows]
    spread = spread.repeat_interleave(block[1], 1)[:, :columns]
    return (stored.float() * spread).to(torch.bfloat16)


def block_size(config: Mapping[str, object]) -> tuple[int, int] | None:
    """Block size of an FP8 checkpoint by its `config.json`; None when it is not quantised.

    Raises InvalidCheckpointError for a quantisation that is not understood.
    """
    entry = config.get("quantization_config")
    if not isinstance(entry, Mapping):
        return None
    block = entry.get("weight_block_size")
    if entry.get("quant_method") != "fp8" or not isinstance(block, list) or len(block) != 2:
        raise InvalidCheckpointError(
            f"quantization {entry.get('quant_method')!r} is not FP8 with blocks of weights"
        )
    rows, columns = block
    if not all(type(size) is int and 0 < size < 1 << 31 for size in block):
        raise InvalidCheckpointError(f"config.json: weight_block_size is {block!r}")
    return rows, columns


def quantization_config(kept: list[str], scale_format: ScaleFormat) -> dict[str, object]:
    """Make the entry of `config.json` for a checkpoint whose modules but `kept` are quantised."""
    config: dict[str, object] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": kept,
    }
    return config | ({"scale_fmt": "ue8m0"} if scale_format == "ue8m0" else {})


def _as_blocks(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """[rows, columns] as [blocks down, rows, blocks across, columns], filled up with zeros."""
    down, across = scale_shape(tuple(weight.shape), block)
    padded = torch.nn.functional.pad(
        weight,
        (0, across * block[1] - weight.shape[1], 0, down * block[0] - weight.shape[0]),
    )
    return padded.reshape(down, block[0], across, block[1])
