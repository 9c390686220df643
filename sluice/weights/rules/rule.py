"""The words of a weight table: one rule says how one Megatron tensor is made of HF tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Stage(StrEnum):
    """Which pipeline stage holds a tensor."""

    EMBEDDING = "embedding"  # the first
    LAYER = "layer"  # the one of its layer
    FINAL = "final"  # the last: the norm after the layers
    HEAD = "head"  # the last: logits or value


class Pack(StrEnum):
    """How sources become one tensor. In brackets: the rows, from the first to the last."""

    ONE = "one"  # [source]
    QKV = "qkv"  # for every KV group: [its query heads, its key head, its value head]
    GATED = "gated"  # on every tensor-parallel rank: [its gate rows, its up rows]


class Cut(StrEnum):
    """The axis of the packed tensor that tensor parallelism divides."""

    NONE = "none"  # every rank holds all of it
    ROWS = "rows"  # axis 0
    COLUMNS = "columns"  # axis 1


class Layers(StrEnum):
    """Which layers a rule with `{layer}` in it is for."""

    ALL = "all"
    DENSE = "dense"
    SPARSE = "sparse"


@dataclass(frozen=True)
class Source:
    """An HF tensor; `shape` names dimensions of the ModelShape ("q", "hidden" ...)."""

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class WeightRule:
    """One line of a family's table, for both directions.

    Names may hold `{layer}` and `{expert}`, global indices; a rule with `{expert}` is divided
    over expert-parallel ranks. `when` lists flags of the ModelShape that must be set, or unset
    with a leading "!". `padded`: rows are filled up with zeros to the padded vocabulary.
    `alias`: a second home of a tensor that another rule exports (a tied output layer).
    `copies`: HF tensors that a checkpoint may hold beside the source and that must equal it.
    """

    megatron: str
    sources: tuple[Source, ...]
    stage: Stage
    pack: Pack = Pack.ONE
    cut: Cut = Cut.NONE
    layers: Layers = Layers.ALL
    when: tuple[str, ...] = ()
    padded: bool = False
    alias: bool = False
    copies: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        if self.cut is not Cut.ROWS and (self.padded or self.pack is not Pack.ONE):
            raise ValueError(f"{self.megatron!r}: packed and padded tensors are cut by rows")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A table of rules and what its `config.json` means.

    `defaults` are the values of keys that a `config.json` may leave out. `flags` maps a flag of
    the ModelShape to the config key that sets it, or to a constant. `ignored` are HF names
    (patterns of `fnmatch`) that carry no weights.
    """

    name: str
    architectures: tuple[str, ...]
    rules: tuple[WeightRule, ...]
    defaults: Mapping[str, object] = field(default_factory=dict)
    flags: Mapping[str, str | bool] = field(default_factory=dict)
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
