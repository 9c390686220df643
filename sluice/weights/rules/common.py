"""Rules that several families share. A family's file says which of them it has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from sluice.weights.rules.rule import Layers, Pack, ShardAxis, SourceTensor, Stage, WeightRule

_HF = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."
PREDICTION = "mtp.layers.0."  # the layer of multi-token prediction; nobody has published two
_EMBED = SourceTensor("model.embed_tokens.weight", ("vocab", "hidden"))
_LM_HEAD = SourceTensor("lm_head.weight", ("vocab", "hidden"))

ENDS = (
    WeightRule(
        megatron="embedding.word_embeddings.weight",
        sources=(_EMBED,),
        stage=Stage.EMBEDDING,
        cut=ShardAxis.ROWS,
        padded=True,
        when=("!tied",),
    ),
    WeightRule(
        megatron="embedding.word_embeddings.weight",
        sources=(_EMBED,),
        stage=Stage.EMBEDDING,
        cut=ShardAxis.ROWS,
        padded=True,
        when=("tied",),
        copies=(_LM_HEAD,),
    ),
    WeightRule(
        megatron="decoder.final_layernorm.weight",
        sources=(SourceTensor("model.norm.weight", ("hidden",)),),
        stage=Stage.FINAL,
    ),
    WeightRule(
        megatron="output_layer.weight",
        sources=(_LM_HEAD,),
        stage=Stage.HEAD,
        cut=ShardAxis.ROWS,
        padded=True,
        when=("!tied", "!value_head"),
    ),
    WeightRule(  # with a pipeline the last stage has its own copy of a tied embedding
        megatron="output_layer.weight",
        sources=(_EMBED,),
        stage=Stage.HEAD,
        cut=ShardAxis.ROWS,
        padded=True,
        alias=True,
        when=("tied", "!value_head"),
    ),
    WeightRule(  # as in transformers' *ForTokenClassification and *ForSequenceClassification
        megatron="output_layer.weight",
        sources=(SourceTensor("score.weight", ("one", "hidden")),),
        stage=Stage.HEAD,
        when=("value_head",),
    ),
    WeightRule(
        megatron="output_layer.bias",
        sources=(SourceTensor("score.bias", ("one",)),),
        stage=Stage.HEAD,
        when=("value_bias",),
    ),
)

NORMS = tuple(
    WeightRule(
        megatron=f"{_MEGATRON}{megatron}.weight",
        sources=(SourceTensor(f"{_HF}{hf}.weight", ("hidden",)),),
        stage=Stage.LAYER,
    )
    for megatron, hf in (
        ("input_layernorm", "input_layernorm"),
        ("pre_mlp_layernorm", "post_attention_layernorm"),
    )
)

ATTENTION = (
    WeightRule(
        megatron=f"{_MEGATRON}self_attention.linear_qkv.weight",
        sources=(
            SourceTensor(f"{_HF}self_attn.q_proj.weight", ("q", "hidden")),
            SourceTensor(f"{_HF}self_attn.k_proj.weight", ("kv", "hidden")),
            SourceTensor(f"{_HF}self_attn.v_proj.weight", ("kv", "hidden")),
        ),
        stage=Stage.LAYER,
        pack=Pack.QKV,
        cut=ShardAxis.ROWS,
    ),
    WeightRule(
        megatron=f"{_MEGATRON}self_attention.linear_qkv.bias",
        sources=(
            SourceTensor(f"{_HF}self_attn.q_proj.bias", ("q",)),
            SourceTensor(f"{_HF}self_attn.k_proj.bias", ("kv",)),
            SourceTensor(f"{_HF}self_attn.v_proj.bias", ("kv",)),
        ),
        stage=Stage.LAYER,
        pack=Pack.QKV,
        cut=ShardAxis.ROWS,
        when=("attention_bias",),
    ),
    WeightRule(
        megatron=f"{_MEGATRON}self_attention.linear_proj.weight",
        sources=(SourceTensor(f"{_HF}self_attn.o_proj.weight", ("hidden", "q")),),
        stage=Stage.LAYER,
        cut=ShardAxis.COLUMNS,
    ),
    WeightRule(  # added after the sum over ranks, so every rank holds all of it
        megatron=f"{_MEGATRON}self_attention.linear_proj.bias",
        sources=(SourceTensor(f"{_HF}self_attn.o_proj.bias", ("hidden",)),),
        stage=Stage.LAYER,
        when=("output_bias",),
    ),
)

QK_NORM = tuple(
    WeightRule(
        megatron=f"{_MEGATRON}self_attention.{letter}_layernorm.weight",
        sources=(SourceTensor(f"{_HF}self_attn.{letter}_norm.weight", ("head_dim",)),),
        stage=Stage.LAYER,
    )
    for letter in "qk"
)

GATED_MLP = (
    WeightRule(
        megatron=f"{_MEGATRON}mlp.linear_fc1.weight",
        sources=(
            SourceTensor(f"{_HF}mlp.gate_proj.weight", ("ffn", "hidden")),
            SourceTensor(f"{_HF}mlp.up_proj.weight", ("ffn", "hidden")),
        ),
        stage=Stage.LAYER,
        layers=Layers.DENSE,
        pack=Pack.GATED,
        cut=ShardAxis.ROWS,
    ),
    WeightRule(
        megatron=f"{_MEGATRON}mlp.linear_fc1.bias",
        sources=(
            SourceTensor(f"{_HF}mlp.gate_proj.bias", ("ffn",)),
            SourceTensor(f"{_HF}mlp.up_proj.bias", ("ffn",)),
        ),
        stage=Stage.LAYER,
        layers=Layers.DENSE,
        pack=Pack.GATED,
        cut=ShardAxis.ROWS,
        when=("mlp_bias",),
    ),
    WeightRule(
        megatron=f"{_MEGATRON}mlp.linear_fc2.weight",
        sources=(SourceTensor(f"{_HF}mlp.down_proj.weight", ("hidden", "ffn")),),
        stage=Stage.LAYER,
        layers=Layers.DENSE,
        cut=ShardAxis.COLUMNS,
    ),
    WeightRule(
        megatron=f"{_MEGATRON}mlp.linear_fc2.bias",
        sources=(SourceTensor(f"{_HF}mlp.down_proj.bias", ("hidden",)),),
        stage=Stage.LAYER,
        layers=Layers.DENSE,
        when=("mlp_bias",),
    ),
)

ROUTER = WeightRule(
    megatron=f"{_MEGATRON}mlp.router.weight",
    sources=(SourceTensor(f"{_HF}mlp.gate.weight", ("experts", "hidden")),),
    stage=Stage.LAYER,
    layers=Layers.SPARSE,
)


def expert_layers(
    first: tuple[SourceTensor, ...], second: SourceTensor, when: tuple[str, ...] = ()
) -> tuple[WeightRule, ...]:
    """Make the two layers of an expert: gate and up from `first`, down from `second`."""
    return (
        WeightRule(
            megatron=f"{_MEGATRON}mlp.experts.local_experts.{{expert}}.linear_fc1.weight",
            sources=first,
            stage=Stage.LAYER,
            layers=Layers.SPARSE,
            pack=Pack.GATED,
            cut=ShardAxis.ROWS,
            when=when,
        ),
        WeightRule(
            megatron=f"{_MEGATRON}mlp.experts.local_experts.{{expert}}.linear_fc2.weight",
            sources=(second,),
            stage=Stage.LAYER,
            layers=Layers.SPARSE,
            cut=ShardAxis.COLUMNS,
            when=when,
        ),
    )


_EXPERT = f"{_HF}mlp.experts.{{expert}}."
_SINGLE = (
    (
        SourceTensor(f"{_EXPERT}gate_proj.weight", ("moe_ffn", "hidden")),
        SourceTensor(f"{_EXPERT}up_proj.weight", ("moe_ffn", "hidden")),
    ),
    SourceTensor(f"{_EXPERT}down_proj.weight", ("hidden", "moe_ffn")),
)


def _stacked(*, transposed: bool) -> tuple[tuple[SourceTensor, ...], SourceTensor]:
    first = SourceTensor(
        f"{_HF}mlp.experts.gate_up_proj",
        ("2*moe_ffn", "hidden"),
        sections=("moe_ffn", "moe_ffn"),
        stacked=True,
        transposed=transposed,
    )
    second = SourceTensor(
        f"{_HF}mlp.experts.down_proj", ("hidden", "moe_ffn"), stacked=True, transposed=transposed
    )
    return (first,), second


_STACKED = _stacked(transposed=False)
EXPERTS = (ROUTER, *expert_layers(*_SINGLE))
EITHER_EXPERTS = (  # checkpoints with a tensor for each expert, or with one of all
    ROUTER,
    *expert_layers(*_SINGLE, ("!stacked_experts",)),
    *expert_layers(*_STACKED, ("stacked_experts",)),
)
TRANSPOSED_EXPERTS = (  # always one tensor of all, published with its axes exchanged
    ROUTER,
    *expert_layers(*_stacked(transposed=True), ("!straight_experts",)),
    *expert_layers(*_STACKED, ("straight_experts",)),
)

ROUTER_BIAS = (
    WeightRule(  # a buffer that balances load; Megatron keeps it in float32
        megatron=f"{_MEGATRON}mlp.router.expert_bias",
        sources=(SourceTensor(f"{_HF}mlp.gate.e_score_correction_bias", ("experts",)),),
        stage=Stage.LAYER,
        layers=Layers.SPARSE,
    ),
)


def _shared(hf: str, width: str) -> tuple[WeightRule, ...]:
    """Experts that every token goes through, as one MLP under the HF name `hf`."""
    return (
        WeightRule(
            megatron=f"{_MEGATRON}mlp.shared_experts.linear_fc1.weight",
            sources=(
                SourceTensor(f"{_HF}mlp.{hf}.gate_proj.weight", (width, "hidden")),
                SourceTensor(f"{_HF}mlp.{hf}.up_proj.weight", (width, "hidden")),
            ),
            stage=Stage.LAYER,
            layers=Layers.SPARSE,
            pack=Pack.GATED,
            cut=ShardAxis.ROWS,
        ),
        WeightRule(
            megatron=f"{_MEGATRON}mlp.shared_experts.linear_fc2.weight",
            sources=(SourceTensor(f"{_HF}mlp.{hf}.down_proj.weight", ("hidden", width)),),
            stage=Stage.LAYER,
            layers=Layers.SPARSE,
            cut=ShardAxis.COLUMNS,
        ),
    )


SHARED_EXPERTS = _shared("shared_experts", "shared_experts*moe_ffn")
SHARED_EXPERT = (
    *_shared("shared_expert", "shared_ffn"),
    WeightRule(
        megatron=f"{_MEGATRON}mlp.shared_experts.gate_weight",
        sources=(SourceTensor(f"{_HF}mlp.shared_expert_gate.weight", ("one", "hidden")),),
        stage=Stage.LAYER,
        layers=Layers.SPARSE,
    ),
)


_WHEN_PREDICTS = {Layers.DENSE: ("predicts", "!experts"), Layers.SPARSE: ("predicts", "experts")}


def predicted(
    layer: Iterable[WeightRule],
    hf: str,
    *,
    embedding: str,
    hidden: str,
    join: str,
    last: str,
    hidden_first: bool = False,
) -> tuple[WeightRule, ...]:
    """Make the rules of the layer of multi-token prediction, a `layer` with the HF prefix `hf`.

    The others are HF names: norms of the embedding and of the hidden state, the projection of
    both, the norm behind the layer (arXiv 2412.19437, 2.2). `hidden_first`: the projection there
    is of the hidden state and then of the embedding.
    """

    def rule(
        megatron: str,
        name: str,
        *shape: str,
        pack: Pack = Pack.ONE,
        cut: ShardAxis = ShardAxis.NONE,
    ) -> WeightRule:
        return WeightRule(
            megatron=f"{PREDICTION}{megatron}.weight",
            sources=(SourceTensor(name, shape),),
            stage=Stage.FINAL,
            pack=pack,
            cut=cut,
            when=("predicts",),
        )

    joined = Pack.SWAPPED if hidden_first else Pack.ONE
    return (
        rule("enorm", embedding, "hidden"),
        rule("hnorm", hidden, "hidden"),
        rule("eh_proj", join, "hidden", "2*hidden", pack=joined, cut=ShardAxis.ROWS),
        *(_of_prediction(each, hf) for each in layer),
        rule("final_layernorm", last, "hidden"),
    )


def _of_prediction(rule: WeightRule, hf: str) -> WeightRule:
    sources = (replace(s, name=s.name.replace(_HF, hf, 1)) for s in rule.sources)
    return replace(
        rule,
        megatron=rule.megatron.replace(_MEGATRON, f"{PREDICTION}transformer_layer.", 1),
        sources=tuple(sources),
        stage=Stage.FINAL,
        layers=Layers.ALL,
        when=(*rule.when, *_WHEN_PREDICTS.get(rule.layers, ("predicts",))),
    )


def repeated(rules: Iterable[WeightRule], copies: dict[str, str]) -> Iterator[WeightRule]:
    """Give tensors of `rules` the copies that checkpoints have beside a layer of prediction.

    `copies` are HF names: of a tensor, and of its copy.
    """
    for rule in rules:
        copy = None if rule.alias else copies.get(rule.sources[0].name)
        if copy is None:
            yield rule
            continue
        more = (*rule.copies, SourceTensor(copy, rule.sources[0].shape))
        yield replace(rule, when=(*rule.when, "!predicts"))
        yield replace(rule, when=(*rule.when, "predicts"), copies=more)


_NEXT = "model.layers.{layers}."


def followed_by_next(layer: tuple[WeightRule, ...]) -> tuple[WeightRule, ...]:
    """Make all rules of a model of such layers, numbered on by one of multi-token prediction.

    Checkpoints have the embedding and the output layer beside that one once more.
    """
    copies = {
        "model.embed_tokens.weight": f"{_NEXT}embed_tokens.weight",
        "lm_head.weight": f"{_NEXT}shared_head.head.weight",
    }
    next_layer = predicted(
        layer,
        _NEXT,
        embedding=f"{_NEXT}enorm.weight",
        hidden=f"{_NEXT}hnorm.weight",
        join=f"{_NEXT}eh_proj.weight",
        last=f"{_NEXT}shared_head.norm.weight",
    )
    return (*repeated(ENDS, copies), *layer, *next_layer)
