"""Qwen2.5-VL: Qwen2 under a vision tower of gated MLPs with biases and RMSNorm."""

from __future__ import annotations

from sluice.weights.rules import vision
from sluice.weights.rules.common import ATTENTION, ENDS, GATED_MLP, NORMS
from sluice.weights.rules.rule import Family

_BLOCK = "visual.blocks.{layer}."
_TOWER = (
    vision.vision_rule(
        "vision_model.patch_embed.proj.weight", "visual.patch_embed.proj.weight", vision.PATCH
    ),
    *vision.norms(_BLOCK, ("weight",)),
    *vision.attention(_BLOCK),
    *vision.gated_mlp(_BLOCK),
    vision.vision_rule(
        "vision_model.decoder.final_layernorm.weight",
        "visual.merger.ln_q.weight",
        ("vision_hidden",),
    ),
    *vision.merger("vision_model.projection.encoder.", "visual.merger.mlp.", ("0", "2")),
)

QWEN2_5_VL = Family(
    name="qwen2_5_vl",
    architectures=("Qwen2_5_VLForConditionalGeneration",),
    rules=(*ENDS, *NORMS, *ATTENTION, *GATED_MLP, *_TOWER),
    text="text_config",
    defaults={"vision_config.in_channels": 3, "vision_config.temporal_patch_size": 2},
    flags={"attention_bias": True},
    sizes=vision.SIZES,
    spellings=(  # as its classes in memory have them, and some older checkpoints
        (r"^model\.language_model\.", "model."),
        (r"^model\.visual\.", "visual."),
    ),
    prefix="language_model.",
)
