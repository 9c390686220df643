"""The reference backend: one transformers model per rank, data-parallel over ranks.

Its optimizer is AdamW over one flat gradient buffer: reduced, clipped and applied once a step.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from services.trainer.backend import (
    Mesh,
    MicroBatch,
    ModelName,
    PassSums,
    StepOutcome,
    TrainingBackend,
)
from services.trainer.backends.reference.model import ScoredModel, split_rows
from services.trainer.config import OptimConfig, TrainerConfig, VisionConfig
from services.trainer.staging import LiveTensors, StagedCheckpoint
from sluice import platform
from sluice.algo.collectives import create_collectives
from sluice.algo.logprobs import EntropyMode
from sluice.algo.losses import compute_loss, pack_rows
from sluice.algo.spec import LossSpec
from sluice.imports import uncompiled
from sluice.vision import Features, part_of
from sluice.weights.manifest import FileEntry, ShardFile
from sluice.weights.shards import PublishedShards, ShardWrite, write_shard

with uncompiled():
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

NON_FINITE = "non-finite gradient norm"
CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_
MODEL_FILE, OPTIMIZER_FILE = "policy.safetensors", "optimizer.safetensors"
SHARD_BYTES = 64 << 20  # of a published file, which engines take as soon as it is written
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class ReferenceBackend(TrainingBackend):
    """float32 parameters, gradients and AdamW state; optional bfloat16 matrix products.

    Models run without dropout: log-probs are then the same whenever they are computed.
    """

    def __init__(self, config: TrainerConfig, mesh: Mesh) -> None:
        self.mesh = mesh
        self._config = config
        self._platform = platform.current()
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._platform.set_device(local_rank)
        self._device = self._platform.device(local_rank)
        self._platform.seed_all(config.seed)
        self._policy = ScoredModel.load(
            config.model, self._device, config.head, float32_head=config.float32_head
        )
        self._reference: ScoredModel | None = None
        self._optimizer = FlatOptimizer(self._policy.model, config.optim, config.vision)
        world = dist.group.WORLD if mesh.world_size > 1 else None
        self._ranks = create_collectives(world, config.ranks.check_timeout) if world else None

    @torch.no_grad()
    def compute_logprobs(
        self, micro_batches: Sequence[MicroBatch], *, model: ModelName, temperature: float
    ) -> dict[str, torch.Tensor]:
        scored = self._policy if model == "policy" else self._load_reference()
        logprobs: dict[str, torch.Tensor] = {}
        for rows, features in self._passes(micro_batches, scored):
            with self._precision():
                logprobs_T, _ = scored.score(rows, features, temperature=temperature, entropy="off")
            parts = logprobs_T.float().cpu().split([row.response_length for row in rows])
            logprobs.update((row.sample_id, part) for row, part in zip(rows, parts, strict=True))
        return logprobs

    @torch.no_grad()
    def compute_values(self, micro_batches: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
        values: dict[str, torch.Tensor] = {}
        for rows, features in self._passes(micro_batches, self._policy):
            with self._precision():
                values_T = self._policy.value(rows, features).cpu()
            parts = values_T.split([row.response_length for row in rows])
            values.update((row.sample_id, part) for row, part in zip(rows, parts, strict=True))
        return values

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss: LossSpec) -> PassSums:
        total, tokens = 0.0, 0
        sums: dict[str, tuple[float, float]] = {}
        for rows, features in self._passes(micro_batches, self._policy):
            outputs_T, entropy_T = self._run(rows, features, loss)
            terms = compute_loss(pack_rows(rows, loss, outputs_T, entropy_T), loss)
            terms.loss.backward()
            total += terms.loss.item()
            tokens += int(terms.token_count.item())
            for name, (value, weight) in terms.metrics.items():
                had = sums.get(name, (0.0, 0.0))
                sums[name] = (had[0] + value.item(), had[1] + weight.item())
        return PassSums(loss=total, token_count=tokens, metrics=sums)

    def step(self, *, normalizer: float, learning_rate: float | None) -> StepOutcome:
        rate = self._config.optim.learning_rate if learning_rate is None else learning_rate
        return self._optimizer.step(normalizer, rate, self._reduce)

    def discard_gradients(self) -> None:
        self._optimizer.clear()

    def stage_checkpoint(self, directory: Path) -> StagedCheckpoint:
        files = _checkpoint_files(self._policy.model, self._optimizer, self.mesh)
        return StagedFiles(directory, files, sync=self._config.durable)

    def load_checkpoint(self, directory: Path) -> None:
        _load(directory, self._policy.model, self._optimizer, self.mesh)

    def write_shards(self, directory: Path, write: ShardWrite | None = None) -> list[ShardFile]:
        dtype = getattr(torch, self._config.publish_dtype)
        write = write or PublishedShards(keep=False, sync=self._config.durable).submit
        return _write_shards(directory, self._policy.model, self.mesh, dtype, write)

    def close(self) -> None:
        self._reference = None

    def _passes(
        self, micro_batches: Sequence[MicroBatch], scored: ScoredModel
    ) -> Iterator[tuple[MicroBatch, Features]]:
        """Micro-batches fill an accelerator; a processor is filled by less, within less memory.

        The tower runs once over the images of a micro-batch, and backward behind its last pass.
        """
        for rows in micro_batches:
            if not rows:
                continue
            with self._precision():
                features = scored.see(rows)
            leaves = features.cut()
            for part in split_rows(rows) if self._device.type == "cpu" else [rows]:
                yield part, leaves
            features.backward(leaves)

    def _run(
        self, rows: MicroBatch, features: Features, loss: LossSpec
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs and entropy, or values and none, float32[R]."""
        entropy: EntropyMode = "gradient" if loss.has_entropy_gradient else "metric"
        options: Any = {"temperature": loss.temperature or 1.0, "entropy": entropy}
        with self._precision():
            if loss.loss.head == "value":
                return self._policy.value(rows, features), None
            return self._policy.score(rows, features, **options)

    def _reduce(self, gradients: torch.Tensor) -> None:
        if self._ranks is not None:
            self._ranks.all_reduce(gradients, "sum")
            self._ranks.end_step()

    def _load_reference(self) -> ScoredModel:
        """The frozen model, loaded on its first use."""
        if self._reference is None:
            path = self._config.reference_model or self._config.model
            self._reference = ScoredModel.load(
                path, self._device, float32_head=self._config.float32_head
            )
            self._reference.model.requires_grad_(False)
        return self._reference

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._config.autocast):
            yield


