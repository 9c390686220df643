"""Packs the rows of a batch into micro-batches: the same count on every data-parallel rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sluice.balance.planner_inputs import (
    GroupTooLargeError,
    OversizePolicy,
    OversizeRowError,
    PlanError,
    PlanLimits,
    PlanRows,
    tabulate,
)
from sluice.balance.planner_packing import RowCluster, RowCosts, pack
from sluice.balance.planner_spread import even_out, split_pieces, spread

__all__ = [
    "GroupTooLargeError",
    "MicroBatchPlan",
    "OversizePolicy",
    "OversizeRowError",
    "PlanError",
    "PlanLimits",
    "PlanRows",
    "PlanStatistics",
    "assign_owners",
    "plan_micro_batches",
]


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
class MicroBatchPlan:
    """`ranks[r][i]` lists the rows of micro-batch i on rank r; an empty one is a dummy.

    Rows in `leftover` belong to the next step: whole groups, the last in order. `truncated`
    maps a row to the tokens kept.
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


def plan_micro_batches(rows: PlanRows, limits: PlanLimits) -> MicroBatchPlan:
    """Pack rows into micro-batches of at most `limits.cap` tokens, balanced by cost.

    Every row is in exactly one micro-batch or in `leftover`, which is empty without
    `max_micro_batches`. A dummy appears only on a rank with fewer rows than micro-batches.
    Deterministic. Raises OversizeRowError for a row the policy does not admit,
    GroupTooLargeError, and ValueError for malformed columns.
    """
    table, truncated = tabulate(rows, limits)
    shares = _shares(rows, limits.data_size)
    allowed = limits.usable_micro_batches
    if allowed is not None and rows.owners is None:
        allowed *= limits.data_size
    packed, leftover = [], []
    ranks_per_share = limits.data_size // len(shares)
    step = limits.micro_batch_multiple * ranks_per_share
    for share in shares:
        content, left = _pack_prefix(table, share, limits.cap, step, allowed)
        packed.append(content)
        leftover += left
    needed = max(-(-len(content) // ranks_per_share) for content in packed)
    multiple = limits.micro_batch_multiple
    count = max(1, -(-needed // multiple)) * multiple
    ranks = [
        rank
        for content in packed
        for rank in _schedule(table, content, ranks_per_share, count, limits.cap)
    ]
    return MicroBatchPlan(
        ranks=tuple(ranks),
        leftover=tuple(sorted(leftover)),
        truncated=truncated,
        statistics=_statistics(table, ranks, limits.cap),
    )


def _shares(rows: PlanRows, data_size: int) -> list[list[int]]:
    """Rows that may go to the same ranks: all of them, or those of each owner."""
    if rows.owners is None:
        return [list(range(len(rows.lengths)))]
    shares: list[list[int]] = [[] for _ in range(data_size)]
    for row, owner in enumerate(rows.owners):
        shares[owner].append(row)
    return shares


def _pack_prefix(
    table: RowCosts, share: list[int], cap: int, step: int, allowed: int | None
) -> tuple[list[list[RowCluster]], list[int]]:
    """Pack as many leading groups as fit `allowed` bins; returns the rows left out."""
    packed = pack(table, share, cap, step)
    if allowed is None or len(packed) <= allowed:
        return packed, []
    members: dict[int, list[int]] = {}
    for row in share:
        members.setdefault(table.groups[row], []).append(row)
    groups = list(members.values())
    packed = []
    fitting, high = 0, len(groups) - 1
    while fitting < high:
        middle = (fitting + high + 1) // 2
        candidate = pack(table, [row for group in groups[:middle] for row in group], cap, step)
        if len(candidate) <= allowed:
            fitting, packed = middle, candidate
        else:
            high = middle - 1
    if fitting == 0:
        raise GroupTooLargeError(groups[0][0], len(pack(table, groups[0], cap)), allowed)
    return packed, [row for group in groups[fitting:] for row in group]


def _schedule(
    table: RowCosts, packed: list[list[RowCluster]], rank_count: int, count: int, cap: int
) -> list[tuple[tuple[int, ...], ...]]:
    """Balance packed rows over `rank_count` ranks of `count` micro-batches, costliest first."""
    bin_count = rank_count * count
    packed = split_pieces(packed, table, bin_count)
    arrangement = spread(packed, bin_count, cap)
    rank_of = _assign_bins(arrangement.loads, rank_count)
    even_out(arrangement, rank_of, rounds=4 * rank_count + 64)
    for rank in range(rank_count):
        local = np.full(bin_count, -1)
        local[rank_of == rank] = np.arange(count)
        even_out(arrangement, local, rounds=4 * count)
    rows_of: list[list[int]] = [[] for _ in range(bin_count)]
    pieces = [piece for content in packed for piece in content]
    for piece, place in zip(pieces, arrangement.bin_of.tolist(), strict=True):
        rows_of[place] += piece.rows
    costliest_first = np.argsort(-arrangement.loads, kind="stable").tolist()
    return [
        tuple(tuple(sorted(rows_of[place])) for place in costliest_first if rank_of[place] == rank)
        for rank in range(rank_count)
    ]


def _assign_bins(loads: np.ndarray, rank_count: int) -> np.ndarray:
    """The rank of each bin: equal counts, bins of like cost at the same position."""
    order = np.argsort(-loads, kind="stable")
    rank_of = np.empty(len(loads), dtype=np.int64)
    rank_of[order] = assign_owners(loads[order].tolist(), rank_count)
    return rank_of


def _statistics(
    table: RowCosts, ranks: Sequence[Sequence[Sequence[int]]], cap: int
) -> PlanStatistics:
    costs = np.array([[table.cost_of(content) for content in rank] for rank in ranks])
    tokens = sum(table.tokens_of(content) for rank in ranks for content in rank)
    if not tokens:
        costs = np.ones_like(costs)
    mean = float(costs.sum(axis=1).mean())
    return PlanStatistics(
        micro_batch_count=costs.shape[1],
        dummy_count=sum(not content for rank in ranks for content in rank),
        token_count=tokens,
        fill=tokens / (cap * costs.size),
        imbalance=float(costs.sum(axis=1).max()) / mean,
        lockstep_imbalance=float(costs.max(axis=0).sum()) / mean,
    )
