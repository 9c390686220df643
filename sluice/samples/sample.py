"""A sample: one token sequence, its training signals and the weights that made it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Response tokens first_token..last_token (inclusive) were sampled by one weight version."""

    version: int
    digest: str
    first_token: int
    last_token: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A row of a batch. Per-token columns have the length of the response.

    `columns` maps a known column name (see columns.py) to an array (per token) or a float
    (per sample); an absent name is an absent value, never a zero. `routed_experts`, where a
    mixture of experts sampled: int16[length - 1, mixture layers, chosen], for every token but
    the last.
    """

    sample_id: str
    group_id: str
    token_ids: np.ndarray  # int32[length], prompt then response
    prompt_length: int
    finish_reason: str = ""
    columns: Mapping[str, np.ndarray | float] = field(default_factory=dict)
    spans: tuple[VersionSpan, ...] = ()
    routed_experts: np.ndarray | None = None

    @property
    def response_length(self) -> int:
        return len(self.token_ids) - self.prompt_length
