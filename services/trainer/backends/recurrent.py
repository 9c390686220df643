"""Layers of transformers models that go from token to token, and so over the rows of a pack.

A recurrence and a causal convolution do. They are given rows side by side instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from services.trainer.backends.packing import PackedLayout

# transformers' words for such layers, by which it hands on a mask.
LAYER_TYPES = ("linear_attention", "conv")
_MARK = "has_recurrent_layers"  # an attribute of models, which every pass asks for


def recurrent_layers(model: torch.nn.Module) -> Iterator[Any]:
    """Find the layers of a model whose state goes from token to token: they have a convolution."""
    for module in model.modules():
        if any(isinstance(child, torch.nn.Conv1d) for child in module.children()):
            yield module


def keep_rows_apart(model: torch.nn.Module) -> None:
    """Have recurrent layers take packs in which every row stands whole.

    Raises ValueError where a configuration tells of more of them than are known here.
    """
    found = [*recurrent_layers(model)]
    config: Any = model.config
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    if (told := sum(kind in LAYER_TYPES for kind in kinds)) > len(found):
        raise ValueError(
            f"model_type {config.model_type} has {told} layers that go from token to token, of "
            f"which {len(found)} are known here: the others would go on over the rows of a pack"
        )
    setattr(model, _MARK, bool(found))
    for module in found:
        module.forward = MethodType(_forward_rows, _Recurrent(module.forward))


def row_inputs(model: torch.nn.Module, layout: PackedLayout) -> dict[str, Any]:
    """Return what a model with recurrent layers is given beside a pack; of others nothing.

    Where transformers hands on a mask to them there is the layout: not all hand on more.
    """
    if not getattr(model, _MARK, False):
        return {}
    return {"attention_mask": {"full_attention": None, **dict.fromkeys(LAYER_TYPES, layout)}}


@dataclass(frozen=True)
class _Recurrent:
    forward: Any


def _forward_rows(
    layer: _Recurrent, hidden_states: torch.Tensor, *, attention_mask: PackedLayout, **_: Any
) -> torch.Tensor:
    """[1, T, H] to [1, T, H]; padding stands behind the rows, where no state comes from."""
    outputs = []
    for bucket in attention_mask.buckets:
        assert bucket.whole_rows
        picked = hidden_states[0].index_select(0, bucket.keys)
        made = layer.forward(hidden_states=picked.view(bucket.count, bucket.key_length, -1))
        flat = made.flatten(0, 1)
        outputs.append(flat if bucket.kept is None else flat.index_select(0, bucket.kept))
    return torch.cat(outputs)[None]
