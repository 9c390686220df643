"""Results of a pass made known on every pipeline stage, so that all ranks answer alike."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from services.trainer.backends.megatron.batch import PackedBatch


def share_responses(
    batches: Sequence[PackedBatch], scored: Sequence[torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """sample_id -> float32[response] on the CPU, from the last stage's `scored`.

    Collective over the pipeline.
    """
    rows = [row for batch in batches for row in batch.rows]
    lengths = [row.response_length for row in rows]
    if scored:
        flat = torch.cat(list(scored)).float()
    else:
        flat = torch.empty(sum(lengths), dtype=torch.float32, device=device)
    _from_last_stage(flat)
    parts = torch.split(flat.cpu(), lengths)
    return {row.sample_id: part.clone() for row, part in zip(rows, parts, strict=True)}


def share_sums(sums: dict[str, float], device: torch.device) -> dict[str, float]:
    """The last stage's `sums` on every stage. Collective over the pipeline."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return sums
    encoded = json.dumps(sums).encode()
    length = torch.tensor(len(encoded), dtype=torch.int64, device=device)
    _from_last_stage(length)
    data = torch.zeros(int(length), dtype=torch.uint8)
    if parallel_state.is_pipeline_last_stage():
        data = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    data = data.to(device)
    _from_last_stage(data)
    decoded: dict[str, float] = json.loads(bytes(data.tolist()))
    return decoded


def _from_last_stage(tensor: torch.Tensor) -> None:
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast(
            tensor,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
