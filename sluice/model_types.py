"""Types of models that run by the code of another: their directories name code, which is never run.

Importing this costs nothing of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SAME_AS = {
    "kimi_k2": "deepseek_v3",  # Kimi K2
    "mimo": "qwen2",  # MiMo-7B: its layer of multi-token prediction is not part of the stack
}


# Model types whose towers take `ImageRules.patches`, and whose text takes three positions a token;
# transformers' classes of the towers.
TOWERS = {
    "qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel",
    "qwen3_5": "Qwen3_5VisionModel",
    "qwen3_5_moe": "Qwen3_5MoeVisionModel",
    "qwen3_vl": "Qwen3VLVisionModel",
    "qwen3_vl_moe": "Qwen3VLMoeVisionModel",
}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_COUNTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


def check_chosen(config: Mapping[str, Any]) -> None:
    """Raises ValueError for a config.json that sends tokens to more experts than a layer has.

    What cannot be chosen ends the first pass of whoever computes by it.
    """
    text = config.get("text_config") or config  # of a model that sees
    if not isinstance(text, Mapping):
        return
    counts, chosen = (
        next((text[key] for key in keys if text.get(key)), 0)
        for keys in (EXPERT_COUNTS, CHOSEN_COUNTS)
    )
    if isinstance(counts, int) and isinstance(chosen, int) and 0 < counts < chosen:
        raise ValueError(f"config.json has tokens go to {chosen} experts, and a layer has {counts}")


def layer_configs(text: Any) -> list[Any]:
    """Returns the configuration of each layer where they differ in their sizes, else the one."""
    if not getattr(text, "is_heterogeneous", False):
        return [text]
    return [text.per_layer_config[index] for index in range(text.num_hidden_layers)]


def known_type(model_type: str) -> str:
    """The `model_type` by which transformers knows a model."""
    return SAME_AS.get(model_type, model_type)


def read_config(directory: Path) -> PretrainedConfig:
    """A model directory's configuration, of the type that runs it. Raises OSError, ValueError."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        return _read_config(directory)
    except StrictDataclassError as error:  # no ValueError, and names the value in a second line
        raise ValueError(f"config.json: {error.__cause__ or error}") from None


def _read_config(directory: Path) -> PretrainedConfig:
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
