"""LoRA adapters beside a model whose own weights stay as they were loaded, bit for bit.

They lie outside of the model: its modules, names and tensors are those without them. A linear layer
that has one adds alpha / rank * B A x to what it gives (arXiv 2106.09685). With adapters off, the
model is its base. Several are on one model by name, and passes are of the one that is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
import torch.distributed as dist
import xxhash
from torch.nn.functional import linear

from services.trainer.backend import Mesh, StepOutcome
from services.trainer.backends import replica
from services.trainer.backends.replica import FlatOptimizer, StagedFiles, norm_of
from services.trainer.backends.sparse import INDEXER
from services.trainer.config import LoraConfig, OptimConfig, TrainerConfig
from services.trainer.parking import HeldTensors
from sluice.algo.collectives import Collectives
from sluice.weights.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    AdapterSpec,
    decode_adapter_config,
    encode_adapter_config,
    matched_layers,
    split_name,
    tensor_names,
)
from sluice.weights.checkpoint import describe_shard, digest_base, verify_files
from sluice.weights.errors import InvalidAdapterError, WeightStoreError
from sluice.weights.manifest import MANIFEST_NAME, ShardFile, read_manifest
from sluice.weights.shards import ShardWrite

EXPERT_LAYERS = {  # as checkpoints name them
    *("down_proj", "gate_proj", "gate_up_proj", "up_proj"),
    *("w1", "w2", "w3"),
}


@dataclass(frozen=True)
class Adapter:
    """Of one linear layer: float32 `a` [rank, in] and `b` [out, rank]."""

    a: torch.nn.Parameter
    b: torch.nn.Parameter

    def __call__(self, inputs: torch.Tensor, scale: float) -> torch.Tensor:
        """[..., in] to [..., out], in the dtype of the inputs or of autocast."""
        low = linear(inputs, self.a.to(inputs.dtype))
        return linear(low, self.b.to(low.dtype)) * scale


Adapted = Callable[[Adapter, torch.Tensor, torch.Tensor, float], torch.Tensor]


def adapted(
    adapter: Adapter, inputs: torch.Tensor, output: torch.Tensor, scale: float
) -> torch.Tensor:
    """The output of a layer with what its adapter adds to it."""
    return output + adapter(inputs, scale)


class Adapters:
    """The adapters of a model by the names of their layers; `parameters` have peft's names."""

    def __init__(
        self, spec: AdapterSpec, *, seed: int, start: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """start: whole factors by peft's names, as of `read_start`; None draws them by `seed`."""
        self.spec, self._seed, self._start = spec, seed, start
        self.layers: dict[str, Adapter] = {}
        self.are_on = True

    def check_layers(self, matched: Collection[str]) -> None:
        """Raise InvalidAdapterError unless `start` is of all layers that are targets."""
        if self._start is None:
            return
        found = {split_name(name)[0] for name in self._start}
        if missing := sorted(set(matched) - found):
            raise InvalidAdapterError(f"lora.start has no adapter of layer {missing[0]!r}")
        if others := sorted(found - set(matched)):
            raise InvalidAdapterError(f"lora.start has layer {others[0]!r}, which is no target")

    def draw(self, layer: str, width: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whole first factors of a layer of `width` (in, out), on the CPU.

        B is zero, so that it adds nothing, and A is drawn as peft and torch's linear layers do, by
        seed and name: the same whatever else there is, and on all ranks. Where there is a
        `start` they are its. Raises InvalidAdapterError where that has other shapes.
        """
        inside, outside = width
        if self._start is not None:
            return self._started(layer, inside, outside)
        drawn = xxhash.xxh3_64_intdigest(f"{self._seed}/{layer}".encode()) >> 1
        generator = torch.Generator().manual_seed(drawn)
        bound = inside**-0.5
        a = torch.empty(self.spec.rank, inside).uniform_(-bound, bound, generator=generator)
        return a, torch.zeros(outside, self.spec.rank)

    def _started(self, layer: str, inside: int, outside: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._start is not None
        a, b = (self._start[name].clone() for name in tensor_names(layer))
        if (a.shape[1], b.shape[0]) != (inside, outside):
            raise InvalidAdapterError(
                f"lora.start: layer {layer!r} has {a.shape[1]} inputs and {b.shape[0]} outputs, "
                f"not {inside} and {outside}"
            )
        return a, b

    def add(self, layer: str, a: torch.Tensor, b: torch.Tensor) -> Adapter:
        """Make the adapter of a layer, of what this rank has of its factors."""
        adapter = self.layers[layer] = Adapter(torch.nn.Parameter(a), torch.nn.Parameter(b))
        return adapter

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return {
            name: parameter
            for layer, adapter in self.layers.items()
            for name, parameter in zip(tensor_names(layer), (adapter.a, adapter.b), strict=True)
        }

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model is its base meanwhile."""
        were, self.are_on = self.are_on, False
        try:
            yield
        finally:
            self.are_on = were


class AdaptableLayers:
    """The linear layers of a frozen transformers model, which add what the adapters in use give.

    A layer has one hook, however many adapters there are.
    """

    def __init__(self, model: Any, device: torch.device, adapted: Adapted = adapted) -> None:
        """`adapted`: how the output of a layer comes by what its adapter adds."""
        model.requires_grad_(False)
        head = model.get_output_embeddings()
        self._layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head and INDEXER not in name
        }
        self._model, self._device, self._adapted = model, device, adapted
        self._hooked: set[str] = set()
        self.used: Adapters | None = None

    def attach(self, adapters: Adapters) -> None:
        """Give adapters their layers, which take part while they are in use.

        Raises InvalidAdapterError for targets that are not there.
        """
        targets = adapters.spec.targets
        _refuse_experts(self._model, targets)
        _refuse_fused(self._model, targets)
        matched = matched_layers(self._layers, targets)
        adapters.check_layers(matched)
        for layer in matched:
            module = self._layers[layer]
            drawn = adapters.draw(layer, (module.in_features, module.out_features))
            adapters.add(layer, *(factor.to(self._device) for factor in drawn))
            if layer not in self._hooked:
                module.register_forward_hook(partial(self._add, layer))
                self._hooked.add(layer)

    def _add(
        self, layer: str, _: Any, inputs: tuple[torch.Tensor], output: torch.Tensor
    ) -> torch.Tensor:
        used = self.used
        adapter = used.layers.get(layer) if used is not None and used.are_on else None
        if used is None or adapter is None:
            return output
        return self._adapted(adapter, inputs[0], output, used.spec.scale)


def begin(settings: LoraConfig, directory: Path, *, seed: int) -> Adapters:
    """Return adapters of the model in `directory`, which have no layers yet; collective.

    Raises InvalidAdapterError, or another WeightStoreError, also for the files of `start`.
    """
    spec = settings.spec(shared_digest(directory))
    start = None if settings.start is None else read_start(Path(settings.start), spec)
    return Adapters(spec, seed=seed, start=start)


def read_start(folder: Path, spec: AdapterSpec) -> dict[str, torch.Tensor]:
    """Read the adapter of a folder of peft, or of a published version, whole and as float32.

    Where the folder has a manifest, every byte is checked against it. Raises InvalidAdapterError
    unless it is of `spec`, whole and finite.
    """
    try:
        told = decode_adapter_config((folder / ADAPTER_CONFIG).read_bytes(), spec.base_digest)
        spec.check_same("it", told)
        if (folder / MANIFEST_NAME).is_file():
            verify_files(folder, read_manifest(folder))
        shard = describe_shard(folder / ADAPTER_FILE)
        data = (folder / ADAPTER_FILE).read_bytes()
        spec.check_tensors({name: (t.dtype, t.shape) for name, t in shard.tensors.items()})
    except (OSError, ValueError, WeightStoreError) as error:
        raise InvalidAdapterError(f"lora.start {str(folder)!r} is of no use: {error}") from error
    tensors = {name: tensor.float() for name, tensor in safetensors.torch.load(data).items()}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise InvalidAdapterError(f"lora.start: tensor {name!r} is not finite")
    return tensors


def _refuse_experts(model: Any, targets: Collection[str]) -> None:
    shared = sorted(set(targets) & EXPERT_LAYERS)
    if shared and any(name.endswith(".experts") for name, _ in model.named_modules()):
        raise InvalidAdapterError(
            f"lora.targets name {', '.join(map(repr, shared))}: layers of the model's experts too, "
            "which take no adapters here; name others"
        )


def _refuse_fused(model: Any, targets: Collection[str]) -> None:
    """Mamba's output layers: kernels take their weight and not what is added, as peft says too."""
    if "out_proj" in targets and any(
        hasattr(module, "out_proj") and hasattr(module, "A_log") and hasattr(module, "D")
        for module in model.modules()
    ):
        raise InvalidAdapterError(
            "lora.targets name 'out_proj': a layer of Mamba, whose kernels take its weight alone: "
            "peft refuses adapters of it; name others"
        )


def shared_digest(directory: Path) -> str:
    """Hash a base on the first rank, for all of them; collective. Raises InvalidAdapterError."""
    told = ["", ""]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            told[0] = digest_base(directory)
        except (WeightStoreError, OSError) as error:
            told[1] = str(error)
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0)
    digest, failure = told
    if failure:
        raise InvalidAdapterError(f"{directory.name!r} is no base of adapters: {failure}")
    return digest


