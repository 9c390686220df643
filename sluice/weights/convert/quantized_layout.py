"""Layouts of quantised checkpoints: which weights, stored how; what `config.json` says. No torch.

FP8 is that of DeepSeek-V3's and Qwen3's, which SGLang, vLLM and transformers read: `weight` in
float8_e4m3fn, `weight_scale_inv` in float32 with weight = stored * scale, one for every block of
128 x 128. https://huggingface.co/deepseek-ai/DeepSeek-V3 (README_WEIGHTS.md)

INT4 is that of Kimi-K2-Thinking's, which compressed-tensors calls pack-quantized: experts alone, in
`weight_packed` eight to an int32, the first in the lowest bits and 8 more than its value;
`weight_scale` in bfloat16, one for every so many inputs of a row; `weight_shape`.
https://github.com/vllm-project/compressed-tensors

MXFP4 is that of gpt-oss, which is read alone: all experts of a layer in one tensor, whose rows and
inputs are exchanged once it is plain. `_blocks` has two numbers of 4 bits (e2m1) to a byte, the
first in the lower ones, 32 to a block; `_scales` the exponent of each block, 127 more than it is.
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from sluice.weights.errors import InvalidCheckpointError

Quantization = Literal["", "fp8", "fp8_ue8m0", "int4_32", "int4_128"]
Shape = tuple[int, ...]
Described = tuple[str, Shape]  # dtype of safetensors, shape

FP8 = "F8_E4M3"  # of safetensors
BLOCK = (128, 128)
PER_INT32 = 8  # numbers of 4 bits
PER_MX_BLOCK = 32
_WEIGHT = ".weight"
_LINEAR = re.compile(
    r"(\w_proj|_proj_with_mqa|\.in_proj_qkv|\.in_proj_z|\.experts\.\d+\.w[123])\.weight$"
)
_KEPT = re.compile(r"(^|\.)(visual|lm_head|embed_tokens|indexer)\.")
_EXPERT = re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|down_proj|w[123])\.weight$")
_STACKED = 3  # dimensions of a tensor of all experts


class QuantizedLayout(ABC):
    """How matrices are stored as several tensors each, of which `suffixes` follow their names."""

    label: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    dimensions: ClassVar[int] = 2  # of what is stored as several

    @abstractmethod
    def quantizes(self, name: str, shape: Shape) -> bool:
        """Return whether a tensor of a plain checkpoint is one of those."""

    @abstractmethod
    def parts(self, shape: Shape) -> tuple[Described, ...]:
        """Return what is stored of a matrix, in the order of `suffixes`."""

    @abstractmethod
    def shape_of(self, stored: Shape) -> Shape:
        """Return the shape of a matrix by that of its first part."""

    @abstractmethod
    def is_first_part(self, name: str, dtype: str) -> bool:
        """Return whether that is how the first part of a matrix is called, and typed."""

    @abstractmethod
    def config(self, kept: list[str]) -> dict[str, object]:
        """Make `quantization_config` of a checkpoint whose modules but `kept` are quantised."""

    def names(self, weight: str) -> tuple[str, ...]:
        """Return what the parts of a matrix are called."""
        return tuple(weight + suffix for suffix in self.suffixes)

    def is_beside(self, name: str) -> bool:
        """Return whether that is how a further part of a matrix is called."""
        return name.endswith(self.suffixes[1:])

    def weight_of(self, part: str) -> str:
        """Return the name of the matrix that the first part called so belongs to."""
        return part.removesuffix(self.suffixes[0])

    def refusal(self, name: str, shape: Shape) -> str:
        """Return why a tensor keeps its checkpoint from being stored so; empty where none does."""
        if len(shape) == _STACKED and "experts" in name and min(shape) > 1:
            return f"{name!r} has all experts in one tensor, for which {self.label} has no layout"
        return ""


@dataclass(frozen=True)
class Fp8Blocks(QuantizedLayout):
    """Linear layers in FP8 (e4m3). scale_format: "ue8m0" has powers of two alone."""

    label = "FP8"
    suffixes = ("", "_scale_inv")

    block: tuple[int, int] = BLOCK
    scale_format: Literal["float32", "ue8m0"] = "float32"

    def quantizes(self, name: str, shape: Shape) -> bool:
        is_matrix = len(shape) == 2 and 0 not in shape
        return is_matrix and bool(_LINEAR.search(name)) and not _KEPT.search(name)

    def parts(self, shape: Shape) -> tuple[Described, ...]:
        return (FP8, shape), ("F32", self.scale_shape(shape))

    def scale_shape(self, shape: Shape) -> tuple[int, int]:
        """Return the shape of the scales of a weight: blocks down, blocks across."""
        return -(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])

    def shape_of(self, stored: Shape) -> Shape:
        return stored

    def is_first_part(self, name: str, dtype: str) -> bool:
        return dtype in (FP8, "F8_E5M2")

    def config(self, kept: list[str]) -> dict[str, object]:
        config: dict[str, object] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(self.block),
            "modules_to_not_convert": kept,
        }
        return config | ({"scale_fmt": "ue8m0"} if self.scale_format == "ue8m0" else {})


@dataclass(frozen=True)
class Int4Groups(QuantizedLayout):
    """Weights of routed experts in 4 bits, a scale for every `size` inputs."""

    label = "INT4"
    suffixes = ("_packed", "_scale", "_shape")

    size: int

    def quantizes(self, name: str, shape: Shape) -> bool:
        return len(shape) == 2 and 0 not in shape and bool(_EXPERT.search(name))

    def refusal(self, name: str, shape: Shape) -> str:
        if self.quantizes(name, shape) and shape[1] % self.size:
            return f"{name!r} has {shape[1]} inputs, which are no whole groups of {self.size}"
        return super().refusal(name, shape)

    def parts(self, shape: Shape) -> tuple[Described, ...]:
        rows, inputs = shape
        packed, scale = (rows, inputs // PER_INT32), (rows, inputs // self.size)
        return ("I32", packed), ("BF16", scale), ("I64", (2,))

    def shape_of(self, stored: Shape) -> Shape:
        return (stored[0], stored[1] * PER_INT32) if len(stored) == 2 else stored

    def is_first_part(self, name: str, dtype: str) -> bool:
        return name.endswith(_WEIGHT + self.suffixes[0]) and dtype == "I32"

    def is_beside(self, name: str) -> bool:
        return super().is_beside(name) and name.rpartition(".")[2].startswith("weight_")

    def config(self, kept: list[str]) -> dict[str, object]:
        group: dict[str, object] = {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": self.size,
                "dynamic": False,
                "actorder": None,
                "block_structure": None,
                "observer": "minmax",
                "observer_kwargs": {},
            },
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "kv_cache_scheme": None,
            "ignore": kept,
        }


@dataclass(frozen=True)
class Mxfp4Blocks(QuantizedLayout):
    """Experts in blocks of 4 bits that share an exponent; nothing is stored so here."""

    label = "MXFP4"
    suffixes = ("_blocks", "_scales")
    dimensions = 3

    def quantizes(self, name: str, shape: Shape) -> bool:
        return False

    def parts(self, shape: Shape) -> tuple[Described, ...]:
        experts, inputs, rows = shape
        blocks = inputs // PER_MX_BLOCK
        whole = (experts, rows, blocks, PER_MX_BLOCK // 2)
        return ("U8", whole), ("U8", whole[:3])

    def shape_of(self, stored: Shape) -> Shape:
        if len(stored) != 4:
            return stored
        return stored[0], stored[2] * 2 * stored[3], stored[1]

    def is_first_part(self, name: str, dtype: str) -> bool:
        return name.endswith(self.suffixes[0]) and dtype == "U8"

    def config(self, kept: list[str]) -> dict[str, object]:
        return {"quant_method": "mxfp4", "modules_to_not_convert": kept}


def layout_named(name: Quantization) -> QuantizedLayout | None:
    """Return the layout of a setting; None of an empty one."""
    if not name:
        return None
    if name.startswith("int4_"):
        return Int4Groups(int(name.removeprefix("int4_")))
    return Fp8Blocks(scale_format="ue8m0" if name == "fp8_ue8m0" else "float32")


def stating(config: Mapping[str, object]) -> list[Mapping[str, object]]:
    """Return the parts of a `config.json` in which `quantization_config` may stand."""
    text = config.get("text_config")
    return [config, text] if isinstance(text, Mapping) else [config]


def layout_of(config: Mapping[str, object]) -> QuantizedLayout | None:
    """Return the layout of a checkpoint by its `config.json`; None when it is not quantised.

    Raises InvalidCheckpointError for a quantisation that is not understood.
    """
    entries = (part.get("quantization_config") for part in stating(config))
    entry = next((entry for entry in entries if entry is not None), None)
    if not isinstance(entry, Mapping):
        return None
    method = entry.get("quant_method")
    if method == "compressed-tensors":
        return _int4_of(entry)
    if method == "mxfp4":
        return Mxfp4Blocks()
    block = entry.get("weight_block_size")
    if method != "fp8" or not isinstance(block, list) or len(block) != 2:
        raise InvalidCheckpointError(
            f"quantization {method!r} is neither FP8 with blocks of weights, nor INT4 as "
            "compressed-tensors packs it, nor MXFP4"
        )
    rows, columns = block
    if not all(type(size) is int and 0 < size < 1 << 31 for size in block):
        raise InvalidCheckpointError(f"config.json: weight_block_size is {block!r}")
    return Fp8Blocks((rows, columns))


def _int4_of(entry: Mapping[str, object]) -> Int4Groups:
    """Raises InvalidCheckpointError for another kind that compressed-tensors has."""
    groups = entry.get("config_groups")
    found = list(groups.values()) if isinstance(groups, Mapping) else []
    weights = found[0].get("weights") if len(found) == 1 and isinstance(found[0], Mapping) else None
    if entry.get("format") != "pack-quantized" or not isinstance(weights, Mapping):
        raise InvalidCheckpointError(
            "config.json: of compressed-tensors one group of format 'pack-quantized' alone is "
            f"known, not {entry.get('format')!r}"
        )
    wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    for key, value in wanted.items():
        if weights.get(key) != value:
            raise InvalidCheckpointError(
                f"config.json: weights of {key} {weights.get(key)!r}, where only {value!r} is known"
            )
    if weights.get("actorder"):
        raise InvalidCheckpointError("config.json: weights in an order of their own (actorder)")
    size = weights.get("group_size")
    if type(size) is not int or not 0 < size < 1 << 31 or size % PER_INT32:
        raise InvalidCheckpointError(
            f"config.json: group_size is {size!r}, no multiple of {PER_INT32}"
        )
    return Int4Groups(size)


def is_quantized(tensors: Mapping[str, str]) -> bool:
    """Return whether any of the tensors, dtypes by name, is part of a quantised matrix."""
    layouts = Fp8Blocks(), Int4Groups(PER_INT32), Mxfp4Blocks()
    return any(
        layout.is_first_part(name, dtype) for name, dtype in tensors.items() for layout in layouts
    )


def check_stated(config: Mapping[str, object], tensors: Mapping[str, str]) -> None:
    """Raise InvalidCheckpointError for quantised tensors that a config.json does not tell of.

    tensors: dtypes by name.
    """
    if is_quantized(tensors) and layout_of(config) is None:
        raise InvalidCheckpointError(
            "it has quantised weights, and a config.json that knows of none"
        )


def modules_kept(tensors: Mapping[str, Described]) -> list[str]:
    """Name the modules whose matrices are not quantised, of tensors by name: dtype and shape."""
    return sorted(
        name.removesuffix(_WEIGHT)
        for name, (dtype, shape) in tensors.items()
        if name.endswith(_WEIGHT) and len(shape) == 2 and dtype != FP8
    )
