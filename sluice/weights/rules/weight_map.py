"""The families there are, and their rules written out for one model: every tensor, both ways."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from sluice.weights.errors import InvalidCheckpointError, MissingTensorError, UnexpectedTensorError
from sluice.weights.rules.common import PREDICTION
from sluice.weights.rules.deepseek_v3 import DEEPSEEK_V3
from sluice.weights.rules.glm4 import GLM4
from sluice.weights.rules.glm4_moe import GLM4_MOE
from sluice.weights.rules.glm_moe_dsa import GLM_MOE_DSA
from sluice.weights.rules.gpt_oss import GPT_OSS
from sluice.weights.rules.llama import LLAMA
from sluice.weights.rules.mimo import MIMO
from sluice.weights.rules.minimax_m2 import MINIMAX_M2
from sluice.weights.rules.qwen2 import QWEN2
from sluice.weights.rules.qwen2_5_vl import QWEN2_5_VL
from sluice.weights.rules.qwen3 import QWEN3
from sluice.weights.rules.qwen3_5 import (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_VL,
    QWEN3_5_VL_MOE,
    QWEN3_NEXT,
)
from sluice.weights.rules.qwen3_moe import QWEN3_MOE
from sluice.weights.rules.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE
from sluice.weights.rules.rule import Family, Pack, ShardAxis, SourceTensor, Stage, WeightRule
from sluice.weights.rules.shape import ModelShape

FAMILIES = (
    LLAMA,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    QWEN2_5_VL,
    QWEN3_VL,
    QWEN3_VL_MOE,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_VL,
    QWEN3_5_VL_MOE,
    GLM4,
    GLM4_MOE,
    GLM_MOE_DSA,
    DEEPSEEK_V3,
    MINIMAX_M2,
    MIMO,
    GPT_OSS,
)


class UnknownArchitectureError(InvalidCheckpointError):
    """No family knows the architecture of a `config.json`."""


def family_of(config: Mapping[str, object]) -> Family:
    """Find the family of a parsed `config.json` by exact architecture name.

    Raises UnknownArchitectureError listing the known ones.
    """
    families = {name: family for family in FAMILIES for name in family.architectures}
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise UnknownArchitectureError(
            f"config.json names architectures {architectures!r}; exactly one is needed"
        )
    if architectures[0] not in families:
        raise UnknownArchitectureError(
            f"no weight rules for {architectures[0]!r}; known are {', '.join(sorted(families))}"
        )
    return families[architectures[0]]


class RuleConflictError(InvalidCheckpointError):
    """Two rules claim one tensor."""


class TensorShapeError(InvalidCheckpointError):
    """A tensor of a checkpoint has not the shape that the model's dimensions give."""


@dataclass(frozen=True)
class HfTensor:
    """A tensor of an HF checkpoint; with an `index`, a binding has only that expert's part.

    `shape` is as it is stored. `rows` are those of its sections, which fill it; empty is one
    section. `transposed`: rows are stored as columns. `alternating`: the rows of its sections are
    stored in turns.
    """

    name: str
    shape: tuple[int, ...]
    index: int | None = None
    rows: tuple[int, ...] = ()
    transposed: bool = False
    alternating: bool = False

    @property
    def stored_part(self) -> tuple[int, ...]:
        """Shape of what a binding takes of it, as it is stored."""
        return self.shape if self.index is None else self.shape[1:]

    @property
    def part(self) -> tuple[int, ...]:
        """Shape of what a binding takes of it."""
        return self.stored_part[::-1] if self.transposed else self.stored_part


