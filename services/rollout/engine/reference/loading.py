"""Versions of weights made ready for the model that serves, several shards at a time."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from services.rollout.engine.interface import ServedWeights
from services.rollout.engine.reference.adapters import ServingAdapter
from services.rollout.engine.reference.model import ServingModel
from services.rollout.engine.versions import (
    check_adapter,
    check_processor,
    check_whole,
    checked_manifest,
    describe_model,
    is_quantized,
    reading,
)
from services.rollout.errors import UnfitWeightsError
from sluice import faults
from sluice.durable import is_memory
from sluice.operations import UNASKED, OperationsConfig
from sluice.priority import lower_priority, threads_beside
from sluice.side_copies import Fills
from sluice.weights.checkpoint import (
    check_companions,
    checked_shard,
    shard_paths,
)
from sluice.weights.convert.hf import read_config
from sluice.weights.convert.quantization import restored
from sluice.weights.convert.quantized_layout import check_stated, layout_of
from sluice.weights.dtypes import DTYPE_NAMES
from sluice.weights.manifest import Manifest, ShardFile, TensorEntry
from sluice.weights.shards import load_verified, mapped_tensor


@dataclass(frozen=True)
class PreparedWeights:
    """Parameters on the device, ready to be swapped in.

    `owned`: memory that nothing else refers to, so that it may be written once they serve no more.
    """

    version: int
    digest: str
    parameters: dict[str, torch.nn.Parameter]
    owned: bool = False
    line: str = ""


def fit_received(
    model: ServingModel,
    base: ServedWeights | None,
    manifest: Manifest,
    tensors: Iterator[tuple[str, torch.Tensor]],
) -> PreparedWeights | ServingAdapter:
    """Fits a version that comes tensor by tensor; all of it is read, whatever it fits.

    Raises UnfitWeightsError, AdapterBaseError, UnfitAdapterError and what the iterator raises.
    """
    received = dict(tensors)
    check_plain(manifest)
    if manifest.adapter is not None:
        return model.adapters.fit(manifest, check_adapter(manifest, base), received)
    model.check_named(manifest.version, received)
    return PreparedWeights(manifest.version, manifest.digest, model.fit(received), owned=True)


def check_plain(manifest: Manifest) -> None:
    """Raises UnfitWeightsError for quantised weights: their layout is in files of the store."""
    if is_quantized(manifest.tensors):
        raise UnfitWeightsError(
            f"version {manifest.version} is quantised: it needs the store", version=manifest.version
        )


def open_model(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    asked: OperationsConfig = UNASKED,
) -> tuple[ServingModel, PreparedWeights]:
    """Builds a model from a plain HF directory and takes its weights as version 0.

    Raises UnfitWeightsError or UnsupportedModelError.
    """
    digest, tensors = describe_model(directory)
    numbers = None
    if is_quantized(tensors):
        with reading(0):
            stored = {n: t for path in shard_paths(directory) for n, t in load_file(path).items()}
            numbers = _restored(stored, directory, dtype)
    model = ServingModel(directory, dtype, device, asked, numbers)
    return model, PreparedWeights(0, digest, model.parameters())


def _restored(
    tensors: Mapping[str, torch.Tensor], directory: Path, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Returns quantised tensors as numbers. Raises WeightStoreError or OSError."""
    config = read_config(directory)
    check_stated(config, {name: DTYPE_NAMES[tensor.dtype] for name, tensor in tensors.items()})
    layout = layout_of(config)
    assert layout is not None, "checked above"
    return dict(restored(tensors, layout, dtype))


