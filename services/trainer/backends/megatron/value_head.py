"""A critic's head: one value per token where a language model has its logits."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule


class ValueHeadError(ValueError):
    """A model has no output layer to replace, or several."""


class ValueHead(MegatronModule):  # type: ignore[misc]
    """hidden[tokens, batch, hidden] -> float32[tokens, batch, 1], equal on tensor-parallel ranks.

    Every rank sees all tokens and computes the same gradient, so that no sum is needed.
    Called as the output layer that it replaces.
    """

    def __init__(self, config: TransformerConfig, device: torch.device) -> None:
        super().__init__(config=config)
        self.gathers = config.sequence_parallel
        options = {"dtype": config.params_dtype, "device": device}
        self.weight = torch.nn.Parameter(torch.zeros((1, config.hidden_size), **options))
        self.bias = torch.nn.Parameter(torch.zeros(1, **options))

    def forward(
        self, hidden: torch.Tensor, weight: None = None, runtime_gather_output: object = None
    ) -> tuple[torch.Tensor, None]:
        if self.gathers:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        weight_1H, bias_1 = self.weight.float(), self.bias.float()
        return torch.nn.functional.linear(hidden.float(), weight_1H, bias_1), None


def find_output_layer(model: torch.nn.Module) -> Any:
    """The module inside `model` (or itself) that has an `output_layer`. Raises ValueHeadError."""
    sites: list[tuple[str, Any]] = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "output_layer", None), torch.nn.Module)
    ]
    if len(sites) != 1:
        names = ", ".join(repr(name) for name, _ in sites) or "nowhere"
        raise ValueHeadError(f"a model needs one output_layer, found in: {names}")
    return sites[0][1]


def find_decoder(model: torch.nn.Module) -> Any:
    """The transformer block of `model`, wherever it is nested."""
    return next(module.decoder for module in model.modules() if hasattr(module, "decoder"))


def place_value_head(model: torch.nn.Module, config: TransformerConfig) -> None:
    """Put a ValueHead in place of the output layer, wherever in `model` it is nested.

    A model that already ends in a ValueHead is left alone. Raises ValueHeadError.
    """
    owner = find_output_layer(model)
    if isinstance(owner.output_layer, ValueHead):
        return
    if getattr(owner, "share_embeddings_and_output_weights", False):
        raise ValueHeadError("a model with a value head must not tie its output to the embedding")
    owner.output_layer = ValueHead(config, next(owner.parameters()).device)
