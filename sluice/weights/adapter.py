"""LoRA adapters in peft's form: what one is, its `adapter_config.json`, the names of its tensors.

A linear layer W gives W x + alpha / rank * B A x, A of [rank, in], B of [out, rank]
(arXiv 2106.09685). peft's files hold `base_model.model.<layer>.lora_A.weight` and `lora_B.weight`.
No torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sluice.json_values import load_json
from sluice.place import is_plain_name
from sluice.weights.errors import InvalidAdapterError, OtherBaseError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
FACTORS = ("lora_A", "lora_B")
DTYPES = ("F32", "BF16", "F16")
DEFAULT_TARGETS = (
    "down_proj",
    "gate_proj",
    "k_proj",
    "o_proj",
    "q_proj",
    "up_proj",
    "v_proj",
)
MAX_RANK = 1 << 16
MIN_ALPHA = 1e-6  # below it an adapter says next to nothing, and learns by rounding
MAX_ALPHA = 1e6  # times a sum of float32 numbers it has to stay one
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TAKEN = ("base", "policy")  # what engines call the base, and the adapter of a trainer of one
_DIGEST = re.compile(r"[0-9a-f]{32}")
_BASE = "sluice:"  # before the digest of a base, where peft has the name of one
# What peft may do besides; an adapter that needs any of it gives other results without.
_BEYOND = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "corda_config",
    "exclude_modules",
    "fan_in_fan_out",
    "layer_replication",
    "layers_to_transform",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_dora",
    "use_qalora",
    "use_rslora",
)


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """An adapter but for its numbers. Raises InvalidAdapterError for what cannot be one.

    targets: last names of the layers that have adapters, sorted, all of one `rank`. base_digest:
    digest of the version that the base is, as of its manifest or of `digest_base`.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base_digest: str

    def __post_init__(self) -> None:
        if type(self.rank) is not int or not 1 <= self.rank <= MAX_RANK:
            raise InvalidAdapterError(f"the rank of an adapter is {_shown(self.rank)}")
        is_number = type(self.alpha) in (int, float)
        if not (is_number and MIN_ALPHA <= self.alpha <= MAX_ALPHA):
            raise InvalidAdapterError(f"alpha of an adapter is {_shown(self.alpha)}")
        bad = [name for name in self.targets if not _is_leaf(name)]
        if bad or not self.targets or len(set(self.targets)) < len(self.targets):
            raise InvalidAdapterError(
                f"targets of an adapter are {_shown(list(self.targets))}: names of layers, each "
                "once, without what they are in"
            )
        if not (isinstance(self.base_digest, str) and _DIGEST.fullmatch(self.base_digest)):
            raise InvalidAdapterError(
                f"the digest of an adapter's base is {_shown(self.base_digest)}"
            )
        object.__setattr__(self, "alpha", float(self.alpha))
        object.__setattr__(self, "targets", tuple(sorted(self.targets)))

    @property
    def scale(self) -> float:
        """Return by what B A x is multiplied."""
        return self.alpha / self.rank

    def check_base(self, digest: str) -> None:
        """Raise OtherBaseError unless the adapter was trained on the base of this digest."""
        if digest != self.base_digest:
            raise OtherBaseError(self.base_digest, digest)

    def check_same(self, what: str, had: AdapterSpec) -> None:
        """Raise InvalidAdapterError unless `what` is of such adapters of the same base."""
        for name in ("base_digest", "rank", "alpha", "targets"):
            was, now = getattr(had, name), getattr(self, name)
            if was != now:
                raise InvalidAdapterError(
                    f"{what} is of other adapters: {name} was {was}, and is {now}"
                )

    def check_tensors(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[str]:
        """Return the layers, sorted, that tensors (name -> dtype, shape) are an adapter of.

        Raises InvalidAdapterError, which names the tensor, for what is not of this spec.
        """
        found: dict[str, set[str]] = {}
        for name, (dtype, shape) in sorted(tensors.items()):
            layer, factor = split_name(name)
            if leaf_of(layer) not in self.targets:
                raise InvalidAdapterError(f"tensor {name!r} is of a layer that is no target")
            if dtype not in DTYPES:
                raise InvalidAdapterError(f"tensor {name!r} is of dtype {dtype!r}")
            axis = FACTORS.index(factor)
            if len(shape) != 2 or shape[axis] != self.rank or not shape[1 - axis]:
                raise InvalidAdapterError(
                    f"tensor {name!r} has shape {list(shape)}, which is not of rank {self.rank}"
                )
            found.setdefault(layer, set()).add(factor)
        for layer, factors in found.items():
            if missing := set(FACTORS) - factors:
                raise InvalidAdapterError(f"layer {layer!r} has no {min(missing)}")
        if unused := set(self.targets) - {leaf_of(layer) for layer in found}:
            raise InvalidAdapterError(f"no tensor is of target {min(unused)!r}")
        return sorted(found)


def check_name(name: str) -> None:
    """Raise InvalidAdapterError for what cannot name one adapter of several."""
    if not _NAME.fullmatch(name):
        raise InvalidAdapterError(f"{_shown(name)} must match {_NAME.pattern}")
    if name in _TAKEN:
        raise InvalidAdapterError(f"{name!r} names something else in engines")


def tensor_names(layer: str) -> tuple[str, str]:
    """Name A and B of a layer, which is named as in the base's checkpoint without `.weight`."""
    a, b = (f"{PREFIX}{layer}.{factor}.weight" for factor in FACTORS)
    return a, b


def split_name(name: str) -> tuple[str, str]:
    """Return layer and factor (`lora_A` or `lora_B`). Raises InvalidAdapterError."""
    layer, _, factor = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
    if not layer or factor not in FACTORS or f"{PREFIX}{layer}.{factor}.weight" != name:
        raise InvalidAdapterError(f"tensor {name!r} is none of an adapter")
    return layer, factor


def leaf_of(layer: str) -> str:
    """Return the last name of a layer."""
    return layer.rpartition(".")[2]


def matched_layers(layers: Iterable[str], targets: Collection[str]) -> list[str]:
    """Return those of the layers that are targets. Raises InvalidAdapterError for idle targets."""
    every = list(layers)
    leaves = {leaf_of(layer) for layer in every}
    if idle := sorted(set(targets) - leaves):
        raise InvalidAdapterError(
            f"lora.targets name {', '.join(map(repr, idle))}, which no linear layer of the model "
            f"is called; they are: {', '.join(sorted(leaves))}"
        )
    return [layer for layer in every if leaf_of(layer) in targets]


def encode_adapter_config(spec: AdapterSpec) -> bytes:
    """Encode `adapter_config.json`, which peft and engines read beside ADAPTER_FILE."""
    document = {
        "base_model_name_or_path": _BASE + spec.base_digest,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": spec.rank,
        "target_modules": list(spec.targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def decode_adapter_config(data: bytes, base_digest: str | None = None) -> AdapterSpec:
    """Parse `adapter_config.json`, also of peft's own.

    base_digest: of what the adapter is put on, where the file does not say (peft's never do).
    Raises InvalidAdapterError, for anything of peft that changes results too, or OtherBaseError.
    """
    try:
        document: Any = load_json(data)
    except ValueError as error:
        raise InvalidAdapterError(f"{ADAPTER_CONFIG} is malformed: {error}") from error
    if not isinstance(document, dict):
        raise InvalidAdapterError(f"{ADAPTER_CONFIG} holds no mapping")
    _check_kind(document)
    base = document.get("base_model_name_or_path")
    stated = base.removeprefix(_BASE) if isinstance(base, str) and base.startswith(_BASE) else None
    if stated is None and base_digest is None:
        raise InvalidAdapterError(f"{ADAPTER_CONFIG} does not say the digest of its base")
    targets = document.get("target_modules")
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        raise InvalidAdapterError(
            f"{ADAPTER_CONFIG}: target_modules is {_shown(targets)}, not a list of names"
        )
    spec = AdapterSpec(
        rank=document.get("r"),  # type: ignore[arg-type]  # the spec checks it
        alpha=document.get("lora_alpha"),  # type: ignore[arg-type]
        targets=tuple(targets),
        base_digest=stated if stated is not None else base_digest or "",
    )
    if base_digest is not None:
        spec.check_base(base_digest)
    return spec


def _check_kind(document: Mapping[str, Any]) -> None:
    if document.get("peft_type") != "LORA":
        kind = _shown(document.get("peft_type"))
        raise InvalidAdapterError(f"{ADAPTER_CONFIG}: peft_type is {kind}, not 'LORA'")
    if document.get("bias", "none") != "none":
        raise InvalidAdapterError(f"{ADAPTER_CONFIG}: bias is {_shown(document['bias'])}")
    if document.get("init_lora_weights", True) not in (True, False, "gaussian"):
        shown = _shown(document["init_lora_weights"])
        raise InvalidAdapterError(
            f"{ADAPTER_CONFIG}: init_lora_weights is {shown}, which changes the base"
        )
    for name in _BEYOND:
        if document.get(name):
            raise InvalidAdapterError(
                f"{ADAPTER_CONFIG}: {name} is {_shown(document[name])}, which is unknown here"
            )


def _is_leaf(name: object) -> bool:
    return isinstance(name, str) and is_plain_name(name) and "." not in name


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
