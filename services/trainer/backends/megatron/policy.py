"""One model on one rank: its chunks, built and filled; for training also its optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from services.trainer.backends.megatron.config import MegatronConfig
from services.trainer.backends.megatron.head import OutputHead
from services.trainer.backends.megatron.model_config import (
    ModelSource,
    read_model,
    transformer_config,
    uses_transformer_engine,
)
from services.trainer.backends.megatron.provider import ModelRequest, PositionRotary, build_model
from services.trainer.backends.megatron.upstream import current_device
from services.trainer.backends.megatron.weights import LocalTensor, load_hf, local_tensors
from services.trainer.config import Head


@dataclass(frozen=True, kw_only=True)
class PolicyModel:
    """`chunks` are what the schedules run (wrapped); `tensors` all parameters with their rules."""

    source: ModelSource
    config: TransformerConfig
    chunks: Sequence[torch.nn.Module]
    models: Sequence[torch.nn.Module]  # the same, bare
    tensors: Sequence[LocalTensor]
    head: OutputHead | None
    padded_vocab: int
    bytes_read: int


def create_policy(
    directory: Path,
    config: MegatronConfig,
    *,
    device: torch.device,
    head: Head = "policy",
    trained: bool = True,
) -> PolicyModel:
    """Build this rank's chunks and load the HF checkpoint in `directory` into them.

    `head` value: a critic, also of a language model's checkpoint, whose head then starts at zero.
    `trained`: wrap them for gradients. Collective over the model-parallel groups.
    """
    source = read_model(directory, head)
    rotary = PositionRotary(source.hf_config, device)
    scale = rotary.attention_scaling**2 * source.shape.head_dim**-0.5
    core = transformer_config(source, config, softmax_scale=scale)
    padded = source.padded_vocab(config)
    models = _build(source, core, config, rotary=rotary, padded_vocab=padded)
    tensors = tuple(local_tensors(models, source, core))
    bytes_read = load_hf(tensors, source, directory, padded_vocab=padded)
    last = models[-1] if parallel_state.is_pipeline_last_stage() else None
    output = OutputHead(last, vocab=source.shape.vocab) if last is not None else None
    chunks: list[Any] = list(models)
    if core.bf16 or core.fp16:
        chunks = [Float16Module(core, chunk) for chunk in chunks]
    if trained:
        chunks = _wrap(chunks, core, config)
    return PolicyModel(
        source=source,
        config=core,
        chunks=chunks,
        models=models,
        tensors=tensors,
        head=output,
        padded_vocab=padded,
        bytes_read=bytes_read,
    )


def _build(
    source: ModelSource,
    core: TransformerConfig,
    config: MegatronConfig,
    *,
    rotary: PositionRotary,
    padded_vocab: int,
) -> list[torch.nn.Module]:
    interleaved = config.virtual_pipeline > 1
    models = []
    for index in range(config.virtual_pipeline):
        stage = index if interleaved else None
        request = ModelRequest(
            config=core,
            hf_config=source.hf_config,
            padded_vocab=padded_vocab,
            tied=source.tied,
            value_head=source.value_head,
            transformer_engine=uses_transformer_engine(config),
            rotary=rotary,
            pre_process=parallel_state.is_pipeline_first_stage(
                ignore_virtual=not interleaved, vp_stage=stage
            ),
            post_process=parallel_state.is_pipeline_last_stage(
                ignore_virtual=not interleaved, vp_stage=stage
            ),
            vp_stage=stage,
        )
        # Megatron leaves some of its parameters (routers) on the host.
        models.append(build_model(config.model_provider, request).to(current_device()))
    return models


def _wrap(
    chunks: Sequence[torch.nn.Module], core: TransformerConfig, config: MegatronConfig
) -> list[torch.nn.Module]:
    """Megatron's DDP: gradients gather in float32 buffers, whatever the parameters' dtype."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=config.distributed_optimizer,
        overlap_grad_reduce=False,  # gradients are reduced once a step, not once a pass
    )
    return [
        DistributedDataParallel(core, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
