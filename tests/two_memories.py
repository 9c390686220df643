"""Memory of the host that is told from a device's, where both are the host's own.

Operations between them raise as they do on an accelerator, and so does what computes on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sluice import platform
from sluice.platform import Platform

COPIES = {"copy_", "_to_copy", "clone"}  # into the other memory, or out of it
FILLS = {"zero_", "fill_"}


class WrongMemoryError(AssertionError):
    """An operation computes on the host, or takes tensors of both memories."""


class HostMemory:
    """What was asked of `Platform.host_memory`."""

    def __init__(self) -> None:
        self.memories: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self.memories)

    def has(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        spans = ((m.data_ptr(), m.data_ptr() + m.nbytes) for m in self.memories)
        return any(first <= address < end for first, end in spans)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise WrongMemoryError inside for what an accelerator could not do, or the host would."""
        with _Watch(self):
            yield


class _Watch(TorchDispatchMode):
    def __init__(self, host: HostMemory) -> None:
        super().__init__()
        self._host = host

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__
        made = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if name in COPIES | FILLS or not any(self._host.has(t) for t in tensors if t.numel()):
            return made
        results = [t for t in tree_leaves(made) if isinstance(t, torch.Tensor)]
        written = any(
            r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns
        )
        if written or not all(self._host.has(t) for t in results if t.numel()):
            raise WrongMemoryError(f"{name} on {[self._host.has(t) for t in tensors]}")
        return made


@contextmanager
def two_memories(device: Platform = platform.CPU) -> Iterator[HostMemory]:
    """Have a device's `host_memory` noted; it is the current one inside."""
    host, kind = HostMemory(), type(device)
    taken = kind.host_memory

    def host_memory(self: Platform, size: int) -> torch.Tensor:
        host.memories.append(taken(self, size))
        return host.memories[-1]

    with (
        patch.object(kind, "host_memory", host_memory),
        patch.object(platform, "current", lambda: device),
    ):
        yield host