class FlatOptimizer:
    """Parameters whose gradients are views of one float32 buffer.

    Backward passes add into the buffer; `step` is the only place that divides. Parameters of parts
    that `vision` freezes take no gradients from then on.
    """

    def __init__(
        self, model: torch.nn.Module, optim: OptimConfig, vision: VisionConfig | None = None
    ) -> None:
        scales = (vision or VisionConfig()).scales(optim.learning_rate)
        self._max_norm = optim.max_grad_norm
        for name, parameter in model.named_parameters():
            if not scales[part_of(name)]:
                parameter.requires_grad_(False)
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        first = next(iter(self.parameters.values()))
        size = sum(p.numel() for p in self.parameters.values())
        self.gradients = torch.zeros(size, dtype=first.dtype, device=first.device)
        offset = 0
        for parameter in self.parameters.values():
            view = self.gradients[offset : offset + parameter.numel()]
            parameter.grad = view.view_as(parameter)
            offset += parameter.numel()
        groups: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
        for name, parameter in self.parameters.items():
            decay = optim.weight_decay if parameter.ndim > 1 else 0.0
            groups.setdefault((decay, scales[part_of(name)]), []).append(parameter)
        self.adam = torch.optim.AdamW(
            [
                {"params": parameters, "weight_decay": decay, "scale": scale}
                for (decay, scale), parameters in groups.items()
            ],
            lr=optim.learning_rate,
            betas=optim.betas,
            eps=optim.epsilon,
            fused=True if first.device.type == "cpu" else None,  # elsewhere torch chooses
        )

    def step(
        self, normalizer: float, rate: float, reduce: Callable[[torch.Tensor], None]
    ) -> StepOutcome:
        """Sum gradients over ranks with `reduce`, divide, clip, apply, clear."""
        reduce(self.gradients)
        total = torch.linalg.vector_norm(self.gradients, dtype=torch.float64).item()
        norm = total / normalizer
        if not math.isfinite(norm):
            self.clear()
            return StepOutcome(grad_norm=norm, learning_rate=rate, skipped_reason=NON_FINITE)
        clip = min(1.0, self._max_norm / (norm + CLIP_EPSILON)) if self._max_norm else 1.0
        self.gradients.mul_(clip / normalizer)
        for group in self.adam.param_groups:
            group["lr"] = rate * group["scale"]
        self.adam.step()
        self.clear()
        return StepOutcome(grad_norm=norm, learning_rate=rate)

    def clear(self) -> None:
        self.gradients.zero_()


def _checkpoint_files(
    model: torch.nn.Module, optimizer: FlatOptimizer, mesh: Mesh
) -> dict[str, Mapping[str, torch.Tensor]]:
    """Model, optimizer and random state; the first and the last rank share the writing."""
    files: dict[str, Mapping[str, torch.Tensor]] = {
        _random_name(mesh): {"torch": torch.get_rng_state()}
    }
    if mesh.data_rank == 0:
        files[MODEL_FILE] = _model_tensors(model)
    if mesh.data_rank == mesh.data_size - 1:
        files[OPTIMIZER_FILE] = _optimizer_tensors(optimizer)
    return files


