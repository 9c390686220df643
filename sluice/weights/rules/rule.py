"""The words of a weight table: one rule says how one Megatron tensor is made of HF tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Stage(StrEnum):
    """Which pipeline stage holds a tensor."""

    EMBEDDING = "embedding"  # the first
    VISION = "vision"  # the first, before the embedding
    LAYER = "layer"  # the one of its layer
    FINAL = "final"  # the last: the norm after the layers
    HEAD = "head"  # the last: logits or value


class Pack(StrEnum):
    """How the sections of the sources become one tensor: its rows, from the first to the last.

    A source is one section unless its rule names several.
    """

    ONE = "one"  # [source]
    QKV = "qkv"  # for every KV group: [its query heads, its key head, its value head]
    GATED_QKV = "gated_qkv"  # the same; a query head's gate follows it in HF, all heads here
    GATED = "gated"  # on every tensor-parallel rank: [its gate rows, its up rows]
    SECTIONS = "sections"  # on every tensor-parallel rank: [its rows of each section]
    GROUPED_SECTIONS = "grouped_sections"  # the same; HF has the sections of one group together
    SHIFTED = "shifted"  # [source - 1]: a norm's weight, stored around zero
    SWAPPED = "swapped"  # the second half of the source's columns, then the first


ALTERED = (Pack.SHIFTED, Pack.SWAPPED)  # which no rows of a source are, byte for byte


class ShardAxis(StrEnum):
    """The axis of the packed tensor that tensor parallelism divides."""

    NONE = "none"  # every rank holds all of it
    ROWS = "rows"  # axis 0
    COLUMNS = "columns"  # axis 1


class Layers(StrEnum):
    """Which layers a rule with `{layer}` in it is for."""

    ALL = "all"
    DENSE = "dense"
    SPARSE = "sparse"
    ATTENTION = "attention"  # softmax attention
    LINEAR_ATTENTION = "linear_attention"
    INDEXED = "indexed"  # with an indexer, whose choice of keys layers behind it may share
    VISION = "vision"  # blocks of the vision tower
    DEEPSTACK = "deepstack"  # mergers of the vision tower that feed later layers


@dataclass(frozen=True)
class SourceTensor:
    """An HF tensor; `shape` holds sizes of the ModelShape ("q", "hidden", "heads*nope" ...).

    `sections` are the rows of each section, where there is more than one. `stacked`: the tensor
    holds all experts, along an axis before `shape`. `transposed`: it is stored with the two axes of
    `shape` exchanged. `alternating`: it is stored with the rows of its sections, which are of one
    length, in turns.
    """

    name: str
    shape: tuple[str, ...]
    sections: tuple[str, ...] = ()
    stacked: bool = False
    transposed: bool = False
    alternating: bool = False


@dataclass(frozen=True, kw_only=True)
class WeightRule:
    """One line of a family's table, for both directions.

    Names may hold `{layer}` and `{expert}`, global indices, and those of HF tensors `{layers}`,
    the number of layers; a rule with `{expert}` is divided over expert-parallel ranks. `when` lists
    flags of the ModelShape that must be set, or unset with a leading "!". `padded`: rows are filled
    up with zeros to the padded vocabulary.
    `alias`: a second home of a tensor that another rule exports (a tied output layer).
    `copies`: HF tensors that a checkpoint may hold beside the source and that must equal it.
    `groups` and `heads` are sizes: the KV groups and the query heads of Pack.QKV; the groups of
    Pack.GROUPED_SECTIONS.
    `section_keys`: Megatron's checkpoints hold every section as a tensor of its own, so named.
    """

    megatron: str
    sources: tuple[SourceTensor, ...]
    stage: Stage
    pack: Pack = Pack.ONE
    cut: ShardAxis = ShardAxis.NONE
    layers: Layers = Layers.ALL
    when: tuple[str, ...] = ()
    padded: bool = False
    alias: bool = False
    copies: tuple[SourceTensor, ...] = ()
    groups: str = "kv_heads"
    heads: str = "heads"
    section_keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        plain = self.pack in (Pack.ONE, *ALTERED)
        if self.cut is not ShardAxis.ROWS and (self.padded or not plain):
            raise ValueError(f"{self.megatron!r}: packed and padded tensors are cut by rows")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A table of rules and what its `config.json` means.

    `text` is the part of `config.json` that describes the language model; empty is all of it.
    `defaults` are the values of keys that it may leave out. `flags` maps a flag of the ModelShape
    to the config key that sets it, or to a constant. `sizes` maps a size of the ModelShape to its
    key, from the root where it holds a dot. `ignored` are HF names (patterns of `fnmatch`)
    that carry no weights; `foreign` are weights that training does not own, with `{layers}` for
    the number of layers. `spellings` are (pattern of `re`, replacement): other names of tensors.
    `full_precision` are names whose type is kept when a checkpoint's is changed.
    `prefix` stands before the names of the language model in a Megatron checkpoint.
    `expert_width` is the key of the width of an expert.
    """

    name: str
    architectures: tuple[str, ...]
    rules: tuple[WeightRule, ...]
    text: str = ""
    defaults: Mapping[str, object] = field(default_factory=dict)
    flags: Mapping[str, str | bool] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    foreign: tuple[str, ...] = ()
    spellings: tuple[tuple[str, str], ...] = ()
    full_precision: tuple[str, ...] = ()
    prefix: str = ""
    expert_width: str = "moe_intermediate_size"
