"""Rows packed into one sequence: where each token stands, and which buckets are attended together.

Every distinct prompt of a group stands once, followed by its longest response; the other responses
stand apart, all without their last tokens, which predict nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from services.trainer.backend import MicroBatch, Row
from sluice.algo.losses import LossColumns
from sluice.fused_operations import PackRows
from sluice.vision import TEXT, Features, Patches, rotary_positions

CLUSTER_TOKENS = 64  # siblings' tokens that share one attention call: fills a tile of the kernel
PASS_TOKENS = 4096  # more at once are no faster on a processor: larger tensors are mapped anew
AGAIN_FACTOR = 32  # a prompt is encoded again where a pass has so many times its tokens
LONG_TOKENS = 512  # longer runs are attended without padding, longer masks cut into blocks
NOTHING = Features()
# for a pass without rows
DUMMY = Row(
    sample_id="",
    group_id="",
    token_ids=torch.zeros(2, dtype=torch.int64),
    prompt_length=1,
    loss_mask=torch.zeros(1, dtype=torch.bool),
)


@dataclass(frozen=True)
class PromptBucket:
    """Runs, or clusters of siblings, whose attention is one padded batch of N.

    queries: int64[N * R], keys: int64[N * K], positions in the pack (padding stands at 0 and
    is never seen). mask: bool[R, K] or [N, 1, R, K]; None where the queries are the last R keys
    and each sees those up to its own. kept: int64, those among the N * R outputs that are of the
    bucket, in the order of the pack; None for all.
    """

    count: int
    query_length: int
    key_length: int
    queries: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor | None
    kept: torch.Tensor | None

    @property
    def whole_rows(self) -> bool:
        """Each of N stands there from its first token on, and sees what is before."""
        return self.mask is None and self.query_length == self.key_length

    def shown(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The mask as kernels take it: those of a CPU add it up, so that each layer of a pass would
        make zeros and infinities of it."""
        is_added = self.mask is not None and self.mask.device.type == "cpu"
        return self._added if is_added and dtype == torch.float32 else self.mask

    @cached_property
    def _added(self) -> torch.Tensor:
        assert self.mask is not None
        return torch.zeros(self.mask.shape).masked_fill_(~self.mask, -torch.inf)

    @cached_property
    def rows(self) -> PackRows:
        """The N rows as a kernel takes them, padding behind them included."""
        lengths = [self.query_length] * self.count
        keys = lengths if self.whole_rows else [self.key_length] * self.count
        return PackRows(lengths, keys, self.queries.device)


@dataclass(frozen=True)
class PackedLayout:
    """A micro-batch as one sequence of T tokens, and where its R response tokens stand.

    token_ids: int64[T]. position_ids: int64[T], or [3, T] of a model that sees. predictors:
    int64[R], the packed token that predicts each response token, rows in order. targets: int64[R].
    features: int64[T], the row of the features that an image's token shows, TEXT elsewhere. The
    kept outputs of the buckets, one after another, are the pack. longest: tokens of the longest
    row. row_places: where each row's tokens stand but for the last, which predicts nothing, one row
    behind the other. multiplicity: int64[T], the rows that each token is read in so: those of a
    prompt that is shared in several.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    buckets: tuple[PromptBucket, ...]
    predictors: torch.Tensor
    targets: torch.Tensor
    longest: int
    features: torch.Tensor
    row_places: torch.Tensor
    multiplicity: torch.Tensor

    def gather_indexed(self, keys: torch.Tensor) -> torch.Tensor:
        """Returns what the keys of the buckets are places in, of [T, ...] of these tokens.

        No gradient comes back.
        """
        return keys


@dataclass(frozen=True)
class PassInputs:
    """What a pass computes with: the pack, and what its loss reads.

    named: tokens that a teacher named at each place, int64[R, K]. patches: of the images, where the
    model sees them in the same pass. experts: that routers are to choose, int16[layers, T, K].
    """

    layout: PackedLayout
    columns: LossColumns | None = None
    named: torch.Tensor | None = None
    patches: Patches | None = None
    experts: torch.Tensor | None = None


@dataclass(frozen=True)
class _Table:
    """Rows as columns; int64 each. tokens: all rows one behind the other, each from `offsets` on.

    prompt_of: which distinct prompt a row has. inner: response tokens that predict another.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    prompt_lengths: np.ndarray
    responses: np.ndarray
    prompt_of: np.ndarray

    @property
    def inner(self) -> np.ndarray:
        return np.maximum(self.responses - 1, 0)


