"""Tensors between the ranks of a context-parallel group, with gradients, by a SequenceLayout.

Which collectives run, forward and backward, depends on the arguments that all ranks share and
never on what a rank holds: a rank without a token of any sample sends and receives nothing in the
same collectives, and its gradient edges exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from sluice.algo.collectives import Collectives
from sluice.algo.layout import ResponseLayout, SequenceLayout

GatherGradient = Literal["sum", "own", "none"]


def redistribute(
    columns: Sequence[torch.Tensor],
    source: SequenceLayout,
    target: SequenceLayout,
    collectives: Collectives,
    *,
    differentiable: bool,
) -> list[torch.Tensor]:
    """Columns [source.local_length, ...] of this rank re-laid out to [target.local_length, ...].

    One all-to-all for all columns, and one more in backward if `differentiable`, on every rank
    alike. Padding slots of the target are 0 and get no gradient.
    """
    if source.lengths != target.lengths or source.size != target.size:
        raise ValueError("source and target lay out other samples or other ranks")
    if len({column.dtype for column in columns}) != 1:
        raise ValueError("columns of one exchange have one dtype")
    widths = [math.prod(column.shape[1:]) for column in columns]
    flat_LK = torch.cat([c.reshape(len(c), w) for c, w in zip(columns, widths, strict=True)], 1)
    flat_LK = _with_edge(flat_LK) if differentiable else flat_LK.detach()
    routes = _Routes(source, target, collectives.rank)
    apply: Callable[..., torch.Tensor] = _Exchange.apply
    moved_LK = apply(flat_LK, routes, collectives)
    return [
        part.reshape(target.local_length, *column.shape[1:])
        for part, column in zip(moved_LK.split(widths, dim=1), columns, strict=True)
    ]


def gather_places(
    local: torch.Tensor, collectives: Collectives, *, gradient: GatherGradient
) -> torch.Tensor:
    """[size x local_length, ...] from every rank's [local_length, ...], in rank order.

    gradient: "sum" when ranks go on with different losses of the whole (a reduce-scatter in
    backward, as for gathered keys); "own" when all ranks compute the same loss from it (each
    keeps its part, no collective); "none" for no gradient.
    """
    local = local.detach() if gradient == "none" else _with_edge(local)
    apply: Callable[..., torch.Tensor] = _Gather.apply
    return apply(local, collectives, gradient == "sum")


def gather_responses(
    local: torch.Tensor,
    responses: ResponseLayout,
    collectives: Collectives,
    *,
    gradient: GatherGradient,
) -> torch.Tensor:
    """[R, ...] of all response tokens in packed order, from the [L, ...] this rank predicts.

    What needs whole samples, such as GAE, works on this and cuts its result by `share`.
    """
    slots = responses.slots(collectives.rank).to(local.device)
    whole = local.new_zeros((responses.layout.local_length, *local.shape[1:]))
    whole = whole.index_copy(0, slots, local)
    places = gather_places(whole, collectives, gradient=gradient)
    return places.index_select(0, responses.places.to(local.device))


class _Routes:
    """Which slots go where: both sides list the tokens of a pair of ranks in sample order."""

    def __init__(self, source: SequenceLayout, target: SequenceLayout, rank: int) -> None:
        from_ranks = source.token_places // source.local_length
        to_ranks = target.token_places // target.local_length
        leaving = (from_ranks == rank).nonzero()[:, 0]
        leaving = leaving[to_ranks[leaving].argsort(stable=True)]
        coming = (to_ranks == rank).nonzero()[:, 0]
        coming = coming[from_ranks[coming].argsort(stable=True)]
        self.send_slots = source.token_places[leaving] % source.local_length
        self.receive_slots = target.token_places[coming] % target.local_length
        size = source.size
        self.send_counts = torch.bincount(to_ranks[leaving], minlength=size).tolist()
        self.receive_counts = torch.bincount(from_ranks[coming], minlength=size).tolist()
        self.source_length, self.target_length = source.local_length, target.local_length


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local_LK: torch.Tensor, routes: _Routes, collectives: Collectives
    ) -> torch.Tensor:
        ctx.routes, ctx.collectives = routes, collectives
        sent = local_LK.index_select(0, routes.send_slots.to(local_LK.device))
        received = collectives.all_to_all(sent, routes.send_counts, routes.receive_counts)
        moved = local_LK.new_zeros((routes.target_length, local_LK.shape[1]))
        return moved.index_copy_(0, routes.receive_slots.to(local_LK.device), received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_LK: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        routes: _Routes = ctx.routes
        sent = gradient_LK.index_select(0, routes.receive_slots.to(gradient_LK.device))
        received = ctx.collectives.all_to_all(sent, routes.receive_counts, routes.send_counts)
        local = gradient_LK.new_zeros((routes.source_length, gradient_LK.shape[1]))
        local.index_copy_(0, routes.send_slots.to(gradient_LK.device), received)
        return local, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, collectives: Collectives, summed: bool
    ) -> torch.Tensor:
        ctx.collectives, ctx.summed = collectives, summed
        return collectives.all_gather(local).flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        collectives: Collectives = ctx.collectives
        length = len(gradient) // collectives.size
        if not ctx.summed:
            return gradient[collectives.rank * length :][:length], None, None
        counts = [length] * collectives.size
        received = collectives.all_to_all(gradient, counts, counts)  # then a sum: every backend
        return received.view(collectives.size, length, *gradient.shape[1:]).sum(0), None, None


def _with_edge(local: torch.Tensor) -> torch.Tensor:
    """`local`, made a leaf that requires grad where it has no graph, so that backward gets here."""
    return local if local.requires_grad else local.detach().requires_grad_()
