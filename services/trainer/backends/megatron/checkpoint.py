"""Checkpoints in Megatron's torch_dist format: weights, optimizer and RNG of any layout.

Weights load under every layout, the optimizer's state under every layout but those that cross
expert 1 and more (experts then change from one optimizer to another), RNG states under the same
layout only. `sluice.json`, written last, names the layout that saved.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.validation import StrictHandling

from services.trainer.backends.megatron import upstream
from services.trainer.backends.megatron.config import MegatronConfig
from services.trainer.backends.megatron.device import on_cpu
from services.trainer.backends.megatron.policy import Policy
from services.trainer.backends.megatron.saving import PendingSave, ThreadSave
from services.trainer.backends.megatron.stepping import Stepper
from services.trainer.errors import CheckpointMismatchError
from sluice import platform
from sluice.durable import write_new

DESCRIPTION = "sluice.json"
FORMAT = 1
LAYOUT_FIELDS = (
    "tensor",
    "pipeline",
    "virtual_pipeline",
    "context",
    "expert",
    "expert_tensor_size",
    "distributed_optimizer",
    "dtype",
)


class UnfitCheckpointError(CheckpointMismatchError, ValueError):
    """A checkpoint is of another backend, model or layout than it is read into."""


def begin_save(
    policy: Policy, stepper: Stepper, config: MegatronConfig, directory: Path, *, durable: bool
) -> PendingSave:
    """Start writing into the existing, empty `directory`; collective.

    State is copied before the return: training may go on. The checkpoint is complete after
    `PendingSave.finish` and `describe`.
    """
    state = _sharded_state(policy, stepper, loading=False)
    state["rng"] = _rng_object()
    strategy = ThreadSave(threads=config.save_threads, copies=True, durable=durable)
    request = dist_checkpointing.save(
        state,
        str(directory),
        sharded_strategy=strategy,
        async_sharded_save=True,
        content_metadata={"distrib_optim_sharding_type": "fully_reshardable"},
    )
    return PendingSave(request, directory)


def describe(policy: Policy, config: MegatronConfig, directory: Path) -> None:
    """Name model and layout in the finished checkpoint; on rank 0, then all ranks go on."""
    if dist.get_rank() == 0:
        description = {
            "format": FORMAT,
            "backend": "megatron",
            "model": _fingerprint(policy),
            "layout": _layout(config),
        }
        write_new(directory / DESCRIPTION, json.dumps(description).encode())
    dist.barrier()


def load(policy: Policy, stepper: Stepper, config: MegatronConfig, directory: Path) -> None:
    """Read a checkpoint of any layout; collective.

    Raises UnfitCheckpointError when it is of another kind or its optimizer does not fit.
    """
    description = _read_description(directory)
    if description["model"] != _fingerprint(policy):
        raise UnfitCheckpointError(f"the checkpoint {directory.name!r} is of another model")
    saved = description["layout"]
    _check_optimizer(saved, config)
    state = _sharded_state(policy, stepper, loading=True)
    if saved == _layout(config):
        state["rng"] = _rng_object()
    loaded = dist_checkpointing.load(state, str(directory), strict=StrictHandling.RAISE_UNEXPECTED)
    for name, model in _named_models(policy):
        model.load_state_dict(loaded[name])
    upstream.name_missing_steps(loaded["optimizer"])
    with torch.no_grad(), upstream.keep_steps(stepper.optimizer):
        stepper.optimizer.load_state_dict(loaded["optimizer"])
    upstream.own_steps(stepper.optimizer)
    if "rng" in loaded:
        _restore_rng(loaded["rng"])


def _sharded_state(policy: Policy, stepper: Stepper, *, loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state: dict[str, Any] = {
        name: model.sharded_state_dict(metadata=metadata) for name, model in _named_models(policy)
    }
    models = dict(state)
    state["optimizer"] = stepper.optimizer.sharded_state_dict(
        models, is_loading=loading, metadata=metadata
    )
    return state


def _named_models(policy: Policy) -> Sequence[tuple[str, Any]]:
    return [(f"model{index}", model) for index, model in enumerate(policy.models)]


def _layout(config: MegatronConfig) -> dict[str, Any]:
    fields = {name: getattr(config, name) for name in LAYOUT_FIELDS}
    return {**fields, "world_size": dist.get_world_size()}


def _read_description(directory: Path) -> dict[str, Any]:
    try:
        description: dict[str, Any] = json.loads((directory / DESCRIPTION).read_bytes())
        known = description["backend"] == "megatron" and description["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnfitCheckpointError(
            f"{directory.name!r} is no complete checkpoint of the Megatron backend"
        ) from error
    if not known:
        raise UnfitCheckpointError(f"{directory.name!r} is of another backend or format")
    return description


def _fingerprint(policy: Policy) -> str:
    """The same for models of equal tensors, by names and shapes."""
    tensors = sorted(policy.source.weights.hf_tensors().items())
    return xxhash.xxh3_128_hexdigest(json.dumps(tensors).encode())


def _check_optimizer(saved: dict[str, Any], config: MegatronConfig) -> None:
    now = _layout(config)
    if (saved["expert"] > 1) != (config.expert > 1):
        raise UnfitCheckpointError(
            f"optimizer state saved with expert {saved['expert']} cannot be read with expert "
            f"{config.expert}: publish the weights and start from them",
            saved=saved["expert"],
            expert=config.expert,
        )
    for name in ("distributed_optimizer", "dtype"):
        if saved[name] != now[name]:
            raise UnfitCheckpointError(
                f"optimizer state saved with {name} {saved[name]} cannot be read with {now[name]}"
            )


def _rng_object() -> ShardedObject:
    """All generators of this rank; the data is read when saving and ignored when loading."""
    states = {
        "python": random.getstate(),
        "cpu": torch.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if not on_cpu():
        states["device"] = platform.current().module.get_rng_state()
    return ShardedObject("rng", states, (dist.get_world_size(),), (dist.get_rank(),))


def _restore_rng(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["cpu"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
    if "device" in states:
        platform.current().module.set_rng_state(states["device"])
