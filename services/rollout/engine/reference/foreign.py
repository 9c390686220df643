"""Models whose attention is not the engine's: the cache holds tokens, and passes run whole rows.

All else of the engine stays as it is: rows, prefixes, lanes and versions are of tokens then. A
token costs as much as its whole row, so this is for models that no other engine serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from services.rollout.engine.reference.adapters import AdapterLayers
from services.rollout.engine.reference.attention import (
    Block,
    CacheShape,
    DecodeBlock,
    ForwardPlan,
    PaddingBlock,
    PromptBlock,
)
from sluice.imports import uncompiled

with uncompiled():
    from transformers import AutoModelForCausalLM, PretrainedConfig

# Attention that keys, values and a window do not describe.
SETTINGS = ("attn_logit_softcapping", "kv_lora_rank", "num_kv_shared_layers")
WITH_SINKS = ("gpt_oss",)
OWN_LAYERS = {"full_attention", "sliding_attention"}


def foreign_reason(config: PretrainedConfig) -> str:
    """Return what of a model the engine's own attention does not know; empty for nothing."""
    for name in SETTINGS:
        if getattr(config, name, None):
            return name
    if other := set(getattr(config, "layer_types", None) or ()) - OWN_LAYERS:
        return f"layer_types {min(other)}"
    if config.model_type in WITH_SINKS:
        return "attention sinks"
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if not getattr(kind, "_supports_attention_backend", True):
        return "attention of its own"
    return ""


def token_cache(device: torch.device) -> CacheShape:
    """Return the shape of a cache that holds a token where others hold its keys and values."""
    return CacheShape(layers=1, kv_heads=1, head_dim=1, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class _Wanted:
    """Rows [N, L] of a block, and which (row, column) of them logits are wanted of.

    first: the first token of the pass that belongs to each row.
    """

    rows: torch.Tensor
    first: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor


def run_whole_rows(
    module: Any,
    tokens: torch.Tensor,
    plan: ForwardPlan,
    keep: torch.Tensor,
    adapters: AdapterLayers,
) -> torch.Tensor:
    """Compute logits float32[len(keep), V] of rows `keep` of a pass over tokens int64[T]."""
    width = module.config.get_text_config().vocab_size
    logits = torch.zeros(len(keep), width, device=tokens.device)
    first = 0
    for block in plan.blocks:
        count = _width(block)
        mine = ((keep >= first) & (keep < first + count)).nonzero()[:, 0]
        wanted = _write(block, tokens[first : first + count], keep[mine] - first)
        begin, first = first, first + count
        if wanted is None or not len(mine):
            continue
        columns, place = wanted.column.unique(return_inverse=True)
        # What stands behind a row's own tokens is older or empty: nothing before it sees that.
        owners = (begin + wanted.first).repeat_interleave(wanted.rows.shape[1])
        shares = adapters.select(owners)
        made = module(input_ids=wanted.rows, use_cache=False, logits_to_keep=columns).logits
        adapters.restore(shares)
        logits[mine] = made[wanted.row, place].float()
    return logits


def _width(block: Block) -> int:
    return block.count * block.chunk if isinstance(block, PromptBlock) else block.count


def _write(block: Block, tokens: torch.Tensor, kept: torch.Tensor) -> _Wanted | None:
    """Put the tokens of a pass into the cache; the rows that `kept` of them ask for."""
    if isinstance(block, PaddingBlock):
        return None
    cache = block.kv[0, 0, :, 0, :, 0]
    if isinstance(block, DecodeBlock):
        rows = torch.arange(block.count, device=tokens.device)
        cache[rows, block.positions] = tokens
        return _Wanted(cache[: block.count, : block.length], rows, kept, block.positions[kept])
    end = block.start + block.chunk
    cache[:, block.start : end] = tokens.view(block.count, block.chunk)
    firsts = torch.arange(block.count, device=tokens.device) * block.chunk
    return _Wanted(cache[:, :end], firsts, kept // block.chunk, block.start + kept % block.chunk)
