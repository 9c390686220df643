"""Dimensions of a model, read from the `config.json` of an HF checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sluice.weights.errors import InvalidCheckpointError
from sluice.weights.rules.rule import Family, Layers

MOST_LAYERS, MOST_EXPERTS = 4096, 1 << 19  # of a stack, of all layers: rules are written for each


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the rules of a family need to know of one model. Counts; `ffn` is a width.

    `sparse_layers` are the indices of mixture-of-experts layers, `linear_layers` those of linear
    attention, `indexed_layers` those of indexers that choose keys. Flags in use: tied,
    attention_bias (query, key, value), output_bias, mlp_bias, value_head, value_bias,
    stacked_experts, straight_experts, predicts, experts (there are some), and those of families.
    `sizes` holds what some families have beyond the fields.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    ffn: int
    experts: int = 0
    moe_ffn: int = 0
    sparse_layers: frozenset[int] = frozenset()
    linear_layers: frozenset[int] = frozenset()
    indexed_layers: frozenset[int] = frozenset()
    flags: frozenset[str] = field(default_factory=frozenset)
    sizes: Mapping[str, int] = field(default_factory=dict)

    def dimension(self, name: str) -> int:
        """Evaluate a symbolic size: a name, a number, or products and sums of them."""
        return sum(
            math.prod(self._size(factor.strip()) for factor in term.split("*"))
            for term in name.split("+")
        )

    def _size(self, name: str) -> int:
        if name.isdecimal():
            return int(name)
        derived = {"one": 1, "q": self.heads * self.head_dim, "kv": self.kv_heads * self.head_dim}
        known = derived | dict(self.sizes)
        size: int = known[name] if name in known else getattr(self, name)
        return size

    def allows(self, when: tuple[str, ...]) -> bool:
        """Return whether the conditions of a rule hold."""
        return all((flag.lstrip("!") in self.flags) != flag.startswith("!") for flag in when)

    def layer_indices(self, layers: Layers) -> tuple[int, ...]:
        """List the layers, or the blocks of the vision tower, that a rule is for."""
        if layers is Layers.VISION:
            return tuple(range(self.sizes.get("vision_layers", 0)))
        if layers is Layers.DEEPSTACK:
            return tuple(range(self.sizes.get("deepstack", 0)))
        every = range(self.layers)
        wanted = {
            Layers.ALL: every,
            Layers.SPARSE: self.sparse_layers,
            Layers.DENSE: set(every) - self.sparse_layers,
            Layers.LINEAR_ATTENTION: self.linear_layers,
            Layers.INDEXED: self.indexed_layers,
            Layers.ATTENTION: set(every) - self.linear_layers,
        }[layers]
        return tuple(sorted(wanted))


def read_shape(
    family: Family,
    config: Mapping[str, object],
    *,
    value_head: bool = False,
    value_bias: bool = True,
    stacked_experts: bool = False,
    straight_experts: bool = False,
    predicts: bool = False,
) -> ModelShape:
    """Read the shape of a model of `family` from its parsed `config.json`.

    `value_head`: the model ends in one value per token instead of logits, with a bias or without.
    `stacked_experts`: its HF checkpoint has one tensor of all experts of a layer.
    `straight_experts`: with axes as other families have them, where those of this one are published
    exchanged. `predicts`: with its layer of multi-token prediction, whose MLP is of experts where
    the model has any.
    Raises InvalidCheckpointError naming a missing or malformed key.
    """
    keys = ConfigKeys(config, family)
    heads, hidden, layers = (
        keys.count("num_attention_heads", least=1),
        keys.count("hidden_size", least=1),
        keys.count("num_hidden_layers", least=1),
    )
    flags = {
        flag
        for flag, source in family.flags.items()
        if (keys.flag(source) if isinstance(source, str) else source)
    }
    if keys.flag("tie_word_embeddings"):
        flags.add("tied")
    flags |= {
        flag
        for flag, is_set in (
            ("value_head", value_head),
            ("value_bias", value_head and value_bias),
            ("stacked_experts", stacked_experts),
            ("straight_experts", straight_experts),
            ("predicts", predicts),
        )
        if is_set
    }
    experts = keys.count("num_experts", "num_local_experts", "n_routed_experts", default=0)
    if experts:
        flags.add("experts")
    sizes = {name: keys.size(key) for name, key in family.sizes.items()}
    stacks = {"num_hidden_layers": layers}
    stacks |= {name: sizes[name] for name in ("vision_layers", "deepstack") if name in sizes}
    for name, count in stacks.items():
        if count > MOST_LAYERS:
            raise InvalidCheckpointError(f"config.json: {name} is {count}, more than {MOST_LAYERS}")
    if layers * experts > MOST_EXPERTS:
        raise InvalidCheckpointError(f"config.json: {layers} layers of {experts} experts are many")
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=keys.count("num_key_value_heads", default=heads, least=1),
        head_dim=keys.count("head_dim", default=hidden // heads),
        vocab=keys.count("vocab_size"),
        ffn=keys.count("intermediate_size", default=0 if experts else None),
        experts=experts,
        moe_ffn=keys.count(family.expert_width) if experts else 0,
        sparse_layers=_sparse_layers(keys, layers, experts),
        linear_layers=_linear_layers(keys, layers),
        indexed_layers=_indexed_layers(keys, layers),
        flags=frozenset(flags),
        sizes=sizes,
    )


class ConfigKeys:
    """Keys of `config.json` by name: of its text part, or by a dotted path from the root."""

    def __init__(self, config: Mapping[str, object], family: Family) -> None:
        self._root, self._defaults = config, family.defaults
        text = config.get(family.text) if family.text else None
        inner = text if isinstance(text, Mapping) else config
        self._values: dict[str, object] = {**family.defaults, **inner}
        if "tie_word_embeddings" in config:  # the language model's own is not looked at
            self._values["tie_word_embeddings"] = config["tie_word_embeddings"]

    def get(self, name: str) -> object:
        """Return the value of a key; None where it is absent. A list counts as its length."""
        if "." not in name:
            return self._values.get(name)
        value: object = self._root
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is None:
            value = self._values.get(name)  # a default
        return len(value) if isinstance(value, list | tuple) else value

    def count(self, *names: str, default: int | None = None, least: int = 0) -> int:
        """Return the first of `names` that is set; a null counts as absent."""
        for name in names:
            value = self.get(name)
            if type(value) is int and least <= value < 1 << 31:
                return value
            if value is not None:
                raise InvalidCheckpointError(f"config.json: {name} is {value!r}, not a count")
        if default is None:
            raise InvalidCheckpointError(f"config.json lacks {names[0]}")
        return default

    def size(self, name: str) -> int:
        """Return a count; 0 for one that may be null and is."""
        optional = name in self._defaults and self._defaults[name] is None
        return self.count(name, default=0 if optional else None)

    def flag(self, name: str) -> bool:
        """Return whether a key is true; `has:key` asks whether it is set at all."""
        if name.startswith("has:"):
            return self.get(name.removeprefix("has:")) is not None
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidCheckpointError(f"config.json: {name} is {value!r}, not a boolean")
        return bool(value)

    def kinds(self, name: str, layers: int) -> Sequence[object] | None:
        """Return what each of `layers` layers is; None where nothing says so."""
        kinds = self._values.get(name)
        if not isinstance(kinds, list | tuple):
            return None
        if len(kinds) != layers:
            raise InvalidCheckpointError(
                f"config.json: {name} has {len(kinds)} entries for {layers} layers"
            )
        return kinds

    def indices(self, name: str) -> frozenset[int]:
        value = self.get(name) or ()
        if not isinstance(value, list | tuple) or not all(isinstance(item, int) for item in value):
            raise InvalidCheckpointError(f"config.json: {name} is {value!r}, not a list of layers")
        return frozenset(value)


def _sparse_layers(keys: ConfigKeys, layers: int, experts: int) -> frozenset[int]:
    if not experts:
        return frozenset()
    if (kinds := keys.kinds("mlp_layer_types", layers)) is not None:
        return frozenset(i for i, kind in enumerate(kinds) if kind == "sparse")
    step = keys.count("decoder_sparse_step", default=1, least=1)
    dense = keys.indices("mlp_only_layers")
    first = keys.count("first_k_dense_replace", default=0)
    return frozenset(
        layer for layer in range(first, layers) if layer not in dense and (layer + 1) % step == 0
    )


def _linear_layers(keys: ConfigKeys, layers: int) -> frozenset[int]:
    """By `layer_types`, or every layer but each `full_attention_interval`-th."""
    if (kinds := keys.kinds("layer_types", layers)) is not None:
        return frozenset(i for i, kind in enumerate(kinds) if kind == "linear_attention")
    interval = keys.count("full_attention_interval", default=0)
    return frozenset(i for i in range(layers) if interval and (i + 1) % interval)


def _indexed_layers(keys: ConfigKeys, layers: int) -> frozenset[int]:
    """By `indexer_types`, a pattern of F and S, or a frequency; all where nothing says so.

    None in a model without indexers.
    """
    if not keys.count("index_topk", default=0):
        return frozenset()
    kinds = keys.kinds("indexer_types", layers)
    if kinds is None:
        pattern = keys.get("index_topk_pattern")
        kinds = pattern if isinstance(pattern, str) else keys.kinds("index_topk_pattern", layers)
    if kinds is not None:
        full = frozenset(i for i, kind in enumerate(kinds) if kind in ("full", "F"))
        if len(kinds) != layers or not {*kinds} <= {"full", "shared", "F", "S"} or 0 not in full:
            raise InvalidCheckpointError(
                f"config.json: indexers are {kinds!r}, not full or shared, the first full, for "
                f"{layers} layers"
            )
        return full
    every = keys.count("index_topk_freq", default=1, least=1)
    first = keys.count("index_skip_topk_offset", default=2)
    return frozenset(i for i in range(layers) if max(i - first + 1, 0) % every == 0)
