"""Packs the rows of a batch into micro-batches: the same count on every data-parallel rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class PlanError(Exception):
    """The rows cannot be planned under these limits."""


class OversizeRowError(PlanError):
    """One row alone is longer than a micro-batch may be."""

    def __init__(self, row: int, length: int, cap: int) -> None:
        super().__init__(f"row {row} has {length} tokens, a micro-batch holds {cap}")
        self.row, self.length, self.cap = row, length, cap


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

    @property
    def cap(self) -> int:
        return self.token_cap * self.context_size


@dataclass(frozen=True, kw_only=True)
class PlanStatistics:
    """How good a plan is. Ratios are 1.0 at best; `fill` is tokens by room."""

    micro_batch_count: int  # per rank
    dummy_count: int  # over all ranks
    token_count: int  # as run: shared prompts once per micro-batch
    fill: float
    imbalance: float  # largest by mean cost of a rank
    lockstep_imbalance: float  # sum over i of the largest i-th micro-batch, by mean rank cost


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`ranks[r][i]` lists the rows of micro-batch i on rank r; an empty one is a dummy.

    Rows in `leftover` belong to the next step. `truncated` maps a row to the tokens kept.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    leftover: tuple[int, ...] = ()
    truncated: Mapping[int, int] = field(default_factory=dict)
    statistics: PlanStatistics


def assign_owners(group_costs: Sequence[float], data_size: int) -> list[int]:
    """Return the data-parallel rank of each group, such that any range of groups is balanced.

    Of every `data_size` groups in order each rank gets one, the heaviest going to the rank
    with the least so far. The loads of two ranks over any contiguous range differ by at
    most four times the largest cost.
    """
    if data_size < 1:
        raise ValueError(f"data_size must be positive, got {data_size}")
    owners = [0] * len(group_costs)
    loads = [0.0] * data_size
    for start in range(0, len(group_costs), data_size):
        window = range(start, min(start + data_size, len(group_costs)))
        heaviest_first = sorted(window, key=lambda group: (-group_costs[group], group))
        lightest_first = sorted(range(data_size), key=lambda rank: (loads[rank], rank))
        for group, rank in zip(heaviest_first, lightest_first, strict=False):
            owners[group] = rank
            loads[rank] += group_costs[group]
    return owners


def plan_micro_batches(rows: PlanRows, limits: PlanLimits) -> Plan:
    """Pack rows into micro-batches of at most `limits.cap` tokens, balanced by cost.

    Every row is in exactly one micro-batch or in `leftover`. Deterministic.
    Raises OversizeRowError for a row that the policy does not admit.
    """
    cap = limits.cap
    owners = rows.owners
    costs = rows.costs if rows.costs is not None else rows.lengths
    bins: list[list[list[int]]] = [[] for _ in range(limits.data_size)]
    for row in sorted(range(len(rows.lengths)), key=lambda i: (-rows.lengths[i], i)):
        if rows.lengths[row] > cap:
            raise OversizeRowError(row, rows.lengths[row], cap)
        rank = (
            owners[row]
            if owners is not None
            else min(
                range(len(bins)), key=lambda r: sum(costs[i] for part in bins[r] for i in part)
            )
        )
        for part in bins[rank]:
            if sum(rows.lengths[i] for i in part) + rows.lengths[row] <= cap:
                part.append(row)
                break
        else:
            bins[rank].append([row])
    multiple = limits.micro_batch_multiple
    count = max(1, -(-max(len(parts) for parts in bins) // multiple)) * multiple
    ranks = tuple(
        tuple(tuple(sorted(part)) for part in parts) + ((),) * (count - len(parts))
        for parts in bins
    )
    loads = [sum(costs[i] for part in parts for i in part) for parts in bins]
    tokens = sum(rows.lengths)
    mean = sum(loads) / len(loads) or 1.0
    lockstep = sum(max(sum(costs[i] for i in parts[n]) for parts in ranks) for n in range(count))
    return Plan(
        ranks=ranks,
        statistics=PlanStatistics(
            micro_batch_count=count,
            dummy_count=sum(not part for parts in ranks for part in parts),
            token_count=tokens,
            fill=tokens / (cap * count * limits.data_size),
            imbalance=max(loads) / mean,
            lockstep_imbalance=lockstep / mean,
        ),
    )
