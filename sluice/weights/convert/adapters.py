"""Adapters merged into their base, or written as one plain folder of peft's."""

from __future__ import annotations

import json
import math
import mmap
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from sluice.weights.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    AdapterSpec,
    decode_adapter_config,
    encode_adapter_config,
    split_name,
    tensor_names,
)
from sluice.weights.checkpoint import (
    INDEX_NAME,
    Extent,
    companion_files,
    digest_base,
    encode_index,
    map_shard,
    read_index,
    shard_paths,
)
from sluice.weights.convert.hf import CONFIG, HfSource, read_config
from sluice.weights.convert.options import ConvertOptions, OptionError
from sluice.weights.convert.pieces import Files
from sluice.weights.convert.plan import RECORD, check_files, find_checks
from sluice.weights.convert.saved import MODEL_FILE, check_saved
from sluice.weights.convert.work import Control, ConversionReport
from sluice.weights.errors import InvalidAdapterError, MissingFileError, TensorDigestError
from sluice.weights.manifest import MANIFEST_NAME, read_manifest
from sluice.weights.rules.packing import InexactTensorError
from sluice.weights.shards import load_verified, mapped_tensor, write_shard

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FLOATS = ("F64", "F32", "BF16", "F16")  # numbers that are what they say, without a scale beside
IDLE = ("model", "allow", "deny", "vocab_multiple", "stacking", "plain_norms", "max_file_bytes")


def is_adapter(source: Path) -> bool:
    """Return whether a directory holds an adapter: a version of a store, or a folder of peft's."""
    return (source / ADAPTER_CONFIG).is_file()


