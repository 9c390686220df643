"""Megatron's process groups, made from a MegatronConfig."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from services.trainer.backends.megatron.config import MegatronConfig
from sluice.weights.rules import Partition


def start(config: MegatronConfig, *, seed: int) -> None:
    """Make all groups; collective over the default group, which must exist."""
    interleaved = config.virtual_pipeline > 1
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline if interleaved else None,
        context_parallel_size=config.context,
        expert_model_parallel_size=config.expert,
        expert_tensor_parallel_size=config.expert_tensor_size,
        order="tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def stop() -> None:
    parallel_state.destroy_model_parallel()


def partition(*, expert: bool, padded_vocab: int) -> Partition:
    """This rank's tensor-parallel share of an ordinary tensor or of an expert's."""
    if expert:
        return Partition(
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
            padded_vocab,
        )
    return Partition(
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
        padded_vocab,
    )


def tensor_group(*, expert: bool) -> dist.ProcessGroup:
    """Ranks that hold the shares of one tensor."""
    if expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()
