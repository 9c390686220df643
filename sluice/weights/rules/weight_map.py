"""The rules of a family, written out for one model: every tensor by name, both ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from sluice.weights.errors import (
    InvalidCheckpointError,
    MissingTensorError,
    UnexpectedTensorError,
)
from sluice.weights.rules.rule import Cut, Family, Layers, Pack, Source, Stage, WeightRule
from sluice.weights.rules.shape import ModelShape


class RuleConflictError(InvalidCheckpointError):
    """Two rules claim one tensor."""


class TensorShapeError(InvalidCheckpointError):
    """A tensor of a checkpoint has not the shape that the model's dimensions give."""


@dataclass(frozen=True)
class HfTensor:
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Binding:
    """One Megatron tensor with global indices, and the HF tensors that it is made of.

    `groups` is the number of KV groups (Pack.QKV). `expert` is None unless expert-parallel.
    """

    megatron: str
    sources: tuple[HfTensor, ...]
    stage: Stage
    pack: Pack
    cut: Cut
    groups: int
    padded: bool = False
    alias: bool = False
    layer: int | None = None
    expert: int | None = None
    copies: tuple[HfTensor, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the packed tensor before it is cut, without vocabulary padding."""
        rows = sum(source.shape[0] for source in self.sources)
        return (rows, *self.sources[0].shape[1:])


class WeightMap:
    """Every tensor of one model. Raises RuleConflictError when two rules claim one."""

    def __init__(self, family: Family, shape: ModelShape) -> None:
        self.family = family
        self.shape = shape
        self._by_megatron: dict[str, Binding] = {}
        self._by_hf: dict[str, Binding] = {}
        for binding in _expand(family.rules, shape):
            if binding.megatron in self._by_megatron:
                raise RuleConflictError(f"two rules make {binding.megatron!r}")
            self._by_megatron[binding.megatron] = binding
            for source in () if binding.alias else binding.sources:
                if source.name in self._by_hf:
                    raise RuleConflictError(f"two rules take {source.name!r}")
                self._by_hf[source.name] = binding
        self._copies = {copy.name: copy for b in self.bindings() for copy in b.copies}

    def bindings(self) -> tuple[Binding, ...]:
        """All tensors, in the order of the rules."""
        return tuple(self._by_megatron.values())

    def binding(self, name: str) -> Binding:
        """The binding of a Megatron or an HF name. Raises UnexpectedTensorError with the name."""
        found = self._by_megatron.get(name) or self._by_hf.get(name)
        if found is None:
            raise UnexpectedTensorError((name,))
        return found

    def hf_tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the HF checkpoint that the model is exported to."""
        return {
            source.name: source.shape
            for name, binding in self._by_hf.items()
            for source in binding.sources
            if source.name == name
        }

    def check_hf(self, found: Mapping[str, tuple[int, ...]]) -> None:
        """Check names and shapes of an HF checkpoint against the model.

        Raises MissingTensorError, UnexpectedTensorError or TensorShapeError with the names.
        """
        expected = self.hf_tensors()
        missing = tuple(sorted(set(expected) - set(found)))
        if missing:
            raise MissingTensorError(missing)
        allowed = expected | {copy.name: copy.shape for copy in self._copies.values()}
        unknown = tuple(sorted(name for name in found if name not in allowed))
        unknown = tuple(name for name in unknown if not self._is_ignored(name))
        if unknown:
            raise UnexpectedTensorError(unknown)
        for name, shape in found.items():
            if name in allowed and tuple(shape) != allowed[name]:
                raise TensorShapeError(
                    f"tensor {name!r} has shape {tuple(shape)}, the model has {allowed[name]}"
                )

    def _is_ignored(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.family.ignored)


def _expand(rules: tuple[WeightRule, ...], shape: ModelShape) -> Iterator[Binding]:
    for rule in rules:
        if not shape.allows(rule.when):
            continue
        for layer in _layers_of(rule, shape):
            experts = range(shape.experts) if "{expert}" in rule.megatron else (None,)
            for expert in experts:
                yield _bind(rule, shape, layer, expert)


def _layers_of(rule: WeightRule, shape: ModelShape) -> tuple[int | None, ...]:
    if "{layer}" not in rule.megatron:
        return (None,)
    every = range(shape.layers)
    if rule.layers is Layers.ALL:
        return tuple(every)
    sparse = rule.layers is Layers.SPARSE
    return tuple(layer for layer in every if (layer in shape.sparse_layers) == sparse)


def _bind(rule: WeightRule, shape: ModelShape, layer: int | None, expert: int | None) -> Binding:
    def tensor(source: Source) -> HfTensor:
        sizes = tuple(shape.dimension(name) for name in source.shape)
        return HfTensor(source.name.format(layer=layer, expert=expert), sizes)

    return Binding(
        megatron=rule.megatron.format(layer=layer, expert=expert),
        sources=tuple(tensor(source) for source in rule.sources),
        stage=rule.stage,
        pack=rule.pack,
        cut=rule.cut,
        groups=shape.kv_heads,
        padded=rule.padded,
        alias=rule.alias,
        layer=layer,
        expert=expert,
        copies=tuple(tensor(copy) for copy in rule.copies),
    )
