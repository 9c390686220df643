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

from sluice.balance.layers import (
    feed_forward_size,
    layer_kinds,
    other_weights,
)
from sluice.balance.planner_packing import (
    PackedBins,
    RowCosts,
    even_out,
    pack,
    pack_tighter,
    split_pieces,
    spread,
)

Column = Sequence[int] | Sequence[float] | np.ndarray


@dataclass(frozen=True, kw_only=True)
class TowerShape:
    """The sizes of a vision tower that decide how expensive an image is.

    feed_forward_matrices: of one layer. full_layers: in which every patch of an image sees every
    other; in the rest it sees `window` at most. mergers: each makes one token of `merged` patches.
    """

    hidden_size: int
    layer_count: int
    feed_forward_size: int
    feed_forward_matrices: int
    patch_values: int
    merged: int
    output_size: int
    mergers: int = 1
    full_layers: int
    window: int = 0

    def flops(self, patches: int) -> float:
        """Counts FLOPs of one image, forward: two per weight and patch, four per pair of them."""
        hidden = self.hidden_size
        layer = hidden * (4 * hidden + self.feed_forward_matrices * self.feed_forward_size)
        wide = hidden * self.merged
        merger = self.mergers * wide * (wide + self.output_size) / self.merged
        weights = self.layer_count * layer + self.patch_values * hidden + merger
        seen = self.full_layers * patches
        seen += (self.layer_count - self.full_layers) * min(self.window, patches)
        return patches * (2.0 * weights + 4.0 * hidden * seen)


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """The sizes of attention over latents (arXiv 2405.04434), and of the indexer that chooses keys.

    query_latent: 0 where queries are made of the hidden state. key_size, value_size: of a head.
    index_size: of all heads of an indexer, which `index_layers` layers have, 0 where none does; it
    runs over rows of more than `index_keys` tokens.
    """

    query_latent: int
    key_latent: int
    rotated_size: int
    key_size: int
    value_size: int
    index_heads: int = 0
    index_size: int = 0
    index_keys: int = 0
    index_layers: int = 0

    def weights(self, hidden: int, heads: int) -> int:
        """Counts weights of the attention of one layer, without its indexer."""
        queries = heads * self.key_size
        into = hidden * (self.key_latent + self.rotated_size + self.query_latent)
        of_queries = (self.query_latent or hidden) * queries
        of_keys = self.key_latent * heads * (self.key_size - self.rotated_size + self.value_size)
        return into + of_queries + of_keys + heads * self.value_size * hidden

    def index_flops(self, hidden: int, length: int, cached: int) -> float:
        """Counts FLOPs of all indexers: two per weight and token, two per pair of all heads."""
        if length <= self.index_keys or not self.index_layers:
            return 0.0
        one_head = self.index_size // self.index_heads
        weights = self.query_latent * self.index_size + hidden * (one_head + self.index_heads)
        pairs = _causal_pairs(length) - _causal_pairs(cached)
        each = 2.0 * (length - cached) * weights + 2.0 * pairs * self.index_size
        return self.index_layers * each


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """The sizes that decide how expensive a token and a pair of tokens are."""

    hidden_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_size: int
    feed_forward_size: float  # or of all experts one token visits; mean of layers
    vocabulary_size: int
    gated: bool = True  # SwiGLU has three matrices, a plain MLP two
    window: int | None = None  # sliding-window layers see at most this many tokens
    windowed_layer_count: int = 0
    linear_attention_layer_count: int = 0  # no quadratic term; nor is attention there
    other_weights: int = 0  # of all layers, that are neither attention nor feed-forward
    tower: TowerShape | None = None  # of a model that sees
    latent: LatentShape | None = None  # of attention that head_size does not describe

    @property
    def flops_per_token(self) -> float:
        """Matrix products of one token, forward: two per weight."""
        attention = self.hidden_size * self.head_size * 2 * (self.head_count + self.kv_head_count)
        if self.latent is not None:
            attention = self.latent.weights(self.hidden_size, self.head_count)
        feed_forward = self.hidden_size * self.feed_forward_size * (3 if self.gated else 2)
        attending = self.layer_count - self.linear_attention_layer_count
        layers = attending * attention + self.layer_count * feed_forward + self.other_weights
        return 2.0 * (layers + self.hidden_size * self.vocabulary_size)

    @property
    def flops_per_pair(self) -> float:
        """Scores and weighted values of one query and key, forward, in one layer."""
        if self.latent is not None:
            return 2.0 * self.head_count * (self.latent.key_size + self.latent.value_size)
        return 4.0 * self.head_count * self.head_size


