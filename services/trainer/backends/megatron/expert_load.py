"""Which experts Megatron's routers send the tokens of a pass to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from services.trainer.backends.expert_load import ExpertLoad
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
    shape = policy.source.shape
    sparse = sorted(shape.sparse_layers) if shape.experts else []
    load = ExpertLoad([shape.experts] * len(sparse), device)

    def note(place: int, _: torch.nn.Module, __: Any, made: tuple[torch.Tensor, ...]) -> None:
        load.add_mask(place, made[1])

    for index, model in enumerate(policy.models):
        for place, router in routers_of(model, index, sparse, policy.config):
            router.register_forward_hook(partial(note, place))
    return load


def own_tokens(batch: PackedBatch, groups: RankGroups, config: TransformerConfig) -> torch.Tensor:
    """Return `followed` of the tokens that routers of this rank are given."""
    if not config.sequence_parallel:
        return batch.followed
    return batch.followed.chunk(groups.tensor.size)[groups.tensor.rank]
