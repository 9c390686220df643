"""Checkpoints of the Megatron backend in a bucket."""

from __future__ import annotations

from pathlib import Path

from examples.models.tiny_qwen3 import build_tiny_qwen3
from tests.service.trainer.bucket_checkpoints import check_checkpoints


async def test_tensor_parallel_ranks_save_and_one_goes_on(tmp_path: Path) -> None:
    model = build_tiny_qwen3(tmp_path / "model", 0)
    one = {"backend": "megatron", "megatron": {"dtype": "float32"}}
    two = {**one, "megatron": {"tensor": 2, "dtype": "float32"}, "ranks": {"count": 2}}
    await check_checkpoints(tmp_path, model, two, one)