def forward_flops(shape: TransformerShape, length: int, cached: int = 0) -> float:
    """Counts FLOPs of the tokens `cached`..`length` of a causal sequence, the others cached.

    An estimate to balance by: a training step costs three times as much, on every row alike.
    Follows the count of Narayanan et al. 2021 (Megatron-LM), causal attention at its half. Where an
    indexer chooses keys, trainers make the scores of the others too.
    """
    full = shape.layer_count - shape.windowed_layer_count - shape.linear_attention_layer_count
    pairs = full * (_causal_pairs(length) - _causal_pairs(cached))
    if shape.window is not None:
        windowed = _causal_pairs(length, shape.window) - _causal_pairs(cached, shape.window)
        pairs += shape.windowed_layer_count * windowed
    flops = (length - cached) * shape.flops_per_token + pairs * shape.flops_per_pair
    if shape.latent is not None:
        flops += shape.latent.index_flops(shape.hidden_size, length, cached)
    return flops


def row_costs(
    shape: TransformerShape, lengths: Sequence[int], prompt_lengths: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Returns (`costs`, `prompt_costs`) of PlanRows: whole rows, and what siblings save."""
    return (
        [forward_flops(shape, length) for length in lengths],
        [forward_flops(shape, prompt) for prompt in prompt_lengths],
    )


def shape_from_config(config: Mapping[str, Any]) -> TransformerShape:
    """Reads the shape from a HF `config.json`, also of a vision-language model.

    Raises KeyError naming a size of the text that is absent.
    """
    tower = _tower_from_config(config.get("vision_config") or {})
    config = _by_usual_names(config.get("text_config", config))
    kinds = layer_kinds(config)
    head_count = config["num_attention_heads"]
    without_keys = sum(kind in ("mixer", "none") for kind in kinds)
    return TransformerShape(
        hidden_size=config["hidden_size"],
        layer_count=len(kinds),
        head_count=head_count,
        kv_head_count=config.get("num_key_value_heads") or head_count,
        head_size=config.get("head_dim") or config["hidden_size"] // head_count,
        feed_forward_size=feed_forward_size(config, kinds),
        vocabulary_size=config["vocab_size"],
        gated=_is_gated(config),
        window=config.get("sliding_window") or None,
        windowed_layer_count=kinds.count("window"),
        linear_attention_layer_count=without_keys,
        other_weights=other_weights(config, kinds),
        tower=tower,
        latent=_latent_from_config(config),
    )


def _is_gated(config: Mapping[str, Any]) -> bool:
    kind = config.get("hidden_act") or config.get("mlp_hidden_act") or "silu"
    is_plain = config.get("model_type") == "starcoder2"
    return kind in ("silu", "swish", "gelu_pytorch_tanh") and not is_plain


def _latent_from_config(config: Mapping[str, Any]) -> LatentShape | None:
    if not config.get("kv_lora_rank"):
        return None
    index_heads, kinds = config.get("index_n_heads") or 0, config.get("indexer_types")
    layers = config["num_hidden_layers"] if kinds is None else [*kinds].count("full")
    return LatentShape(
        query_latent=config.get("q_lora_rank") or 0,
        key_latent=config["kv_lora_rank"],
        rotated_size=config["qk_rope_head_dim"],
        key_size=config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        value_size=config["v_head_dim"],
        index_heads=index_heads,
        index_size=index_heads * (config.get("index_head_dim") or 0),
        index_keys=config.get("index_topk") or 0,
        index_layers=layers if index_heads else 0,
    )


_OTHER_NAMES = {  # of GPT-2 and OPT, LFM2, Kimi Linear and LongCat-Flash
    "activation_function": "hidden_act",
    "block_ff_dim": "intermediate_size",
    "expert_ffn_hidden_size": "moe_intermediate_size",
    "ffn_dim": "intermediate_size",
    "ffn_hidden_size": "intermediate_size",
    "moe_k": "num_experts_per_tok",
    "moe_topk": "num_experts_per_tok",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}


def _by_usual_names(config: Mapping[str, Any]) -> dict[str, Any]:
    named = {_OTHER_NAMES.get(name, name): value for name, value in config.items()}
    if "n_embd" in config and not named.get("intermediate_size"):
        named["intermediate_size"] = 4 * config["n_embd"]
    if "num_layers" in config:  # LongCat-Flash, each of which attends twice
        named.setdefault("num_hidden_layers", 2 * config["num_layers"])
    return named


def _tower_from_config(config: Mapping[str, Any]) -> TowerShape | None:
    """None for a tower that is described otherwise than those of Qwen2.5-VL and Qwen3-VL."""
    try:
        merged = config["spatial_merge_size"] ** 2
        full = config.get("fullatt_block_indexes")
        side = config["patch_size"]
        return TowerShape(
            hidden_size=config["hidden_size"],
            layer_count=config["depth"],
            feed_forward_size=config["intermediate_size"],
            feed_forward_matrices=2 if full is None else 3,  # windows came with gates
            patch_values=config.get("in_channels", 3) * config["temporal_patch_size"] * side**2,
            merged=merged,
            output_size=config["out_hidden_size"],
            mergers=1 + len(config.get("deepstack_visual_indexes") or ()),
            full_layers=config["depth"] if full is None else len(full),
            window=0 if full is None else (config["window_size"] // side) ** 2,
        )
    except KeyError:
        return None


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

    lengths: Column  # prompt + response tokens
    costs: Column | None = None  # of the whole row alone; absent: its tokens
    owners: Column | None = None  # data-parallel rank holding the row; absent: any
    groups: Column | None = None  # group index of the row; absent: nothing is shared
    prompt_lengths: Column | None = None  # needed with groups and by TRUNCATE
    prompt_costs: Column | None = None  # share of `costs`; absent: prompt/length of it


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


def assign_owners(costs: Column, data_size: int) -> np.ndarray:
    """Return the data-parallel rank of each item, int64[N]: even over all and over any range.

    Of every `data_size` items in order each rank gets one, the heaviest going to the rank
    with the least so far; then ranks exchange items of one such window until their totals are
    even, and hand over single items where that does not do. The loads of two ranks over any
    contiguous range differ by at most four times the largest cost.
    """
    if data_size < 1:
        raise ValueError(f"data_size must be positive, got {data_size}")
    items = np.asarray(costs, dtype=np.float64)
    owners = _deal(items, data_size)
    _even_by_moves(items, owners, np.bincount(owners, items, data_size))
    return owners


def _deal(items: np.ndarray, data_size: int) -> np.ndarray:
    """Give each rank one item of every window, for `assign_owners`: as many to each."""
    if data_size == 1 or not len(items):
        return np.zeros(len(items), dtype=np.int64)
    windows = -(-len(items) // data_size)
    padded = np.zeros(windows * data_size)
    padded[: len(items)] = items
    table = padded.reshape(windows, data_size)
    falling = np.argsort(-table, axis=1, kind="stable")
    sorted_costs = np.take_along_axis(table, falling, axis=1)
    loads = np.zeros(data_size)
    ranks = np.empty_like(falling)  # of the heaviest of a window, the second, ...
    for window in range(windows):
        lightest_first = np.argsort(loads, kind="stable")
        ranks[window] = lightest_first
        loads[lightest_first] += sorted_costs[window]
    item_of = np.empty_like(falling)  # by window and rank
    np.put_along_axis(item_of, ranks, falling, axis=1)
    _even_windows(np.take_along_axis(table, item_of, axis=1), item_of, loads)
    places = np.empty_like(falling)
    np.put_along_axis(places, item_of, np.broadcast_to(np.arange(data_size), places.shape), axis=1)
    return places.reshape(-1)[: len(items)]


def _even_windows(costs: np.ndarray, item_of: np.ndarray, loads: np.ndarray) -> None:
    """Exchange items of a window between ranks while that lowers the largest load.

    costs and item_of: [window, rank], changed in place as `loads` is.
    """
    for _ in range(8 * len(loads)):
        heavy = int(loads.argmax())
        for light in np.argsort(loads, kind="stable")[:_LIGHTEST].tolist():
            gap = float(loads[heavy] - loads[light])
            moved = costs[:, heavy] - costs[:, light]
            distance = np.where((moved > 0) & (moved < gap), np.abs(moved - gap / 2), np.inf)
            window = int(distance.argmin())
            if distance[window] < np.inf:
                break
        else:
            return
        loads[[heavy, light]] += np.array([-1, 1]) * moved[window]
        for table in (costs, item_of):
            table[window, [heavy, light]] = table[window, [light, heavy]]


def _even_by_moves(items: np.ndarray, owners: np.ndarray, loads: np.ndarray) -> None:
    """Hand items of the heaviest rank to the lightest while it has a hundredth above the mean."""
    for _ in range(8 * len(loads)):
        heavy, light = int(loads.argmax()), int(loads.argmin())
        gap = float(loads[heavy] - loads[light])
        if loads[heavy] <= 1.01 * loads.mean():
            return
        distance = np.where((owners == heavy) & (items < gap), np.abs(items - gap / 2), np.inf)
        item = int(distance.argmin())
        if distance[item] == np.inf:
            return
        owners[item] = light
        loads[[heavy, light]] += np.array([-1, 1]) * items[item]


_LIGHTEST = 4  # ranks that an exchange is looked for with


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
    leftover: list[int] = []
    if allowed is not None:
        fits = _fitting(table, shares, limits.cap, allowed)
        leftover = np.flatnonzero(~fits).tolist()
        shares = [share[fits[share]] for share in shares]
    ranks_per_share = limits.data_size // len(shares)
    step = limits.micro_batch_multiple * ranks_per_share
    packed = _pack_shares(table, shares, limits.cap, step)
    needed = max(-(-len(content.bins) // step) for content in packed)
    count = max(1, needed) * limits.micro_batch_multiple
    ranks = [
        rank
        for content in packed
        for rank in _schedule(table, content, ranks_per_share, count, limits.cap)
    ]
    return MicroBatchPlan(
        ranks=tuple(ranks),
        leftover=tuple(leftover),
        truncated=truncated,
        statistics=_statistics(table, ranks, limits.cap),
    )


def _shares(rows: PlanRows, data_size: int) -> list[np.ndarray]:
    """Rows that may go to the same ranks: all of them, or those of each owner."""
    if rows.owners is None:
        return [np.arange(len(rows.lengths))]
    owners = np.asarray(rows.owners)
    return [np.flatnonzero(owners == rank) for rank in range(data_size)]


def _pack_shares(
    table: RowCosts, shares: Sequence[np.ndarray], cap: int, step: int
) -> list[PackedBins]:
    """Pack each share into bins, counted in full steps of `step`.

    All run as many as the fullest, so that only that is packed as well as can be.
    """
    packed = [pack(table, share, cap) for share in shares]
    steps = [-(-len(content.bins) // step) for content in packed]
    while True:
        fullest = steps.index(max(steps))
        tighter = pack_tighter(table, shares[fullest], cap, packed[fullest])
        if -(-len(tighter.bins) // step) == steps[fullest]:
            return packed
        packed[fullest], steps[fullest] = tighter, -(-len(tighter.bins) // step)


def _fitting(table: RowCosts, shares: Sequence[np.ndarray], cap: int, allowed: int) -> np.ndarray:
    """Tell the rows of as many leading groups as fit `allowed` bins of every share, bool[N]."""

    def count(share: np.ndarray) -> int:
        packed = pack(table, share, cap)
        if len(packed.bins) > allowed:
            packed = pack_tighter(table, share, cap, packed)
        return len(packed.bins)

    def needed(group_count: int) -> int:
        return max(count(share[order[share] < group_count]) for share in shares)

    _, first, group_of = np.unique(table.groups, return_index=True, return_inverse=True)
    order = np.argsort(np.argsort(first))[group_of]  # groups by when they first come
    fitting, high = 0, len(first)
    if needed(high) <= allowed:
        fitting = high
    while fitting < high - 1:
        middle = (fitting + high) // 2
        fitting, high = (middle, high) if needed(middle) <= allowed else (fitting, middle)
    if fitting == 0 < len(first):
        raise GroupTooLargeError(int(first.min()), needed(1), allowed)
    return order < fitting


def _schedule(
    table: RowCosts, packed: PackedBins, rank_count: int, count: int, cap: int
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
    for rows, place in zip(packed.pieces.rows, arrangement.bin_of.tolist(), strict=True):
        rows_of[place] += rows
    costliest_first = np.argsort(-arrangement.loads, kind="stable")
    return [
        tuple(
            tuple(sorted(rows_of[place]))
            for place in costliest_first[rank_of[costliest_first] == rank].tolist()
        )
        for rank in range(rank_count)
    ]


def _assign_bins(loads: np.ndarray, rank_count: int) -> np.ndarray:
    """The rank of each bin: equal counts, bins of like cost at the same position."""
    order = np.argsort(-loads, kind="stable")
    rank_of = np.empty(len(loads), dtype=np.int64)
    rank_of[order] = _deal(loads[order], rank_count)
    return rank_of


def _statistics(
    table: RowCosts, ranks: Sequence[Sequence[Sequence[int]]], cap: int
) -> PlanStatistics:
    bins = [content for rank in ranks for content in rank]
    rows = np.array([row for content in bins for row in content], dtype=np.int64)
    place_of = np.repeat(np.arange(len(bins)), [len(content) for content in bins])
    order = np.lexsort((table.groups[rows], place_of))
    rows, place_of = rows[order], place_of[order]
    groups, prompts = table.groups[rows], table.prompt_tokens[rows]
    firsts = np.ones(len(rows), dtype=np.bool_)
    firsts[1:] = (groups[1:] != groups[:-1]) | (place_of[1:] != place_of[:-1])
    prompt_costs = np.where(firsts, 0, table.prompt_costs[rows])
    costs = np.bincount(place_of, table.costs[rows] - prompt_costs, len(bins))
    costs = costs.reshape(len(ranks), -1)
    tokens = int(table.tokens[rows].sum() - prompts[~firsts].sum())
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
    lengths = np.array(rows.lengths, dtype=np.int64)
    prompts = np.zeros_like(lengths)
    if rows.prompt_lengths is not None:
        prompts = _column(rows, "prompt_lengths", np.int64)
    costs = lengths.astype(np.float64)
    if rows.costs is not None:
        costs = _column(rows, "costs", np.float64)
    _check_columns(rows, limits, lengths, costs)
    cut = np.flatnonzero(lengths > limits.cap)
    if limits.oversize is OversizePolicy.ALONE:
        cut = cut[:0]
    for row in cut.tolist():
        if limits.oversize is OversizePolicy.ERROR or prompts[row] >= limits.cap:
            raise OversizeRowError(row, int(lengths[row]), limits.cap)
    costs[cut] *= limits.cap / lengths[cut]
    tokens = lengths.copy()
    tokens[cut] = limits.cap
    groups = np.arange(len(tokens))
    prompt_costs = np.zeros(len(tokens))
    if rows.groups is None:
        prompts = np.zeros_like(tokens)
    else:
        groups = _column(rows, "groups", np.int64)
        _check_groups(groups, prompts, lengths, has_prompts=rows.prompt_lengths is not None)
        prompt_costs = costs * prompts / tokens
        if rows.prompt_costs is not None:
            prompt_costs = _column(rows, "prompt_costs", np.float64)
    table = RowCosts(
        tokens=tokens,
        costs=costs,
        groups=groups,
        prompt_tokens=prompts,
        prompt_costs=prompt_costs,
    )
    return table, dict.fromkeys(cut.tolist(), limits.cap)


def _column(rows: PlanRows, name: str, dtype: type) -> np.ndarray:
    column: np.ndarray = np.array(getattr(rows, name), dtype=dtype)
    if len(column) != len(rows.lengths):
        raise ValueError(f"{name} has {len(column)} rows, lengths has {len(rows.lengths)}")
    return column


def _check_columns(
    rows: PlanRows, limits: PlanLimits, lengths: np.ndarray, costs: np.ndarray
) -> None:
    if (lengths < 1).any():
        raise ValueError("lengths must be positive")
    if not ((costs > 0) & (costs < math.inf)).all():
        raise ValueError("costs must be positive and finite")
    if rows.owners is not None:
        owners = _column(rows, "owners", np.int64)
        if not ((owners >= 0) & (owners < limits.data_size)).all():
            raise ValueError(f"owners must be below data_size {limits.data_size}")


def _check_groups(
    groups: np.ndarray, prompts: np.ndarray, lengths: np.ndarray, *, has_prompts: bool
) -> None:
    if not has_prompts:
        raise ValueError("groups need prompt_lengths")
    wrong = np.flatnonzero((prompts < 0) | (prompts > lengths))
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(f"row {row} has a prompt of {prompts[row]} in {lengths[row]} tokens")
    _, first, group_of = np.unique(groups, return_index=True, return_inverse=True)
    wrong = np.flatnonzero(prompts != prompts[first][group_of])
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(f"row {row} has another prompt length than its group {groups[row]}")
