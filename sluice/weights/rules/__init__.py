"""Declarative weight rules, HF <-> Megatron, one file a family; see docs/megatron.md."""

from sluice.weights.rules.families import FAMILIES, UnknownArchitectureError, family_of
from sluice.weights.rules.naming import rule_name
from sluice.weights.rules.packing import (
    InexactTensorError,
    Partition,
    PartitionError,
    Run,
    Slice,
    pack,
    padded_rows,
    row_runs,
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
    "InexactTensorError",
    "Layers",
    "ModelShape",
    "Pack",
    "Partition",
    "PartitionError",
    "RuleConflictError",
    "Run",
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
    "row_runs",
    "rule_name",
    "share_shape",
    "source_slices",
    "unpack",
]
