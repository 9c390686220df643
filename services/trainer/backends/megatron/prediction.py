"""Multi-token prediction (arXiv 2412.19437, 2.2): one more layer guesses the token after the next.

It does so from the last hidden state at a token and the embedding of the one that follows. It is
trained beside the policy and apart from it: what it reads, and the output layer, get no gradient
of it, and its own is measured and clipped by itself. The policy's steps are as without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)

from services.trainer.backends.megatron.batch import Following, PackedBatch
from services.trainer.backends.megatron.head import OutputHead
from services.trainer.backends.megatron.upstream import current_device

METRIC = "mtp_loss"  # mean cross-entropy over the trained tokens that are guessed


class PredictionLayer(MultiTokenPredictionLayer):  # type: ignore[misc]
    """Megatron's layer over a pack, whose rows it never looks across."""

    def forward(
        self, hidden: torch.Tensor, embedded: torch.Tensor, rotary: Any, runs: Any
    ) -> torch.Tensor:
        """[tokens of this rank, 1, hidden] each, to the same."""
        run: Callable[..., torch.Tensor] = partial(
            self._proj_and_transformer_layer, rotary_pos_emb=rotary, packed_seq_params=runs
        )
        if self.config.recompute_granularity == "full":
            # a layer that is run again is left out of backward if nothing before it has gradients
            again = tensor_parallel.checkpoint
            run = partial(again, run, self.config.distribute_saved_activations)
            embedded = embedded.requires_grad_()
        return run(hidden, embedded)


def prediction_spec(layer: ModuleSpec, norm: Any) -> MultiTokenPredictionBlockSubmodules:
    """A block of one such layer, around the transformer layer `layer`."""
    submodules = MultiTokenPredictionLayerSubmodules(
        enorm=norm,
        hnorm=norm,
        eh_proj=ColumnParallelLinear,
        transformer_layer=layer,
        layer_norm=norm,
    )
    return MultiTokenPredictionBlockSubmodules(
        layer_specs=[ModuleSpec(module=PredictionLayer, submodules=submodules)]
    )


class Predictor(MultiTokenPredictionBlock):  # type: ignore[misc]
    """`mtp` of the last model chunk; without its own embedding, whose weights it reads.

    On a stage that has none it keeps a copy, which `share_embedding` fills.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: MultiTokenPredictionBlockSubmodules,
        *,
        model: Any,
        rows: int,
        vp_stage: int | None,
    ) -> None:
        """`rows`: of the embedding, on every tensor rank together."""
        super().__init__(config, ModuleSpec(MultiTokenPredictionBlock, submodules=spec), vp_stage)
        self._weight: Callable[[], torch.Tensor] = _find_embedding(model) or (lambda: self.copied)
        copied = None
        if _find_embedding(model) is None:
            shape = (rows // config.tensor_model_parallel_size, config.hidden_size)
            copied = torch.zeros(shape, dtype=config.params_dtype, device=current_device())
        self.register_buffer("copied", copied, persistent=False)
        self._rotary = (getattr(model, "rotary_pos_emb", None),)  # the model's, not a part of this

    def forward(self, output: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """Map the model's output [1, T, hidden] to what the output layer guesses from."""
        assert batch.following is not None
        hidden = output.detach().transpose(0, 1)
        if self.config.sequence_parallel:
            hidden = scatter_to_sequence_parallel_region(hidden)
        (rotary,) = self._rotary
        angles = None if rotary is None else rotary(batch.position_ids)
        embedded = self._embed(batch.following.token_ids)
        (layer,) = self.layers
        made: torch.Tensor = layer(hidden, embedded, angles, batch.runs)
        if self.config.sequence_parallel:
            made = gather_from_sequence_parallel_region(made, tensor_parallel_output_grad=False)
        return made.transpose(0, 1)

    @torch.no_grad()
    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64[1, T] -> [T of this rank, 1, hidden]."""
        weight = self._weight()
        local = token_ids - parallel_state.get_tensor_model_parallel_rank() * len(weight)
        elsewhere = (local < 0) | (local >= len(weight))
        found = torch.nn.functional.embedding(local.masked_fill(elsewhere, 0), weight)
        found = found.masked_fill(elsewhere[..., None], 0.0)
        found = reduce_from_tensor_model_parallel_region(found).transpose(0, 1)
        if self.config.sequence_parallel:
            found = scatter_to_sequence_parallel_region(found)
        return found.contiguous()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> Any:
        (layer,) = self.layers
        return layer.sharded_state_dict(f"{prefix}layers.0.", sharded_offsets, metadata)


def _find_embedding(model: Any) -> Callable[[], torch.Tensor] | None:
    if model.pre_process:
        return lambda: model.embedding.word_embeddings.weight
    if model.share_embeddings_and_output_weights:
        return lambda: model.output_layer.weight
    return None


@torch.no_grad()
def share_embedding(models: Sequence[Any]) -> None:
    """Give the last pipeline stage what the first has now, where it keeps a copy.

    Collective over both, wherever there is a Predictor on the last. `models`: this rank's chunks.
    """
    if not parallel_state.is_rank_in_embedding_group(ignore_virtual=True):
        return
    if parallel_state.is_pipeline_first_stage(ignore_virtual=True):
        weight = models[0].embedding.word_embeddings.weight
    else:
        weight = models[-1].mtp.copied
    source = parallel_state.get_pipeline_model_parallel_first_rank()
    dist.broadcast(weight.detach(), src=source, group=parallel_state.get_embedding_group())


@dataclass(frozen=True)
class Prediction:
    """The loss of a Predictor beside the policy's: `scale` times, summed in the same way."""

    predictor: Predictor
    scale: float

    def loss(
        self, output: torch.Tensor, batch: PackedBatch, head: OutputHead
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The scaled loss of this context rank's tokens, and (sum, weight) of the pack's metric.

        Collective over context ranks.
        """
        following = batch.following
        assert following is not None
        hidden_LH = self.predictor(output, batch)[0].index_select(0, following.predictors)
        logprobs = head.frozen_logprobs(hidden_LH, following.targets)
        loss = -(logprobs * following.weights.to(logprobs.dtype)).sum()
        return self.scale * loss, _measure(logprobs, following, batch)


def _measure(
    logprobs: torch.Tensor, following: Following, batch: PackedBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    total = -logprobs.detach().double().sum()
    sums = torch.stack((total, total.new_tensor(float(len(following.targets)))))
    if batch.context.size > 1:
        batch.context.all_reduce(sums, "sum")
    return sums[0], sums[1]