@dataclass(frozen=True, kw_only=True)
class Binding:
    """One Megatron tensor with global indices, and the HF tensors that it is made of.

    `groups` and `heads` are the KV groups and query heads (Pack.QKV). `expert` is None unless
    expert-parallel.
    """

    megatron: str
    sources: tuple[HfTensor, ...]
    stage: Stage
    pack: Pack
    cut: ShardAxis
    groups: int
    padded: bool = False
    alias: bool = False
    layer: int | None = None
    expert: int | None = None
    copies: tuple[HfTensor, ...] = ()
    heads: int = 0
    section_keys: tuple[str, ...] = ()

    @property
    def rearranged(self) -> bool:
        """Whether its rows do not stand together in a source, or not in their order."""
        return any(source.transposed or source.alternating for source in self.sources)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the packed tensor before it is cut, without vocabulary padding."""
        rows = sum(source.part[0] for source in self.sources)
        return (rows, *self.sources[0].part[1:])

    def sections(self) -> tuple[tuple[int, int, int], ...]:
        """(number of its source, first row, rows) of every section, in order."""
        sections = []
        for index, source in enumerate(self.sources):
            start = 0
            for rows in source.rows or (source.part[0],):
                sections.append((index, start, rows))
                start += rows
        return tuple(sections)


class WeightMap:
    """Every tensor of one model. Raises RuleConflictError when two rules claim one."""

    def __init__(self, family: Family, shape: ModelShape) -> None:
        self.family = family
        self.shape = shape
        self._by_megatron: dict[str, Binding] = {}
        self._by_hf: dict[str, list[Binding]] = {}
        taken = set[tuple[str, int | None]]()  # names, with the index of a part
        for binding in _expand(family.rules, shape):
            if binding.megatron in self._by_megatron:
                raise RuleConflictError(f"two rules make {binding.megatron!r}")
            self._by_megatron[binding.megatron] = binding
            for source in () if binding.alias else binding.sources:
                if taken & {(source.name, None), (source.name, source.index)}:
                    raise RuleConflictError(f"two rules take {source.name!r}")
                taken.add((source.name, source.index))
                self._by_hf.setdefault(source.name, []).append(binding)
        self._copies = {copy.name: copy for b in self.bindings() for copy in b.copies}

    def bindings(self) -> tuple[Binding, ...]:
        """Return all tensors, in the order of the rules."""
        return tuple(self._by_megatron.values())

    def binding(self, name: str) -> Binding:
        """Find the binding of a Megatron or an HF name. Raises UnexpectedTensorError with the name.

        Of an HF tensor that holds all experts it is the first expert's.
        """
        binding = self._by_megatron.get(name)
        if binding is not None:
            return binding
        if name not in self._by_hf:
            raise UnexpectedTensorError((name,))
        return self._by_hf[name][0]

    def hf_tensors(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the HF checkpoint that the model is exported to."""
        return {
            source.name: source.shape
            for name, bindings in self._by_hf.items()
            for source in bindings[0].sources
            if source.name == name
        }

    def tensors_of(self, stage: Stage) -> set[str]:
        """Return the names of the HF tensors that a pipeline stage holds."""
        return {s.name for b in self.bindings() if b.stage is stage for s in b.sources}

    def without(self, stage: Stage) -> WeightMap:
        """Return the rules of the model but for the tensors of one stage."""
        rules = tuple(rule for rule in self.family.rules if rule.stage is not stage)
        return WeightMap(replace(self.family, rules=rules), self.shape)

    def plain(self, stage: Stage, prefix: str) -> WeightMap:
        """Return the rules with the tensors of one stage whole and as the HF checkpoint has them.

        They are named `prefix` and what follows the first part of their names that all share.
        """
        of_stage = {s.name: s.shape for b in self.bindings() if b.stage is stage for s in b.sources}
        least, most = (name.split(".") for name in (min(of_stage), max(of_stage)))
        shared = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(least, most, strict=False)
        )
        root = "".join(f"{part}." for part, _ in shared)
        rules = tuple(
            WeightRule(
                megatron=prefix + name.removeprefix(root),
                sources=(SourceTensor(name, tuple(map(str, shape))),),
                stage=stage,
            )
            for name, shape in of_stage.items()
        )
        kept = tuple(rule for rule in self.family.rules if rule.stage is not stage)
        return WeightMap(replace(self.family, rules=(*kept, *rules)), self.shape)

    def check_hf(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check names and shapes of an HF checkpoint against the model.

        Raises MissingTensorError, UnexpectedTensorError or TensorShapeError with the names.
        """
        expected = self.hf_tensors()
        missing = tuple(sorted(set(expected) - set(shapes)))
        if missing:
            raise MissingTensorError(missing)
        allowed = expected | {copy.name: copy.shape for copy in self._copies.values()}
        unknown = tuple(sorted(name for name in shapes if name not in allowed))
        unknown = tuple(n for n in unknown if not (self.is_ignored(n) or self.is_foreign(n)))
        if unknown:
            raise UnexpectedTensorError(unknown)
        for name, shape in shapes.items():
            if name in allowed and tuple(shape) != allowed[name]:
                raise TensorShapeError(
                    f"tensor {name!r} has shape {tuple(shape)}, the model has {allowed[name]}"
                )

    def is_stacked(self, name: str) -> bool:
        """Return whether an HF tensor holds all experts."""
        return any(s.index is not None for s in self._by_hf[name][0].sources if s.name == name)

    def is_ignored(self, name: str) -> bool:
        """Return whether an HF tensor of that name carries no weights."""
        return any(fnmatchcase(name, pattern) for pattern in self.family.ignored)

    def is_foreign(self, name: str) -> bool:
        """Return whether an HF tensor of that name is one that training does not own."""
        return any(
            fnmatchcase(name, pattern.format(layers=self.shape.layers))
            for pattern in self.family.foreign
        )

    def is_full_precision(self, name: str) -> bool:
        """Return whether an HF tensor keeps its type when the others change theirs."""
        return any(fnmatchcase(name, pattern) for pattern in self.family.full_precision)

    def copies_of(self, name: str) -> tuple[str, ...]:
        """Return the names under which the model's layer of prediction has a tensor once more."""
        return tuple(
            copy.name
            for binding in self._by_hf.get(name, ())
            for copy in binding.copies
            if self.is_foreign(copy.name)
        )

    def is_copy(self, name: str) -> bool:
        """Return whether an HF tensor of that name repeats another one (a tied output layer)."""
        return name in self._copies


def _expand(rules: tuple[WeightRule, ...], shape: ModelShape) -> Iterator[Binding]:
    for rule in rules:
        if not shape.allows(rule.when):
            continue
        for layer in _layers_of(rule, shape):
            experts = range(shape.experts) if "{expert}" in rule.megatron else (None,)
            for expert in experts:
                yield _bind(rule, shape, layer, expert)


def _layers_of(rule: WeightRule, shape: ModelShape) -> tuple[int | None, ...]:
    return shape.layer_indices(rule.layers) if "{layer}" in rule.megatron else (None,)


def _bind(rule: WeightRule, shape: ModelShape, layer: int | None, expert: int | None) -> Binding:
    def tensor(source: SourceTensor) -> HfTensor:
        sizes = tuple(shape.dimension(name) for name in source.shape)
        sizes = sizes[::-1] if source.transposed else sizes
        return HfTensor(
            source.name.format(layer=layer, expert=expert, layers=shape.layers),
            (shape.experts, *sizes) if source.stacked else sizes,
            expert if source.stacked else None,
            tuple(shape.dimension(name) for name in source.sections),
            source.transposed,
            source.alternating,
        )

    return Binding(
        megatron=rule.megatron.format(layer=layer, expert=expert),
        sources=tuple(tensor(source) for source in rule.sources),
        stage=rule.stage,
        pack=rule.pack,
        cut=rule.cut,
        groups=shape.dimension(rule.groups),
        heads=shape.dimension(rule.heads),
        section_keys=rule.section_keys,
        padded=rule.padded,
        alias=rule.alias,
        layer=layer,
        expert=expert,
        copies=tuple(tensor(copy) for copy in rule.copies),
    )


TRANSFORMER_ENGINE_NAMES = (  # (pattern, replacement), tried in order
    (r"\.self_attention\.linear_qkv\.layer_norm_", ".input_layernorm."),
    (r"\.self_attention\.in_proj\.layer_norm_", ".input_layernorm."),
    (r"\.self_attention\.linear_(q|kv)_up_proj\.layer_norm_", r".self_attention.\1_layernorm."),
    (r"\.mlp\.linear_fc1\.layer_norm_", ".pre_mlp_layernorm."),
    (
        r"\.mlp\.experts\.linear_(fc[12])\.(weight|bias)(\d+)$",
        r".mlp.experts.local_experts.\3.linear_\1.\2",
    ),
)
WRAPPERS = re.compile(r"^((module|language_model)\.)+")  # of data parallelism, of nested models
_LAYER_NUMBER = re.compile(r"(\blayers\.)(\d+)(\.)")
_EXPERT_NUMBER = re.compile(r"(\blocal_experts\.)(\d+)(\.)")


def rule_name(parameter: str, *, layer_offset: int = 0, expert_offset: int = 0) -> str:
    """Return the name that the rules have for parameter `parameter` of a model chunk.

    The offsets are the global indices of the chunk's first layer and first expert.
    """
    name = WRAPPERS.sub("", parameter)
    for pattern, replacement in TRANSFORMER_ENGINE_NAMES:
        name = re.sub(pattern, replacement, name)
    if name.startswith(PREDICTION):  # behind the chunk's layers, numbered apart
        layer_offset = 0
    name = _LAYER_NUMBER.sub(lambda m: f"{m[1]}{int(m[2]) + layer_offset}{m[3]}", name, count=1)
    return _EXPERT_NUMBER.sub(lambda m: f"{m[1]}{int(m[2]) + expert_offset}{m[3]}", name, count=1)
