"""Collectives of one process group, and a monitor that catches ranks whose sequences differ.

Every collective of `sluice.algo` goes through `Collectives`, so that in debug mode each is
compared over a second (gloo) group before it runs: instead of a hang there is an error that
names the first rank that differs.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

DIGEST_BYTES = 16
NAME_BYTES = 96


class CollectiveMismatchError(RuntimeError):
    """Ranks of a group are about to run, or have run, different collectives."""

    def __init__(self, rank: int, found: str, expected: str, index: int) -> None:
        self.rank, self.found, self.expected, self.index = rank, found, expected, index
        super().__init__(
            f"rank {rank} differs at collective {index}: it is at {found!r}, others at {expected!r}"
        )


class CollectiveMonitor:
    """Folds every collective into a hash and compares the hashes of all ranks.

    `group` must be a gloo group of the same ranks used for nothing else. A rank that does not
    come within `timeout` is a RuntimeError that names it on the group's first rank, not a hang.
    `end_step` must be called by all ranks at the same points, e.g. before the optimizer.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._group, self._timeout = group, timeout
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._count = 0

    def before(self, description: str) -> None:
        """Compare, then let the collective run. Raises CollectiveMismatchError on every rank."""
        self._hash.update(description.encode())
        self._compare(description)
        self._count += 1

    def end_step(self) -> None:
        """Compare once more: catches ranks that ran fewer collectives than others."""
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
        rank = next(r for r, state in enumerate(states) if state != expected)
        raise CollectiveMismatchError(rank, _name(states[rank]), _name(expected), self._count)


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
        """Reduce in place; also returns `tensor`."""
        self._announce(f"all_reduce {operation} {tuple(tensor.shape)} {tensor.dtype}")
        reduce = dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX
        dist.all_reduce(tensor, op=reduce, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[size, *tensor.shape]; shapes must agree."""
        self._announce(f"all_gather {tuple(tensor.shape)} {tensor.dtype}")
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.stack(parts)

    def all_to_all(
        self, tensor: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        """Rows of `tensor` to ranks in order, `send_counts[r]` to rank r; returns what came."""
        self._announce(f"all_to_all {tuple(tensor.shape[1:])} {tensor.dtype}")
        received = tensor.new_empty((sum(receive_counts), *tensor.shape[1:]))
        dist.all_to_all_single(
            received,
            tensor.contiguous(),
            output_split_sizes=list(receive_counts),
            input_split_sizes=list(send_counts),
            group=self.group,
        )
        return received

    def _announce(self, description: str) -> None:
        if self.monitor is not None:
            self.monitor.before(description)


def create_monitor(group: dist.ProcessGroup, timeout: timedelta) -> CollectiveMonitor:
    """A monitor for `group` with a gloo group of its own; every rank of `group` must call it."""
    side = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timeout,
        backend="gloo",
        use_local_synchronization=True,
    )
    return CollectiveMonitor(side, timeout)
