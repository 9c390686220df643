"""Heads of the last model chunk: log-probs from hidden states, or a critic's values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from services.trainer.backends.megatron.batch import PackedBatch
from sluice.algo.collectives import Collectives, gather_placed
from sluice.algo.logprobs import (
    EntropyMode,
    TopLogprobs,
    VocabShard,
    chunks_of_logits,
    linear_logprobs,
    token_logprobs,
    top_logprobs,
)


class ValueHeadError(ValueError):
    """A model has no output layer to replace, or several."""


class ValueHead(MegatronModule):  # type: ignore[misc]
    """hidden[tokens, batch, hidden] -> float32[tokens, batch, 1], equal on tensor-parallel ranks.

    Every rank sees all tokens and computes the same gradient, so that no sum is needed.
    Called as the output layer that it replaces. A reward model's has no bias.
    """

    def __init__(self, config: TransformerConfig, device: torch.device, *, bias: bool) -> None:
        super().__init__(config=config)
        self.gathers = config.sequence_parallel
        options = {"dtype": config.params_dtype, "device": device}
        self.weight = torch.nn.Parameter(torch.zeros((1, config.hidden_size), **options))
        self.bias = torch.nn.Parameter(torch.zeros(1, **options)) if bias else None

    def forward(
        self, hidden: torch.Tensor, weight: None = None, runtime_gather_output: object = None
    ) -> tuple[torch.Tensor, None]:
        if self.gathers:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        weight_1H, bias_1 = self.weight.float(), None if self.bias is None else self.bias.float()
        return torch.nn.functional.linear(hidden.float(), weight_1H, bias_1), None


def find_output_layer(model: torch.nn.Module) -> Any:
    """Finds the module in `model` (or itself) that has an `output_layer`. Raises ValueHeadError."""
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
    """Finds the transformer block of `model`, wherever it is nested."""
    return next(module.decoder for module in model.modules() if hasattr(module, "decoder"))


def place_value_head(model: torch.nn.Module, config: TransformerConfig, *, bias: bool) -> None:
    """Put a ValueHead in place of the output layer, wherever in `model` it is nested.

    A model that already ends in a ValueHead is left alone. Raises ValueHeadError.
    """
    owner = find_output_layer(model)
    if isinstance(owner.output_layer, ValueHead):
        return
    if getattr(owner, "share_embeddings_and_output_weights", False):
        raise ValueHeadError("a model with a value head must not tie its output to the embedding")
    owner.output_layer = ValueHead(config, next(owner.parameters()).device, bias=bias)


@dataclass(frozen=True)
class ResponseOutputs:
    """float32[R] over the response tokens of a pack in row order, equal on all its ranks.

    outputs: float32[R, 1 + K] where K further tokens were asked for at each place.
    """

    outputs: torch.Tensor
    entropy: torch.Tensor | None


class OutputHead:
    """The output layer of the last model chunk, wherever it is nested.

    Created once after the model is built: from then on the model returns hidden states
    [1, T, hidden] (or, with a value head, values [1, T, 1]) instead of logits.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        vocab: int,
        tensor: Collectives,
        float32: bool,
        most_logits: int,
    ) -> None:
        """`float32`: logits are, also where the model is narrower. `most_logits`: entries of one
        rank; more are made in chunks, once more in backward.
        """
        self._most_logits = most_logits
        self._owner, self._float32 = find_output_layer(model), float32
        self._vocab, self._tensor = vocab, tensor
        layer = self._owner.output_layer
        self.gives_values = isinstance(layer, ValueHead)
        if not self.gives_values:
            layer.forward = _pass_hidden_on if not layer.sequence_parallel else _gather_hidden

    def responses(
        self,
        output: torch.Tensor,
        batch: PackedBatch,
        *,
        temperature: float,
        entropy: EntropyMode,
    ) -> ResponseOutputs:
        """Returns what the model's output for `batch` says of the response tokens."""
        if self.gives_values:
            local = output[0].index_select(0, batch.local_predictors)[:, 0]
            return ResponseOutputs(_over_context(local[:, None], batch)[:, 0], None)
        hidden_LH, weight_VH = output[0].index_select(0, batch.local_predictors), self._weight()
        targets = batch.targets
        if batch.named is not None:
            targets = torch.cat([targets[:, None], batch.named], dim=1)
        logprobs, entropies = self._score(
            hidden_LH, weight_VH, targets, temperature=temperature, entropy=entropy
        )
        if entropy == "off":
            return ResponseOutputs(_over_context(logprobs[:, None], batch)[:, 0], None)
        columns = logprobs[:, None] if batch.named is None else logprobs
        both = _over_context(torch.cat((columns, entropies[:, None]), dim=1), batch)
        return ResponseOutputs(both[:, 0] if batch.named is None else both[:, :-1], both[:, -1])

    def name(
        self, output: torch.Tensor, batch: PackedBatch, *, temperature: float, count: int
    ) -> TopLogprobs:
        """Returns log-probs of the response tokens, and the likeliest at their places.

        All are equal on all ranks of the pack.
        """
        weight_VH = self._weight()
        found = top_logprobs(
            output[0].index_select(0, batch.local_predictors),
            weight_VH,
            batch.targets,
            count,
            temperature=temperature,
            vocab=self._shard(),
            float32=self._float32 and weight_VH.dtype != torch.float32,
        )
        numbers = _over_context(torch.cat((found.logprobs[:, None], found.top), dim=1), batch)
        return TopLogprobs(numbers[:, 0], _over_context(found.ids, batch), numbers[:, 1:])

    def frozen_logprobs(self, hidden_LH: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns log-probs float[L] of `targets`; the output weight gets no gradient of them."""
        weight_VH = self._weight().detach()
        return self._score(hidden_LH, weight_VH, targets, temperature=1.0, entropy="off")[0]

    def _score(
        self,
        hidden_LH: torch.Tensor,
        weight_VH: torch.Tensor,
        targets: torch.Tensor,
        *,
        temperature: float,
        entropy: EntropyMode,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options: Any = {"temperature": temperature, "entropy": entropy, "vocab": self._shard()}
        wider = self._float32 and weight_VH.dtype != torch.float32
        most = self._most_logits
        chunks = chunks_of_logits(len(hidden_LH), len(weight_VH), most, float32=wider)
        if chunks is None:
            whole_LH = copy_to_tensor_model_parallel_region(hidden_LH)  # its gradient is summed
            logits_LV = torch.nn.functional.linear(whole_LH, weight_VH)
            return token_logprobs(logits_LV, targets, reuse_logits=True, **options)
        return linear_logprobs(hidden_LH, weight_VH, targets, **options, **chunks)

    def _weight(self) -> torch.Tensor:
        if getattr(self._owner, "share_embeddings_and_output_weights", False):
            weight: torch.Tensor = self._owner.shared_embedding_or_output_weight()
        else:
            weight = self._owner.output_layer.weight
        return weight

    def _shard(self) -> VocabShard:
        if self._tensor.size == 1:
            return VocabShard(size=self._vocab)
        start = self._tensor.rank * self._weight().shape[0]
        return VocabShard(start=start, size=self._vocab, collectives=self._tensor)


def _pass_hidden_on(hidden: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
    return hidden, None


def _gather_hidden(hidden: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
    """All tokens; the gradient that comes back is whole on every rank, which keeps its part."""
    whole = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    return whole, None


def _over_context(local: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """local[R of this context rank, C] -> [R, C] of the whole pack in row order.

    Every rank computes the same loss from it, so that each keeps the gradient of its own rows.
    """
    return gather_placed(
        local,
        batch.local_predictors,
        batch.places,
        batch.context,
        local_length=batch.token_ids.shape[1],
        gradient="own" if torch.is_grad_enabled() else "none",
    )
