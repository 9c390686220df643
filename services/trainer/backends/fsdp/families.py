"""Which transformers families the fsdp backend trains, and how their rows are packed.

Imports no torch: the controller plans by it. Every entry is proven by tests/fsdp.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

# shared: a prompt of several rows stands in a pack once. rows: every row stands whole, as windows,
# sinks and recurrent layers need it.
Layout = Literal["shared", "rows"]

FAMILIES: dict[str, Layout] = {
    "llama": "shared",
    "qwen2": "shared",
    "qwen3": "shared",
    "qwen3_moe": "shared",
}
REFUSED: dict[str, str] = {}


class UnknownFamilyError(ValueError):
    """A model is of a family that was refused, or was never proven."""


def layout_of(model_type: str, *, unproven: bool = False) -> Layout:
    """Return how rows of this family are packed. Raises UnknownFamilyError."""
    if model_type in REFUSED:
        raise UnknownFamilyError(
            f"model_type {model_type} cannot be trained: {REFUSED[model_type]}"
        )
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if unproven:
        return "rows"
    raise UnknownFamilyError(
        f"model_type {model_type} is not proven here; known: {', '.join(sorted(FAMILIES))}. "
        "Set fsdp.unproven: true to train it all the same"
    )


def shares_prompts(model: str) -> bool:
    """Tell whether rows of the model in a directory share their prompts; of unknown ones, no."""
    model_type = json.loads((Path(model) / "config.json").read_bytes()).get("model_type")
    return FAMILIES.get(model_type) == "shared"