class AdapterTraining:
    """Adapters that every rank has whole, their optimizer, and both in files.

    Passes add this rank's gradients; they are summed over ranks once a step, as one flat tensor.
    `is_writer`: this rank writes checkpoints and publications. `adamw`: the implementation of it.
    """

    def __init__(
        self,
        adapters: Adapters,
        optim: OptimConfig,
        mesh: Mesh,
        ranks: Collectives | None,
        *,
        is_writer: bool,
        adamw: str,
    ) -> None:
        self.adapters, self._mesh, self._ranks = adapters, mesh, ranks
        self.is_writer = is_writer
        self.optimizer = FlatOptimizer(adapters.parameters, optim, adamw=adamw)

    def step(self, normalizer: float, rate: float, optim: OptimConfig | None) -> StepOutcome:
        return self.optimizer.step(normalizer, rate, self.reduce, self.norm, optim)

    def clear(self) -> None:
        self.optimizer.clear()

    def reduce(self, gradients: torch.Tensor) -> None:
        """Sum over the ranks that had other rows."""
        if self._ranks is not None:
            self._ranks.all_reduce(gradients, "sum")
            self._ranks.end_step()

    def norm(self, gradients: torch.Tensor) -> float:
        """Return the norm of all adapters, of summed gradients."""
        return norm_of(gradients)

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return whole tensors of all layers for the writer, of what this rank has by name."""
        return tensors

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Cut what this rank has out of the whole tensor of that name."""
        del name
        return tensor

    def stage(self, directory: Path, *, sync: bool) -> StagedFiles:
        """Take in adapters, optimizer and what they are, to be written."""
        tensors = self.whole(self.adapters.parameters)
        state = self.whole(self.optimizer.state())
        files = replica.random_file(self._mesh)
        if not self.is_writer:
            return StagedFiles(directory, files, {}, sync=sync)
        files |= {replica.MODEL_FILE: tensors, replica.OPTIMIZER_FILE: state}
        small = {ADAPTER_CONFIG: encode_adapter_config(self.adapters.spec)}
        return StagedFiles(directory, files, small, sync=sync)

    def load(self, directory: Path, *, weights_only: bool = False) -> None:
        """Read what was staged, by any backend. Raises ValueError for others or another base."""
        check_checkpoint(directory, self.adapters.spec)
        replica.load(
            directory,
            self.adapters.parameters,
            self.optimizer,
            self._mesh,
            part=self.part,
            holds_all=False,
            weights_only=weights_only,
        )

    def write(self, directory: Path, write: ShardWrite, dtype: torch.dtype) -> list[ShardFile]:
        """Write the one file that peft and engines read, cast to `dtype`."""
        tensors = self.whole(self.adapters.parameters)
        if not self.is_writer:
            return []
        return [write(directory, ADAPTER_FILE, tensors, dict.fromkeys(tensors, dtype))()]


