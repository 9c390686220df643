"""Which tensors of a HF checkpoint are of layers of multi-token prediction.

Engines that draft by them look for them in every version; transformers does not load them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

APART = re.compile(r"(?:model\.)?mtp(?:_layers)?\..+")
IN_STACK = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\..+")


def predicts(name: str, config: Mapping[str, object]) -> bool:
    """Return whether a tensor is named apart, or as of a layer behind those of `config.json`."""
    if APART.fullmatch(name):
        return True
    place, text = IN_STACK.fullmatch(name), config.get("text_config", config)
    layers = text.get("num_hidden_layers") if isinstance(text, Mapping) else None
    return place is not None and isinstance(layers, int) and int(place[1]) >= layers
