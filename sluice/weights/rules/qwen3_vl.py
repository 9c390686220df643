"""Qwen3-VL, dense and mixture of experts: Qwen3 under a tower of plain MLPs and LayerNorm.

Some of the tower's blocks feed later layers of the language model through mergers of their own
(deepstack).
"""

from __future__ import annotations

from sluice.weights.rules import vision
from sluice.weights.rules.common import (
    ATTENTION,
    ENDS,
    GATED_MLP,
    NORMS,
    QK_NORM,
    TRANSPOSED_EXPERTS,
)
from sluice.weights.rules.rule import Family, Layers, WeightRule

HF = "model.language_model."
_VISUAL = "model.visual."
_BLOCK = f"{_VISUAL}blocks.{{layer}}."
_FEATURES = ("linear_fc1", "linear_fc2")


def _norm(megatron: str, hf: str, size: str, layers: Layers) -> tuple[WeightRule, ...]:
    return tuple(
        WeightRule(
            megatron=f"{megatron}{kind}",
            sources=(vision.SourceTensor(f"{hf}norm.{kind}", (size,)),),
            stage=vision.Stage.VISION,
            layers=layers,
        )
        for kind in ("weight", "bias")
    )


TOWER = (
    vision.vision_rule(
        "vision_model.patch_embed.proj.weight", f"{_VISUAL}patch_embed.proj.weight", vision.PATCH
    ),
    vision.vision_rule(
        "vision_model.patch_embed.proj.bias", f"{_VISUAL}patch_embed.proj.bias", ("vision_hidden",)
    ),
    vision.vision_rule(
        "vision_model.pos_embed.weight",
        f"{_VISUAL}pos_embed.weight",
        ("vision_positions", "vision_hidden"),
    ),
    *vision.norms(_BLOCK, ("weight", "bias")),
    *vision.attention(_BLOCK),
    *vision.plain_mlp(_BLOCK),
    *_norm("vision_model.merger.patch_norm.", f"{_VISUAL}merger.", "vision_hidden", Layers.VISION),
    *vision.merger("vision_model.merger.", f"{_VISUAL}merger.", _FEATURES),
)
_DEEPSTACK = (
    *_norm(
        "vision_model.decoder.deepstack_merger_list.{layer}.patch_norm.",
        f"{_VISUAL}deepstack_merger_list.{{layer}}.",
        vision.MERGED,
        Layers.DEEPSTACK,
    ),
    *vision.merger(
        "vision_model.decoder.deepstack_merger_list.{layer}.",
        f"{_VISUAL}deepstack_merger_list.{{layer}}.",
        _FEATURES,
        Layers.DEEPSTACK,
    ),
)
SIZES = {**vision.SIZES, "vision_positions": "vision_config.num_position_embeddings"}
DEFAULTS = {"vision_config.in_channels": 3, "vision_config.temporal_patch_size": 2}

_TEXT = (*ENDS, *NORMS, *ATTENTION, *QK_NORM, *GATED_MLP)

QWEN3_VL = Family(
    name="qwen3_vl",
    architectures=("Qwen3VLForConditionalGeneration",),
    rules=(*vision.nested(_TEXT, HF), *TOWER, *_DEEPSTACK),
    text="text_config",
    defaults={"head_dim": 128, **DEFAULTS},
    flags={"attention_bias": "attention_bias", "output_bias": "attention_bias"},
    sizes={**SIZES, "deepstack": "vision_config.deepstack_visual_indexes"},
    prefix="language_model.",
)
QWEN3_VL_MOE = Family(
    name="qwen3_vl_moe",
    architectures=("Qwen3VLMoeForConditionalGeneration",),
    rules=(*vision.nested((*_TEXT, *TRANSPOSED_EXPERTS), HF), *TOWER, *_DEEPSTACK),
    text="text_config",
    defaults=QWEN3_VL.defaults,
    flags=QWEN3_VL.flags,
    sizes=QWEN3_VL.sizes,
    prefix="language_model.",
)
