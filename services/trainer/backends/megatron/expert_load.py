"""Which experts Megatron's routers send the tokens of a pass to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from services.trainer.backends.expert_load import ExpertLoad, NoBiasError
from services.trainer.backends.megatron.batch import PackedBatch
from services.trainer.backends.megatron.head import find_decoder
from services.trainer.backends.megatron.model import PolicyModel
from services.trainer.backends.megatron.parallel import RankGroups


def routers_of(
    model: torch.nn.Module, index: int, sparse: Sequence[int], config: TransformerConfig
) -> Iterator[tuple[int, Any]]:
    """Yield the routers of a chunk, each with its place among `sparse`, the mixture layers of all.

    index: which chunk of this stage it is. A layer of multi-token prediction is left out.
    """
    interleaved = config.virtual_pipeline_model_parallel_size is not None
    offset = get_transformer_layer_offset(config, vp_stage=index if interleaved else None)
    for number, layer in enumerate(find_decoder(model).layers, offset):
        if number in sparse:
            yield sparse.index(number), layer.mlp.router


def watch_routers(policy: PolicyModel, device: torch.device) -> ExpertLoad:
    """Count what the routers of this stage choose, each among those of all stages."""
    sparse = _mixture_layers(policy)
    load = ExpertLoad([policy.source.shape.experts] * len(sparse), device)

    def note(place: int, _: torch.nn.Module, __: Any, made: tuple[torch.Tensor, ...]) -> None:
        load.add_mask(place, made[1])

    for place, router in all_routers(policy):
        router.register_forward_hook(partial(note, place))
    return load


def watch_biases(load: ExpertLoad, policy: PolicyModel) -> None:
    """Have `load` even out the experts of this stage. Raises NoBiasError.

    Megatron's own update counts padding and the last tokens of rows, and moves biases where a step
    is skipped.
    """
    if not policy.source.biased:
        raise NoBiasError(policy.source.hf_config.model_type)
    for place, router in all_routers(policy):
        load.add_bias(place, (router, "expert_bias"))


def all_routers(policy: PolicyModel) -> Iterator[tuple[int, Any]]:
    """Yield those of this stage, each with its place among the mixture layers of all stages."""
    sparse = _mixture_layers(policy)
    for index, model in enumerate(policy.models):
        yield from routers_of(model, index, sparse, policy.config)


def _mixture_layers(policy: PolicyModel) -> list[int]:
    shape = policy.source.shape
    return sorted(shape.sparse_layers) if shape.experts else []


def own_tokens(batch: PackedBatch, groups: RankGroups, config: TransformerConfig) -> torch.Tensor:
    """Return `followed` of the tokens that routers of this rank are given."""
    if not config.sequence_parallel:
        return batch.followed
    return batch.followed.chunk(groups.tensor.size)[groups.tensor.rank]
