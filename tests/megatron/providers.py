"""Model providers of every kind that a configuration may name."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from services.trainer.backends.megatron.model import (
    ModelRequest,
    decoder_spec,
    gpt_model,
    register_factory,
)

CALLS: list[str] = []


def spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    CALLS.append("spec")
    return decoder_spec(config, transformer_engine=False, vp_stage=vp_stage)


def factory(request: ModelRequest) -> GPTModel:
    CALLS.append("factory")
    return gpt_model(None, request)


def staged(
    pre_process: bool, post_process: bool, request: ModelRequest, vp_stage: int | None = None
) -> GPTModel:
    CALLS.append("staged")
    assert (pre_process, post_process) == (request.pre_process, request.post_process)
    return gpt_model(None, request)


def maker(hf_config: Any) -> Any:
    """Gives a callable, as configurations of other programs do."""
    CALLS.append("maker")
    return spec


def open_ended(**given: Any) -> GPTModel:
    CALLS.append("open_ended")
    return gpt_model(None, given["request"])


class Nested(MegatronModule):  # type: ignore[misc]
    """A language model inside another, as vision models have it."""

    def __init__(self, request: ModelRequest) -> None:
        super().__init__(config=request.config)
        self.pre_process, self.post_process = request.pre_process, request.post_process
        self.vp_stage = request.vp_stage
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = request.tied
        self.language_model = gpt_model(None, request)

    def set_input_tensor(self, tensor: Any) -> None:
        self.language_model.set_input_tensor(tensor)

    def shared_embedding_or_output_weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.language_model.shared_embedding_or_output_weight()
        return weight

    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        output: torch.Tensor = self.language_model(*arguments, **named)
        return output

    def sharded_state_dict(self, prefix: str = "", *arguments: Any, **named: Any) -> Any:
        return self.language_model.sharded_state_dict(
            f"{prefix}language_model.", *arguments, **named
        )


def nested(request: ModelRequest) -> Nested:
    CALLS.append("nested")
    return Nested(request)


def number(config: TransformerConfig) -> int:
    return 7


def demanding(args: Any) -> None:
    raise AssertionError("must not be called")


def two_heads(request: ModelRequest) -> torch.nn.Module:
    model = Nested(request)
    model.second = gpt_model(None, request)
    return model


NOT_CALLABLE = 7
register_factory("test-factory", factory)
