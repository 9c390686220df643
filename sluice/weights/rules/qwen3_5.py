"""Qwen3-Next, and Qwen3.5, dense and mixture of experts, with and without a vision tower.

Most layers are Gated DeltaNet (linear attention), the others softmax attention whose output is
gated. Norms are stored around zero on both sides, but for the one after the linear attention,
which only Megatron stores so: see `megatron/core/ssm/gated_delta_net.py`.
"""

from __future__ import annotations

from dataclasses import replace

from sluice.weights.rules import qwen3_vl, vision
from sluice.weights.rules.common import (
    ATTENTION,
    EITHER_EXPERTS,
    ENDS,
    EXPERTS,
    GATED_MLP,
    NORMS,
    QK_NORM,
    SHARED_EXPERT,
    predicted,
)
from sluice.weights.rules.rule import (
    Family,
    Layers,
    Pack,
    ShardAxis,
    SourceTensor,
    Stage,
    WeightRule,
)

_HF = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}.self_attention."
_KEYS, _VALUES = "linear_key_heads*linear_key_dim", "linear_value_heads*linear_value_dim"
_QKV = (_KEYS, _KEYS, _VALUES)
_QKV_ROWS = f"{_KEYS}+{_KEYS}+{_VALUES}"


def _linear(name: str, source: SourceTensor, **more: object) -> WeightRule:
    return WeightRule(
        megatron=f"{_MEGATRON}{name}",
        sources=(source,),
        stage=Stage.LAYER,
        layers=Layers.LINEAR_ATTENTION,
        **more,  # type: ignore[arg-type]
    )


_SECTIONS = ("query", "key", "value", "z", "beta", "alpha")
_BY_KEY_HEAD = WeightRule(  # a key head's rows of all sections stand together
    megatron=f"{_MEGATRON}in_proj.weight",
    sources=(
        SourceTensor(
            f"{_HF}linear_attn.in_proj_qkvz.weight",
            (f"{_QKV_ROWS}+{_VALUES}", "hidden"),
            sections=(*_QKV, _VALUES),
        ),
        SourceTensor(
            f"{_HF}linear_attn.in_proj_ba.weight",
            ("2*linear_value_heads", "hidden"),
            sections=("linear_value_heads", "linear_value_heads"),
        ),
    ),
    stage=Stage.LAYER,
    pack=Pack.GROUPED_SECTIONS,
    groups="linear_key_heads",
    cut=ShardAxis.ROWS,
    layers=Layers.LINEAR_ATTENTION,
    section_keys=_SECTIONS,
)
DELTA_NET = (
    WeightRule(
        megatron=f"{_MEGATRON}in_proj.weight",
        sources=(
            SourceTensor(
                f"{_HF}linear_attn.in_proj_qkv.weight", (_QKV_ROWS, "hidden"), sections=_QKV
            ),
            SourceTensor(f"{_HF}linear_attn.in_proj_z.weight", (_VALUES, "hidden")),
            SourceTensor(f"{_HF}linear_attn.in_proj_b.weight", ("linear_value_heads", "hidden")),
            SourceTensor(f"{_HF}linear_attn.in_proj_a.weight", ("linear_value_heads", "hidden")),
        ),
        stage=Stage.LAYER,
        pack=Pack.SECTIONS,
        cut=ShardAxis.ROWS,
        layers=Layers.LINEAR_ATTENTION,
        section_keys=_SECTIONS,
    ),
    _linear(
        "conv1d.weight",
        SourceTensor(
            f"{_HF}linear_attn.conv1d.weight",
            (_QKV_ROWS, "1", "linear_kernel"),
            sections=_QKV,
        ),
        pack=Pack.SECTIONS,
        cut=ShardAxis.ROWS,
        section_keys=("query", "key", "value"),
    ),
    _linear(
        "dt_bias",
        SourceTensor(f"{_HF}linear_attn.dt_bias", ("linear_value_heads",)),
        cut=ShardAxis.ROWS,
    ),
    _linear(
        "A_log",
        SourceTensor(f"{_HF}linear_attn.A_log", ("linear_value_heads",)),
        cut=ShardAxis.ROWS,
    ),
    _linear(
        "out_norm.weight",
        SourceTensor(f"{_HF}linear_attn.norm.weight", ("linear_value_dim",)),
        pack=Pack.SHIFTED,
    ),
    _linear(
        "out_proj.weight",
        SourceTensor(f"{_HF}linear_attn.out_proj.weight", ("hidden", _VALUES)),
        cut=ShardAxis.COLUMNS,
    ),
)


