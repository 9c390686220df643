"""Indexers of transformers models choose by rows of a pack, in bfloat16 too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GlmMoeDsaConfig
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

from services.trainer.backends.packing import pack
from services.trainer.backends.sparse import PackMask, choose_by_rows
from tests.contract.training_backend.cases import make_row

TOKENS, HEADS, SIZE, COUNT = 200, 6, 8, 5


@pytest.mark.parametrize("autocast", [False, True])
def test_what_weighs_heads_is_not_rounded(autocast: bool) -> None:
    """Nothing is rotated here; queries and keys are of bfloat16, and their products are not."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 12, "q_lora_rank": 10, "qk_rope_head_dim": 4}
    config = GlmMoeDsaConfig(
        **sizes, index_topk=COUNT, index_n_heads=HEADS, index_head_dim=SIZE, num_hidden_layers=1
    )
    indexer = GlmMoeDsaIndexer(config, 0).bfloat16()
    choose_by_rows(indexer)
    hidden = torch.randn(1, TOKENS, 12).bfloat16()
    latent = torch.randn(1, TOKENS, 10).bfloat16()
    query = indexer.wq_b(latent)[0].unflatten(-1, (HEADS, SIZE))
    key = indexer.k_norm(indexer.wk(hidden))[0]
    angles = torch.ones(1, TOKENS, 4).bfloat16(), torch.zeros(1, TOKENS, 4).bfloat16()
    row = make_row("a/0", range(10), [0] * (TOKENS - 9), seed=0)  # a pack leaves out the last one
    layout = pack([row])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        (found,) = indexer(hidden, latent, angles, PackMask(layout), layout.position_ids[None])
    products = np.einsum("qhd,kd->qhk", *(each.detach().double().numpy() for each in (query, key)))
    weight = hidden[0].double() @ indexer.weights_proj.weight.detach().double().T
    scores = np.einsum("qh,qhk->qk", weight.numpy(), np.maximum(products, 0))
    for place in range(COUNT, TOKENS):
        best = np.argsort(-scores[place, : place + 1], kind="stable")[:COUNT]
        assert set(found[0, place].tolist()) == {*best.tolist()}, place
