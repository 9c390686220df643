"""Collectives of one process group, the gather with gradients over them, and their debug check.

What trainer ranks exchange goes through `Collectives`, so that with `ranks.check_collectives` each
is compared over a second (gloo) group before it runs: instead of a hang or wrong numbers there is
an error that names the rank that differs and the collective.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

GatherGradient = Literal["sum", "own", "none"]

# before torch 2.13 it has its deprecated name alone
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

DIGEST_BYTES = 16
NAME_BYTES = 96


class CollectiveMismatchError(RuntimeError):
    """Ranks of a group are about to run, or have run, different collectives."""

    def __init__(self, rank: int, found: str, expected: str, index: int) -> None:
        self.rank, self.found, self.expected, self.index = rank, found, expected, index
        super().__init__(
            f"rank {rank} differs at collective {index}: it is at {found!r}, others at {expected!r}"
        )


def is_disconnected(error: Exception) -> bool:
    """Whether a collective failed because connections of its group broke: it never runs again.

    gloo's errors are RuntimeErrors that name the place in its code.
    """
    return isinstance(error, dist.DistError) or "gloo/transport/" in str(error)


class CollectiveMonitor:
    """Folds every collective into a hash and compares the hashes of all ranks.

    The error names a rank by its number in the world.

    `group` must be a gloo group of the same ranks used for nothing else. A rank that does not
    come within `timeout` is a RuntimeError that names it on the group's first rank, not a hang.
    `end_step` must be called by all ranks at the same points, e.g. before the optimizer.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._group, self._timeout = group, timeout
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._count = 0

    def before(self, description: str) -> None:
        """Compares before a collective runs. Raises CollectiveMismatchError on every rank."""
        self._hash.update(description.encode())
        self._compare(description)
        self._count += 1

    def end_step(self) -> None:
        """Compares once more: catches ranks that ran fewer collectives than others."""
        self._compare("end of step")
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._count = 0

    def _compare(self, description: str) -> None:
        at_end = description == "end of step"
        digest = hashlib.blake2b(self._hash.digest() + bytes([at_end]), digest_size=DIGEST_BYTES)
        name = description.encode()[:NAME_BYTES].ljust(NAME_BYTES)
        mine = torch.frombuffer(bytearray(digest.digest() + name), dtype=torch.uint8)
        dist.monitored_barrier(self._group, timeout=self._timeout, wait_all_ranks=True)
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(rows, mine, group=self._group)
        states = [bytes(row.tolist()) for row in rows]
        if len(set(states)) == 1:
            return
        # The most common state is taken for right; of equally common ones, the lowest rank's.
        expected = Counter(states).most_common(1)[0][0]
        place = next(r for r, state in enumerate(states) if state != expected)
        rank = dist.get_global_rank(self._group, place)
        raise CollectiveMismatchError(rank, _name(states[place]), _name(expected), self._count)


def _name(state: bytes) -> str:
    return state[DIGEST_BYTES:].decode(errors="replace").rstrip()


