"""Megatron's parallel groups of this process, opened and closed by the backends that use them."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from services.trainer.backends.megatron.config import MegatronConfig
from services.trainer.backends.megatron.layout import LayoutError
from sluice.weights.rules import Partition

_users: list[MegatronConfig] = []  # Megatron keeps one set of groups a process


def start(config: MegatronConfig, *, seed: int) -> None:
    """Make all groups; collective over the default group, which must exist.

    Backends of one process share them. Raises LayoutError when theirs are of another layout.
    """
    if _users:
        if _sizes(_users[0]) != _sizes(config):
            raise LayoutError("a backend of another layout is open in this process")
        _users.append(config)
        return
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
    _users.append(config)


def stop() -> None:
    """Undo one `start`; the last one ends the groups."""
    if _users:
        _users.pop()
    if not _users and parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


def _sizes(config: MegatronConfig) -> tuple[int, ...]:
    return (
        config.tensor,
        config.pipeline,
        config.virtual_pipeline,
        config.context,
        config.expert,
        config.expert_tensor_size,
    )


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
