"""The tensors of an HF checkpoint by name, whatever it calls them and however it stores them."""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from sluice.weights.checkpoint import shard_paths
from sluice.weights.convert.errors import ConflictingTensorError
from sluice.weights.convert.fp8 import SCALE, block_size, dequantize
from sluice.weights.convert.pieces import Content, Files, Piece
from sluice.weights.errors import (
    DamagedFileError,
    InvalidCheckpointError,
    MissingFileError,
    MissingTensorError,
    UnexpectedTensorError,
)
from sluice.weights.header import parse_header
from sluice.weights.rules import WeightMap
from sluice.weights.shards import TORCH_DTYPES

CONFIG = "config.json"
QUANTIZED = (torch.float8_e4m3fn, torch.float8_e5m2)


def read_config(directory: Path) -> dict[str, object]:
    """The parsed `config.json` of a directory. Raises MissingFileError, InvalidCheckpointError."""
    try:
        config = json.loads((directory / CONFIG).read_bytes())
    except FileNotFoundError as error:
        raise MissingFileError(CONFIG) from error
    except ValueError as error:
        raise InvalidCheckpointError(f"{CONFIG!r} is malformed: {error}") from error
    if not isinstance(config, dict):
        raise InvalidCheckpointError(f"{CONFIG!r} holds no mapping")
    return config


@dataclass(frozen=True)
class Found:
    """A tensor as it lies in a checkpoint: its own name, its file and its bytes."""

    name: str
    path: Path
    content: Content


class HfSource:
    """An HF checkpoint. Tensors go by the names of the rules; FP8 blocks read as bfloat16.

    Raises ConflictingTensorError when two tensors of one name differ, MissingTensorError for FP8
    blocks without their scales, and UnexpectedTensorError for scales of anything else.
    """

    def __init__(
        self, directory: Path, files: Files, spellings: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.directory, self._files = directory, files
        self._spellings = [(re.compile(pattern), text) for pattern, text in spellings]
        self._found: dict[str, Found] = {}
        self.duplicates: list[str] = []
        for path in shard_paths(directory):
            for found in _read_shard(path):
                self._add(found)
        self._block = block_size(read_config(directory))
        self._check_scales()

    def names(self) -> tuple[str, ...]:
        """Names of the tensors; the scales of quantised ones belong to them."""
        return tuple(n for n in self._found if not self._is_scale(n))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._found[name].content.shape for name in self.names()}

    def found(self, name: str) -> Found:
        """A tensor as it is stored. Raises MissingTensorError."""
        if name not in self._found:
            raise MissingTensorError((name,))
        return self._found[name]

    def stored(self) -> Mapping[str, Found]:
        """Everything as it is stored, scales as well."""
        return self._found

    def is_quantized(self, name: str) -> bool:
        return self._block is not None and name + SCALE in self._found

    def content(self, name: str) -> Content:
        """A tensor's numbers. Raises MissingTensorError."""
        stored = self.found(name).content
        if not self.is_quantized(name):
            return stored
        scale, block = self._found[name + SCALE].content, self._block
        assert block is not None

        def compute() -> torch.Tensor:
            return dequantize(self._files.load(stored), self._files.load(scale), block)

        items = torch.Size(stored.shape).numel()
        return Content(torch.bfloat16, stored.shape, compute=compute, working_bytes=7 * items)

    def check(self, weights: WeightMap) -> None:
        """Raises MissingTensorError, UnexpectedTensorError or TensorShapeError with the names."""
        weights.check_hf(self.shapes())

    def _is_scale(self, name: str) -> bool:
        return self._block is not None and name.endswith(SCALE)

    def _check_scales(self) -> None:
        if self._block is None:
            return
        blocks = {n for n, f in self._found.items() if f.content.dtype in QUANTIZED}
        scaled = {name.removesuffix(SCALE) for name in self._found if name.endswith(SCALE)}
        if lost := sorted(blocks - scaled):
            raise MissingTensorError(tuple(name + SCALE for name in lost))
        if stale := sorted(scaled - blocks):
            raise UnexpectedTensorError(tuple(name + SCALE for name in stale))

    def _add(self, found: Found) -> None:
        name = found.name
        for pattern, text in self._spellings:
            name = pattern.sub(text, name)
        other = self._found.get(name)
        if other is None:
            self._found[name] = found
            return
        same = (other.content.dtype, other.content.shape) == (
            found.content.dtype,
            found.content.shape,
        )
        if not same or self._files.digest(other.content) != self._files.digest(found.content):
            raise ConflictingTensorError(
                f"{other.path.name}:{other.name}", f"{found.path.name}:{found.name}"
            )
        self.duplicates.append(found.name)


def read_names(path: Path) -> list[str]:
    """Names of the tensors of a safetensors file."""
    return [found.name for found in _read_shard(path)]


def _read_shard(path: Path) -> list[Found]:
    with path.open("rb") as file:
        try:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:  # empty
            raise DamagedFileError(path.name, "is empty") from error
    with mapped:
        extents = parse_header(mapped, file_name=path.name)
    return [
        Found(
            name,
            path,
            Content(
                TORCH_DTYPES[extent.dtype],
                extent.shape,
                (Piece(path, extent.begin, extent.end - extent.begin),),
            ),
        )
        for name, extent in extents.items()
    ]
