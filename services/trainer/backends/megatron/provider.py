"""Where models come from: the built-in GPTModel, a registered factory, or a user's dotted path.

A path may name a factory, a layer spec, or a callable that returns either; what it returned
decides what it was. A callable is handed the arguments that it names, out of those of
ModelRequest: `request`, `config`, `hf_config`, `pre_process`, `post_process`, `vp_stage`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from services.trainer.backends.megatron.layer_spec import decoder_spec
from services.trainer.backends.megatron.rotary import PositionRotary
from services.trainer.backends.megatron.value_head import place_value_head

LAYER_SPECS = (ModuleSpec, TransformerBlockSubmodules)
MAX_CALLS = 3  # a callable that returns a callable that returns a spec


class ModelProviderError(ValueError):
    """A model provider does not give what is needed; the message says what it gave."""


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """What a factory is told about the model chunk to build."""

    config: TransformerConfig
    hf_config: Any
    padded_vocab: int
    tied: bool
    value_head: bool
    transformer_engine: bool
    rotary: PositionRotary
    pre_process: bool
    post_process: bool
    vp_stage: int | None


ModelFactory = Callable[..., torch.nn.Module]
_FACTORIES: dict[str, ModelFactory] = {}


def register_factory(name: str, factory: ModelFactory) -> None:
    """Make `factory` known as `name`. Raises ModelProviderError when the name is taken."""
    if name in _FACTORIES and _FACTORIES[name] is not factory:
        raise ModelProviderError(f"model factory {name!r} is registered twice")
    _FACTORIES[name] = factory


def build_model(provider: str, request: ModelRequest) -> torch.nn.Module:
    """One model chunk; with `request.value_head` the last one ends in a value per token.

    Raises ModelProviderError.
    """
    made: object = _lookup(provider) if provider else None
    for _ in range(MAX_CALLS):
        if isinstance(made, LAYER_SPECS) or not callable(made) or isinstance(made, torch.nn.Module):
            break
        made = _call(made, request)
    if isinstance(made, torch.nn.Module):
        model = made
    elif made is None or isinstance(made, LAYER_SPECS):
        model = gpt_model(made, request)
    else:
        raise ModelProviderError(f"{provider!r} gave {type(made).__name__}, no model and no spec")
    if request.value_head and request.post_process:
        place_value_head(model, request.config)
    return model


def _lookup(provider: str) -> object:
    if provider in _FACTORIES:
        return _FACTORIES[provider]
    module, separator, attribute = provider.partition(":")
    if not separator:
        known = ", ".join(sorted(_FACTORIES)) or "none"
        raise ModelProviderError(
            f"{provider!r} is neither a registered factory ({known}) nor module:attribute"
        )
    try:
        found: object = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ModelProviderError(f"{provider!r} cannot be imported: {error}") from error
    return found


def _call(provider: Callable[..., object], request: ModelRequest) -> object:
    given = {
        "request": request,
        "config": request.config,
        "hf_config": request.hf_config,
        "pre_process": request.pre_process,
        "post_process": request.post_process,
        "vp_stage": request.vp_stage,
    }
    parameters = inspect.signature(provider).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return provider(**given)
    for parameter in parameters:
        needed = parameter.default is parameter.empty and parameter.kind is not (
            parameter.VAR_POSITIONAL
        )
        if needed and parameter.name not in given:
            raise ModelProviderError(
                f"{getattr(provider, '__name__', provider)!r} asks for {parameter.name!r}; "
                f"it may ask for {', '.join(given)}"
            )
    names = [parameter.name for parameter in parameters if parameter.name in given]
    return provider(**{name: given[name] for name in names})


def gpt_model(spec: Any, request: ModelRequest) -> GPTModel:
    """Megatron's own model with the layers of `spec`; None builds this backend's layers."""
    if spec is None:
        spec = decoder_spec(
            request.config,
            transformer_engine=request.transformer_engine,
            vp_stage=request.vp_stage,
        )
    model = GPTModel(
        config=request.config,
        transformer_layer_spec=spec,
        vocab_size=request.padded_vocab,
        max_sequence_length=request.hf_config.max_position_embeddings,
        pre_process=request.pre_process,
        post_process=request.post_process,
        share_embeddings_and_output_weights=request.tied,
        position_embedding_type="mrope",  # the type that is handed position ids
        vp_stage=request.vp_stage,
    )
    model.rotary_pos_emb = request.rotary
    return model
