"""Micro-batches cut over context ranks: each has a part of every row, and attends to the whole.

All that a layer does but attention is of one token. Attention gathers keys and values of all ranks
of the group, and each of this rank's runs sees those of its row up to its own end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AttentionInterface

from services.trainer.backend import Mesh, Row
from services.trainer.backends.expert_load import followed
from services.trainer.backends.fsdp.config import FsdpConfig
from services.trainer.backends.packing import LONG_TOKENS, PackedLayout, PromptBucket
from services.trainer.backends.reference.attention import attend
from services.trainer.backends.sparse import ChosenKeys
from sluice.algo.collectives import Collectives, create_collectives, gather_placed, gather_tokens
from sluice.algo.layout import KeyRange, SequenceLayout
from sluice.fused_operations import Attention, PackRows
from sluice.vision import TEXT

CONTEXT_IMPLEMENTATION = "sluice_context"


@dataclass(frozen=True)
class ContextLayout(PackedLayout):
    """This rank's T tokens of a pack. predictors and targets are those of its own, L of them.

    Queries of the buckets are this rank's tokens, keys those of all ranks in rank order. own:
    int64[L], which of the pack's R response tokens they are. places: int64[R], where the predictor
    of each response token stands among the tokens of all ranks; so `row_places`. order: int64[T],
    where each of this rank's stands among the outputs of the buckets. joined: all of them as one,
    in its order.
    """

    context: Collectives
    own: torch.Tensor
    places: torch.Tensor
    order: torch.Tensor
    joined: JoinedRuns

    def gather(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return those of all ranks, [1, kv_heads, all tokens, D], in one exchange."""
        both = torch.cat((key, value), dim=-1)[0].transpose(0, 1)
        whole = gather_tokens(both, self.context, gradient="sum").transpose(0, 1)[None]
        key, value = whole.split((key.shape[-1], value.shape[-1]), dim=-1)
        return key, value

    def gather_indexed(self, keys: torch.Tensor) -> torch.Tensor:
        return gather_tokens(keys, self.context, gradient="none")

    def share(self, local: torch.Tensor) -> torch.Tensor:
        """Return [R, ...] on all ranks, of what each has for its own response tokens.

        All compute the same loss of it, so that each keeps the gradient of its own.
        """
        return gather_placed(
            local,
            self.predictors,
            self.places,
            self.context,
            local_length=len(self.token_ids),
            gradient="own" if torch.is_grad_enabled() else "none",
        )


@dataclass(frozen=True)
class JoinedRuns(PromptBucket):
    """Runs of any lengths, one behind the other: what kernels take and torch's attention does not.

    `query_length` and `key_length` are those of all.
    """

    runs: tuple[KeyRange, ...]

    @cached_property
    def rows(self) -> PackRows:
        queries = [run.stop - run.start for run in self.runs]
        return PackRows(queries, [run.last - run.first for run in self.runs], self.queries.device)


def pack_context(rows: Sequence[Row], settings: FsdpConfig, context: Collectives) -> ContextLayout:
    """Lay out at least one row, each whole, and take this rank's part of every one."""
    layout = SequenceLayout(
        kind=settings.cp_layout,
        lengths=tuple(len(row.token_ids) for row in rows),
        size=context.size,
    )
    rank = context.rank
    responses = layout.responses([row.prompt_length for row in rows])
    own, runs = responses.share(rank), layout.runs(rank)
    pieces = [
        (piece.first - piece.start, piece.stop - piece.start) for piece in layout.pieces(rank)
    ]
    buckets = _buckets(runs, layout.place_of_pack)
    return ContextLayout(
        token_ids=layout.split([row.token_ids.long() for row in rows], rank),
        position_ids=torch.cat([torch.arange(first, stop) for first, stop in pieces]),
        buckets=buckets,
        predictors=responses.slots(rank),
        targets=torch.cat([row.token_ids[row.prompt_length :].long() for row in rows])[own],
        longest=max(layout.lengths),
        features=torch.full((layout.local_length,), TEXT),
        multiplicity=layout.split([followed(len(row.token_ids)) for row in rows], rank),
        row_places=layout.place_of_pack[
            torch.cat(
                [
                    torch.arange(start, start + len(row.token_ids) - 1)
                    for start, row in zip(layout.starts, rows, strict=False)
                ]
            )
        ],
        context=context,
        own=own,
        places=responses.places,
        order=_order(buckets),
        joined=JoinedRuns(
            count=1,
            query_length=layout.local_length,
            key_length=sum(run.last - run.first for run in runs),
            queries=torch.arange(layout.local_length),
            keys=torch.cat([layout.place_of_pack[run.first : run.last] for run in runs]),
            mask=None,
            kept=None,
            runs=runs,
        ),
    )