@dataclass(frozen=True)
class Collectives:
    """Blocking collectives over `group`; a given `monitor` checks each before it runs."""

    group: dist.ProcessGroup
    monitor: CollectiveMonitor | None = None

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def all_reduce(self, tensor: torch.Tensor, operation: Literal["sum", "max"]) -> torch.Tensor:
        """Reduces in place; also returns `tensor`."""
        self._announce(f"all_reduce {operation} {tuple(tensor.shape)} {tensor.dtype}")
        reduce = dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX
        dist.all_reduce(tensor, op=reduce, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns [size x length, ...] of every rank's [length, ...], in rank order."""
        self._announce(f"all_gather {tuple(tensor.shape)} {tensor.dtype}")
        whole = tensor.new_empty((self.size * len(tensor), *tensor.shape[1:]))
        dist.all_gather_into_tensor(whole, tensor.contiguous(), group=self.group)
        return whole

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this rank's [length, ...] of the sum of every rank's [size x length, ...]."""
        self._announce(f"reduce_scatter {tuple(tensor.shape)} {tensor.dtype}")
        local = tensor.new_empty((len(tensor) // self.size, *tensor.shape[1:]))
        _reduce_scatter(local, tensor.contiguous(), group=self.group)
        return local

    def all_to_all(
        self, tensor: torch.Tensor, *, sent: Sequence[int], taken: Sequence[int]
    ) -> torch.Tensor:
        """Returns the rows that all ranks have for this one, in rank order.

        sent: how many of `tensor`, from the first on, go to each rank; taken: how many come.
        """
        self._announce(f"all_to_all {tuple(tensor.shape[1:])} {tensor.dtype}")
        found = tensor.new_empty((sum(taken), *tensor.shape[1:]))
        sizes = [*taken], [*sent]
        dist.all_to_all_single(found, tensor.contiguous(), *sizes, group=self.group)
        return found

    def end_step(self) -> None:
        """Checks that all ranks ran the same collectives, where there is a monitor."""
        if self.monitor is not None:
            self.monitor.end_step()

    def _announce(self, description: str) -> None:
        if self.monitor is not None:
            self.monitor.before(description)


def create_collectives(group: dist.ProcessGroup, check_timeout: timedelta | None) -> Collectives:
    """Returns collectives over `group`, monitored unless `check_timeout` is None.

    A monitor has a gloo group of its own, for which every rank of `group` must call this.
    """
    if check_timeout is None or dist.get_world_size(group) == 1:
        return Collectives(group)
    side = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=check_timeout,
        backend="gloo",
        use_local_synchronization=True,
    )
    return Collectives(group, CollectiveMonitor(side, check_timeout))


def gather_tokens(
    local: torch.Tensor, collectives: Collectives, *, gradient: GatherGradient
) -> torch.Tensor:
    """Returns [size x length, ...] of every rank's [length, ...], in rank order, differentiable.

    gradient: "sum" when ranks go on with different losses of the whole (a reduce-scatter in
    backward, as for gathered keys); "own" when all ranks compute the same loss from it (each
    keeps its part, no collective); "none" for no gradient. Which collectives run never depends on
    what a rank holds: also a rank whose part has no graph takes part in backward.
    """
    if collectives.size == 1:
        return local.detach() if gradient == "none" else local
    if gradient == "none":
        return collectives.all_gather(local.detach())
    if not local.requires_grad:
        local = local.detach().requires_grad_()
    apply: Callable[..., torch.Tensor] = _GatherTokens.apply
    return apply(local, collectives, gradient == "sum")


def gather_placed(
    local: torch.Tensor,
    slots_L: torch.Tensor,
    places_R: torch.Tensor,
    collectives: Collectives,
    *,
    local_length: int,
    gradient: GatherGradient,
) -> torch.Tensor:
    """Returns [R, ...], on every rank alike, of what each holds for L of the R tokens.

    slots_L: int64[L], where in its `local_length` slots a rank holds them; places_R: int64[R],
    rank x local_length + slot of each token (`ResponseLayout.slots` and `places`).
    """
    if collectives.size == 1:
        return gather_tokens(local, collectives, gradient=gradient)
    slots = local.new_zeros((local_length, *local.shape[1:])).index_copy(0, slots_L, local)
    return gather_tokens(slots, collectives, gradient=gradient).index_select(0, places_R)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, collectives: Collectives, summed: bool
    ) -> torch.Tensor:
        ctx.collectives, ctx.summed = collectives, summed
        return collectives.all_gather(local)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        collectives: Collectives = ctx.collectives
        if ctx.summed:
            return collectives.reduce_scatter(gradient), None, None
        return gradient.chunk(collectives.size)[collectives.rank], None, None


def exchange_rows(
    rows: torch.Tensor, collectives: Collectives, *, sent: Sequence[int], taken: Sequence[int]
) -> torch.Tensor:
    """Returns what `Collectives.all_to_all` does, differentiable: gradients go the way back.

    Whether `rows` have a graph must be alike on all ranks, also on one that has none of them.
    """
    apply: Callable[..., torch.Tensor] = _ExchangeRows.apply
    return apply(rows, collectives, sent, taken)


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        collectives: Collectives,
        sent: Sequence[int],
        taken: Sequence[int],
    ) -> torch.Tensor:
        ctx.collectives, ctx.sent, ctx.taken = collectives, sent, taken
        return collectives.all_to_all(rows, sent=sent, taken=taken)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        collectives: Collectives = ctx.collectives
        back = collectives.all_to_all(gradient, sent=ctx.taken, taken=ctx.sent)
        return back, None, None, None
