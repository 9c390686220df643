"""Counts the bytes of tensors as operations of torch make and lose them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Knows the bytes that are `live` of what was made since it was entered, and their `peak`.

    What backward passes make counts too: on a processor they run in the thread that asks for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        known = {storage._cdata for storage in _storages((args, kwargs))}
        found = func(*args, **(kwargs or {}))
        for storage in _storages(found):
            if storage._cdata not in known:
                known.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._give_back, storage.nbytes())
        return found

    def _give_back(self, size: int) -> None:
        self.live -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    leaves = tree_leaves(tree)
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)]
