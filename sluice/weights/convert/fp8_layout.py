"""Layout of FP8 checkpoints: which weights they quantise, what `config.json` says. No torch.

It is that of DeepSeek-V3's and Qwen3's, which SGLang, vLLM and transformers read: `weight` in
float8_e4m3fn, `weight_scale_inv` in float32 with weight = stored * scale, one for every block of
128 x 128. https://huggingface.co/deepseek-ai/DeepSeek-V3 (README_WEIGHTS.md)
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from sluice.weights.convert.options import ScaleFormat
from sluice.weights.errors import InvalidCheckpointError

SCALE = "_scale_inv"
FP8 = "F8_E4M3"  # of safetensors
BLOCK = (128, 128)
_QUANTIZED = re.compile(
    r"(\w_proj|_proj_with_mqa|\.in_proj_qkv|\.in_proj_z|\.experts\.\d+\.w[123])\.weight$"
)
_KEPT = re.compile(r"(^|\.)(visual|lm_head|embed_tokens|indexer)\.")


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


def modules_kept(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[str]:
    """Name the modules whose matrices are not quantised, of tensors by name: dtype and shape."""
    return sorted(
        name.removesuffix(".weight")
        for name, (dtype, shape) in tensors.items()
        if name.endswith(".weight") and len(shape) == 2 and dtype != FP8
    )