def _long_bucket(run: KeyRange, places: torch.Tensor) -> PromptBucket:
    return PromptBucket(
        count=1,
        query_length=run.stop - run.start,
        key_length=run.last - run.first,
        queries=torch.arange(run.start, run.stop),
        keys=places[run.first : run.last],
        mask=None,
        kept=None,
    )


def _short_bucket(runs: Sequence[KeyRange], places: torch.Tensor) -> PromptBucket:
    """Runs side by side, each a square from its row's start on: what is before it is not kept."""
    starts, stops, firsts, lasts = np.array([astuple(run) for run in runs]).T[..., None]
    keys, queries = lasts - firsts, stops - starts
    longest = int(keys.max())
    offsets = np.arange(longest)
    seen = offsets < keys
    own = seen & (offsets >= keys - queries)
    return PromptBucket(
        count=len(runs),
        query_length=longest,
        key_length=longest,
        queries=torch.from_numpy(np.where(own, offsets + stops - keys, 0).reshape(-1)),
        keys=places[torch.from_numpy(np.where(seen, offsets + firsts, 0).reshape(-1))],
        mask=None,
        kept=torch.from_numpy(np.flatnonzero(own)),
    )


def _buckets(runs: Sequence[KeyRange], places: torch.Tensor) -> tuple[PromptBucket, ...]:
    """Long runs apart, short ones with those of like length; `places`: of the pack's tokens."""
    classes: dict[int, list[KeyRange]] = {}
    long: list[KeyRange] = []
    for run in runs:
        length = run.last - run.first
        (long if length > LONG_TOKENS else classes.setdefault(length.bit_length(), [])).append(run)
    short = [_short_bucket(part, places) for _, part in sorted(classes.items())]
    return (*short, *(_long_bucket(run, places) for run in long))


def _order(buckets: Sequence[PromptBucket]) -> torch.Tensor:
    slots = [b.queries if b.kept is None else b.queries[b.kept] for b in buckets]
    return torch.cat(slots).argsort()


def attend_context(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_layout: ContextLayout,
    kernel: Attention | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    indices: ChosenKeys = (),
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Map this rank's query, key and value as `attend` does those of a whole pack."""
    key, value = packed_layout.gather(key, value)
    given = module, query, key, value, attention_mask
    if kernel is not None and s_aux is None and softcap is None and not indices:
        joined = replace(packed_layout, buckets=(packed_layout.joined,))
        return attend(*given, packed_layout=joined, kernel=kernel, **options)
    options |= {"s_aux": s_aux, "softcap": softcap, "indices": indices}
    made, _ = attend(*given, packed_layout=packed_layout, **options)
    return made.index_select(1, packed_layout.order), None


AttentionInterface.register(CONTEXT_IMPLEMENTATION, attend_context)


def create_context(
    mesh: Mesh, check_timeout: timedelta | None, timeout: timedelta
) -> Collectives | None:
    """Make the group of the ranks that hold parts of this rank's rows; collective over all ranks.

    None where this rank holds its rows whole. `timeout` is that of its collectives.
    """
    if mesh.context_size == 1:
        return None
    found, size = None, mesh.context_size * mesh.tensor_size
    for rank in range(mesh.world_size):
        first, tensor = rank // size * size, rank % mesh.tensor_size
        if rank == first + tensor:  # the first of its group
            ranks = list(range(rank, first + size, mesh.tensor_size))
            group = dist.new_group(ranks, timeout=timeout)
            found = group if mesh.rank in ranks else found
    assert found is not None
    return create_collectives(found, check_timeout)