class AdaptedModel(Protocol):
    """A frozen model whose layers add what the adapters in use give; None and it is its base."""

    used: Adapters | None


class TrainedAdapters:
    """The adapters of a model by name, each trained by itself.

    That of the settings has no name. What any of them costs is its own tensors: the base is one.
    """

    def __init__(
        self,
        model: AdaptedModel,
        settings: LoraConfig,
        config: TrainerConfig,
        start: Callable[[Adapters], AdapterTraining],
    ) -> None:
        """Begin the first adapter; collective. `start` gives adapters their layers of the model.

        Raises InvalidAdapterError, or another WeightStoreError.
        """
        self._model, self._seed, self._start = model, config.seed, start
        first = begin(settings, Path(config.model), seed=config.seed)
        self._base_digest = first.spec.base_digest
        self._trained = {"": start(first)}
        self.use("")

    def create(self, name: str, settings: LoraConfig, seed: int | None) -> None:
        """Begin another one, which is not in use. Raises InvalidAdapterError."""
        spec = settings.spec(self._base_digest)
        drawn = self._seed if seed is None else seed
        self._trained[name] = self._start(Adapters(spec, seed=drawn))

    def delete(self, name: str) -> None:
        """Forget one, if it is there."""
        assert name, "the adapter of the settings stays"
        self._trained.pop(name, None)
        self.use("")

    def use(self, name: str) -> None:
        """Have passes, steps and files be of this one."""
        self.used = self._trained[name]
        self._model.used = self.used.adapters

    def held(self, others: Iterable[torch.Tensor]) -> HeldTensors:
        """Return the tensors of all adapters and of their optimizers, and others beside them."""
        each = [training.optimizer.held(()) for training in self._trained.values()]
        return HeldTensors(
            [*others, *(tensor for held in each for tensor in held.state)],
            [tensor for held in each for tensor in held.gradients],
        )


