"""Packs the rows of a batch into micro-batches: the same count on every data-parallel rank.

Costs of rows are floating-point operations of a transformer: linear and attention terms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from sluice.balance.planner_packing import (
    RowCluster,
    RowCosts,
    even_out,
    pack,
    split_pieces,
    spread,
)


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """The sizes that decide how expensive a token and a pair of tokens are."""

    hidden_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_size: int
    feed_forward_size: int  # of one dense layer, or of all experts one token visits
    vocabulary_size: int
    gated: bool = True  # SwiGLU has three matrices, a plain MLP two
    window: int | None = None  # sliding-window layers see at most this many tokens
    windowed_layer_count: int = 0
    linear_attention_layer_count: int = 0  # no quadratic term

    @property
    def flops_per_token(self) -> float:
        """Matrix products of one token, forward: two per weight."""
        attention = self.hidden_size * self.head_size * 2 * (self.head_count + self.kv_head_count)
        feed_forward = self.hidden_size * self.feed_forward_size * (3 if self.gated else 2)
        layers = self.layer_count * (attention + feed_forward)
        return 2.0 * (layers + self.hidden_size * self.vocabulary_size)

    @property
    def flops_per_pair(self) -> float:
        """Scores and weighted values of one query and key, forward, in one layer."""
        return 4.0 * self.head_count * self.head_size


def forward_flops(shape: TransformerShape, length: int, cached: int = 0) -> float:
    """Counts FLOPs of the tokens `cached`..`length` of a causal sequence, the others cached.

    An estimate to balance by: a training step costs three times as much, on every row alike.
    Follows the count of Narayanan et al. 2021 (Megatron-LM), causal attention at its half.
    """
    full = shape.layer_count - shape.windowed_layer_count - shape.linear_attention_layer_count
    pairs = full * (_causal_pairs(length) - _causal_pairs(cached))
    if shape.window is not None:
        windowed = _causal_pairs(length, shape.window) - _causal_pairs(cached, shape.window)
        pairs += shape.windowed_layer_count * windowed
    return (length - cached) * shape.flops_per_token + pairs * shape.flops_per_pair


def row_costs(
    shape: TransformerShape, lengths: Sequence[int], prompt_lengths: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Returns (`costs`, `prompt_costs`) of PlanRows: whole rows, and what siblings save."""
    return (
        [forward_flops(shape, length) for length in lengths],
        [forward_flops(shape, prompt) for prompt in prompt_lengths],
    )


def shape_from_config(config: Mapping[str, Any]) -> TransformerShape:
    """Reads the shape from a HF `config.json`, also of a vision-language model's text part.

    Raises KeyError naming a size that is absent.
    """
    config = config.get("text_config", config)
    layer_types = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    head_count = config["num_attention_heads"]
    window = config.get("sliding_window") or None
    return TransformerShape(
        hidden_size=config["hidden_size"],
        layer_count=config["num_hidden_layers"],
        head_count=head_count,
        kv_head_count=config.get("num_key_value_heads") or head_count,
        head_size=config.get("head_dim") or config["hidden_size"] // head_count,
        feed_forward_size=_feed_forward_size(config),
        vocabulary_size=config["vocab_size"],
        gated=config.get("hidden_act", "silu") in ("silu", "swish", "gelu_pytorch_tanh"),
        window=window,
        windowed_layer_count=layer_types.count("sliding_attention") if window else 0,
        linear_attention_layer_count=layer_types.count("linear_attention"),
    )


def _feed_forward_size(config: Mapping[str, Any]) -> int:
    experts_per_token = config.get("num_experts_per_tok")
    if not experts_per_token:
        return int(config["intermediate_size"])
    expert_size = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = config.get("shared_expert_intermediate_size")
    if shared is None:
        shared = (config.get("n_shared_experts") or 0) * expert_size
    return int(experts_per_token * expert_size + shared)


def _causal_pairs(length: int, window: int | None = None) -> int:
    """Pairs of a query and a key not after it, and less than `window` before it."""
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


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
    if data_size == 1:
        return owners
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
    table, truncated = _tabulate(rows, limits)
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
    bins = [content for rank in ranks for content in rank]
    rows = np.array([row for content in bins for row in content], dtype=np.int64)
    place_of = np.repeat(np.arange(len(bins)), [len(content) for content in bins])
    _, groups = np.unique(np.asarray(table.groups)[rows], return_inverse=True)
    _, firsts = np.unique(place_of * len(table.tokens) + groups, return_index=True)
    prompts = np.asarray(table.prompt_tokens)[rows]
    prompt_costs = np.asarray(table.prompt_costs)[rows]
    own_costs = np.asarray(table.costs)[rows] - prompt_costs
    costs = np.bincount(place_of, own_costs, len(bins))
    costs += np.bincount(place_of[firsts], prompt_costs[firsts], len(bins))
    costs = costs.reshape(len(ranks), -1)
    tokens = int((np.asarray(table.tokens)[rows] - prompts).sum() + prompts[firsts].sum())
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


def _tabulate(rows: PlanRows, limits: PlanLimits) -> tuple[RowCosts, dict[int, int]]:
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
