"""Which transformers families the fsdp backend trains, and how their rows are packed.

Imports no torch: the controller plans by it. tests/models proves every entry; `make models-table`
writes what it measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from sluice.model_types import EXPERT_COUNTS, TOWERS, known_type

# shared: a prompt of several rows stands in a pack once. rows: every row stands whole, as windows,
# sinks and recurrent layers need it.
Layout = Literal["shared", "rows"]

FAMILIES: dict[str, Layout] = {
    "afmoe": "rows",
    "apertus": "shared",
    "arcee": "shared",
    "bamba": "rows",
    "cohere": "shared",
    "cohere2": "rows",
    "cwm": "rows",
    "deepseek_v2": "shared",
    "deepseek_v3": "shared",
    "dots1": "shared",
    "ernie4_5": "shared",
    "ernie4_5_moe": "shared",
    "exaone4": "shared",
    "exaone_moe": "rows",
    "falcon_h1": "rows",
    "flex_olmo": "shared",
    "gemma": "shared",
    "gemma2": "rows",
    "gemma3_text": "rows",
    "gemma4_text": "rows",
    "glm": "shared",
    "glm4": "shared",
    "glm4_moe": "shared",
    "glm4_moe_lite": "shared",
    "glm_moe_dsa": "shared",
    "gpt2": "shared",
    "gpt_oss": "rows",
    "granite": "shared",
    "granitemoe": "shared",
    "granitemoehybrid": "rows",
    "granitemoeshared": "shared",
    "hunyuan_v1_dense": "shared",
    "hunyuan_v1_moe": "shared",
    "hy_v3": "shared",
    "jamba": "rows",
    "kimi_linear": "rows",
    "laguna": "rows",
    "lfm2": "rows",
    "lfm2_moe": "rows",
    "llama": "shared",
    "mimo_v2_flash": "rows",
    "minimax_m2": "shared",
    "ministral": "rows",
    "ministral3": "shared",
    "mistral": "shared",
    "mixtral": "shared",
    "nemotron_h": "rows",
    "olmo": "shared",
    "olmo2": "shared",
    "olmo3": "rows",
    "olmoe": "shared",
    "opt": "shared",
    "phi": "shared",
    "phi3": "shared",
    "phimoe": "shared",
    "qwen2": "shared",
    "qwen2_5_vl": "shared",
    "qwen2_moe": "shared",
    "qwen3": "shared",
    "qwen3_5": "rows",
    "qwen3_5_moe": "rows",
    "qwen3_5_moe_text": "rows",
    "qwen3_5_text": "rows",
    "qwen3_moe": "shared",
    "qwen3_next": "rows",
    "qwen3_vl": "shared",
    "qwen3_vl_moe": "shared",
    "seed_oss": "shared",
    "smollm3": "shared",
    "solar_open": "shared",
    "starcoder2": "shared",
}
# Families that the reference backend trains, besides those of `model_types.TOWERS`.
# Their attention is the plain one, of queries, keys, values and a scale; of glm_moe_dsa, to keys
# that it has chosen; of gpt_oss, with windows and sinks.
REFERENCE = (
    "deepseek_v3",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss",
    "llama",
    "minimax_m2",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)
IMAGES = "it reads images, which nothing here shows it; docs/vision.md has the families that are"
REFUSED: dict[str, str] = {
    "bloom": "it takes positions from a mask of padding, so rows of a pack see each other",
    "gemma3": IMAGES,
    "gemma4": IMAGES,
    "longcat_flash": "transformers wants weights of its zero experts, which checkpoints have not",
    "minimax": "its recurrent layers run over the rows of a pack",
    "nemotron": "its layers do not hand on to attention how rows are packed",
    "olmo_hybrid": "transformers writes its convolutions in equal parts, which they are not",
    "qwen2_vl": IMAGES,
}
MEASURED_ROPE = {"dynamic", "longrope"}
LEARNED_POSITIONS = {"gpt2": ("n_positions", 1024), "opt": ("max_position_embeddings", 2048)}

NO_PLAN = "transformers ships no plan to cut its layers by"
SEES = "it reads images, by a tower that is not cut over tensor ranks"
TENSOR_REFUSED: dict[str, str] = {  # of families that are trained with fsdp.tensor 1
    "afmoe": NO_PLAN,
    "bamba": NO_PLAN,
    "falcon_h1": NO_PLAN,
    "gpt2": NO_PLAN,
    "gpt_oss": NO_PLAN,
    "granitemoe": NO_PLAN,
    "granitemoehybrid": NO_PLAN,
    "granitemoeshared": NO_PLAN,
    "hunyuan_v1_dense": NO_PLAN,
    "hunyuan_v1_moe": NO_PLAN,
    "jamba": NO_PLAN,
    "lfm2": NO_PLAN,
    "lfm2_moe": NO_PLAN,
    "nemotron_h": NO_PLAN,
    "opt": NO_PLAN,
    "phimoe": NO_PLAN,
    "qwen2_5_vl": SEES,
    "qwen3_5": SEES,
    "qwen3_5_moe": SEES,
    "qwen3_vl": SEES,
    "qwen3_vl_moe": SEES,
}
REPLAY_REFUSED: dict[str, str] = {  # of mixtures that are trained
    "phimoe": "its routers choose one expert after the other, and weigh each by what is near it",
}


class UnknownFamilyError(ValueError):
    """A model is of a family that was refused, or was never proven."""


def layout_of(config: Mapping[str, Any], *, unproven: bool = False) -> Layout:
    """Return how rows are packed for what config.json holds. Raises UnknownFamilyError."""
    model_type = config["model_type"]
    if model_type in REFUSED:
        reason = REFUSED[model_type]
        raise UnknownFamilyError(f"model_type {model_type} cannot be trained: {reason}")
    if model_type not in FAMILIES and not unproven:
        raise UnknownFamilyError(
            f"model_type {model_type} is not proven here; known: {', '.join(sorted(FAMILIES))}. "
            "Set fsdp.unproven: true to train it all the same"
        )
    return "rows" if _has_window(config) else FAMILIES.get(model_type, "rows")


def check_reference(model_type: str) -> None:
    """Raise ValueError for a family that the reference backend does not train."""
    known = (*REFERENCE, *TOWERS)
    if model_type not in known:
        raise ValueError(
            f"model_type {model_type} is unknown here; known: {', '.join(known)}. "
            "Others are trained with `backend: fsdp` or `megatron`: docs/models.md"
        )


def check_tensor(model_type: str) -> None:
    """Raise UnknownFamilyError where layers of a family that is trained cannot be cut."""
    if model_type in TENSOR_REFUSED:
        raise UnknownFamilyError(
            f"model_type {model_type} cannot be trained with fsdp.tensor above 1: "
            f"{TENSOR_REFUSED[model_type]}"
        )


def check_replay(model_type: str, setting: str) -> None:
    """Raise UnknownFamilyError where routers cannot be told which experts to choose."""
    if model_type in REPLAY_REFUSED:
        raise UnknownFamilyError(
            f"{setting} is not for model_type {model_type}: {REPLAY_REFUSED[model_type]}; "
            "leave it out"
        )


def expert_count(config: Mapping[str, Any]) -> int | None:
    """Return how many experts a layer has, by what config.json holds; 0 where it has none.

    None of unproven families, and where it is not the same of all layers.
    """
    if known_type(config.get("model_type", "")) not in FAMILIES:
        return None
    text = config.get("text_config") or config  # of a model that sees
    count = next((text[key] for key in EXPERT_COUNTS if text.get(key)), 0)
    return count if isinstance(count, int) else None


def check_context(config: Mapping[str, Any]) -> None:
    """Raise UnknownFamilyError where a row cannot be cut over ranks, by what config.json holds.

    Layers that are recurrent are found in the model itself.
    """
    if "vision_config" in config:
        raise UnknownFamilyError(
            "fsdp.context above 1 for a model that reads images: no rank has those of a row whole"
        )
    for kind in _measured_ropes(config):
        raise UnknownFamilyError(
            f"fsdp.context above 1 with rope_type {kind}: its angles go by the longest row, of "
            "which a rank has a part"
        )


def check_dropout(config: Mapping[str, Any]) -> None:
    """Raise ValueError where layers that are run again would drop others out."""
    for name, value in _flat(config):
        if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float) and value:
            raise ValueError(f"fsdp.activation_checkpointing with {name} above 0 in config.json")


def _flat(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings of a model and of its parts."""
    for name, value in settings.items():
        if name.endswith("_config") and isinstance(value, Mapping):
            yield from _flat(value)
        yield name, value


