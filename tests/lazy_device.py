"""A device whose memory is the host's and whose side copies are as late as they may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sluice.platform import Platform

GARBAGE = 0xA5


@dataclass(eq=False)
class LateCopy:
    """A copy that is made when somebody waits for it, and reads its source then."""

    number: int
    into: torch.Tensor
    source: torch.Tensor
    device: LazyDevice
    is_made: bool = False
    is_over: bool = False  # the host has waited for it

    def make(self) -> None:
        if not self.is_made:
            self.is_made = True
            self.into.copy_(self.source)

    def synchronize(self) -> None:
        self.device.journal.append(f"end {self.number}")
        self.make()
        self.is_over = True

    def uses(self, tensor: torch.Tensor) -> bool:
        return any(_overlap(tensor, own) for own in (self.into, self.source))


@dataclass(frozen=True)
class LazyDevice(Platform):
    """Copies in the order in which they were begun and waited for are in the journal.

    Memory that is copied from or to a second time, while the host has not waited for the first,
    may have been written in between: that raises.
    """

    journal: list[str] = field(default_factory=list)
    copies: list[LateCopy] = field(default_factory=list)

    def device(self, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    def host_memory(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def begin_copy(self, into: torch.Tensor, source: torch.Tensor, stream: Any) -> LateCopy:
        assert stream is not None
        for earlier in self.copies:
            if not earlier.is_over and (earlier.uses(into) or earlier.uses(source)):
                raise AssertionError(f"memory of copy {earlier.number} was used before its end")
        copy = LateCopy(len(self.copies), into, source, self)
        into.view(-1).view(torch.uint8).fill_(GARBAGE)
        self.journal.append(f"begin {copy.number}")
        self.copies.append(copy)
        return copy

    def await_event(self, event: LateCopy) -> None:
        self.journal.append(f"await {event.number}")
        event.make()


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    spans: Sequence[tuple[int, int]] = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in (a, b)]
    return max(first for first, _ in spans) < min(end for _, end in spans)


def lazy_device() -> LazyDevice:
    return LazyDevice("cpu", "gloo", "")
