"""The keys that are chosen are those of the published formula, whatever stands around a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GlmMoeDsaConfig
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaIndexer,
    GlmMoeDsaRotaryEmbedding,
)

from sluice.algo import key_choice
from sluice.algo.key_choice import choose_keys, rotate_pairs, seen_keys

HEADS, SIZE = 5, 4


def drawn(rows: int, queries: int, keys: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows + queries + keys)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn((rows, *shape), generator=generator)

    return draw(queries, HEADS, SIZE), draw(keys, SIZE), draw(queries, HEADS)


def best(
    query: torch.Tensor, key: torch.Tensor, weight: torch.Tensor, may: np.ndarray, count: int
) -> set[int]:
    """Of one query, in float64: I = sum_h w_h relu(q_h . k); of equal ones the first."""
    products = np.maximum(query.double().numpy() @ key.double().numpy().T, 0)
    scores = weight.double().numpy() @ products
    order = sorted(np.flatnonzero(may), key=lambda place: (-scores[place], place))
    return {int(place) for place in order[:count]}


def check(parts: tuple[torch.Tensor, ...], count: int, mask: torch.Tensor | None) -> None:
    query, key, weight = parts
    rows, length, total = len(query), query.shape[1], key.shape[1]
    chosen = choose_keys(*parts, count, mask)
    assert chosen.dtype is torch.int32
    assert chosen.shape == (rows, length, count)
    seen = torch.cat(
        [seen_keys(chosen, slice(a, a + 3), total, mask) for a in range(0, length, 3)], dim=1
    )
    for row in range(rows):
        for place in range(length):
            if mask is None:
                may = np.arange(total) <= total - length + place
            else:
                may = (mask if mask.ndim == 2 else mask[row])[place].numpy()
            found = set(seen[row, place].nonzero()[:, 0].tolist())
            assert found == best(query[row, place], key[row], weight[row, place], may, count)


@pytest.mark.parametrize(("queries", "keys"), [(20, 20), (7, 20), (1, 6)])
@pytest.mark.parametrize("limit", [1 << 26, 300, 1])
def test_the_best_of_the_keys_up_to_its_own_are_seen(
    queries: int, keys: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_choice, "MOST_SCORES", limit)
    check(drawn(3, queries, keys), 5, None)


@pytest.mark.parametrize("apart", [True, False])
def test_what_a_mask_hides_is_not_chosen(apart: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand((3, 9, 16) if apart else (9, 16), generator=generator) < 0.5
    mask[..., 3] = True
    check(drawn(3, 9, 16), 6, mask)


def test_of_equal_scores_the_first_are_taken() -> None:
    """Of negative ones too, and of zeros, which is what keys have that no head is for."""
    query, key, weight = drawn(2, 12, 12)
    key[:, 2:9] = key[:, 2:3]
    key[:, 5] = 0
    check((query, key, weight), 4, None)
    check((query, key, -weight.abs()), 4, None)
    check((-query.abs(), key.abs(), weight), 4, None)  # all are 0


def test_neither_gradients_nor_autocast_reach_it() -> None:
    query, key, weight = drawn(2, 12, 12)
    plain = choose_keys(query, key, weight, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(choose_keys(query.requires_grad_(), key, weight, 4), plain)


def test_transformers_chooses_the_same() -> None:
    sizes: dict[str, Any] = {"hidden_size": 12, "q_lora_rank": 10, "qk_rope_head_dim": 4}
    config = GlmMoeDsaConfig(
        **sizes, index_topk=6, index_n_heads=24, index_head_dim=8, max_position_embeddings=64
    )
    torch.manual_seed(0)
    indexer, turned = GlmMoeDsaIndexer(config, 0), GlmMoeDsaRotaryEmbedding(config)
    hidden, latent = torch.randn(2, 40, 12), torch.randn(2, 40, 10)
    positions = torch.arange(40)[None]
    cosine, sine = turned(hidden, positions)
    mask = torch.ones(2, 40, 40, dtype=torch.bool).tril()
    expected = indexer(hidden, latent, (cosine, sine), mask, positions)
    query = rotate_pairs(
        indexer.wq_b(latent).unflatten(-1, (24, 8)), cosine[:, :, None], sine[:, :, None], 4
    )
    key = rotate_pairs(indexer.k_norm(indexer.wk(hidden)), cosine, sine, 4)
    chosen = choose_keys(query, key, indexer.weights_proj(hidden), 6)
    seen, wanted = (seen_keys(each, slice(0, 40), 40) for each in (chosen, expected))
    assert torch.equal(seen, wanted)
