"""What a plan is made from: rows, limits, and the errors of rows that do not fit them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sluice.balance.planner_packing import RowCosts


class PlanError(Exception):
    """The rows cannot be planned under these limits."""


class OversizeRowError(PlanError):
    """One row alone is longer than a micro-batch may be."""

    def __init__(self, row: int, length: int, cap: int) -> None:
        super().__init__(f"row {row} has {length} tokens, a micro-batch holds {cap}")
        self.row, self.length, self.cap = row, length, cap


class GroupTooLargeError(PlanError):
    """One group alone needs more micro-batches than `max_micro_batches` admits."""

    def __init__(self, row: int, needed: int, allowed: int) -> None:
        super().__init__(
            f"the group of row {row} needs {needed} micro-batches, at most {allowed} are allowed"
        )
        self.row, self.needed, self.allowed = row, needed, allowed


class OversizePolicy(StrEnum):
    """ERROR refuses a row over the cap, TRUNCATE cuts it to the cap, ALONE runs it by itself."""

    ERROR = "error"
    TRUNCATE = "truncate"
    ALONE = "alone"


@dataclass(frozen=True, kw_only=True)
class PlanRows:
    """The rows to plan, as columns of one length.

    With `groups`, the prompt of a group is encoded once per micro-batch: its tokens are the
    prompts of its distinct groups plus all responses, and its cost is the sum of `costs`
    less `prompt_costs` for every further row of a group.
    """

    lengths: Sequence[int]  # prompt + response tokens
    costs: Sequence[float] | None = None  # of the whole row alone; absent: its tokens
    owners: Sequence[int] | None = None  # data-parallel rank holding the row; absent: any
    groups: Sequence[int] | None = None  # group index of the row; absent: nothing is shared
    prompt_lengths: Sequence[int] | None = None  # needed with groups and by TRUNCATE
    prompt_costs: Sequence[float] | None = None  # share of `costs`; absent: prompt/length of it


@dataclass(frozen=True, kw_only=True)
class PlanLimits:
    """What a plan must keep."""

    token_cap: int  # tokens of a micro-batch on one context-parallel rank
    context_size: int = 1
    data_size: int = 1
    micro_batch_multiple: int = 1  # group size of the interleaved (VPP) pipeline schedule
    oversize: OversizePolicy = OversizePolicy.ERROR
    max_micro_batches: int | None = None  # per rank; rows beyond it become leftovers

    def __post_init__(self) -> None:
        for name in ("token_cap", "context_size", "data_size", "micro_batch_multiple"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.max_micro_batches is not None and self.usable_micro_batches == 0:
            raise ValueError(
                f"max_micro_batches {self.max_micro_batches} is below "
                f"micro_batch_multiple {self.micro_batch_multiple}"
            )

    @property
    def cap(self) -> int:
        """Tokens of a micro-batch over all context-parallel ranks."""
        return self.token_cap * self.context_size

    @property
    def usable_micro_batches(self) -> int | None:
        """`max_micro_batches` rounded down to the multiple."""
        if self.max_micro_batches is None:
            return None
        return self.max_micro_batches // self.micro_batch_multiple * self.micro_batch_multiple


def tabulate(rows: PlanRows, limits: PlanLimits) -> tuple[RowCosts, dict[int, int]]:
    """Check the columns and apply the oversize policy; returns the tokens kept of cut rows."""
    _check_columns(rows, limits)
    tokens = list(rows.lengths)
    costs = [float(cost) for cost in (tokens if rows.costs is None else rows.costs)]
    prompts = [0] * len(tokens) if rows.prompt_lengths is None else list(rows.prompt_lengths)
    truncated: dict[int, int] = {}
    for row, length in enumerate(tokens):
        if length <= limits.cap or limits.oversize is OversizePolicy.ALONE:
            continue
        if limits.oversize is OversizePolicy.ERROR or prompts[row] >= limits.cap:
            raise OversizeRowError(row, length, limits.cap)
        truncated[row] = tokens[row] = limits.cap
        costs[row] *= limits.cap / length
    if rows.groups is None:
        prompts = [0] * len(tokens)
    prompt_costs = (
        [
            cost * prompt / length
            for cost, prompt, length in zip(costs, prompts, tokens, strict=True)
        ]
        if rows.prompt_costs is None or rows.groups is None
        else list(rows.prompt_costs)
    )
    table = RowCosts(
        tokens=tokens,
        costs=costs,
        groups=range(len(tokens)) if rows.groups is None else list(rows.groups),
        prompt_tokens=prompts,
        prompt_costs=prompt_costs,
    )
    return table, truncated


def _check_columns(rows: PlanRows, limits: PlanLimits) -> None:
    count = len(rows.lengths)
    for name in ("costs", "owners", "groups", "prompt_lengths", "prompt_costs"):
        column = getattr(rows, name)
        if column is not None and len(column) != count:
            raise ValueError(f"{name} has {len(column)} rows, lengths has {count}")
    if any(length < 1 for length in rows.lengths):
        raise ValueError("lengths must be positive")
    if rows.costs is not None and not all(0 < cost < math.inf for cost in rows.costs):
        raise ValueError("costs must be positive and finite")
    if rows.owners is not None and not all(0 <= rank < limits.data_size for rank in rows.owners):
        raise ValueError(f"owners must be below data_size {limits.data_size}")
    if rows.groups is None:
        return
    if rows.prompt_lengths is None:
        raise ValueError("groups need prompt_lengths")
    prompts: dict[int, int] = {}
    for row, group in enumerate(rows.groups):
        prompt = rows.prompt_lengths[row]
        if not 0 <= prompt <= rows.lengths[row]:
            raise ValueError(f"row {row} has a prompt of {prompt} in {rows.lengths[row]} tokens")
        if prompts.setdefault(group, prompt) != prompt:
            raise ValueError(f"row {row} has another prompt length than its group {group}")
