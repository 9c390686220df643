"""HF tensors out of a torch_dist checkpoint, whatever ranks wrote it."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

import torch

from sluice.weights.convert.options import Stacking
from sluice.weights.convert.pieces import Content, FileRange, Files
from sluice.weights.convert.stored import Chunk, StoredKey, find_bytes, read_keys
from sluice.weights.errors import MissingTensorError, UncoveredTensorError, UnexpectedTensorError
from sluice.weights.rules.common import PREDICTION
from sluice.weights.rules.packing import Partition, row_runs, unpack
from sluice.weights.rules.rule import ALTERED, Layers
from sluice.weights.rules.weight_map import Binding, TensorShapeError, WeightMap

Pieces = tuple[FileRange, ...]
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
        self.directory, self._weights, self._files = directory, weights, files
        self._keys = read_keys(directory)
        self._chunks: dict[str, dict[tuple[int, ...], list[Chunk]]] = {}
        self._offsets: dict[Chunk, int] = {}
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
        for stored in self._keys.values():
            for chunk in stored.chunks:
                start = self._data_offset(chunk, stored.dtype)
                piece = FileRange(chunk.path, start, math.prod(chunk.sizes) * stored.dtype.itemsize)
                content = Content(stored.dtype, chunk.sizes, (piece,))
                yield chunk_name(stored.key, chunk.offsets), content

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
        self._check_covered(binding, place)
        dtype = self._dtype(binding, place)
        size = math.prod(binding.shape) * dtype.itemsize

        def compute(name: str) -> torch.Tensor:
            return unpack(binding, [self._assemble(binding, place)])[name]

        return {
            source.name: Content(
                dtype,
                source.stored_part,
                compute=lambda name=source.name: compute(name),  # type: ignore[misc]
                working_bytes=2 * size,
            )
            for source in binding.sources
        }

    def _check_covered(self, binding: Binding, place: Place) -> None:
        """Raises UncoveredTensorError unless each number of a tensor is in one chunk."""
        (key,) = self._own_keys(binding, place)
        stored, lead = self._keys[key], len(place.lead)
        chunks = set(self._at(stored, place))
        count = sum(math.prod(chunk.sizes[lead:]) for chunk in chunks)
        overlap = any(_overlap(one, other, lead) for one, other in combinations(chunks, 2))
        if overlap or count != math.prod(stored.shape[lead:]):
            raise UncoveredTensorError(key, "some of it is in no chunk, or in two")

    def _assemble(self, binding: Binding, place: Place) -> torch.Tensor:
        """Assemble a Megatron tensor, without padding, from chunks cut along any axis."""
        (key,) = self._own_keys(binding, place)
        stored, lead = self._keys[key], len(place.lead)
        whole = torch.empty(stored.shape[lead:], dtype=stored.dtype)
        for chunk in self._at(stored, place):
            start = self._data_offset(chunk, stored.dtype)
            size = math.prod(chunk.sizes[lead:])
            skip = _ravel(place.index, chunk.offsets, chunk.sizes) * size
            piece = FileRange(
                chunk.path,
                start + skip * stored.dtype.itemsize,
                size * stored.dtype.itemsize,
            )
            part = self._files.load(Content(stored.dtype, chunk.sizes[lead:], (piece,)))
            where = tuple(
                slice(o, o + s)
                for o, s in zip(chunk.offsets[lead:], chunk.sizes[lead:], strict=True)
            )
            whole[where] = part
        return whole[: binding.shape[0]]

    def _rows(self, binding: Binding, place: Place, first: int, last: int) -> Pieces | None:
        """Find rows of the Megatron tensor; None where columns were cut."""
        if not binding.section_keys:
            return self._key_rows(self._keys[place.key], place, first, last)
        row = 0
        for name, (_, _, rows) in zip(binding.section_keys, binding.sections(), strict=True):
            if row <= first < row + rows:
                return self._key_rows(
                    self._keys[f"{place.key}.{name}"], place, first - row, last - row
                )
            row += rows
        raise AssertionError("a run is of one section")

    def _key_rows(self, stored: StoredKey, place: Place, first: int, last: int) -> Pieces | None:
        lead, parts = len(place.lead), []
        width = math.prod(stored.shape[lead + 1 :]) * stored.dtype.itemsize
        for chunk in self._at(stored, place):
            if chunk.sizes[lead + 1 :] != stored.shape[lead + 1 :]:
                return None
            low, height = chunk.offsets[lead], chunk.sizes[lead]
            start, stop = max(first, low), min(last, low + height)
            if start >= stop:
                continue
            skip = _ravel(place.index, chunk.offsets, chunk.sizes) * height + start - low
            data = self._data_offset(chunk, stored.dtype)
            parts.append(
                (start, stop, FileRange(chunk.path, data + skip * width, (stop - start) * width))
            )
        at, pieces = first, []
        for start, stop, piece in sorted(parts, key=lambda item: item[:2]):
            if start != at:
                break
            pieces.append(piece)
            at = stop
        if at != last:
            raise UncoveredTensorError(stored.key, f"rows from {at} on are in no chunk, or in two")
        return tuple(pieces)

    def _at(self, stored: StoredKey, place: Place) -> list[Chunk]:
        """List the chunks that hold something of a place."""
        if stored.key not in self._chunks:
            index: dict[tuple[int, ...], list[Chunk]] = {}
            lead = len(place.lead)
            for chunk in stored.chunks:
                axes = (
                    range(o, o + s)
                    for o, s in zip(chunk.offsets[:lead], chunk.sizes[:lead], strict=True)
                )
                for position in product(*axes):
                    index.setdefault(position, []).append(chunk)
            self._chunks[stored.key] = index
        return self._chunks[stored.key].get(place.index, [])

    def _data_offset(self, chunk: Chunk, dtype: torch.dtype) -> int:
        """Find the bytes of a chunk in its file."""
        if chunk not in self._offsets:
            expected = (dtype, torch.Size(chunk.sizes))
            self._offsets[chunk] = find_bytes(
                self._files, chunk.path, chunk.offset, chunk.length, expected
            )
        return self._offsets[chunk]

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


def chunk_name(key: str, offsets: tuple[int, ...]) -> str:
    """Name a part of a stored tensor, as digests are kept by."""
    return f"{key}@{','.join(map(str, offsets))}"


def _overlap(one: Chunk, other: Chunk, lead: int) -> bool:
    """Return whether two chunks hold a number of the same place behind the leading axes."""
    axes = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(max(o, p) < min(o + s, p + t) for o, s, p, t in list(axes)[lead:])


def _ravel(index: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Return the position of `index` among the leading axes of a chunk."""
    at = 0
    for axis, position in enumerate(index):
        at = at * sizes[axis] + position - offsets[axis]
    return at
