"""Rules of Qwen's vision towers, and the language models under them.

Megatron's names are those of mbridge and Megatron-Bridge (`vision_model.*`), where the tower is
built of Megatron's own layers: queries, keys and values by head, shares by rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sluice.weights.rules.rule import Layers, Pack, ShardAxis, SourceTensor, Stage, WeightRule

BLOCK = "vision_model.decoder.layers.{layer}."
SIZES = {
    "vision_layers": "vision_config.depth",
    "vision_hidden": "vision_config.hidden_size",
    "vision_ffn": "vision_config.intermediate_size",
    "vision_heads": "vision_config.num_heads",
    "vision_out": "vision_config.out_hidden_size",
    "vision_channels": "vision_config.in_channels",
    "vision_patch": "vision_config.patch_size",
    "vision_frames": "vision_config.temporal_patch_size",
    "vision_merge": "vision_config.spatial_merge_size",
}
MERGED = "vision_hidden*vision_merge*vision_merge"
PATCH = ("vision_hidden", "vision_channels", "vision_frames", "vision_patch", "vision_patch")


def nested(rules: Iterable[WeightRule], hf: str) -> tuple[WeightRule, ...]:
    """Rules of a language model whose HF names begin with `hf` in place of `model.`."""

    def move(source: SourceTensor) -> SourceTensor:
        name = source.name
        return (
            replace(source, name=hf + name.removeprefix("model.")) if "model." in name else source
        )

    return tuple(
        replace(rule, sources=tuple(map(move, rule.sources)), copies=tuple(map(move, rule.copies)))
        for rule in rules
    )


def vision_rule(
    megatron: str,
    hf: str,
    shape: tuple[str, ...],
    cut: ShardAxis = ShardAxis.NONE,
    block: str = "",
    **more: object,
) -> WeightRule:
    """Make a rule of the tower with one source; `block` stands before the HF name."""
    return WeightRule(
        megatron=megatron,
        sources=(SourceTensor(block + hf, shape),),
        stage=Stage.VISION,
        cut=cut,
        layers=Layers.VISION,
    )


def attention(block: str) -> tuple[WeightRule, ...]:
    """Fused queries, keys and values [q; k; v] with biases, and the output projection."""
    thirds = ("vision_hidden",) * 3

    def fused(kind: str, rest: tuple[str, ...]) -> WeightRule:
        source = SourceTensor(
            f"{block}attn.qkv.{kind}", ("3*vision_hidden", *rest), sections=thirds
        )
        return WeightRule(
            megatron=f"{BLOCK}self_attention.linear_qkv.{kind}",
            sources=(source,),
            stage=Stage.VISION,
            pack=Pack.QKV,
            cut=ShardAxis.ROWS,
            layers=Layers.VISION,
            groups="vision_heads",
            heads="vision_heads",
        )

    return (
        fused("weight", ("vision_hidden",)),
        fused("bias", ()),
        vision_rule(
            f"{BLOCK}self_attention.linear_proj.weight",
            "attn.proj.weight",
            ("vision_hidden", "vision_hidden"),
            ShardAxis.COLUMNS,
            block,
        ),
        vision_rule(
            f"{BLOCK}self_attention.linear_proj.bias",
            "attn.proj.bias",
            ("vision_hidden",),
            block=block,
        ),
    )


def norms(block: str, kinds: tuple[str, ...]) -> tuple[WeightRule, ...]:
    """Make the norms before attention and the MLP; `kinds`: weight, and bias of a LayerNorm."""
    names = (("input_layernorm", "norm1"), ("pre_mlp_layernorm", "norm2"))
    return tuple(
        vision_rule(f"{BLOCK}{megatron}.{kind}", f"{hf}.{kind}", ("vision_hidden",), block=block)
        for megatron, hf in names
        for kind in kinds
    )


def plain_mlp(block: str) -> tuple[WeightRule, ...]:
    """Two linear layers without a gate; their rows are cut as they stand."""
    return (
        vision_rule(
            f"{BLOCK}mlp.linear_fc1.weight",
            "mlp.linear_fc1.weight",
            ("vision_ffn", "vision_hidden"),
            ShardAxis.ROWS,
            block,
        ),
        vision_rule(
            f"{BLOCK}mlp.linear_fc1.bias",
            "mlp.linear_fc1.bias",
            ("vision_ffn",),
            ShardAxis.ROWS,
            block,
        ),
        vision_rule(
            f"{BLOCK}mlp.linear_fc2.weight",
            "mlp.linear_fc2.weight",
            ("vision_hidden", "vision_ffn"),
            ShardAxis.COLUMNS,
            block,
        ),
        vision_rule(
            f"{BLOCK}mlp.linear_fc2.bias", "mlp.linear_fc2.bias", ("vision_hidden",), block=block
        ),
    )


def gated_mlp(block: str) -> tuple[WeightRule, ...]:
    """Make the rules of a gated MLP with biases on all three layers."""

    def packed(kind: str, rest: tuple[str, ...]) -> WeightRule:
        return WeightRule(
            megatron=f"{BLOCK}mlp.linear_fc1.{kind}",
            sources=tuple(
                SourceTensor(f"{block}mlp.{name}_proj.{kind}", ("vision_ffn", *rest))
                for name in ("gate", "up")
            ),
            stage=Stage.VISION,
            pack=Pack.GATED,
            cut=ShardAxis.ROWS,
            layers=Layers.VISION,
        )

    return (
        packed("weight", ("vision_hidden",)),
        packed("bias", ()),
        vision_rule(
            f"{BLOCK}mlp.linear_fc2.weight",
            "mlp.down_proj.weight",
            ("vision_hidden", "vision_ffn"),
            ShardAxis.COLUMNS,
            block,
        ),
        vision_rule(
            f"{BLOCK}mlp.linear_fc2.bias", "mlp.down_proj.bias", ("vision_hidden",), block=block
        ),
    )


def merger(
    megatron: str, hf: str, names: tuple[str, str], layers: Layers = Layers.VISION
) -> tuple[WeightRule, ...]:
    """Make the two linear layers from merged patches to the language model; `names` are HF's."""
    shapes = {names[0]: (MERGED, MERGED), names[1]: ("vision_out", MERGED)}
    cuts = {"weight": (ShardAxis.ROWS, ShardAxis.COLUMNS), "bias": (ShardAxis.ROWS, ShardAxis.NONE)}
    return tuple(
        replace(
            vision_rule(
                f"{megatron}linear_fc{index + 1}.{kind}",
                f"{hf}{name}.{kind}",
                shapes[name] if kind == "weight" else shapes[name][:1],
                cuts[kind][index],
            ),
            layers=layers,
        )
        for index, name in enumerate(names)
        for kind in ("weight", "bias")
    )
