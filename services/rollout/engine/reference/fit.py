"""Which models this engine serves, by their configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from services.rollout.errors import UnfitWeightsError, UnsupportedModelError
from sluice.model_types import check_chosen, read_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def read_model_config(directory: Path) -> PretrainedConfig:
    """Reads config.json of a model directory; raises UnfitWeightsError."""
    try:
        config = read_config(directory)
        check_chosen(config.to_dict())
    except (ValueError, OSError, KeyError) as error:
        raise UnfitWeightsError(f"{directory.name!r} has no usable config: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # weights are numbers here
    return config


def check_rope(config: PretrainedConfig) -> None:
    """Raises UnsupportedModelError for angles that change with the length of a row.

    Those of longrope are others for all tokens of a row that outgrows the first training, and for
    all rows of a pass: what is cached of it, and its neighbours, would be wrong.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):
        if isinstance(part, Mapping) and part.get("rope_type") == "longrope":
            raise UnsupportedModelError(
                "rope_type longrope (rope_scaling) has other angles for all tokens of a row that "
                f"is longer than {part.get('original_max_position_embeddings')}: this engine does "
                "not serve it, another backend may",
                rope_type="longrope",
            )
