"""Latent attention to the keys that an indexer chooses (GLM-5), over packs of sequences.

Megatron's own knows neither packs nor context ranks, wants bfloat16 and a kernel, and rotates
another part of a head. Here a layer chooses among the keys of each run, and layers behind it that
have no indexer share its choice.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from services.trainer.backends.megatron.attention import PackRuns
from services.trainer.backends.megatron.latent import (
    NORM_EPSILON,
    DuplicatedLinear,
    LatentPackAttention,
    LatentSelfAttention,
)
from services.trainer.backends.megatron.upstream import current_device
from services.trainer.backends.sparse import ChosenKeys
from sluice.algo.collectives import gather_tokens
from sluice.algo.key_choice import choose_keys, rotate_pairs, weigh_heads


class Indexer(torch.nn.Module):
    """Whole on every tensor rank, and frozen: no gradient comes through its choice."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads, self.size = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.count, self.rotated = config.dsa_indexer_topk, config.qk_pos_emb_head_dim
        self._scattered = config.sequence_parallel
        options: Any = {"dtype": config.params_dtype, "device": current_device()}
        self.linear_wq_b = DuplicatedLinear(config.q_lora_rank, self.heads * self.size, config)
        self.linear_wk = DuplicatedLinear(config.hidden_size, self.size, config)
        self.k_norm = torch.nn.LayerNorm(self.size, NORM_EPSILON, **options)
        self.linear_weights_proj = DuplicatedLinear(config.hidden_size, self.heads, config)

    @torch.no_grad()
    def forward(
        self, hidden: torch.Tensor, latent: torch.Tensor, pack: PackRuns, angles: torch.Tensor
    ) -> ChosenKeys:
        """Returns int32[1, rows, count] for each run, None where it sees all of its keys.

        hidden: [tokens, hidden size] and latent: [tokens, latent size], of the tokens that this
        tensor rank has; angles: float32[tokens of all of them, rotated dim]. Collective unless no
        sequence of the pack has more keys than are chosen.
        """
        longest = max(b - a for a, b in zip(pack.starts, pack.starts[1:], strict=False))
        if longest <= self.count:
            return ()
        query, _ = self.linear_wq_b(latent)
        key, _ = self.linear_wk(hidden)
        weight = weigh_heads(hidden, self.linear_weights_proj.weight)
        key = self.k_norm(key)
        if self._scattered and parallel_state.get_tensor_model_parallel_world_size() > 1:
            query, key, weight = map(gather_from_sequence_parallel_region, (query, key, weight))
        cosine, sine = angles.cos().to(key.dtype), angles.sin().to(key.dtype)
        query = query.unflatten(-1, (self.heads, self.size))
        query = rotate_pairs(query, cosine[:, None], sine[:, None], self.rotated)
        key = rotate_pairs(key, cosine, sine, self.rotated)
        if pack.order is not None:
            assert pack.context is not None
            key = gather_tokens(key, pack.context, gradient="none").index_select(0, pack.order)
        chosen: list[torch.Tensor | None] = []
        for run in pack.runs:
            if run.last - run.first <= self.count:
                chosen.append(None)
                continue
            rows, keys = slice(run.start, run.stop), key[None, run.first : run.last]
            chosen.append(choose_keys(query[None, rows], keys, weight[None, rows], self.count))
        return tuple(chosen)


class ChosenPackAttention(LatentPackAttention):
    """Attention over a pack to the keys that the indexer of this layer, or of one before, chose."""

    def __init__(
        self, config: Any, *, layer_number: int, predicts: bool = False, **options: Any
    ) -> None:
        """predicts: it is the layer of multi-token prediction, which has its own indexer."""
        super().__init__(config, layer_number=layer_number, **options)
        own = config.num_layers if predicts else layer_number - 1
        indexed = config.indexed_layers | {config.num_layers}
        self.chooser = max(layer for layer in indexed if layer <= own)
        self.indexer = Indexer(config) if self.chooser == own else None
        # A layer that is run again in backward, in part or without the one whose choice it shares.
        is_shared = own < config.num_layers and own + 1 not in indexed
        self.keeps = is_shared or config.recompute_granularity == "selective"

    def chosen_keys(self, pack: PackRuns) -> ChosenKeys:
        return pack.chosen[self.chooser]


class ChosenSelfAttention(LatentSelfAttention):
    """Latent attention whose indexer reads what queries are made of."""

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: None,
        position_ids: None,
        packed_seq_params: PackRuns,
        **options: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Has the indexer choose keys for the pack, beside what it returns."""
        pack, given = packed_seq_params, (key_value_states, position_ids)
        made: tuple[torch.Tensor, ...] = super().get_query_key_value_tensors(
            hidden_states, *given, pack, **options
        )
        attention, latent = self.core_attention, made[3]
        if attention.indexer is not None:
            angles = self.rotary_pos_emb(pack.positions)[:, 0]
            chosen = attention.indexer(hidden_states[:, 0], latent, pack, angles)
            pack.chosen[attention.chooser] = chosen
        return made

    def forward(self, *args: Any, packed_seq_params: PackRuns, **options: Any) -> Any:
        made = super().forward(*args, packed_seq_params=packed_seq_params, **options)
        if self.core_attention.indexer is not None and not self.core_attention.keeps:
            del packed_seq_params.chosen[self.core_attention.chooser]
        return made
