"""The experts that tokens were sent to, as SGLang tells them at the end of a sample."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.rollout.errors import EngineFailedError, UnfitWeightsError
from sluice.weights.errors import InvalidCheckpointError
from sluice.weights.rules.families import family_of
from sluice.weights.rules.shape import ConfigKeys, read_shape


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Counts of a model; `mixtures` are the indices of its layers with experts, in order."""

    layers: int
    mixtures: tuple[int, ...]
    experts: int
    chosen: int


def read_routing(document: Mapping[str, Any]) -> Routing:
    """Of a parsed `config.json`. Raises UnfitWeightsError for a model without experts."""
    try:
        family = family_of(document)
        shape = read_shape(family, document)
        chosen = ConfigKeys(document, family).count("num_experts_per_tok", default=0)
    except InvalidCheckpointError as error:
        raise UnfitWeightsError(f"engine.routed_experts: {error}") from error
    if not (shape.sparse_layers and chosen):
        raise UnfitWeightsError("engine.routed_experts: the model has no layers of experts")
    return Routing(
        layers=shape.layers,
        mixtures=tuple(sorted(shape.sparse_layers)),
        experts=shape.experts,
        chosen=chosen,
    )


def parse_experts(text: str, routing: Routing, tokens: int) -> np.ndarray:
    """int16[tokens, mixture layers, chosen] of SGLang's base64 of int32[tokens, layers, chosen].

    Rows of dense layers hold nothing and are left out. Raises EngineFailedError unless there are
    `tokens` rows, all with experts of this model.
    """
    try:
        found = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    except (binascii.Error, ValueError) as error:
        raise EngineFailedError(f"SGLang sent routed experts that are no int32: {error}") from error
    width = routing.layers * routing.chosen
    if found.size != tokens * width:
        raise EngineFailedError(
            f"SGLang sent routed experts of {found.size / width:g} tokens, not of {tokens}: "
            f"{found.size} values for {routing.layers} layers with {routing.chosen} each"
        )
    table = found.reshape(tokens, routing.layers, routing.chosen)[:, list(routing.mixtures)]
    if table.size and not 0 <= table.min() <= table.max() < routing.experts:
        raise EngineFailedError(f"SGLang sent an expert that is not among {routing.experts}")
    return np.ascontiguousarray(table, dtype=np.int16)