class SpareMemory:
    """Parameters that served before, written again: fresh pages cost more than what is copied."""

    def __init__(self) -> None:
        self._spare: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        self._lock = threading.Lock()

    def give(self, value: torch.Tensor) -> None:
        with self._lock:
            self._spare.setdefault((value.shape, value.dtype), []).append(value)

    def take(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns memory of whatever content, spare where there is some."""
        with self._lock:
            fitting = self._spare.get((shape, dtype))
            spare = fitting.pop() if fitting else None
        return torch.empty(shape, dtype=dtype, device=device) if spare is None else spare

    def clear(self) -> None:
        with self._lock:
            self._spare.clear()


@dataclass(frozen=True)
class _Staged:
    """A tensor on the device, and what it was checked against."""

    entry: TensorEntry
    value: torch.Tensor
    owned: bool


class VersionLoader:
    """Reads and checks versions for one model, those in the making too. For any thread.

    `model` is the one that serves; without one, the first version that is loaded makes it.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        shares: bool = False,
        asked: OperationsConfig = UNASKED,
        ready: Callable[[ServingModel], object] = lambda model: None,
    ) -> None:
        """`shares`: versions that lie in memory of the host, in this dtype, serve as they lie.

        asked: of models that are made of versions, which operations are chosen ahead. ready: is
        called with such a model; it raises for one that shall not serve.
        """
        self._dtype, self._device, self._asked = dtype, device, asked
        self._ready = ready
        self._shares = shares and device.type == "cpu"
        self._pool = ThreadPoolExecutor(
            threads_beside(), "engine-shards", initializer=lower_priority
        )
        self._spare = SpareMemory()
        self._staged: dict[str, _Staged] = {}
        self._taking = threading.Lock()
        self.model: ServingModel | None = None

    def stage(self, path: Path, shard: ShardFile) -> None:
        """Reads a shard of a version in the making, as far as the model has its tensors.

        Raises DigestMismatchError or UnfitWeightsError.
        """
        if is_quantized(shard.tensors):
            return  # scales may lie in another file
        staged = self._staged  # once forgotten, what is still added is lost
        names = frozenset() if self.model is None else self.model.parameter_names()
        with reading(0):
            values = self._read(path, shard, names)
        owned = not self._is_shared(path)
        staged.update((name, _Staged(shard.tensors[name], values[name], owned)) for name in values)
        faults.point("engine.staged")

    def serves_as_it_lies(self, path: Path, shard: ShardFile) -> bool:
        """Returns whether no tensor of a shard would be copied: staged, it takes no memory."""
        kinds = {entry.dtype for entry in shard.tensors.values()}
        return self._is_shared(path.parent) and kinds == {DTYPE_NAMES[self._dtype]}

    def forget(self) -> None:
        """Forgets what was staged; the memory is used again."""
        for each in self._take_staged().values():
            if each.owned:
                self._spare.give(each.value)

    def _take_staged(self) -> dict[str, _Staged]:
        """Returns what is staged, for this caller alone."""
        with self._taking:
            staged, self._staged = self._staged, {}
        return staged

    def retire(self, weights: PreparedWeights) -> None:
        """Takes the memory of parameters that serve no more."""
        self._spare.clear()  # one model's worth is enough
        if weights.owned:
            for parameter in weights.parameters.values():
                self._spare.give(parameter.detach())

    def release(self) -> None:
        """Keeps no memory for the next version."""
        self.forget()
        self._spare.clear()

    def load(
        self,
        version: int,
        digest: str,
        directory: Path,
        base: ServedWeights | None = None,
        adapters: Collection[ServedWeights] = (),
    ) -> PreparedWeights | ServingAdapter:
        """Reads, verifies and fits a version directory; the model goes on serving.

        Shards that were staged as the manifest has them are not read again. Without a model the
        directory's config builds it. `base` serves, and `adapters` are held with it. Raises
        DigestMismatchError, UnfitWeightsError, UnsupportedModelError, AdapterBaseError,
        UnfitAdapterError or MixedWeightsError.
        """
        try:
            with reading(version):
                manifest = checked_manifest(directory, version, digest)
                check_whole(manifest, adapters)
                if manifest.adapter is not None:
                    return self._load_adapter(directory, manifest, base)
                quantized = is_quantized(manifest.tensors)
                matches = self.model is not None and self.model.names_match(manifest.tensors)
                if self.model is not None and matches:
                    self.model.check_incoming(manifest)
                if self.model is not None and matches and not quantized:
                    check_companions(directory, manifest)
                    values = self._read_all(directory, manifest)
                    parameters = self.model.adopt(values)
                    owned = not self._is_shared(directory)
                    return PreparedWeights(version, digest, parameters, owned)
                tensors, numbers = dict(load_verified(directory, manifest)), None
                if quantized:
                    tensors = numbers = _restored(tensors, directory, self._dtype)
        finally:
            self.forget()
        build = partial(ServingModel, directory, self._dtype, self._device, self._asked, numbers)
        converted = None
        if self.model is None:
            self._ready(converted := build())
            self.model = converted
        model = self.model
        check_processor(manifest, model.images.processor)
        if model.names_match(tensors):
            return PreparedWeights(version, digest, model.fit(tensors), owned=True)
        # Checkpoints of some architectures name or cut tensors in another way than the module.
        converted = converted or build()
        return PreparedWeights(version, digest, model.fit(converted.parameters()), owned=True)

    def _load_adapter(
        self, directory: Path, manifest: Manifest, base: ServedWeights | None
    ) -> ServingAdapter:
        spec = check_adapter(manifest, base)
        assert self.model is not None
        self.model.adapters.check(manifest.version, manifest.tensors)  # before a byte is read
        tensors = dict(load_verified(directory, manifest))
        return self.model.adapters.fit(manifest, spec, tensors)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read_all(self, directory: Path, manifest: Manifest) -> Mapping[str, torch.Tensor]:
        assert self.model is not None
        names, staged = self.model.parameter_names(), self._take_staged()
        values: dict[str, torch.Tensor] = {}

        def read(shard: ShardFile) -> None:
            found = {name: staged.get(name) for name in shard.tensors if name in names}
            if found and all(s and s.entry == shard.tensors[n] for n, s in found.items()):
                values.update((name, staged.pop(name).value) for name in found)
            else:
                values.update(self._read(directory / shard.file_name, shard, names))

        with reading(manifest.version):
            for _ in self._pool.map(read, manifest.shards()):
                pass
        return values

    def _read(
        self, path: Path, shard: ShardFile, names: Collection[str]
    ) -> dict[str, torch.Tensor]:
        """Checks a shard; its tensors that have one of these names, copied unless it is shared.

        One that is shared is a private map: what is written to it never reaches the file.
        """
        values: dict[str, torch.Tensor] = {}
        shared = self._is_shared(path.parent)  # the file may be gone, which is told below
        fills = Fills()
        try:
            for name, mapped, extent in checked_shard(path, shard, mmap.ACCESS_COPY):
                if name in names:
                    tensor = mapped_tensor(mapped, extent)
                    dtype = self._dtype if self.model is None else self.model.dtype_of(name)
                    if shared and tensor.dtype == dtype:
                        values[name] = tensor
                    else:
                        values[name] = self._spare.take(tensor.shape, dtype, self._device)
                        fills.begin(values[name], tensor)
        finally:
            fills.settle()  # then whoever has them may read them, on whatever stream
        return values

    def _is_shared(self, path: Path) -> bool:
        return self._shares and is_memory(path)