@dataclass(frozen=True)
class _Spans:
    """Stretches of the pack that are attended together; int64[N] each.

    A run is a prompt and its longest response, and has nothing before it; a cluster is one or more
    responses that follow the prompt found in `before_*`.
    """

    starts: np.ndarray
    lengths: np.ndarray
    before_starts: np.ndarray
    before_lengths: np.ndarray

    @property
    def causal(self) -> np.ndarray:
        """bool[N], where queries of the prompt are made again: cheaper than what a mask hides."""
        long = (self.lengths > CLUSTER_TOKENS) & (self.before_lengths <= self.lengths)
        return long | (self.before_lengths == 0)

    def size_classes(self) -> np.ndarray:
        """Equal where one batch is made of them."""
        before = _size_class(self.before_lengths) << 32
        apart = _size_class(self.lengths) + before
        return np.where(self.causal, _size_class(self.before_lengths + self.lengths), apart)

    def pick(self, index: np.ndarray) -> _Spans:
        return _Spans(
            self.starts[index],
            self.lengths[index],
            self.before_starts[index],
            self.before_lengths[index],
        )


def _size_class(lengths: np.ndarray) -> np.ndarray:
    """The power of two, so that padding at most doubles them; of long ones the length itself."""
    return np.where(lengths > LONG_TOKENS, lengths, np.frexp(lengths)[1])


def pack(
    rows: Sequence[Row],
    merge_size: int = 0,
    features: Features = NOTHING,
    *,
    shares_prompts: bool = True,
    experts: Sequence[torch.Tensor] | None = None,
) -> PackedLayout:
    """Lays out at least one row; rows of one group with equal prompts share them.

    merge_size: of the model's image rules; 0 where it takes one position a token. Without
    `shares_prompts` every row has its own, and all buckets are of whole rows. experts: that routers
    are to choose for each row's tokens; prompts are equal if theirs are, too.
    """
    table, leaders = _tabulate(rows, experts, shares_prompts=shares_prompts)
    clusters = [*([leader] for leader in leaders.tolist()), *_clusters(table, leaders)]
    heads = np.array([cluster[0] for cluster in clusters], dtype=np.int64)
    prompts = table.prompt_lengths[heads]
    lengths = np.array([table.inner[cluster].sum() for cluster in clusters], dtype=np.int64)
    runs = np.arange(len(clusters)) < len(leaders)
    spans = _Spans(
        np.empty_like(prompts),
        lengths + np.where(runs, prompts, 0),
        np.empty_like(prompts),
        np.where(runs, 0, prompts),
    )
    order = np.argsort(spans.size_classes(), kind="stable")
    spans.starts[order] = _starts(spans.lengths[order])
    prompt_starts = spans.starts[: len(leaders)]
    spans.before_starts[:] = prompt_starts[table.prompt_of[heads]]

    row_order = np.array([row for place in order for row in clusters[place]], dtype=np.int64)
    skipped = table.prompt_lengths.copy()  # tokens of each row that stand elsewhere
    skipped[leaders] = 0
    sizes = (table.prompt_lengths + table.inner - skipped)[row_order]
    row_starts = np.zeros(len(rows), dtype=np.int64)
    row_starts[row_order] = _starts(sizes) + (table.prompt_lengths - skipped)[row_order]
    source = _ranges((table.offsets + skipped)[row_order], sizes)
    owners = np.repeat(row_order, sizes)
    positions, shown = _ranges(skipped[row_order], sizes), np.full(len(source), TEXT)
    if merge_size:
        places = [(len(row.token_ids), row.media) for row in rows]
        every = [rotary_positions(*place, merge_size) for place in places]
        positions = np.concatenate(every, axis=1)[:, source]
        shown = np.concatenate([features.index(*place) for place in places])[source]
    row_places = _row_places(table, prompt_starts, row_starts)
    return PackedLayout(
        token_ids=torch.from_numpy(table.tokens[source]),
        position_ids=torch.from_numpy(positions),
        features=torch.from_numpy(shown),
        buckets=tuple(_buckets(spans.pick(order), owners)),
        predictors=torch.from_numpy(_predictors(table, prompt_starts, row_starts)),
        targets=torch.from_numpy(
            table.tokens[_ranges(table.offsets + table.prompt_lengths, table.responses)]
        ),
        longest=int((table.prompt_lengths + table.responses).max()),
        row_places=torch.from_numpy(row_places),
        multiplicity=torch.from_numpy(np.bincount(row_places, minlength=len(source))),
    )


