"""Megatron's process groups in this process, opened and closed by the backends that use them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from services.trainer.backend import LayoutError
from services.trainer.backends.megatron.config import MegatronConfig
from services.trainer.backends.megatron.upstream import current_device
from sluice.algo.collectives import Collectives, create_collectives
from sluice.weights.rules.packing import Partition

_users: list[MegatronConfig] = []  # Megatron keeps one set of groups a process


@dataclass(frozen=True)
class RankGroups:
    """What this backend itself exchanges with other ranks, beside Megatron's own collectives."""

    world: Collectives
    tensor: Collectives
    context: Collectives
    data: Collectives  # with those of context
    model: Collectives  # tensor ranks of all stages
    checkpoint: dist.ProcessGroup  # of all ranks, on their hosts, for the thread that writes files

    def any_rank(self, flag: bool) -> bool:
        """Returns whether `flag` is set on any rank of the world; collective."""
        highest = torch.tensor(float(flag), device=current_device())
        return bool(self.world.all_reduce(highest, "max").item())

    def end_step(self) -> None:
        """Checks, where collectives are checked, that all ranks ran the same; collective."""
        for collectives in (self.context, self.tensor, self.data, self.model, self.world):
            collectives.end_step()


def start(
    config: MegatronConfig, *, seed: int, check_timeout: timedelta | None, timeout: timedelta
) -> RankGroups:
    """Makes all groups; collective over the default group, which must exist.

    Backends of one process share Megatron's. Raises LayoutError when theirs are of another layout.
    `check_timeout`: of the check before each collective; None checks none. `timeout`: of every
    collective, and of ranks that have written their files of a checkpoint, for the others.
    """
    if _users and _sizes(_users[0]) != _sizes(config):
        raise LayoutError("a backend of another layout is open in this process")
    if not _users:
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
            distributed_timeout_minutes=timeout / timedelta(minutes=1),
        )
        tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    _users.append(config)
    world = dist.group.WORLD
    assert world is not None
    return RankGroups(
        world=create_collectives(world, check_timeout),
        tensor=create_collectives(parallel_state.get_tensor_model_parallel_group(), check_timeout),
        context=create_collectives(parallel_state.get_context_parallel_group(), check_timeout),
        data=create_collectives(
            parallel_state.get_data_parallel_group(with_context_parallel=True), check_timeout
        ),
        model=create_collectives(parallel_state.get_model_parallel_group(), check_timeout),
        checkpoint=dist.new_group(backend="gloo", timeout=timeout),
    )


def stop() -> None:
    """Undoes one `start`; the last one ends the groups."""
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
    """Returns this rank's tensor-parallel share of an ordinary tensor or of an expert's."""
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
    """Returns the group of the ranks that hold the shares of one tensor."""
    if expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()
