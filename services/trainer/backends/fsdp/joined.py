"""Weights that transformers joins of several tensors of a checkpoint, along the cut of ranks.

Its loader reads a rank's part of each and joins these, where a part of all joined is wanted: on two
ranks and more every row stood at another place, in what is published too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from services.trainer.backends.fsdp.tensor_parallel import tensor_cut
from sluice.weights.stored_experts import tensor_shapes


def check_joined(model: Any, size: int, directory: Path) -> None:
    """Raise ValueError where ranks have unequal parts of what is joined, or tensor ranks do.

    Of a model that is cut over tensor ranks, `size` data ranks are to cut and nothing has loaded.
    Also where it would not be published as the checkpoint in `directory` has it. May raise
    WeightStoreError.
    """
    stored: Mapping[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        lengths = _joined(model, name, parameter)
        if lengths:
            stored = stored or tensor_shapes(directory)
            _check_written(model, name, parameter, stored)
        uneven = any(length % size for length in lengths)
        if lengths and (uneven or tensor_cut(parameter) is not None):
            raise ValueError(
                f"{name} is made of {len(lengths)} tensors of {lengths[0]} rows, of which {size} "
                "data ranks cannot have equal parts: take another count of ranks"
            )


@torch.no_grad()
def put_in_order(model: Any, data: DeviceMesh) -> None:
    """Give every data rank its part of what is joined; collective, once after loading."""
    size = data.size()
    for name, parameter in model.named_parameters():
        if size == 1 or not (lengths := _joined(model, name, parameter)):
            continue
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        mine = local.to(data.device_type).contiguous()  # with cpu_offload it is on the host
        parts = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(parts, mine, group=data.get_group())
        pieces = [part.split([length // size for length in lengths]) for part in parts]
        whole = torch.cat([piece for source in zip(*pieces, strict=True) for piece in source])
        local.copy_(whole.chunk(size)[data.get_local_rank()])


def _check_written(
    model: Any, name: str, parameter: torch.Tensor, stored: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ValueError: transformers cuts what is joined into equal parts, whatever they were."""
    for own, tensor in _sources(model, name, parameter).items():
        if stored.get(own, tensor.shape) != tensor.shape:
            raise ValueError(
                f"{own} has the shape {[*stored[own]]} in the checkpoint and would be published as "
                f"{[*tensor.shape]}: model_type {model.config.model_type} cannot be trained"
            )


def _sources(model: Any, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a parameter is made of, by name, without memory."""
    empty = torch.empty(parameter.shape, device="meta")
    made: dict[str, torch.Tensor] = revert_weight_conversion(model, {name: empty})
    return made


def _joined(model: Any, name: str, parameter: torch.Tensor) -> list[int]:
    """The rows of each tensor that a parameter is made of one behind another; else nothing."""
    made = [*_sources(model, name, parameter).values()]
    if len(made) == 1 or any(tensor.shape[1:] != parameter.shape[1:] for tensor in made):
        return []
    lengths = [tensor.shape[0] for tensor in made]
    return lengths if sum(lengths) == parameter.shape[0] else []