def _gated(rule: WeightRule) -> WeightRule:
    """Attention of the layers that have it, a gate beside every query head."""
    if rule.pack is not Pack.QKV:
        return replace(rule, layers=Layers.ATTENTION)
    query, *others = rule.sources
    query = replace(query, shape=("2*q", *query.shape[1:]))
    return replace(rule, sources=(query, *others), pack=Pack.GATED_QKV, layers=Layers.ATTENTION)


def _prediction(*mlp: WeightRule) -> tuple[WeightRule, ...]:
    """A layer with softmax attention."""
    return predicted(
        (*NORMS, *_GATED_ATTENTION, *mlp),
        "mtp.layers.0.",
        embedding="mtp.pre_fc_norm_embedding.weight",
        hidden="mtp.pre_fc_norm_hidden.weight",
        join="mtp.fc.weight",
        last="mtp.norm.weight",
    )


_GATED_ATTENTION = tuple(_gated(rule) for rule in (*ATTENTION, *QK_NORM))
_ATTENTION = (*ENDS, *NORMS, *_GATED_ATTENTION)
_TEXT = (*_ATTENTION, *DELTA_NET)
_DENSE = (*_TEXT, *GATED_MLP)
_SPARSE = (*_TEXT, *EITHER_EXPERTS, *SHARED_EXPERT)
_SIZES = {
    "linear_key_heads": "linear_num_key_heads",
    "linear_value_heads": "linear_num_value_heads",
    "linear_key_dim": "linear_key_head_dim",
    "linear_value_dim": "linear_value_head_dim",
    "linear_kernel": "linear_conv_kernel_dim",
}
_SHARED = {"shared_ffn": "shared_expert_intermediate_size"}
_DEFAULTS = {"head_dim": 256, "linear_conv_kernel_dim": 4, **qwen3_vl.DEFAULTS}
_FLAGS: dict[str, str | bool] = {
    "attention_bias": "attention_bias",
    "output_bias": "attention_bias",
}
_FOREIGN = ("mtp.*", "model.mtp.*")
_PRECISE = ("*.linear_attn.A_log", "*.linear_attn.norm.weight")

QWEN3_NEXT = Family(
    name="qwen3_next",
    architectures=(
        "Qwen3NextForCausalLM",
        "Qwen3NextForTokenClassification",
        "Qwen3NextForSequenceClassification",
    ),
    rules=(
        *_ATTENTION,
        _BY_KEY_HEAD,
        *DELTA_NET[1:],
        *GATED_MLP,
        *EXPERTS,
        *SHARED_EXPERT,
        *_prediction(*GATED_MLP, *EXPERTS, *SHARED_EXPERT),
    ),
    defaults={"head_dim": 256, "linear_conv_kernel_dim": 4, "full_attention_interval": 4},
    flags=_FLAGS,
    sizes={**_SIZES, **_SHARED},
    foreign=_FOREIGN,
    full_precision=_PRECISE,
)
QWEN3_5 = Family(
    name="qwen3_5",
    architectures=("Qwen3_5ForCausalLM",),
    rules=(*_DENSE, *_prediction(*GATED_MLP)),
    defaults=_DEFAULTS,
    flags=_FLAGS,
    sizes=_SIZES,
    foreign=_FOREIGN,
    full_precision=_PRECISE,
    spellings=((r"^model\.language_model\.", "model."),),
)
QWEN3_5_MOE = Family(
    name="qwen3_5_moe",
    architectures=("Qwen3_5MoeForCausalLM",),
    rules=(*_SPARSE, *_prediction(*EITHER_EXPERTS, *SHARED_EXPERT)),
    defaults=_DEFAULTS,
    flags=_FLAGS,
    sizes={**_SIZES, **_SHARED},
    foreign=_FOREIGN,
    full_precision=_PRECISE,
    spellings=((r"^model\.language_model\.", "model."),),
)
QWEN3_5_VL = Family(
    name="qwen3_5_vl",
    architectures=("Qwen3_5ForConditionalGeneration",),
    rules=(*vision.nested(_DENSE, qwen3_vl.HF), *qwen3_vl.TOWER),
    text="text_config",
    defaults=_DEFAULTS,
    flags=_FLAGS,
    sizes={**_SIZES, **qwen3_vl.SIZES},
    foreign=_FOREIGN,
    full_precision=_PRECISE,
    prefix="language_model.",
)
QWEN3_5_VL_MOE = Family(
    name="qwen3_5_vl_moe",
    architectures=("Qwen3_5MoeForConditionalGeneration",),
    rules=(*vision.nested(_SPARSE, qwen3_vl.HF), *qwen3_vl.TOWER),
    text="text_config",
    defaults=_DEFAULTS,
    flags=_FLAGS,
    sizes={**_SIZES, **_SHARED, **qwen3_vl.SIZES},
    foreign=_FOREIGN,
    full_precision=_PRECISE,
    prefix="language_model.",
)
