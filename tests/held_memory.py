"""What a backend holds between calls, counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.trainer.backend import TrainingBackend


def held_parts(backend: TrainingBackend) -> dict[str, int]:
    held = backend.held_tensors()
    return {"state": _bytes(held.state), "gradients": _bytes(held.gradients)}


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Of the stretches that they lie on: on a host a part may be a view of a file that is mapped,
    of which nothing else is there."""
    total = end = 0
    for begin, size in sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors):
        total += max(0, begin + size - max(begin, end))
        end = max(end, begin + size)
    return total
