"""Adapters in SGLang: folders that it reads, under names that it never sees twice.

SGLang (0.5.23) neither replaces what a name stands for nor forgets it for good when it is unloaded:
a request for the name loads the old folder again. So each version has a name of its own, and no
request names one that was let go. Of q, k, v and of gate and up it keeps one stack: a server given
`up_proj` without `gate_proj` dies with the first request, so that what lacks is written as zeros.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from services.rollout.engine.interface import ServedWeights
from services.rollout.engine.sglang.client import Capabilities, SglangClient, SGLangRefusedError
from services.rollout.engine.versions import (
    adapter_name,
    check_adapter,
    checked_manifest,
    reading,
    surplus,
)
from services.rollout.errors import EngineFailedError, UnfitAdapterError, VersionUnavailableError
from sluice.weights.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    AdapterSpec,
    encode_adapter_config,
    leaf_of,
    split_name,
    tensor_names,
)
from sluice.weights.checkpoint import BITS, check_companions, checked_shard, encode_header

if TYPE_CHECKING:
    from sluice.weights.manifest import Manifest

logger = logging.getLogger(__name__)

STACKS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
Shapes = Mapping[str, tuple[int, ...]]  # of the base's tensors, by name


@dataclass(frozen=True)
class DiskAdapter:
    """An adapter in a folder of this host that SGLang can read, every byte of it checked."""

    version: int
    digest: str
    spec: AdapterSpec
    directory: Path
    line: str = ""  # the adapter of several that it is a version of

    @property
    def name(self) -> str:
        """The name under which SGLang has it."""
        return adapter_name(self.version)

    @property
    def weights(self) -> ServedWeights:
        return ServedWeights(self.version, self.digest, self.spec.base_digest)


class AdapterFolders:
    """Folders of adapters below one of its own, which goes with it. Calls block."""

    def __init__(self) -> None:
        self._root: tempfile.TemporaryDirectory[str] | None = None

    def read(
        self,
        version: int,
        digest: str,
        directory: Path,
        base: ServedWeights | None,
        shapes: Shapes,
        capabilities: Capabilities | None,
    ) -> DiskAdapter:
        """Checks a version of the store, and writes it as SGLang needs it.

        Raises DigestMismatchError naming the tensor or file, AdapterBaseError, UnfitAdapterError,
        UnfitWeightsError, or EngineFailedError where no server has been up yet.
        """
        with reading(version):
            manifest = checked_manifest(directory, version, digest)
            spec = check_adapter(manifest, base)
            check_server(manifest, spec, capabilities)
            check_layers(manifest, shapes)
            check_companions(directory, manifest)
            if self._root is None:
                self._root = tempfile.TemporaryDirectory(prefix="sluice-adapters-")
            folder = Path(self._root.name, adapter_name(version))
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            completed = _write(folder / ADAPTER_FILE, directory, manifest, shapes)
            targets = tuple({*spec.targets, *completed})
            (folder / ADAPTER_CONFIG).write_bytes(
                encode_adapter_config(replace(spec, targets=targets))
            )
        return DiskAdapter(version, digest, spec, folder, manifest.line)

    def remove(self, adapter: DiskAdapter) -> None:
        """Removes a folder."""
        shutil.rmtree(adapter.directory, ignore_errors=True)

    def close(self) -> None:
        """Removes all folders."""
        if self._root is not None:
            self._root.cleanup()


class LoraFault(NamedTuple):
    """What of an adapter a server does not take: words, and what they name."""

    text: str
    named: Mapping[str, str | int] = MappingProxyType({})


def lora_fault(spec: AdapterSpec, rank: int, targets: Collection[str]) -> LoraFault | None:
    """What a server for this rank, 0 for none, and these targets does not take, if anything."""
    if not rank:
        return LoraFault("is an adapter, and SGLang was started without: set engine.sglang.lora")
    if spec.rank > rank:
        return LoraFault(
            f"is of rank {spec.rank}, and SGLang was started for at most {rank} "
            "(engine.sglang.lora.max_rank)",
            {"rank": spec.rank, "limit": rank},
        )
    if foreign := set(spec.targets) - set(targets):
        return LoraFault(
            f"has the target {min(foreign)!r}, which SGLang was not started for "
            "(engine.sglang.lora.targets)",
            {"target": min(foreign)},
        )
    return None


def check_server(manifest: Manifest, spec: AdapterSpec, capabilities: Capabilities | None) -> None:
    """Raises UnfitAdapterError for an adapter that the server was not started for.

    Of one that has not been up yet nothing is known: EngineFailedError, which is no refusal.
    """
    version = manifest.version
    if capabilities is None:
        raise EngineFailedError("SGLang is being started")
    if capabilities.lora_rank and capabilities.dp_size > 1:
        raise UnfitAdapterError(
            f"version {version} is an adapter, which SGLang takes while it runs only where "
            "dp_size is 1",
            version=version,
        )
    rank, targets = capabilities.lora_rank, capabilities.lora_targets
    if fault := lora_fault(spec, rank, targets):
        raise UnfitAdapterError(f"version {version} {fault.text}", version=version, **fault.named)


def check_layers(manifest: Manifest, shapes: Shapes) -> None:
    """Raises UnfitAdapterError naming a tensor whose layer the base has not, or not so."""
    for name, tensor in sorted(manifest.tensors.items()):
        layer, factor = split_name(name)
        base = shapes.get(f"{layer}.weight", ())
        if len(base) != 2 or ".experts." in layer:
            raise UnfitAdapterError(
                f"the model has no linear layer {layer!r} that takes adapters",
                version=manifest.version,
                tensor=name,
            )
        size = base[1] if factor == "lora_A" else base[0]
        if tensor.shape[factor == "lora_A"] != size:
            raise UnfitAdapterError(
                f"tensor {name!r} has shape {[*tensor.shape]}; {size} of the layer's should "
                "stand in it",
                version=manifest.version,
                tensor=name,
            )


def _write(path: Path, directory: Path, manifest: Manifest, shapes: Shapes) -> set[str]:
    """Writes the tensors as one file, stacks completed by zeros; the targets that came with these.

    Every byte is checked on the way.
    """
    layout = {name: (t.dtype, t.shape) for name, t in manifest.tensors.items()}
    layers = {split_name(name)[0] for name in layout}
    zeros: dict[str, tuple[str, tuple[int, ...]]] = {}
    for layer in layers:
        stack = next((stack for stack in STACKS if leaf_of(layer) in stack), ())
        for leaf in stack:
            sibling = layer.removesuffix(leaf_of(layer)) + leaf
            if sibling in layers or f"{sibling}.weight" not in shapes:
                continue
            a, b = tensor_names(layer)
            (dtype, a_shape), (_, b_shape) = layout[a], layout[b]
            rows = shapes[f"{sibling}.weight"][0]
            names = tensor_names(sibling)
            zeros |= {names[0]: (dtype, a_shape), names[1]: (dtype, (rows, b_shape[1]))}
    data: dict[str, bytes] = {}
    for shard in manifest.shards():
        for name, mapped, extent in checked_shard(directory / shard.file_name, shard):
            data[name] = mapped[extent.begin : extent.end]
    header, order = encode_header(layout | zeros)
    with path.open("wb") as file:
        file.write(header)
        for name in order:
            file.write(data[name] if name in data else bytes(_size(*zeros[name])))
    return {leaf_of(split_name(name)[0]) for name in zeros}


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    return shape[0] * shape[1] * BITS[dtype] // 8


class ServerAdapters:
    """The adapters that one server holds, and which of them requests use.

    They are loaded and let go by one caller at a time.
    """

    def __init__(self, limit: int, folders: AdapterFolders) -> None:
        self._limit, self.folders = limit, folders
        self._uses: Counter[int] = Counter()
        self.held: dict[int, DiskAdapter] = {}  # by version, in the order of their commits
        self.current: DiskAdapter | None = None

    def use(self, weights: ServedWeights) -> None:
        """Keeps an adapter for a request, until `end_use`; nothing for the base."""
        if weights.base_digest:
            self._uses[weights.version] += 1

    def end_use(self, weights: ServedWeights) -> None:
        if weights.base_digest:
            self._uses[weights.version] -= 1

    def find(self, version: int, base: ServedWeights) -> ServedWeights:
        """Returns the weights of a version. Raises VersionUnavailableError for one not held."""
        if version in self.held:
            return self.held[version].weights
        if version != base.version:
            raise VersionUnavailableError(f"version {version} is not held", exact_version=version)
        return base

    async def serve(self, client: SglangClient, adapter: DiskAdapter, seconds: float) -> None:
        """Loads an adapter and serves it; of those beyond the limit what nobody uses goes.

        One of several serves those alone that name it. Raises UnfitAdapterError where SGLang
        refuses it.
        """
        body = {"lora_name": adapter.name, "lora_path": str(adapter.directory)}
        try:
            try:
                await client.post("/load_lora_adapter", body, seconds)
            except SGLangRefusedError:  # a server that outlived an engine may have the name
                await self._unload(client, adapter, seconds)
                await client.post("/load_lora_adapter", body, seconds)
        except SGLangRefusedError as error:
            raise UnfitAdapterError(str(error), version=adapter.version) from error
        self.held[adapter.version] = adapter
        if not adapter.line:
            self.current = adapter
        await self._let_go(client, adapter, seconds)

    async def _let_go(self, client: SglangClient, new: DiskAdapter, seconds: float) -> None:
        lines = {version: one.line for version, one in self.held.items()}
        used = {version for version in self.held if self._uses[version]} | {new.version}
        used |= set() if self.current is None else {self.current.version}
        for adapter in [self.held[version] for version in surplus(lines, self._limit, used)]:
            del self.held[adapter.version]  # no request finds it from here on
            try:
                await self._unload(client, adapter, seconds)
            except SGLangRefusedError as error:
                logger.warning("SGLang keeps %s: %s", adapter.name, error)
            await asyncio.to_thread(self.folders.remove, adapter)

    async def _unload(self, client: SglangClient, adapter: DiskAdapter, seconds: float) -> None:
        await client.post("/unload_lora_adapter", {"lora_name": adapter.name}, seconds)

    async def restore(self, client: SglangClient, seconds: float) -> None:
        """Gives a new server the newest adapter of each line; the others are gone.

        Raises EngineFailedError.
        """
        newest = {one.line: one for one in self.held.values() if one.line}
        if self.current is not None:
            newest[""] = self.current
        self.held = {}
        self._uses.clear()
        for adapter in newest.values():
            try:
                await self.serve(client, adapter, seconds)
            except UnfitAdapterError as error:
                raise EngineFailedError(f"SGLang does not take {adapter.name}: {error}") from error

    def close(self) -> None:
        """Removes what was written for SGLang."""
        with contextlib.suppress(OSError):
            self.folders.close()
