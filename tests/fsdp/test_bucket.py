"""Checkpoints of the fsdp backend in a bucket."""

from __future__ import annotations

from pathlib import Path

from examples.models.tiny_qwen3 import build_tiny_qwen3
from tests.service.trainer.bucket_checkpoints import check_checkpoints


async def test_two_ranks_save_and_one_goes_on(tmp_path: Path) -> None:
    model = build_tiny_qwen3(tmp_path / "model", 0)
    settings = {"backend": "fsdp", "fsdp": {"dtype": "float32"}}
    await check_checkpoints(tmp_path, model, {**settings, "ranks": {"count": 2}}, settings)
