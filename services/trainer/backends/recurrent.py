"""Recurrent layers of transformers models, which would carry their state over the rows of a pack.

They are given rows side by side instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from services.trainer.backends.reference.packing import PackedLayout


def recurrent_layers(model: torch.nn.Module) -> Iterator[Any]:
    """Find the layers of a model whose state goes from token to token."""
    for module in model.modules():
        if hasattr(module, "conv1d") and hasattr(module, "A_log"):
            yield module


def keep_rows_apart(model: torch.nn.Module) -> None:
    """Have recurrent layers take packs in which every row stands whole."""
    for module in recurrent_layers(model):
        module.forward = MethodType(_forward_rows, _Recurrent(module.forward))


@dataclass(frozen=True)
class _Recurrent:
    forward: Any


def _forward_rows(
    layer: _Recurrent, hidden_states: torch.Tensor, *, packed_layout: PackedLayout, **_: Any
) -> torch.Tensor:
    """[1, T, H] to [1, T, H]; padding stands behind the rows, where no state comes from."""
    outputs = []
    for bucket in packed_layout.buckets:
        assert bucket.whole_rows
        picked = hidden_states[0].index_select(0, bucket.keys)
        made = layer.forward(hidden_states=picked.view(bucket.count, bucket.key_length, -1))
        flat = made.flatten(0, 1)
        outputs.append(flat if bucket.kept is None else flat.index_select(0, bucket.kept))
    return torch.cat(outputs)[None]
