"""Attention over packed rows, plugged into transformers by name.

It runs over buckets of like lengths, padded where these are short, all else over the pack. No mask
has more rows than LONG_TOKENS: long rows are attended causally, their prompt included, or block by
block where the prompt is longer still.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from services.trainer.backends.banded import Scores, attend_banded
from services.trainer.backends.packing import LONG_TOKENS, PackedLayout, PromptBucket
from services.trainer.backends.sparse import ChosenKeys, attend_chosen
from sluice.fused_operations import Attention, attend_masked
from sluice.imports import uncompiled

with uncompiled():
    from transformers import AttentionInterface

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
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    indices: ChosenKeys | None = (),
    packed_layout: PackedLayout,
    kernel: Attention | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Maps query [1, heads, T, D], key and value [1, kv_heads, T, D] to [1, T, heads, D].

    kernel: of causal attention without sinks; masks are torch's. A window is honoured over rows
    that share no prompt, else by refusing it where it would matter; so are sinks, `s_aux` [heads].
    indices: which keys are seen of each bucket, where an indexer has chosen.
    """
    del attention_mask  # the layout knows
    window = sliding_window
    if window is not None and packed_layout.longest <= window:
        window = None
    if s_aux is not None and hasattr(s_aux, "to_local"):  # a DTensor: a rank's heads alone
        s_aux = s_aux.to_local()
    scores = Scores(scaling, window, s_aux, softcap)
    # not [0], whose gradient is a copy
    heads = query.squeeze(0), key.squeeze(0), value.squeeze(0)
    buckets = packed_layout.buckets
    chosen = indices or (None,) * len(buckets)
    outputs = [
        _attend_bucket(*heads, bucket, scores, kernel, seen)
        for bucket, seen in zip(buckets, chosen, strict=True)
    ]
    return torch.cat(outputs)[None], None


def _attend_bucket(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bucket: PromptBucket,
    scores: Scores,
    kernel: Attention | None,
    chosen: torch.Tensor | None,
) -> torch.Tensor:
    """The bucket's share of the pack, [tokens, heads, D]."""
    if kernel is not None and bucket.mask is None and not scores.by_hand and chosen is None:
        return _attend_kernel(query, key, value, bucket, scores, kernel)

    def gather(heads: torch.Tensor, index: torch.Tensor, length: int) -> torch.Tensor:
        picked = heads.index_select(1, index)
        return picked.view(len(heads), bucket.count, length, -1).transpose(0, 1)

    queries = gather(query, bucket.queries, bucket.query_length)
    keys = gather(key, bucket.keys, bucket.key_length)
    values = gather(value, bucket.keys, bucket.key_length)
    if not scores.plain:
        if bucket.mask is not None:
            raise NotImplementedError("windows, sinks and caps over rows that share their prompt")
        out = attend_banded(queries, keys, values, scores)
    elif chosen is not None:
        out = attend_chosen(queries, keys, values, bucket.mask, chosen, scores.scaling)
    elif (mask := bucket.shown(queries.dtype)) is not None:
        out = attend_masked(queries, keys, values, mask, scores.scaling)
    elif bucket.query_length == bucket.key_length:
        gqa = len(query) != len(key)
        options: Any = {"scale": scores.scaling, "enable_gqa": gqa, "is_causal": True}
        out = scaled_dot_product_attention(queries, keys, values, **options)
    else:
        out = _attend_tail(queries, keys, values, scores.scaling)
    flat = out.transpose(1, 2).flatten(0, 1)
    return flat if bucket.kept is None else flat.index_select(0, bucket.kept)


def _attend_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bucket: PromptBucket,
    scores: Scores,
    kernel: Attention,
) -> torch.Tensor:
    """By one call over the rows of a bucket, each of queries that end where its keys do."""
    scale = query.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
    flat = kernel(
        query.index_select(1, bucket.queries).transpose(0, 1),
        key.index_select(1, bucket.keys).transpose(0, 1),
        value.index_select(1, bucket.keys).transpose(0, 1),
        bucket.rows,
        scale,
        scores.window,
    )
    return flat if bucket.kept is None else flat.index_select(0, bucket.kept)


def _attend_tail(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Causal attention of [N, heads, R, D] that stand at the end of K > R keys and values.

    Its blocks of queries share one mask, of which each sees the end.
    """
    length, total = query.shape[2], key.shape[2]
    block = min(LONG_TOKENS, length)
    mask = query.new_zeros(block, total)
    mask[:, total - block :] = query.new_full((block, block), -torch.inf).triu_(1)
    outputs = []
    for left in range((length - 1) // block * block, -1, -block):  # queries behind the block
        stop = length - left
        start, seen = max(0, stop - block), total - left
        outputs.append(
            attend_masked(
                query[:, :, start:stop],
                key[:, :, :seen],
                value[:, :, :seen],
                mask[block - (stop - start) :, left:],
                scale,
            )
        )
    return torch.cat(outputs, dim=2)


AttentionInterface.register(IMPLEMENTATION, attend)