def check_lengths(config: Mapping[str, Any], longest: int | None) -> None:
    """Raise UnknownFamilyError where a row may change the angles of those that it is packed with.

    longest: tokens that a row may have; None where nothing bounds them.
    """
    for kind, rope in _measured_ropes(config).items():
        key = "max_position_embeddings" if kind == "dynamic" else "original_max_position_embeddings"
        most = rope.get(key) or config[key]
        if longest is None or longest > most:
            raise UnknownFamilyError(
                f"rope_type {kind} has other angles for all rows of a pack where one has more than "
                f"{most} tokens: set max_tokens_per_micro_batch to {most} at most, and "
                "oversize_policy to error or truncate"
            )


def _measured_ropes(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The settings, by kind, of rotary embeddings whose angles go by the longest row."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    each = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]
    found = {part.get("rope_type", part.get("type")): part for part in each}
    return {kind: part for kind, part in found.items() if kind in MEASURED_ROPE}


def learned_positions(config: Mapping[str, Any]) -> int:
    """Return how many positions a model has learned; 0 where they are computed, for any row."""
    key, default = LEARNED_POSITIONS.get(config.get("model_type", ""), ("", 0))
    return int(config.get(key, default))


def shares_prompts(model: str) -> bool:
    """Tell whether rows of the model in a directory share their prompts; of unknown ones, no."""
    config = json.loads((Path(model) / "config.json").read_bytes())
    return FAMILIES.get(known_type(config["model_type"])) == "shared" and not _has_window(config)


def keeps_rows_apart(model: str) -> bool:
    """Tell whether the family of the model in a directory does; of one that ranks refuse, no."""
    try:
        config = json.loads((Path(model) / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    kind = config.get("model_type") if isinstance(config, dict) else None
    return isinstance(kind, str) and FAMILIES.get(known_type(kind)) == "rows"


def _has_window(config: Mapping[str, Any]) -> bool:
    config = config.get("text_config") or config  # of a model that sees, unless it is an older one
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return False
    layers = config.get("layer_types")
    return not layers or "sliding_attention" in layers
