"""HF tensors out of a torch_dist checkpoint, whatever ranks wrote it."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from sluice.weights.convert.options import Stacking
from sluice.weights.convert.pieces import Content, Files
from sluice.weights.convert.stored import read_keys
from sluice.weights.convert.stored_chunks import Pieces, StoredChunks
from sluice.weights.errors import MissingTensorError, UnexpectedTensorError
from sluice.weights.rules.common import PREDICTION
from sluice.weights.rules.packing import Partition, row_runs, unpack
from sluice.weights.rules.rule import ALTERED, Layers
from sluice.weights.rules.weight_map import Binding, TensorShapeError, WeightMap

PREDICTED_LAYER = f"{PREDICTION}transformer_layer."
VISION_LAYERS = "vision_model.decoder.layers."
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
        """Return the suffix of an object, such as extra state, of this place."""
        index, lead = self.index or (0,), self.lead or (1,)
        return f"/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, lead))}"


class Naming:
    """Places of the tensors of one model. `fused`: norms have TransformerEngine's names.

    `apart` names blocks ("decoder.layers.") whose layers are not stacked, whatever `stacking` is.
    """

    def __init__(
        self,
        weights: WeightMap,
        *,
        stacking: Stacking,
        fused: bool = True,
        apart: Collection[str] = (),
    ) -> None:
        self._weights = weights
        self._fused = fused
        self._names = {binding.megatron for binding in weights.bindings()}
        shape = weights.shape
        # As TransformerBlock does: with a list of sparse or linear layers, but for all sparse ones.
        uneven = bool(shape.linear_layers) or 0 < len(shape.sparse_layers) < shape.layers
        uneven |= 0 < len(shape.indexed_layers) < shape.layers
        self._lengths = {
            "decoder.layers.": shape.layers,
            VISION_LAYERS: len(shape.layer_indices(Layers.VISION)),
        }
        self._stacked = {
            block
            for block in self._lengths.keys() - set(apart)
            if stacking == "stacked"
            or (stacking == "auto" and (block == VISION_LAYERS or not uneven))
        }

    def place(self, binding: Binding) -> Place:
        """Return the place of a tensor; experts always are stacked in their layer."""
        name, lead, index = binding.megatron, [], []
        block = _LAYER.match(name)
        if block is not None and block["block"] in self._lengths:
            stacked = block["block"] in self._stacked
            name = block["block"] + ("" if stacked else f"{block['layer']}.")
            if stacked:
                lead.append(self._lengths[block["block"]])
                index.append(int(block["layer"]))
            name += self._layer_name(block["block"] + block["layer"] + ".", block["rest"])
        elif name.startswith(PREDICTED_LAYER):
            rest = name.removeprefix(PREDICTED_LAYER)
            name = PREDICTED_LAYER + self._layer_name(PREDICTED_LAYER, rest)
        if binding.expert is not None:
            lead.append(self._weights.shape.experts)
            index.append(binding.expert)
            name = _EXPERT.sub("experts.", name)
        vision = name.startswith("vision_model.")
        return Place(
            name if vision else self._weights.family.prefix + name, tuple(lead), tuple(index)
        )

    def stacked_block(self, binding: Binding) -> str | None:
        """Return the block of layers that a tensor is stacked with; None where it is not."""
        block = _LAYER.match(binding.megatron)
        return block["block"] if block is not None and block["block"] in self._stacked else None

    def extra_state(self, binding: Binding) -> str | None:
        """Name the state that Megatron keeps beside a linear layer; None beside others."""
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


def _find_namings(weights: WeightMap) -> list[Naming]:
    """List every way in which some Megatron model names tensors, the usual ones first."""
    ways: tuple[Stacking, ...] = ("stacked", "single", "auto")
    return [
        Naming(weights, stacking=stacking, fused=fused)
        for fused in (True, False)
        for stacking in ways
    ]


class TorchDistSource:
    """A torch_dist checkpoint of the model that `weights` describes.

    Raises MissingTensorError, UnexpectedTensorError or TensorShapeError with the keys.
    """

    def __init__(self, directory: Path, weights: WeightMap, files: Files) -> None:
        self.directory, self._weights = directory, weights
        self._keys = read_keys(directory)
        self._chunks = StoredChunks(self._keys, files)
        self._places = dict(self._find_places())
        taken = {key for b, place in self._places.items() for key in self._own_keys(b, place)}
        surplus = tuple(sorted(set(self._keys) - taken))
        if surplus:
            raise UnexpectedTensorError(surplus)
        for binding, place in self._places.items():
            self._check_shape(binding, place)

    def bindings(self) -> tuple[Binding, ...]:
        """Return the tensors that the checkpoint holds, in the order of the rules."""
        return tuple(self._places)

    def chunks(self) -> Iterator[tuple[str, Content]]:
        """Yield every chunk as it is stored, by key and offsets."""
        return self._chunks.stored()

    def contents(self, binding: Binding) -> dict[str, Content]:
        """Make the HF tensors of one Megatron tensor; of experts kept together, the one's part."""
        place = self._places[binding]
        runs = row_runs(binding, Partition(0, 1, binding.shape[0]))
        pieces: list[Pieces] = []
        for source in range(len(binding.sources)):
            own = sorted((r for r in runs if r.source == source), key=lambda run: run.start)
            parts = [self._rows(binding, place, run.row, run.row + run.rows) for run in own]
            altered = binding.pack in ALTERED or binding.rearranged
            if altered or any(part is None for part in parts):
                return self._computed(binding, place)
            pieces.append(tuple(piece for part in parts for piece in part or ()))
        dtype = self._dtype(binding, place)
        return {
            source.name: Content(dtype, source.part, own)
            for source, own in zip(binding.sources, pieces, strict=True)
        }

    def _computed(self, binding: Binding, place: Place) -> dict[str, Content]:
        (key,) = self._own_keys(binding, place)
        self._chunks.check_covered(key, place.index)
        dtype = self._dtype(binding, place)
        size = math.prod(binding.shape) * dtype.itemsize

        def compute(name: str) -> torch.Tensor:
            whole = self._chunks.assemble(key, place.index)
            return unpack(binding, [whole[: binding.shape[0]]])[name]  # without padding

        return {
            source.name: Content(
                dtype,
                source.stored_part,
                compute=lambda name=source.name: compute(name),  # type: ignore[misc]
                working_bytes=2 * size,
            )
            for source in binding.sources
        }

    def _rows(self, binding: Binding, place: Place, first: int, last: int) -> Pieces | None:
        """Find rows of the Megatron tensor; None where columns were cut."""
        if not binding.section_keys:
            return self._chunks.rows(place.key, place.index, first, last)
        row = 0
        for name, (_, _, rows) in zip(binding.section_keys, binding.sections(), strict=True):
            if row <= first < row + rows:
                key = f"{place.key}.{name}"
                return self._chunks.rows(key, place.index, first - row, last - row)
            row += rows
        raise AssertionError("a run is of one section")

    def _find_places(self) -> Iterator[tuple[Binding, Place]]:
        namings, missing = _find_namings(self._weights), []
        for binding in self._weights.bindings():
            if binding.alias:
                continue
            place = self._find(binding, namings)
            if place is None:
                missing.append(namings[0].place(binding).key)
            else:
                yield binding, place
        if missing:
            raise MissingTensorError(tuple(sorted(set(missing))))

    def _find(self, binding: Binding, namings: list[Naming]) -> Place | None:
        for naming in namings:
            place = naming.place(binding)
            if all(key in self._keys for key in self._own_keys(binding, place)):
                return place
        return None

    def _own_keys(self, binding: Binding, place: Place) -> tuple[str, ...]:
        if not binding.section_keys:
            return (place.key,)
        return tuple(f"{place.key}.{name}" for name in binding.section_keys)

    def _dtype(self, binding: Binding, place: Place) -> torch.dtype:
        kinds = {self._keys[key].dtype for key in self._own_keys(binding, place)}
        if len(kinds) > 1:
            raise TensorShapeError(f"tensor {place.key!r} is stored in several types")
        return kinds.pop()

    def _check_shape(self, binding: Binding, place: Place) -> None:
        heights = [rows for _, _, rows in binding.sections()]
        keys = self._own_keys(binding, place)
        if not binding.section_keys:
            heights = [binding.shape[0]]
        for key, rows in zip(keys, heights, strict=True):
            shape = (*place.lead, rows, *binding.shape[1:])
            actual = self._keys[key].shape
            padded = list(actual)
            if binding.padded and len(actual) == len(shape):
                padded[len(place.lead)] = min(rows, actual[len(place.lead)])
            if tuple(padded) != shape:
                raise TensorShapeError(f"tensor {key!r} has shape {actual}, the model has {shape}")
