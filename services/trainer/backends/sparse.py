"""Sparse attention of transformers models (GLM-5): which keys are seen, by rows of a pack.

An indexer beside attention chooses them; transformers has it do so by a mask over whole rows. It
takes no gradients, so that its weights stay as they were loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from services.trainer.backends.packing import LONG_TOKENS, PackedLayout
from sluice.algo.key_choice import choose_keys, rotate_pairs, seen_keys, weigh_heads
from sluice.fused_operations import attend_masked

INDEXER = ".self_attn.indexer."  # in the names of its weights, on every backend
ATTENTION_TYPE = "indexed_attention"  # transformers' word, by which it hands on a mask

# For each bucket of a pack int32[N, R, count], as `choose_keys` has them; None where queries see
# all of their keys. Empty where those of all buckets do.
ChosenKeys = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class PackMask:
    """Stands where transformers has a mask: it takes the part of heads of it, for the indexer."""

    layout: PackedLayout

    def __getitem__(self, part: object) -> PackMask:
        return self


def mask_inputs(model: Any, layout: PackedLayout) -> dict[str, Any]:
    """Return what a model with indexers is given beside a pack; of others nothing."""
    if not getattr(model.config, "index_topk", None):
        return {}
    return {"attention_mask": {ATTENTION_TYPE: PackMask(layout)}}


def choose_by_rows(model: torch.nn.Module) -> None:
    """Have the indexers of a model choose among the keys of the row that a query is in.

    Raises ValueError for indexers that choose in another way, such as DeepSeek-V3.2's, whose
    rotation turns halves.
    """
    for module in model.modules():
        kind = type(module).__name__
        if kind == "GlmMoeDsaIndexer":
            module.forward = MethodType(_choose, module)
        elif kind.endswith("Indexer"):
            raise ValueError(f"{kind} chooses keys in a way that is unknown here")


@torch.no_grad()
def _choose(
    indexer: Any,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: PackMask,
    position_ids: torch.Tensor,
    past_key_values: None = None,
) -> ChosenKeys:
    """Of hidden states [1, T, H], and of what queries are made of [1, T, latent]."""
    layout, count = attention_mask.layout, indexer.index_topk
    if layout.longest <= count:
        return ()
    cosine, sine = (angles[0] for angles in position_embeddings)
    rotated = indexer.qk_rope_head_dim
    queries_THD = indexer.wq_b(q_resid[0]).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    queries_THD = rotate_pairs(queries_THD, cosine[:, None], sine[:, None], rotated)
    keys_TD = indexer.k_norm(indexer.wk(hidden_states[0]))
    keys_SD = layout.gather_indexed(rotate_pairs(keys_TD, cosine, sine, rotated))
    weights_TH = weigh_heads(hidden_states[0], indexer.weights_proj.weight)
    chosen: list[torch.Tensor | None] = []
    for bucket in layout.buckets:
        if bucket.key_length <= count:
            chosen.append(None)
            continue
        mask = bucket.mask
        chosen.append(
            choose_keys(
                queries_THD.index_select(0, bucket.queries).unflatten(0, (bucket.count, -1)),
                keys_SD.index_select(0, bucket.keys).unflatten(0, (bucket.count, -1)),
                weights_TH.index_select(0, bucket.queries).unflatten(0, (bucket.count, -1)),
                count,
                mask if mask is None or mask.ndim == 2 else mask[:, 0],
            )
        )
    return tuple(chosen)


def attend_chosen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    chosen: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """Attend from [N, heads, R, D] to chosen ones of K keys, in blocks of queries.

    Without a kernel of its own: it costs what all keys would.
    """
    total, outputs = key.shape[2], []
    shown = mask if mask is None or mask.ndim == 2 else mask[:, 0]
    for start in range(0, query.shape[2], LONG_TOKENS):
        rows = slice(start, start + LONG_TOKENS)
        seen = seen_keys(chosen, rows, total, shown)[:, None]
        outputs.append(attend_masked(query[:, :, rows], key, value, seen, scale))
    return torch.cat(outputs, dim=2)
