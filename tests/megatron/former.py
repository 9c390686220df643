"""The checkpoint format of earlier releases, by Megatron's own gathering and torch's own writer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

from services.trainer.backends.megatron.backend import MegatronBackend
from services.trainer.backends.megatron.checkpoint import _fingerprint, _layout


def save(backend: MegatronBackend, directory: Path) -> None:
    """Write a checkpoint of format 1; collective."""
    policy, optimizer = backend._policy, backend._stepper.optimizer
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    models: list[Any] = list(policy.models)
    state: dict[str, Any] = {
        f"model{index}": model.sharded_state_dict(metadata=metadata)
        for index, model in enumerate(models)
    }
    state["optimizer"] = optimizer.sharded_state_dict(dict(state), metadata=metadata)
    states = {
        "python": random.getstate(),
        "cpu": torch.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    state["rng"] = ShardedObject("rng", states, (dist.get_world_size(),), (dist.get_rank(),))
    sharded, common = save_preprocess(state, False)
    if dist.get_rank() == 0:
        torch.save(common, directory / "common.pt")
        description = {
            "format": 1,
            "backend": "megatron",
            "model": _fingerprint(policy),
            "layout": _layout(backend._layout),
        }
        (directory / "sluice.json").write_text(json.dumps(description))
    replaced, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    dcp.save(
        mcore_to_pyt_state_dict(replaced, False),
        storage_writer=dcp.FileSystemWriter(directory),
        planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
    )