def split_rows(rows: MicroBatch) -> Iterator[list[Row]]:
    """Cuts rows into passes that end where they have PASS_TOKENS; siblings follow one another.

    Groups are cut only where their prompts, encoded again, are little beside a pass.
    """
    lengths = [row.token_ids.shape[0] for row in rows]
    if sum(lengths) <= PASS_TOKENS:
        yield list(rows)
        return
    groups: dict[str, list[tuple[Row, int]]] = {}
    for row, length in zip(rows, lengths, strict=True):
        groups.setdefault(row.group_id, []).append((row, length))
    part: list[Row] = []
    tokens = 0
    for siblings in groups.values():
        is_first = True
        for row, length in siblings:
            if tokens >= PASS_TOKENS and (
                is_first or row.prompt_length * AGAIN_FACTOR <= PASS_TOKENS
            ):
                yield part
                part, tokens = [], 0
            tokens += length - row.prompt_length if part and not is_first else length
            part.append(row)
            is_first = False
    yield part


def _tabulate(
    rows: Sequence[Row], experts: Sequence[torch.Tensor] | None, *, shares_prompts: bool
) -> tuple[_Table, np.ndarray]:
    """The rows as columns, and for each distinct prompt the longest row that has it."""
    tokens = torch.cat([row.token_ids for row in rows]).numpy()
    lengths = np.array([row.token_ids.shape[0] for row in rows], dtype=np.int64)
    prompts = np.array([row.prompt_length for row in rows], dtype=np.int64)
    offsets = _starts(lengths)
    seen: dict[tuple[object, ...], int] = {}
    leaders: list[int] = []
    prompt_of = np.empty(len(rows), dtype=np.int64)
    for index, (row, offset) in enumerate(zip(rows, offsets.tolist(), strict=True)):
        shown = tuple(s.digest for s in row.media if s.first_token < row.prompt_length)
        prompt = tokens[offset : offset + row.prompt_length].tobytes()
        chosen = experts[index][: row.prompt_length].numpy().tobytes() if experts else b""
        key = (row.group_id, prompt, shown, chosen) if shares_prompts else (index,)
        if key not in seen:
            seen[key] = len(leaders)
            leaders.append(index)
        prompt_of[index] = place = seen[key]
        if lengths[index] > lengths[leaders[place]]:
            leaders[place] = index
    table = _Table(tokens, offsets, prompts, lengths - prompts, prompt_of)
    return table, np.array(leaders, dtype=np.int64)


def _clusters(table: _Table, leaders: np.ndarray) -> list[list[int]]:
    """The other siblings in runs of at most CLUSTER_TOKENS tokens, longer ones alone."""
    clusters: list[list[int]] = []
    sizes: list[int] = []
    open_clusters: dict[int, int] = {}
    inner = table.inner
    inner[leaders] = 0
    for row, (prompt, size) in enumerate(
        zip(table.prompt_of.tolist(), inner.tolist(), strict=True)
    ):
        if not size:
            continue
        place = open_clusters.get(prompt)
        if place is None or sizes[place] + size > CLUSTER_TOKENS:
            place = open_clusters[prompt] = len(clusters)
            clusters.append([])
            sizes.append(0)
        clusters[place].append(row)
        sizes[place] += size
    return clusters