@dataclass(frozen=True)
class AdapterConversion:
    """What becomes of an adapter, checked by names, shapes and the digest of its base.

    size: bytes of the tensors of the target.
    """

    spec: AdapterSpec
    tensors: Mapping[str, torch.Tensor]
    size: int

    def write(
        self, staging: Path, options: ConvertOptions, control: Control
    ) -> tuple[ConversionReport, dict[str, str]]:
        """Write the files of the target; what became of tensors, and their digests by name."""
        control.progress.total_bytes = self.size
        if options.to == "peft":
            return self._write_folder(staging, options, control)
        assert options.origin is not None
        return self._merge(staging, options.origin, options, control)

    def _write_folder(
        self, staging: Path, options: ConvertOptions, control: Control
    ) -> tuple[ConversionReport, dict[str, str]]:
        control.check()
        dtype = DTYPES.get(options.dtype)
        cast = {n: t if dtype is None else _cast(n, t, dtype) for n, t in self.tensors.items()}
        shard = write_shard(staging, ADAPTER_FILE, cast, sync=options.sync)
        (staging / ADAPTER_CONFIG).write_bytes(encode_adapter_config(self.spec))
        control.progress.done_bytes += shard.size
        digests = {name: entry.digest for name, entry in shard.tensors.items()}
        return ConversionReport(copied=tuple(sorted(digests))), digests

    def _merge(
        self, staging: Path, origin: Path, options: ConvertOptions, control: Control
    ) -> tuple[ConversionReport, dict[str, str]]:
        merged: set[str] = set()
        digests: dict[str, str] = {}
        places: dict[str, str] = {}
        for path in shard_paths(origin):
            tensors = dict(self._merged(path, options, merged, control))
            shard = write_shard(staging, path.name, tensors, sync=options.sync)
            digests |= {name: entry.digest for name, entry in shard.tensors.items()}
            places |= dict.fromkeys(shard.tensors, path.name)
        index = [] if read_index(origin) is None else [origin / INDEX_NAME]
        for path in (*companion_files(origin), *index):
            shutil.copyfile(path, staging / path.name)
        if options.dtype != "keep":
            if index:
                (staging / INDEX_NAME).write_bytes(encode_index(self.size, places))
            config = read_config(origin) | {"dtype": options.dtype}
            config.pop("torch_dtype", None)
            (staging / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        copied = tuple(sorted(digests.keys() - merged))
        return ConversionReport(converted=tuple(sorted(merged)), copied=copied), digests

    def _merged(
        self, path: Path, options: ConvertOptions, merged: set[str], control: Control
    ) -> Iterator[tuple[str, torch.Tensor]]:
        mapped, extents = map_shard(path, mmap.ACCESS_COPY)
        for name, extent in extents.items():
            control.check()
            tensor = mapped_tensor(mapped, extent)
            a, b = tensor_names(name.removesuffix(".weight"))
            dtype = tensor.dtype if options.dtype == "keep" else DTYPES[options.dtype]
            is_merged = a in self.tensors and name.endswith(".weight")
            if is_merged:
                update = self.tensors[b].float() @ self.tensors[a].float() * self.spec.scale
                tensor = tensor.float() + update
                merged.add(name)
            if tensor.is_floating_point():
                tensor = _cast(name, tensor, dtype, is_merged=is_merged)
            yield name, tensor
            control.progress.done_bytes += tensor.nbytes


def _cast(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, *, is_merged: bool = False
) -> torch.Tensor:
    cast = tensor.to(dtype)
    if (is_merged or dtype is torch.float16) and not cast.isfinite().all():
        shown = str(dtype).removeprefix("torch.")
        raise InexactTensorError(f"{name!r} has numbers that {shown} cannot hold")
    return cast


def plan_adapter(source: Path, options: ConvertOptions) -> AdapterConversion:
    """Read an adapter whole, and check that it can become what is asked for.

    With an origin every byte of that is read too: it must be the adapter's base. Raises
    OptionError, InvalidAdapterError, OtherBaseError, and what damaged files raise.
    """
    if options.to == "torch_dist" or options.quantize:
        raise OptionError("an adapter becomes hf, merged into its base (--origin), or peft")
    if options.to == "hf" and options.origin is None:
        raise OptionError("an adapter is merged into its base: name that with --origin")
    usual = ConvertOptions()
    if idle := [name for name in IDLE if getattr(options, name) != getattr(usual, name)]:
        raise OptionError(f"{idle[0]} has no effect on what becomes of an adapter")
    base = None
    if options.origin is not None:
        _check_origin(options.origin)
        base = digest_base(options.origin)
    spec, tensors = read_adapter(source, base)
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise InvalidAdapterError(f"tensor {name!r} is not finite")
    dtype = None if options.dtype == "keep" else DTYPES[options.dtype]
    size = sum(tensor.numel() * (dtype or tensor.dtype).itemsize for tensor in tensors.values())
    if options.to == "hf" and options.origin is not None:
        found: dict[str, Extent] = {}
        for path in shard_paths(options.origin):
            found |= map_shard(path)[1]
        _check_layers(tensors, found)
        _check_plain(tensors, found, None if dtype is None else options.dtype)
        size = sum(_size(extent, dtype) for extent in found.values())
    return AdapterConversion(spec, tensors, size)


def _check_origin(origin: Path) -> None:
    """Check every byte of a base whose writer left digests: peft's own adapters state none."""
    if not any((origin / name).is_file() for name in (MANIFEST_NAME, RECORD)):
        return
    check_files(origin)
    with Files() as files:
        for check in find_checks(HfSource(origin, files)):
            if (actual := files.digest(check.content)) != check.digest:
                raise TensorDigestError(check.name, check.digest, actual, check.place)


def _size(extent: Extent, dtype: torch.dtype | None) -> int:
    if dtype is None or extent.dtype not in FLOATS:
        return extent.end - extent.begin
    return math.prod(extent.shape) * dtype.itemsize


def _check_layers(tensors: Mapping[str, torch.Tensor], base: Mapping[str, Extent]) -> None:
    for layer in {split_name(name)[0] for name in tensors}:
        a, b = (tensors[name] for name in tensor_names(layer))
        extent = base.get(f"{layer}.weight")
        if extent is None or extent.shape != (b.shape[0], a.shape[1]):
            found = "is not there" if extent is None else f"has shape {[*extent.shape]}"
            raise InvalidAdapterError(
                f"weight of layer {layer!r} {found}; the adapter wants {[b.shape[0], a.shape[1]]}"
            )


def _check_plain(
    tensors: Mapping[str, torch.Tensor], base: Mapping[str, Extent], dtype: str | None
) -> None:
    """Raise OptionError where numbers to be changed or cast are scaled by another tensor."""
    for name, extent in sorted(base.items()):
        is_changed = tensor_names(name.removesuffix(".weight"))[0] in tensors
        is_cast = dtype is not None and extent.dtype.startswith("F")
        if extent.dtype not in FLOATS and (is_changed or is_cast):
            raise OptionError(
                f"the base has {name!r} in {extent.dtype}, which is scaled by other tensors: make "
                "it plain first (`sluice convert BASE PLAIN --to hf --dtype bfloat16`)"
            )


def read_adapter(
    source: Path, base_digest: str | None
) -> tuple[AdapterSpec, dict[str, torch.Tensor]]:
    """Read a version of a store, a trainer's checkpoint or a folder of peft's, of `base_digest`.

    Every byte is checked, but of a folder. Raises InvalidAdapterError, OtherBaseError,
    MissingFileError or DamagedFileError, and of a version what `load_verified` raises.
    """
    if (source / MANIFEST_NAME).is_file():
        manifest = read_manifest(source)
        if manifest.adapter is None:
            raise InvalidAdapterError(f"{source.name!r} holds a version that is no adapter")
        tensors = dict(load_verified(source, manifest))
        spec = manifest.adapter
        if base_digest is not None:
            spec.check_base(base_digest)
        return spec, tensors
    data = (source / ADAPTER_CONFIG).read_bytes()
    spec = decode_adapter_config(data, base_digest)
    check_saved(source, large=True)
    path = source / (MODEL_FILE if (source / MODEL_FILE).is_file() else ADAPTER_FILE)
    if not path.is_file():
        raise MissingFileError(ADAPTER_FILE)
    mapped, extents = map_shard(path, mmap.ACCESS_COPY)
    spec.check_tensors({name: (extent.dtype, extent.shape) for name, extent in extents.items()})
    return spec, {name: mapped_tensor(mapped, extent) for name, extent in extents.items()}
