"""Declarative weight rules, HF <-> Megatron, one file a family; see docs/megatron.md."""

from __future__ import annotations

import re

from sluice.weights.rules.packing import (
    InexactTensorError,
    Partition,
    PartitionError,
    RowCopy,
    Slice,
    pack,
    padded_rows,
    row_runs,
    share_shape,
    source_slices,
    unpack,
)
from sluice.weights.rules.rule import (
    Family,
    Layers,
    Pack,
    ShardAxis,
    SourceTensor,
    Stage,
    WeightRule,
)
from sluice.weights.rules.shape import ModelShape, read_shape
from sluice.weights.rules.weight_map import (
    FAMILIES,
    Binding,
    HfTensor,
    RuleConflictError,
    TensorShapeError,
    UnknownArchitectureError,
    WeightMap,
    family_of,
)

__all__ = [
    "FAMILIES",
    "Binding",
    "Family",
    "HfTensor",
    "InexactTensorError",
    "Layers",
    "ModelShape",
    "Pack",
    "Partition",
    "PartitionError",
    "RowCopy",
    "RuleConflictError",
    "ShardAxis",
    "Slice",
    "SourceTensor",
    "Stage",
    "TensorShapeError",
    "UnknownArchitectureError",
    "WeightMap",
    "WeightRule",
    "family_of",
    "pack",
    "padded_rows",
    "read_shape",
    "row_runs",
    "rule_name",
    "share_shape",
    "source_slices",
    "unpack",
]


TRANSFORMER_ENGINE_NAMES = (  # (pattern, replacement), tried in order
    (r"\.self_attention\.linear_qkv\.layer_norm_", ".input_layernorm."),
    (r"\.self_attention\.in_proj\.layer_norm_", ".input_layernorm."),
    (r"\.self_attention\.linear_(q|kv)_up_proj\.layer_norm_", r".self_attention.\1_layernorm."),
    (r"\.mlp\.linear_fc1\.layer_norm_", ".pre_mlp_layernorm."),
    (
        r"\.mlp\.experts\.linear_(fc[12])\.(weight|bias)(\d+)$",
        r".mlp.experts.local_experts.\3.linear_\1.\2",
    ),
)
WRAPPERS = re.compile(r"^((module|language_model)\.)+")  # of data parallelism, of nested models
_LAYER = re.compile(r"(\blayers\.)(\d+)(\.)")
_EXPERT = re.compile(r"(\blocal_experts\.)(\d+)(\.)")


def rule_name(parameter: str, *, layer_offset: int = 0, expert_offset: int = 0) -> str:
    """The name that the rules have for parameter `parameter` of a model chunk.

    The offsets are the global indices of the chunk's first layer and first expert.
    """
    name = WRAPPERS.sub("", parameter)
    for pattern, replacement in TRANSFORMER_ENGINE_NAMES:
        name = re.sub(pattern, replacement, name)
    name = _LAYER.sub(lambda m: f"{m[1]}{int(m[2]) + layer_offset}{m[3]}", name, count=1)
    return _EXPERT.sub(lambda m: f"{m[1]}{int(m[2]) + expert_offset}{m[3]}", name, count=1)
