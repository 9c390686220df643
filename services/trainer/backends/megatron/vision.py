"""A language model of Megatron that is shown images by the vision tower of transformers.

The tower stands on the first stage, whole on every rank of it. Its features take the places of
placeholders, and further ones are added behind the first layers (deepstack).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from services.trainer.backend import LayoutError
from services.trainer.backends.megatron.batch import PackedBatch
from sluice.vision import TEXT, Features, VisionTower


class VisionLanguageModel(MegatronModule):  # type: ignore[misc]
    """One model chunk. `tower`: on the first one. Called as Megatron's model, and with `batch`."""

    def __init__(
        self, config: TransformerConfig, language_model: Any, tower: VisionTower | None
    ) -> None:
        """Raises LayoutError where the chunk has fewer layers than features are added behind."""
        super().__init__(config=config)
        self.model_type = ModelType.encoder_or_decoder
        self.language_model = language_model
        self.pre_process, self.post_process = (
            language_model.pre_process,
            language_model.post_process,
        )
        self.vp_stage = language_model.vp_stage
        tied = language_model.share_embeddings_and_output_weights
        self.share_embeddings_and_output_weights = tied
        self._tower = tower
        if tower is not None:
            self.vision_model = tower.module
            _keep_precision(tower.module)
            layers = list(language_model.decoder.layers)
            if len(layers) < tower.deep_layers:
                raise LayoutError(
                    f"images add to the first {tower.deep_layers} layers, of which the first "
                    f"chunk of the pipeline holds {len(layers)}: use fewer chunks"
                )
            for index, layer in enumerate(layers[: tower.deep_layers]):
                layer.register_forward_hook(partial(_add_deep, index), with_kwargs=True)

    def set_input_tensor(self, tensor: Any) -> None:
        self.language_model.set_input_tensor(tensor)

    def shared_embedding_or_output_weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.language_model.shared_embedding_or_output_weight()
        return weight

    def forward(self, *, input_ids: torch.Tensor, batch: PackedBatch, **named: Any) -> torch.Tensor:
        if self._tower is not None:
            named["decoder_input"] = self._embed(self._tower, input_ids, batch)
        output: torch.Tensor = self.language_model(input_ids=input_ids, **named)
        return output

    def _embed(
        self, tower: VisionTower, input_ids: torch.Tensor, batch: PackedBatch
    ) -> torch.Tensor:
        """Embeddings [tokens, 1, hidden] of this rank; what images add deeper goes to the pack."""
        hidden_T1H = self.language_model.embedding(input_ids=input_ids, position_ids=None)
        deep = list[torch.Tensor]()
        if images := batch.images:
            features = tower.encode(images)
            # The model runs backward first, then the tower, once: its layers may run forward
            # again for that, and would run the tower's part of the graph backward twice.
            leaves = features.cut()
            features.backward_behind(leaves)
            hidden_T1H, *deep = _place(hidden_T1H, batch.show(leaves), leaves)
        if self.config.sequence_parallel:
            hidden_T1H, *deep = map(scatter_to_sequence_parallel_region, (hidden_T1H, *deep))
        batch.runs.deep = tuple(deep)
        return hidden_T1H


def _place(
    hidden_T1H: torch.Tensor, index_T: torch.Tensor, features: Features
) -> list[torch.Tensor]:
    """Embeddings with the first features in their places; of each further layer those alone."""
    (at,) = torch.nonzero(index_T != TEXT, as_tuple=True)
    at, chosen = at.to(hidden_T1H.device), index_T[at].to(hidden_T1H.device)
    shown = [layer.index_select(0, chosen).to(hidden_T1H.dtype) for layer in features.layers]
    bases = [hidden_T1H, *[torch.zeros_like(hidden_T1H)] * (len(shown) - 1)]
    pairs = zip(bases, shown, strict=True)
    return [base.index_copy(0, at, rows[:, None]) for base, rows in pairs]


def _add_deep(index: int, layer: Any, arguments: Any, named: dict[str, Any], output: Any) -> Any:
    """A hook behind a layer, which returns hidden states and a context."""
    deep = named["packed_seq_params"].deep
    if index >= len(deep):
        return output
    return (output[0] + deep[index], *output[1:])


def _keep_precision(tower: torch.nn.Module) -> None:
    """Frequencies stay float32 whatever the parameters become: casts find buffers only."""
    for module in tower.modules():
        for name in list(module._non_persistent_buffers_set):
            values = module._buffers.pop(name)
            module._non_persistent_buffers_set.discard(name)
            object.__setattr__(module, name, values)