def _predictors(table: _Table, prompt_starts: np.ndarray, row_starts: np.ndarray) -> np.ndarray:
    """A response's first token is predicted by the prompt's last, the others by their former."""
    first = prompt_starts[table.prompt_of] + table.prompt_lengths - 1
    index = _ranges(np.zeros_like(table.responses), table.responses)
    inside = np.repeat(row_starts, table.responses) + index - 1
    return np.where(index == 0, np.repeat(first, table.responses), inside)


def _row_places(table: _Table, prompt_starts: np.ndarray, row_starts: np.ndarray) -> np.ndarray:
    """Of each row its prompt, wherever that stands, and what it has of its own behind that."""
    starts = np.stack([prompt_starts[table.prompt_of], row_starts], axis=1)
    prompts = table.prompt_lengths - (table.responses == 0)
    lengths = np.stack([prompts, table.inner], axis=1)
    return _ranges(starts.reshape(-1), lengths.reshape(-1))


def _buckets(spans: _Spans, owners: np.ndarray) -> Iterator[PromptBucket]:
    """Spans follow one another in the pack, sorted by size class."""
    edges = np.flatnonzero(np.diff(spans.size_classes())) + 1
    for index in np.split(np.arange(len(spans.starts)), edges):
        picked = spans.pick(index)
        yield _causal_bucket(picked) if picked.causal[0] else _prompt_bucket(picked, owners)


def _causal_bucket(spans: _Spans) -> PromptBucket:
    """Every span behind its prompt, if it has one apart, and attended from that on."""
    ends = spans.before_lengths + spans.lengths
    longest = int(ends.max())
    places = np.arange(longest)
    before = places < spans.before_lengths[:, None]
    own = ~before & (places < ends[:, None])
    shifted = spans.starts - spans.before_lengths
    positions = np.where(before, spans.before_starts[:, None], shifted[:, None]) + places
    # Padding stands behind the real tokens, where causal attention does not look.
    index = torch.from_numpy(np.where(before | own, positions, 0).reshape(-1))
    kept = None if own.all() else torch.from_numpy(np.flatnonzero(own))
    return PromptBucket(len(ends), longest, longest, index, index, None, kept)


def _prompt_bucket(spans: _Spans, owners: np.ndarray) -> PromptBucket:
    """Every span sees its whole prompt, and of itself each row its own."""
    count, longest = len(spans.starts), int(spans.lengths.max())
    longest_prompt = int(spans.before_lengths.max())
    own, own_real = _padded(spans.starts, spans.lengths, longest)
    prompt, prompt_real = _padded(spans.before_starts, spans.before_lengths, longest_prompt)
    mask: np.ndarray | None = None
    if longest <= LONG_TOKENS:  # else of equal length each, as are their prompts
        owner = np.where(own_real, owners[own], -1)
        seen_own = (owner[:, :, None] == owner[:, None, :]) & np.tri(longest, dtype=np.bool_)
        seen_prompt = np.broadcast_to(prompt_real[:, None], (count, longest, longest_prompt))
        mask = np.concatenate([seen_prompt, seen_own], axis=2)
        mask = mask[0] if (mask == mask[0]).all() else mask[:, None]
    return PromptBucket(
        count,
        longest,
        longest_prompt + longest,
        torch.from_numpy(own.reshape(-1)),
        torch.from_numpy(np.concatenate([prompt, own], axis=1).reshape(-1)),
        None if mask is None else torch.from_numpy(mask),
        None if own_real.all() else torch.from_numpy(np.flatnonzero(own_real)),
    )


def _padded(starts: np.ndarray, lengths: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """(positions in the pack, whether real), both [N, longest]; padding stands at 0."""
    offsets = np.arange(longest)
    real = offsets < lengths[:, None]
    return np.where(real, starts[:, None] + offsets, 0), real


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.cumsum(lengths) - lengths


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1 ... of each run, one behind the other."""
    return np.repeat(starts - _starts(lengths), lengths) + np.arange(int(lengths.sum()))


def images_of(rows: MicroBatch) -> dict[str, bytes]:
    """Return the distinct images of the rows by digest."""
    return {span.digest: row.images[span.digest] for row in rows for span in row.media}
