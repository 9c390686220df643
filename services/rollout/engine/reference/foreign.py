"""Models whose attention is not the engine's: the cache holds tokens, and passes run whole rows.

All else of the engine stays as it is: rows, prefixes, lanes and versions are of tokens then. A
token costs as much as its whole row, so this is for models that no other engine serves. Of a model
that sees the cache also holds what images showed to the weights that encoded the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from sluice.routers import Routers

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
class _Written:
    """Rows [layers, 2, N, L, D] of a block, and the (row, column) of each of its tokens.

    first: the first token of the pass that belongs to each row.
    """

    rows: torch.Tensor
    first: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor


@dataclass
class WholeRows:
    """A transformers model that is run over whole rows; `sees`: it has a tower."""

    module: Any
    sees: bool
    _experts: torch.Tensor | None = None  # of the tokens of the last pass

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
        routers: Routers | None = None,
    ) -> torch.Tensor:
        """Compute logits float32[len(keep), V] of rows `keep` of a pass over tokens int64[T].

        positions: int64[3, T]. routers: of which experts are to be taken, of all T.
        """
        width = self.module.config.get_text_config().vocab_size
        logits = torch.zeros(len(keep), width, device=tokens.device)
        entries = self._entries(tokens, positions, shown)
        first, chosen = 0, list[tuple[int, torch.Tensor]]()
        for block in plan.blocks:
            count = _width(block)
            mine = ((keep >= first) & (keep < first + count)).nonzero()[:, 0]
            written = _write(block, entries[:, :, first : first + count])
            begin, first = first, first + count
            if written is None or not (len(mine) or routers):
                continue
            kept = keep[mine] - begin
            columns, place = written.column[kept].unique(return_inverse=True)
            # What stands behind a row's own tokens is older or empty: nothing before it sees that.
            length = written.rows.shape[3]
            shares = adapters.select((begin + written.first).repeat_interleave(length))
            made = self._run(written.rows, columns)
            adapters.restore(shares)
            logits[mine] = made[written.row[kept], place].float()
            if routers is not None:
                own = written.row * length + written.column
                chosen.append((begin, routers.take()[own]))
        self._experts = None if routers is None else _joined(chosen, len(tokens))
        return logits

    def take_experts(self) -> torch.Tensor:
        """Return int16[T, mixture layers, chosen] of the last pass, whose routers were given."""
        assert self._experts is not None
        return self._experts

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


def _joined(parts: Sequence[tuple[int, torch.Tensor]], count: int) -> torch.Tensor:
    """Parts of a pass of `count` tokens, each from its first on; zeros for what pads."""
    (_, some), *_ = parts
    whole = some.new_zeros((count, *some.shape[1:]))
    for first, part in parts:
        whole[first : first + len(part)] = part
    return whole


def _write(block: Block, entries: torch.Tensor) -> _Written | None:
    """Put the entries of a pass into the cache, and tell where each is; None for what pads."""
    if isinstance(block, PaddingBlock):
        return None
    cache, device = block.kv[:, :, :, 0], entries.device
    if isinstance(block, DecodeBlock):
        rows = torch.arange(block.count, device=device)
        cache[:, :, rows, block.positions] = entries
        return _Written(cache[:, :, : block.count, : block.length], rows, rows, block.positions)
    end = block.start + block.chunk
    cache[:, :, :, block.start : end] = entries.unflatten(2, (block.count, block.chunk))
    firsts = torch.arange(block.count, device=device) * block.chunk
    every = torch.arange(block.count * block.chunk, device=device)
    return _Written(
        cache[:, :, :, :end], firsts, every // block.chunk, block.start + every % block.chunk
    )
