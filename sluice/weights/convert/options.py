"""What a conversion is asked to do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sluice.weights.convert.fp8 import ScaleFormat
from sluice.weights.rules import Binding, Layers, WeightMap

Format = Literal["hf", "torch_dist"]
Dtype = Literal["keep", "float32", "bfloat16", "float16"]


class OptionError(ValueError):
    """Options that do not go together; the message says which."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks that a torch_dist checkpoint is cut for. Any layout reads any other's."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """How a checkpoint is converted.

    `model` holds the `config.json` (and tokenizer) where the source has none: a directory.
    `origin` is the HF checkpoint that fills in what training does not own: tensors whose names
    match a pattern (fnmatch) of `allow` and none of `deny`. `quantize`: FP8 weights in blocks.
    `fused_norms`: norms under the names that TransformerEngine's layers have. `max_file_bytes`:
    0 takes an eighth of the whole, from 256 MiB to 4 GiB, so that threads write to several files.
    """

    target_format: Format = "torch_dist"
    dtype: Dtype = "keep"
    model: Path | None = None
    origin: Path | None = None
    allow: tuple[str, ...] = ("*",)
    deny: tuple[str, ...] = ()
    quantize: bool = False
    scale_format: ScaleFormat = "float32"
    layout: Layout = Layout()
    vocab_multiple: int = 128
    stacking: Stacking = "auto"
    fused_norms: bool = True
    max_file_bytes: int = 0
    workers: int = 2
    sync: bool = True

    def file_bytes(self, total: int) -> int:
        """Largest size of a file of a checkpoint of `total` bytes."""
        return self.max_file_bytes or min(4 << 30, max(256 << 20, total // 8))

    def check(self) -> None:
        """Raises OptionError."""
        numbers = (*vars(self.layout).values(), self.vocab_multiple, self.workers)
        if min(numbers) < 1 or self.max_file_bytes < 0:
            raise OptionError("sizes of layouts and files, and workers, are at least 1")
        if self.target_format == "torch_dist" and (self.quantize or self.origin is not None):
            raise OptionError("origin and quantize are for HF checkpoints")
        if self.target_format == "hf" and self.layout != Layout():
            raise OptionError("an HF checkpoint is not cut for ranks")
        if self.quantize and self.dtype not in ("keep", "bfloat16"):
            raise OptionError("FP8 checkpoints keep the other tensors in bfloat16")


Stacking = Literal["auto", "stacked", "single"]
FUSED_NORMS = (  # (norm, the linear layer that TransformerEngine fuses it into)
    ("input_layernorm", "self_attention.linear_qkv"),
    ("input_layernorm", "self_attention.in_proj"),
    ("self_attention.q_layernorm", "self_attention.linear_q_up_proj"),
    ("self_attention.kv_layernorm", "self_attention.linear_kv_up_proj"),
    ("pre_mlp_layernorm", "mlp.linear_fc1"),
)
LINEAR = re.compile(r"\.(linear_\w+|in_proj|out_proj)\.weight$")
_LAYER = re.compile(r"^(?P<block>.*\blayers\.)(?P<layer>\d+)\.(?P<rest>.*)$")
_EXPERT = re.compile(r"\blocal_experts\.\d+\.")


@dataclass(frozen=True)
class Place:
    """Where a Megatron tensor lies: at `index` of the leading axes, of sizes `lead`, of `key`."""

    key: str
    lead: tuple[int, ...]
    index: tuple[int, ...]

    def shard(self) -> str:
        """The suffix of an object, such as extra state, of this place."""
        index, lead = self.index or (0,), self.lead or (1,)
        return f"/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, lead))}"


class Naming:
    """Places of the tensors of one model. `fused`: norms have TransformerEngine's names."""

    def __init__(self, weights: WeightMap, *, stacking: Stacking, fused: bool = True) -> None:
        self._weights = weights
        self._fused = fused
        self._names = {binding.megatron for binding in weights.bindings()}
        shape = weights.shape
        uneven = bool(shape.sparse_layers or shape.linear_layers)
        self._stacked = stacking == "stacked" or (stacking == "auto" and not uneven)
        self._even_vision = stacking == "auto"
        self._lengths = {
            "decoder.layers.": shape.layers,
            "vision_model.decoder.layers.": len(shape.layer_indices(Layers.VISION)),
        }

    def place(self, binding: Binding) -> Place:
        """The place of a tensor; experts always are stacked in their layer."""
        name, lead, index = binding.megatron, [], []
        block = _LAYER.match(name)
        if block is not None and block["block"] in self._lengths:
            stacked = self._stacked or (self._even_vision and block["block"].startswith("vision"))
            name = block["block"] + ("" if stacked else f"{block['layer']}.")
            if stacked:
                lead.append(self._lengths[block["block"]])
                index.append(int(block["layer"]))
            name += self._layer_name(block["block"] + block["layer"] + ".", block["rest"])
        if binding.expert is not None:
            lead.append(self._weights.shape.experts)
            index.append(binding.expert)
            name = _EXPERT.sub("experts.", name)
        vision = name.startswith("vision_model.")
        return Place(
            name if vision else self._weights.family.prefix + name, tuple(lead), tuple(index)
        )

    def extra_state(self, binding: Binding) -> str | None:
        """The name of the state that Megatron keeps beside a linear layer; None beside others."""
        place = self.place(binding)
        if not LINEAR.search(place.key):
            return None
        return place.key.removesuffix("weight") + "_extra_state" + place.shard()

    def _layer_name(self, layer: str, name: str) -> str:
        if not self._fused:
            return name
        for norm, linear in FUSED_NORMS:
            if name.startswith(f"{norm}.") and f"{layer}{linear}.weight" in self._names:
                return f"{linear}.layer_norm_{name.removeprefix(f'{norm}.')}"
        return name


def find_namings(weights: WeightMap) -> list[Naming]:
    """Every way in which some Megatron model names tensors, the usual ones first."""
    ways: tuple[Stacking, ...] = ("stacked", "single", "auto")
    return [
        Naming(weights, stacking=stacking, fused=fused)
        for fused in (True, False)
        for stacking in ways
    ]
