"""A mixture of experts trains by the experts its rollout chose, over all services."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.samples.arrow import decode_group
from sluice.samples.blob_store import BlobStore
from tests.e2e.conftest import GRIM, Stack, start_stack, stop_stack

LAYERS, CHOICES = 2, 2


def build_mixture(directory: Path) -> str:
    """The demo's tokenizer, with a mixture in place of its model."""
    build_tiny_qwen3(directory)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=13,
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=CHOICES,
        norm_topk_prob=True,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=11,
        pad_token_id=None,
    )
    model: Any = Qwen3MoeForCausalLM(config)
    model.save_pretrained(directory)
    return str(directory)


@pytest.fixture
def mixture_stack(tmp_path: Path) -> Iterator[Stack]:
    """Engine and episodes in processes of their own; every request is cut off after two tokens."""
    model = build_mixture(tmp_path / "mixture")
    trainer = {
        "model": model,
        "backend": "megatron",
        "megatron": {"dtype": "float32", "routing_replay": "rollout"},
        "optim": {"learning_rate": 2e-3},
    }
    engine = {"max_running": 64, "max_model_length": 16, "threads": 1, "routed_experts": True}
    episodes = {"chunk_tokens": 2, **GRIM["episodes"]}
    stack = start_stack(
        tmp_path / "stack",
        trainer={"kind": "trainer", "config": trainer},
        rollout={"kind": "rollout", "config": {"roles": ["engine"], "engine": engine}},
        episodes={
            "kind": "rollout",
            "config": {"roles": ["episodes"], "tokenizer": model, "episodes": episodes},
        },
    )
    yield stack
    stop_stack(stack)


@pytest.mark.fast
def test_the_experts_of_the_rollout_train(mixture_stack: Stack) -> None:
    training = mixture_stack.train("replay", steps=2)
    training.finish()
    rows = training.rows()
    assert [row["step"] for row in rows] == [1, 2]
    assert all(abs(row["rollout_mismatch"]) < 1e-4 for row in rows)
    store = BlobStore(mixture_stack.run_dir / "store")
    for group in training.groups("consumed"):
        for sample in decode_group(store.get(group.blob)):
            experts = sample.routed_experts
            assert experts is not None
            assert experts.shape == (len(sample.token_ids) - 1, LAYERS, CHOICES)
            assert np.all(experts[..., 0] != experts[..., 1])
