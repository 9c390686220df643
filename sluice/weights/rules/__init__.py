"""Declarative weight rules, HF <-> Megatron, one file a family; see docs/megatron.md."""

from sluice.weights.rules.families import FAMILIES, UnknownArchitectureError, family_of
from sluice.weights.rules.naming import rule_name
from sluice.weights.rules.packing import (
    Partition,
    PartitionError,
    Slice,
    pack,
    padded_rows,
    share_shape,
    source_slices,
    unpack,
)
from sluice.weights.rules.rule import Cut, Family, Layers, Pack, Source, Stage, WeightRule
from sluice.weights.rules.shape import ModelShape, read_shape
from sluice.weights.rules.weight_map import (
    Binding,
    HfTensor,
    RuleConflictError,
    TensorShapeError,
    WeightMap,
)

__all__ = [
    "FAMILIES",
    "Binding",
    "Cut",
    "Family",
    "HfTensor",
    "Layers",
    "ModelShape",
    "Pack",
    "Partition",
    "PartitionError",
    "RuleConflictError",
    "Slice",
    "Source",
    "Stage",
    "TensorShapeError",
    "UnknownArchitectureError",
    "WeightMap",
    "WeightRule",
    "family_of",
    "pack",
    "padded_rows",
    "read_shape",
    "rule_name",
    "share_shape",
    "source_slices",
    "unpack",
]
