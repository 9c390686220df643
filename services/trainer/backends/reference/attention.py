"""Attention over a packed micro-batch, plugged into transformers models by name."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from services.trainer.backends.reference.layout import Bucket, PackedLayout

IMPLEMENTATION = "sluice_shared_prompt"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_layout: PackedLayout,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, T, D], key and value [1, kv_heads, T, D] -> [1, T, heads, D].

    A window is honoured by refusing it where it would matter.
    """
    del attention_mask  # the layout knows
    if sliding_window is not None and packed_layout.longest > sliding_window:
        raise NotImplementedError(f"a window of {sliding_window} tokens over longer rows")
    outputs = [
        _attend_bucket(query[0], key[0], value[0], bucket, scaling)
        for bucket in packed_layout.buckets
    ]
    return torch.cat(outputs)[None], None


def _attend_bucket(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bucket: Bucket,
    scaling: float | None,
) -> torch.Tensor:
    """The bucket's share of the pack, [tokens, heads, D]."""

    def gather(heads: torch.Tensor, index: torch.Tensor, length: int) -> torch.Tensor:
        picked = heads.index_select(1, index)
        return picked.view(len(heads), bucket.count, length, -1).transpose(0, 1)

    out = scaled_dot_product_attention(
        gather(query, bucket.queries, bucket.query_length),
        gather(key, bucket.keys, bucket.key_length),
        gather(value, bucket.keys, bucket.key_length),
        attn_mask=bucket.mask,
        is_causal=bucket.mask is None,
        scale=scaling,
        enable_gqa=len(query) != len(key),
    )
    flat = out.transpose(1, 2).flatten(0, 1)
    return flat if bucket.kept is None else flat.index_select(0, bucket.kept)


AttentionInterface.register(IMPLEMENTATION, attend)
