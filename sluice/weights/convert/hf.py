"""The tensors of an HF checkpoint by name, whatever it calls them and however it stores them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from sluice.json_values import load_json
from sluice.weights.checkpoint import (
    INDEX_NAME,
    SINGLE_NAME,
    encode_header,
    encode_index,
    map_shard,
    parse_extents,
    read_index,
    shard_paths,
)
from sluice.weights.convert.options import ConvertOptions
from sluice.weights.convert.pieces import Content, FileRange, Files
from sluice.weights.convert.quantization import dequantize
from sluice.weights.convert.quantized_layout import layout_of
from sluice.weights.convert.work import ConversionReport, Group, OutputFile, TensorTask
from sluice.weights.dtypes import DTYPE_NAMES, TORCH_DTYPES
from sluice.weights.errors import (
    ConflictingTensorError,
    InvalidCheckpointError,
    MissingFileError,
    MissingTensorError,
    UnexpectedTensorError,
)
from sluice.weights.rules.weight_map import WeightMap

CONFIG = "config.json"
WORKING_BYTES = 16  # to compute one number of a quantised tensor
EXPERTS_IN_ONE = 3  # dimensions of a tensor of all experts
TIED = "tied: it would be a stale copy"
HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output_layer)\.weight$")


def read_config(directory: Path) -> dict[str, object]:
    """Parse `config.json` of a directory. Raises MissingFileError or InvalidCheckpointError."""
    try:
        config = load_json((directory / CONFIG).read_bytes())
    except FileNotFoundError as error:
        raise MissingFileError(CONFIG, place=str(directory)) from error
    except ValueError as error:
        raise InvalidCheckpointError(f"{CONFIG!r} is malformed: {error}") from error
    if not isinstance(config, dict):
        raise InvalidCheckpointError(f"{CONFIG!r} holds no mapping")
    return config


@dataclass(frozen=True)
class HfEntry:
    """A tensor as it lies in a checkpoint: its own name, its file and its bytes."""

    name: str
    path: Path
    content: Content


class HfSource:
    """An HF checkpoint. Tensors go by the names of the rules; quantised ones read as bfloat16.

    Raises ConflictingTensorError when two tensors of one name differ, MissingTensorError for a
    quantised one without its scales, and UnexpectedTensorError for scales of anything else.
    """

    def __init__(
        self, directory: Path, files: Files, spellings: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.directory, self._files = directory, files
        self._spellings = [(re.compile(pattern), text) for pattern, text in spellings]
        self._entries: dict[str, HfEntry] = {}
        self.duplicates: list[str] = []
        self.ghosts: list[str] = []
        self.notes: list[str] = []
        for path in shard_paths(directory):
            for entry in _read_shard(path):
                self._add(entry)
        self._check_index()
        self._layout = layout_of(read_config(directory))
        self._quantized = self._find_quantized()
        parts = {part for weight in self._quantized for part in self._parts(weight)}
        plain = [name for name in self._entries if name not in parts]
        self._names = tuple(sorted((*plain, *self._quantized), key=self._order()))

    def names(self) -> tuple[str, ...]:
        """List the tensors by name; the scales of quantised ones belong to them."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises MissingTensorError."""
        if name in self._quantized:
            return self._quantized[name]
        return self._stored(name).content.shape

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self.shape(name) for name in self._names}

    def _stored(self, name: str) -> HfEntry:
        if name not in self._entries:
            raise MissingTensorError((name,))
        return self._entries[name]

    def stored(self) -> Mapping[str, HfEntry]:
        """Everything as it is stored, scales as well."""
        return self._entries

    def names_in_files(self, names: Iterable[str]) -> set[str]:
        """Return what files call tensors, the scales of quantised ones besides."""
        return {self._entries[part].name for name in names for part in self._parts(name)}

    def _parts(self, name: str) -> tuple[str, ...]:
        """What is stored of a tensor."""
        if self._layout is None or name not in self._quantized:
            return (name,)
        return self._layout.names(name)

    def equals(self, name: str, other: str) -> bool:
        """Return whether two tensors are stored with the same type, shape and bytes."""
        first, second = self._parts(name), self._parts(other)
        return len(first) == len(second) and all(
            self._is_equal(self._entries[one], self._entries[two])
            for one, two in zip(first, second, strict=True)
        )

    def _is_equal(self, first: HfEntry, second: HfEntry) -> bool:
        one, two = first.content, second.content
        same = (one.dtype, one.shape) == (two.dtype, two.shape)
        return same and self._files.digest(one) == self._files.digest(two)

    def content(self, name: str) -> Content:
        """A tensor's numbers. Raises MissingTensorError, InvalidCheckpointError for no matrix."""
        if name not in self._quantized:
            return self._stored(name).content
        parts = [self._entries[part].content for part in self._parts(name)]
        return self._restored(name, parts, self._quantized[name])

    def _restored(self, name: str, parts: list[Content], shape: tuple[int, ...]) -> Content:
        layout = self._layout
        assert layout is not None
        if len(shape) != layout.dimensions:
            raise InvalidCheckpointError(f"{name!r} is {layout.label} and no matrix")

        def compute() -> torch.Tensor:
            try:
                return dequantize([self._files.load(part) for part in parts], layout)
            except InvalidCheckpointError as error:
                raise InvalidCheckpointError(f"{name!r}: {error}") from error

        working = WORKING_BYTES * torch.Size(shape).numel()
        return Content(torch.bfloat16, shape, compute=compute, working_bytes=working)

    def expert(self, name: str, index: int) -> Content:
        """The numbers of one expert of a tensor that holds all of them."""
        if name not in self._quantized:
            part = self.content(name).rows(index, index + 1)
            return Content(part.dtype, part.shape[1:], part.pieces, part.stored)
        count, *shape = self._quantized[name]
        stored = [self._entries[part].content for part in self._parts(name)]
        own = self._restored(name, [part.rows(index, index + 1) for part in stored], (1, *shape))
        if other := [part.shape for part in stored if part.shape[:1] != (count,)]:
            raise InvalidCheckpointError(
                f"{name!r}: scales of shape {other[0]} for {count} experts"
            )
        assert own.compute is not None
        compute = own.compute
        return replace(own, shape=tuple(shape), compute=lambda: compute()[0])

    def tensor_parts(self, name: str) -> list[TensorPart]:
        """What fills an HF tensor: of quantised experts in one tensor each is computed alone."""
        shape = self.shape(name)
        if name not in self._quantized or len(shape) != EXPERTS_IN_ONE:
            return [TensorPart(name, self.content(name))]
        count = shape[0]
        return [TensorPart(name, self.expert(name, i), i, count) for i in range(count)]

    def check(self, weights: WeightMap) -> None:
        """Raises MissingTensorError, UnexpectedTensorError or TensorShapeError with the names."""
        weights.check_hf(self.shapes())

    def _find_quantized(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the quantised tensors by name.

        Raises MissingTensorError for one without all of its parts, UnexpectedTensorError for
        parts of none, InvalidCheckpointError for one that is there plain too.
        """
        layout = self._layout
        if layout is None:
            return {}
        found = {
            layout.weight_of(name): layout.shape_of(entry.content.shape)
            for name, entry in self._entries.items()
            if layout.is_first_part(name, DTYPE_NAMES[entry.content.dtype])
        }
        wanted = {part for weight in found for part in layout.names(weight)}
        if twice := sorted(found.keys() & self._entries.keys() - wanted):
            raise InvalidCheckpointError(f"{twice[0]!r} is there both plain and as {layout.label}")
        if missing := sorted(wanted - self._entries.keys()):
            raise MissingTensorError(tuple(missing))
        beside = {name for name in self._entries if layout.is_beside(name)}
        if surplus := sorted(beside - wanted):
            raise UnexpectedTensorError(tuple(surplus))
        return found

    def _order(self) -> Callable[[str], int]:
        """Where a tensor lies in the files."""
        places = {name: place for place, name in enumerate(self._entries)}
        return lambda name: places[self._parts(name)[0]]

    def _check_index(self) -> None:
        index = read_index(self.directory)
        if index is None:
            return
        entries = self._entries.values()
        found = {entry.name: entry.path.name for entry in entries}
        found |= {name: index.weight_map.get(name, "") for name in self.duplicates}
        self.ghosts, self.notes = index.check(found, sum(e.content.size for e in entries))

    def _add(self, entry: HfEntry) -> None:
        name = entry.name
        for pattern, text in self._spellings:
            name = pattern.sub(text, name)
        other = self._entries.get(name)
        if other is None:
            self._entries[name] = entry
            return
        if not self._is_equal(other, entry):
            raise ConflictingTensorError(
                f"{other.path.name}:{other.name}", f"{entry.path.name}:{entry.name}"
            )
        self.duplicates.append(entry.name)


def _read_shard(path: Path) -> list[HfEntry]:
    mapped, extents = map_shard(path)
    mapped.close()
    return [
        HfEntry(
            name,
            path,
            Content(
                TORCH_DTYPES[extent.dtype],
                extent.shape,
                (FileRange(path, extent.begin, extent.end - extent.begin),),
            ),
        )
        for name, extent in extents.items()
    ]


@dataclass(frozen=True)
class TensorPart:
    """Content that fills an HF tensor, or the part of expert `index` of one.

    is_kept: in its own type, whatever the others are cast to.
    """

    name: str
    content: Content
    index: int | None = None
    count: int = 1
    is_kept: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that it belongs to."""
        return self.content.shape if self.index is None else (self.count, *self.content.shape)


def lay_out_hf(
    groups: Sequence[tuple[str, Sequence[TensorPart]]], *, max_file_bytes: int
) -> tuple[tuple[OutputFile, ...], tuple[Group, ...], dict[str, bytes]]:
    """Files, work and the index of tensors given in groups, each under a name.

    A shard is closed when the next tensor would make it larger than `max_file_bytes`.
    """
    tensors = {part.name: part for _, parts in groups for part in parts}
    shards: list[list[str]] = [[]]
    filled = 0
    for name, part in tensors.items():
        size = part.content.size * part.count
        if shards[-1] and filled + size > max_file_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    files, places = [], {}
    for number, names in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file_name = SINGLE_NAME if len(shards) == 1 else file_name
        described = {n: (DTYPE_NAMES[tensors[n].content.dtype], tensors[n].shape) for n in names}
        header, _ = encode_header(described)
        extents = parse_extents(header, file_name=file_name)
        size = max((extent.end for extent in extents.values()), default=len(header))
        files.append(OutputFile(file_name, size, ((0, header),)))
        places.update({name: (file_name, extent.begin) for name, extent in extents.items()})
    work = tuple(Group(name, tuple(_task(part, places) for part in ps)) for name, ps in groups)
    texts = {}
    if len(shards) > 1:
        total = sum(part.content.size * part.count for part in tensors.values())
        texts[INDEX_NAME] = encode_index(total, {n: place[0] for n, place in places.items()})
    return tuple(files), work, texts


def _task(part: TensorPart, places: dict[str, tuple[str, int]]) -> TensorTask:
    file_name, offset = places[part.name]
    if part.index is None:
        return TensorTask(part.name, part.content, file_name, offset)
    at = offset + part.index * part.content.size
    return TensorTask(f"{part.name}[{part.index}]", part.content, file_name, at)


def fill_from_origin(
    groups: Sequence[tuple[str, Sequence[TensorPart]]],
    origin: HfSource,
    options: ConvertOptions,
    weights: WeightMap | None,
    config: Mapping[str, object],
    tower: Collection[str] = (),
) -> tuple[list[tuple[str, list[TensorPart]]], ConversionReport]:
    """Find the tensors of the origin that the groups lack, and report on the whole.

    Left out are copies of tied tensors, which would be stale, and names that the patterns do not
    let through; scales of quantised tensors go with their tensors, which are copied as numbers.
    Tensors in both with another shape are conflicts: the converted one is kept. `config` is the
    model's, which says of an architecture without rules whether its output layer is tied. Of what
    training owns nothing is taken but the `tower`, which the source has nothing of.
    """
    owned = set() if weights is None else weights.hf_tensors().keys() - set(tower)
    own = {part.name: part.shape for _, parts in groups for part in parts}
    copied: list[tuple[str, list[TensorPart]]] = []
    skipped: dict[str, str] = {n: "stored twice, equal" for n in origin.duplicates}
    conflicting: dict[str, str] = {}
    for name in origin.names():
        shape = origin.shape(name)
        if name in own:
            if own[name] != shape:
                conflicting[name] = f"{shape} in the origin, {own[name]} converted"
        elif name in owned:  # experts in one tensor here, in several there
            skipped[name] = "trained: the source has it in another form"
        elif weights is None and _is_tied_head(name, origin, own, config):
            skipped[name] = TIED
        elif (reason := _left_out(name, options, weights)) is not None:
            skipped[name] = reason
        else:
            copied.append((name, origin.tensor_parts(name)))
    scales = origin.stored().keys() - origin.shapes().keys()
    skipped |= {name: "scale: the numbers are copied unquantised" for name in sorted(scales)}
    report = ConversionReport(
        converted=tuple(sorted(own)),
        copied=tuple(sorted(name for name, _ in copied)),
        skipped=skipped | dict.fromkeys(origin.ghosts, "named by the origin's index, in no file"),
        conflicting=conflicting,
        notes=tuple(f"origin: {note}" for note in origin.notes),
    )
    return copied, report


def _is_tied_head(
    name: str, origin: HfSource, own: Mapping[str, tuple[int, ...]], config: Mapping[str, object]
) -> bool:
    """Whether an output layer repeats an embedding, in an architecture that has no rules.

    That is a matrix with a row for each token, as the source has one. It is tied by the word of
    `config.json`, or where the origin holds the two equal.
    """
    inner = config.get("text_config")
    text = {**(inner if isinstance(inner, Mapping) else {}), **config}
    tied, shape = text.get("tie_word_embeddings") is True, origin.shape(name)
    named = bool(HEAD.search(name))
    if not named and shape[:1] != (text.get("vocab_size"),):
        return False
    others = [n for n in origin.names() if own.get(n) == shape and len(shape) == 2]
    return (tied and bool(named or others)) or any(origin.equals(name, n) for n in others)


def _left_out(name: str, options: ConvertOptions, weights: WeightMap | None) -> str | None:
    if weights is not None and weights.is_copy(name):
        return TIED
    if weights is not None and weights.is_ignored(name):
        return "carries no weights"
    if not any(fnmatchcase(name, pattern) for pattern in options.allow):
        return "not allowed"
    if any(fnmatchcase(name, pattern) for pattern in options.deny):
        return "denied"
    return None
