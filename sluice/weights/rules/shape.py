"""Dimensions of a model, read from the `config.json` of an HF checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sluice.weights.errors import InvalidCheckpointError
from sluice.weights.rules.rule import Family


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the rules of a family need to know of one model. Counts; `ffn` is a width.

    `sparse_layers` are the indices of mixture-of-experts layers. Flags in use: tied,
    attention_bias (query, key, value), output_bias, mlp_bias, value_head.
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
    flags: frozenset[str] = field(default_factory=frozenset)

    def dimension(self, name: str) -> int:
        """Size of a symbolic dimension of a Source."""
        derived = {"one": 1, "q": self.heads * self.head_dim, "kv": self.kv_heads * self.head_dim}
        size: int = derived[name] if name in derived else getattr(self, name)
        return size

    def allows(self, when: tuple[str, ...]) -> bool:
        """Whether the conditions of a rule hold."""
        return all((flag.lstrip("!") in self.flags) != flag.startswith("!") for flag in when)


def read_shape(
    family: Family, config: Mapping[str, object], *, value_head: bool = False
) -> ModelShape:
    """The shape of a model of `family` from its parsed `config.json`.

    `value_head`: the model ends in one value per token instead of logits.
    Raises InvalidCheckpointError naming a missing or malformed key.
    """
    keys = _Keys({**family.defaults, **config})
    heads, hidden, layers = (
        keys.count("num_attention_heads"),
        keys.count("hidden_size"),
        keys.count("num_hidden_layers"),
    )
    flags = {
        flag
        for flag, source in family.flags.items()
        if (keys.flag(source) if isinstance(source, str) else source)
    }
    if keys.flag("tie_word_embeddings"):
        flags.add("tied")
    if value_head:
        flags.add("value_head")
    experts = keys.count("num_experts", "num_local_experts", default=0)
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=keys.count("num_key_value_heads", default=heads),
        head_dim=keys.count("head_dim", default=hidden // heads),
        vocab=keys.count("vocab_size"),
        ffn=keys.count("intermediate_size"),
        experts=experts,
        moe_ffn=keys.count("moe_intermediate_size") if experts else 0,
        sparse_layers=_sparse_layers(keys, layers, experts),
        flags=frozenset(flags),
    )


@dataclass(frozen=True)
class _Keys:
    values: Mapping[str, object]

    def count(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is set; a null counts as absent."""
        for name in names:
            value = self.values.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
            if value is not None:
                raise InvalidCheckpointError(f"config.json: {name} is {value!r}, not a count")
        if default is None:
            raise InvalidCheckpointError(f"config.json lacks {names[0]}")
        return default

    def flag(self, name: str) -> bool:
        value = self.values.get(name, False)
        if value is not None and not isinstance(value, bool):
            raise InvalidCheckpointError(f"config.json: {name} is {value!r}, not a boolean")
        return bool(value)

    def indices(self, name: str) -> frozenset[int]:
        value = self.values.get(name) or ()
        if not isinstance(value, list | tuple) or not all(isinstance(item, int) for item in value):
            raise InvalidCheckpointError(f"config.json: {name} is {value!r}, not a list of layers")
        return frozenset(value)


def _sparse_layers(keys: _Keys, layers: int, experts: int) -> frozenset[int]:
    if not experts:
        return frozenset()
    step, dense = keys.count("decoder_sparse_step", default=1), keys.indices("mlp_only_layers")
    return frozenset(
        layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0
    )