def training(
    model: Any,
    config: TrainerConfig,
    mesh: Mesh,
    ranks: Collectives | None,
    device: torch.device,
    adamw: str,
    adapted: Adapted = adapted,
) -> TrainedAdapters | None:
    """Freeze a transformers model that all ranks hold, and begin adapters; collective.

    None where the configuration has no `lora`. Raises as `TrainedAdapters` does.
    """
    if config.lora is None:
        return None
    layers = AdaptableLayers(model, device, adapted)

    def start(adapters: Adapters) -> AdapterTraining:
        layers.attach(adapters)
        return AdapterTraining(
            adapters, config.optim, mesh, ranks, is_writer=mesh.rank == 0, adamw=adamw
        )

    return TrainedAdapters(layers, config.lora, config, start)


def check_checkpoint(directory: Path, spec: AdapterSpec) -> None:
    """Raise ValueError unless a checkpoint is of such adapters of the same base."""
    path = directory / ADAPTER_CONFIG
    if not path.is_file():
        raise ValueError(f"the checkpoint {directory.name!r} is of no adapters: leave lora out")
    try:
        saved = decode_adapter_config(path.read_bytes())
    except InvalidAdapterError as error:
        raise ValueError(f"the checkpoint {directory.name!r} is damaged: {error}") from error
    try:
        spec.check_same(f"the checkpoint {directory.name!r}", saved)
    except InvalidAdapterError as error:
        raise ValueError(str(error)) from error


def refuse_checkpoint(directory: Path) -> None:
    """Raise ValueError where a checkpoint is of adapters, and lora is not set."""
    if (directory / ADAPTER_CONFIG).exists():
        raise ValueError(f"the checkpoint {directory.name!r} is of adapters: set lora")