class StagedFiles(StagedCheckpoint):
    """Files of tensors; those of the reference backend's ranks need nothing of each other."""

    def __init__(
        self, directory: Path, files: Mapping[str, Mapping[str, torch.Tensor]], *, sync: bool
    ) -> None:
        self._directory, self._sync = directory, sync
        self._files = {name: LiveTensors(tensors) for name, tensors in files.items()}

    def write(self) -> dict[str, FileEntry]:
        entries = {}
        for name, tensors in self._files.items():
            shard = write_shard(self._directory, name, tensors, sync=self._sync)
            entries[name] = FileEntry(shard.size, shard.digest)
        return entries

    def keep(self) -> None:
        for tensors in self._files.values():
            tensors.keep()


def _load(directory: Path, model: torch.nn.Module, optimizer: FlatOptimizer, mesh: Mesh) -> None:
    """What `save` wrote, under any count of ranks.

    Raises ValueError for another model's or a damaged one; the state is then undefined.
    """
    own = _model_tensors(model)
    with _open(directory / MODEL_FILE) as saved, torch.no_grad():
        if different := sorted(set(saved.keys()) ^ own.keys()):
            named = ", ".join(different[:8])
            raise ValueError(f"the checkpoint is of another model, they differ in: {named}")
        for name, tensor in own.items():
            tensor.copy_(saved.get_tensor(name))
    with _open(directory / OPTIMIZER_FILE) as moments:
        stepped = set(moments.keys())
        for name, parameter in optimizer.parameters.items():
            if f"{name}/step" not in stepped:
                optimizer.adam.state.pop(parameter, None)
                continue
            state = optimizer.adam.state[parameter]
            for kind in MOMENTS:  # in place: a second copy would be twice the model
                read = moments.get_tensor(f"{name}/{kind}")
                if kind in state:
                    state[kind].copy_(read)
                else:
                    state[kind] = read.to(parameter.device, copy=True)
    optimizer.clear()
    random = directory / _random_name(mesh)
    if random.exists():
        with _open(random) as states:
            torch.set_rng_state(states.get_tensor("torch"))


def _write_shards(
    directory: Path, model: PreTrainedModel, mesh: Mesh, dtype: torch.dtype, write: ShardWrite
) -> list[ShardFile]:
    """This rank's share of the tensors, as HF names them, in files of about SHARD_BYTES.

    Buffers, such as the biases of routers that choose experts, keep their dtype.
    """
    share = _share(_published_tensors(model), mesh)
    buffers = {name for name, _ in model.named_buffers()}
    casts = {
        name: dtype
        for name, tensor in share.items()
        if tensor.is_floating_point() and name not in buffers
    }
    stem = f"model-{mesh.data_rank + 1:05d}-of-{mesh.data_size:05d}"
    pending = [
        write(directory, f"{stem}-{i:05d}.safetensors" if i else f"{stem}.safetensors", p, casts)
        for i, p in enumerate(_parts(share, casts))
    ]
    return [wait() for wait in pending]


def _parts(
    share: Mapping[str, torch.Tensor], casts: Mapping[str, torch.dtype]
) -> Iterator[dict[str, torch.Tensor]]:
    """Cut a share into parts of at most SHARD_BYTES, but for tensors that are larger."""
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in share.items():
        nbytes = tensor.numel() * casts.get(name, tensor.dtype).itemsize
        size += nbytes
        if part and size > SHARD_BYTES:
            yield part
            part, size = {}, nbytes
        part[name] = tensor
    if part:
        yield part


def _published_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and buffers under the names of the original checkpoint; tied ones once."""
    reverted: dict[str, torch.Tensor] = revert_weight_conversion(model, _model_tensors(model))
    return reverted


def _model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; tied ones once."""
    seen: set[int] = set()
    found = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            found[name] = tensor
    return found


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Open a file of tensors, which are read one by one. Raises ValueError for a damaged one."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path.name} is damaged: {error}") from error


def _optimizer_tensors(optimizer: FlatOptimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{kind}": optimizer.adam.state[parameter][kind]
        for name, parameter in optimizer.parameters.items()
        if parameter in optimizer.adam.state
        for kind in MOMENTS
    }


def _share(tensors: Mapping[str, torch.Tensor], mesh: Mesh) -> dict[str, torch.Tensor]:
    """Tensors of this rank: the largest first, each to the rank with the least so far."""
    loads = [0] * mesh.data_size
    share = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].numel(), name)):
        rank = loads.index(min(loads))
        loads[rank] += tensors[name].numel()
        if rank == mesh.data_rank:
            share[name] = tensors[name]
    return share


def _random_name(mesh: Mesh) -> str:
    return f"random-{mesh.rank:05d}.safetensors"
