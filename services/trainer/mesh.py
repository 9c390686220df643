"""Where a rank of a trainer stands. Imports no torch: layouts are checked without."""

from __future__ import annotations

from dataclasses import dataclass


class LayoutError(ValueError):
    """A world, or a model, does not divide into the parallel sizes asked for."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Where this rank stands. Ranks of one `data_rank` hold the same rows."""

    rank: int
    world_size: int
    data_rank: int = 0
    data_size: int = 1
    tensor_size: int = 1
    pipeline_size: int = 1
    context_size: int = 1
    expert_size: int = 1
    virtual_pipeline_size: int = 1
    replicas: int = 1  # of the model, each cut over data ranks
    reports: bool = True  # exactly one rank of each data_rank answers with rows and sums
