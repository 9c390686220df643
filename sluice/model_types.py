"""Types of models that run by the code of another: their directories name code, which is never run.

Importing this costs nothing of transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SAME_AS = {
    "kimi_k2": "deepseek_v3",  # Kimi K2
    "mimo": "qwen2",  # MiMo-7B: its layer of multi-token prediction is not part of the stack
}


def known_type(model_type: str) -> str:
    """The `model_type` by which transformers knows a model."""
    return SAME_AS.get(model_type, model_type)


def read_config(directory: Path) -> PretrainedConfig:
    """A model directory's configuration, of the type that runs it. Raises OSError, ValueError."""
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found, _ = PretrainedConfig.get_config_dict(directory, local_files_only=True)
    kind = found.get("model_type") if isinstance(found, dict) else None
    other = SAME_AS.get(kind) if isinstance(kind, str) else None
    if other is None:  # what is no configuration is refused there, too
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True)
        return config
    own = {name: value for name, value in found.items() if name not in ("model_type", "auto_map")}
    made: PretrainedConfig = CONFIG_MAPPING[other].from_dict(own)
    return made
