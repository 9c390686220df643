"""Models whose attention is not the engine's: the cache holds tokens, and passes run whole rows.

All else of the engine stays as it is: rows, prefixes, lanes and versions are of tokens then. A
token costs as much as its whole row, so this is for models that no other engine serves. Of a model
that sees the cache also holds what images showed to the weights that encoded the prompt.
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
    Shown,
)
from sluice.imports import uncompiled

with uncompiled():
    from transformers import AutoModelForCausalLM, PretrainedConfig

# Attention that keys, values and a window do not describe.
SETTINGS = ("attn_logit_softcapping", "kv_lora_rank", "num_kv_shared_layers")
WITH_SINKS = ("gpt_oss", "mimo_v2_flash")
OWN_LAYERS = {"full_attention", "sliding_attention"}


def foreign_reason(config: PretrainedConfig) -> str:
    """Return what of a model the engine's own attention does not know; empty for nothing."""
    for name in SETTINGS:
        if getattr(config, name, None):
            return name
    if getattr(config, "is_heterogeneous", False):
        return "layers of several sizes"
    if other := set(getattr(config, "layer_types", None) or ()) - OWN_LAYERS:
        return f"layer_types {min(other)}"
    if config.model_type in WITH_SINKS:
        return "attention sinks"
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if not getattr(kind, "_supports_attention_backend", True):
        return "attention of its own"
    return ""


def foreign_attention(config: PretrainedConfig) -> str | None:
    """Return which implementation of transformers such a model runs; None for what it chooses.

    That of torch leaves out, without a word, that scores are capped.
    """
    return "eager" if getattr(config, "attn_logit_softcapping", None) else None


# What stands in the cache for a token of a model that sees: numbers that float32 has exactly.
_TOKEN, _POSITIONS, _IS_SHOWN, _WIDTH = 0, slice(1, 4), 4, 5


@dataclass(frozen=True)
class _Wanted:
    """Rows [layers, 2, N, L, D] of a block, and which (row, column) of them logits are wanted of.

    first: the first token of the pass that belongs to each row.
    """

    rows: torch.Tensor
    first: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor


@dataclass(frozen=True)
class WholeRows:
    """A transformers model that is run over whole rows; `sees`: it has a tower."""

    module: Any
    sees: bool

    def cache_shape(self, device: torch.device) -> CacheShape:
        """Return the shape of a cache that holds a token where others hold its keys and values."""
        if not self.sees:
            return CacheShape(layers=1, kv_heads=1, head_dim=1, dtype=torch.int64, device=device)
        config = self.module.config
        deep = len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
        width = max(_WIDTH, config.get_text_config().hidden_size)
        return CacheShape(1 + deep, 1, width, torch.float32, device)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        plan: ForwardPlan,
        keep: torch.Tensor,
        adapters: AdapterLayers,
        shown: Shown | None,
    ) -> torch.Tensor:
        """Compute logits float32[len(keep), V] of rows `keep` of a pass over tokens int64[T].

        positions: int64[3, T].
        """
        width = self.module.config.get_text_config().vocab_size
        logits = torch.zeros(len(keep), width, device=tokens.device)
        entries = self._entries(tokens, positions, shown)
        first = 0
        for block in plan.blocks:
            count = _width(block)
            mine = ((keep >= first) & (keep < first + count)).nonzero()[:, 0]
            wanted = _write(block, entries[:, :, first : first + count], keep[mine] - first)
            begin, first = first, first + count
            if wanted is None or not len(mine):
                continue
            columns, place = wanted.column.unique(return_inverse=True)
            # What stands behind a row's own tokens is older or empty: nothing before it sees that.
            owners = (begin + wanted.first).repeat_interleave(wanted.rows.shape[3])
            shares = adapters.select(owners)
            made = self._run(wanted.rows, columns)
            adapters.restore(shares)
            logits[mine] = made[wanted.row, place].float()
        return logits

    def _entries(
        self, tokens: torch.Tensor, positions: torch.Tensor, shown: Shown | None
    ) -> torch.Tensor:
        """[layers, 2, T, D], as they go into the cache."""
        shape = self.cache_shape(tokens.device)
        size = (shape.layers, 2, len(tokens), shape.head_dim)
        entries = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        entries[0, 0, :, _TOKEN] = tokens.to(shape.dtype)
        if self.sees:
            entries[0, 0, :, _POSITIONS] = positions.T.to(shape.dtype)
        if shown is not None:
            entries[0, 0, shown.rows, _IS_SHOWN] = 1
            for layer, features in zip(entries, shown.layers, strict=True):
                layer[1, shown.rows, : features.shape[1]] = features.to(shape.dtype)
        return entries

    def _run(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Logits [N, len(columns), V] of rows [layers, 2, N, L, D]."""
        ids = rows[0, 0, :, :, _TOKEN].long()
        if not self.sees:
            answer = self.module(input_ids=ids, use_cache=False, logits_to_keep=columns)
            logits: torch.Tensor = answer.logits
            return logits
        embeddings, deep = self.module.get_input_embeddings()(ids), dict[str, Any]()
        mask = rows[0, 0, :, :, _IS_SHOWN] > 0
        features = rows[:, 1][:, mask][..., : embeddings.shape[-1]].to(embeddings.dtype)
        embeddings[mask] = features[0]
        if len(features) > 1:
            deep = {"visual_pos_masks": mask, "deepstack_visual_embeds": [*features[1:]]}
        hidden = self.module.model.language_model(
            inputs_embeds=embeddings,
            position_ids=rows[0, 0, :, :, _POSITIONS].long().movedim(-1, 0),
            use_cache=False,
            **deep,
        ).last_hidden_state
        logits = self.module.lm_head(hidden[:, columns])
        return logits


def _width(block: Block) -> int:
    return block.count * block.chunk if isinstance(block, PromptBlock) else block.count


def _write(block: Block, entries: torch.Tensor, kept: torch.Tensor) -> _Wanted | None:
    """Put the entries of a pass into the cache; the rows that `kept` of them ask for."""
    if isinstance(block, PaddingBlock):
        return None
    cache, device = block.kv[:, :, :, 0], entries.device
    if isinstance(block, DecodeBlock):
        rows = torch.arange(block.count, device=device)
        cache[:, :, rows, block.positions] = entries
        return _Wanted(
            cache[:, :, : block.count, : block.length], rows, kept, block.positions[kept]
        )
    end = block.start + block.chunk
    cache[:, :, :, block.start : end] = entries.unflatten(2, (block.count, block.chunk))
    firsts = torch.arange(block.count, device=device) * block.chunk
    return _Wanted(
        cache[:, :, :, :end], firsts, kept // block.chunk, block.start + kept % block.chunk
    )
