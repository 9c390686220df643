"""A checkpoint that is written while training goes on: tensors are copied only where it must be."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, ItemsView, Iterator, Mapping
from typing import Generic, TypeVar

import torch

from sluice.weights.manifest import FileEntry

Key = TypeVar("Key", bound=Hashable)


class LiveTensors(Mapping[Key, torch.Tensor], Generic[Key]):
    """Tensors that are written one after the other, while others may come to change them.

    `tensors[key]` takes a tensor as it was at first: on the host, alone, and once. `items` shows
    what there is, without elements.
    """

    def __init__(self, tensors: Mapping[Key, torch.Tensor]) -> None:
        self._live = {key: tensor.detach() for key, tensor in tensors.items()}
        self._shapes = {key: tensor.to("meta") for key, tensor in self._live.items()}
        self._kept: dict[Key, torch.Tensor] = {}
        self._lock = threading.Lock()  # held while one tensor is copied

    def keep(self) -> None:
        """Copy what was not taken yet into host memory: the tensors are about to change."""
        for key in list(self._live):
            with self._lock:
                if (tensor := self._live.pop(key, None)) is not None:
                    self._kept[key] = _copied(tensor)

    def clear(self) -> None:
        """Forget what was not taken."""
        with self._lock:
            self._live.clear()
            self._kept.clear()

    def items(self) -> ItemsView[Key, torch.Tensor]:
        return self._shapes.items()

    def __getitem__(self, key: Key) -> torch.Tensor:
        with self._lock:
            kept = self._kept.pop(key, None)
            return _copied(self._live.pop(key)) if kept is None else kept

    def __iter__(self) -> Iterator[Key]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


class StagedCheckpoint(ABC):
    """The state of one rank at one moment, to be written once, by any thread."""

    @abstractmethod
    def write(self) -> dict[str, FileEntry]:
        """Write it; returns the files that this rank wrote by name, digested while they were.

        Collective where the backend's ranks are. Raises OSError where files cannot be written.
        """

    @abstractmethod
    def keep(self) -> None:
        """Copy into host memory what is not written yet: the state is about to change."""
