"""The reference backend: one transformers model per rank, data-parallel over ranks.

Its optimizer goes by one flat gradient buffer: reduced, clipped and applied once a step.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.trainer.backend import (
    Mesh,
    MicroBatch,
    ModelName,
    PassSums,
    StepOutcome,
    TrainingBackend,
)
from services.trainer.backends import lora, replica
from services.trainer.backends.expert_load import load_metrics, watch_biases, watch_experts
from services.trainer.backends.expert_losses import count_tokens, trained, watch_logits
from services.trainer.backends.muon import hidden_matrices
from services.trainer.backends.packing import DUMMY, NOTHING, PassInputs, split_rows
from services.trainer.backends.quantized_passes import simulate_experts
from services.trainer.backends.reference.model import ScoredModel
from services.trainer.backends.replay import PackReplay, replayed
from services.trainer.backends.replica import FlatOptimizer
from services.trainer.backends.sums import SumsOnDevice, by_sample, pass_sums
from services.trainer.backends.trainable import frozen_parameters
from services.trainer.backends.untrained import untrained_names, untrained_tensors
from services.trainer.config import Head, LoraConfig, OptimConfig, TrainerConfig
from services.trainer.parking import HeldTensors
from services.trainer.staging import StagedCheckpoint
from sluice import platform
from sluice.algo.collectives import create_collectives
from sluice.algo.logprobs import EntropyMode, TopLogprobs
from sluice.algo.losses import compute_loss, pack_columns, pack_named
from sluice.algo.spec import LossSpec
from sluice.imports import uncompiled
from sluice.side_copies import Uploads, to_device
from sluice.vision import Features
from sluice.weights.manifest import ShardFile
from sluice.weights.shards import PublishedShards, ShardWrite

with uncompiled():
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

SHARD_BYTES = 64 << 20  # of a published file, which engines take as soon as it is written


class ReferenceBackend(TrainingBackend):
    """float32 parameters, gradients and optimizer state; optional bfloat16 matrix products.

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
        self._uploads = Uploads(self._device)
        self._policy = self._load(config.model, config.head)
        if (simulated := config.publish.simulated) is not None:
            simulate_experts(self._policy.model, simulated)
        self._expert_load = watch_experts(self._policy.model, self._device)
        if config.experts.bias_update_rate:
            watch_biases(self._expert_load, self._policy.model)
        self._expert_losses = watch_logits(config.experts, self._policy.model, self._expert_load)
        self.operations = self._policy.operations
        self._reference: ScoredModel | None = None
        self._reference_directory = ""  # of the settings
        self._untrained: tuple[str, ...] | None = None  # of the source, once they were asked for
        world = dist.group.WORLD if mesh.world_size > 1 else None
        self._ranks = create_collectives(world, config.ranks.check_timeout) if world else None
        adamw = self.operations["adamw"]
        self._lora = lora.training(
            self._policy.model, config, mesh, self._ranks, self._device, adamw
        )
        self._replay = self._create_replay()
        self.meets_in_passes = self._replay is not None or self._expert_losses is not None
        self._whole: FlatOptimizer | None = None  # of the model itself
        if self._lora is None:
            frozen = frozen_parameters(config, self._policy.model)
            parameters = dict(self._policy.model.named_parameters())
            for name in frozen:
                parameters[name].requires_grad_(False)
            scales = config.vision.scales(config.optim.learning_rate)
            matrices = hidden_matrices(self._policy.model, config.optim)
            self._whole = FlatOptimizer(
                parameters, config.optim, adamw=adamw, scales=scales, matrices=matrices
            )

    @torch.no_grad()
    def compute_logprobs(
        self, micro_batches: Sequence[MicroBatch], *, model: ModelName, temperature: float
    ) -> dict[str, torch.Tensor]:
        found: list[tuple[MicroBatch, torch.Tensor]] = []
        with self._scorer(model) as scored, self._replayed(model, micro_batches) as replay:
            for rows, features, inputs in self._passes(micro_batches, scored, replay=replay):
                with self._precision():
                    logprobs_T, _ = scored.score(
                        inputs.layout, features, temperature=temperature, entropy="off"
                    )
                found.append((rows, logprobs_T.float()))
        return by_sample(found)

    @torch.no_grad()
    def compute_top_logprobs(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        model: ModelName,
        temperature: float,
        count: int,
    ) -> dict[str, TopLogprobs]:
        found: dict[str, TopLogprobs] = {}
        with self._scorer(model) as scored, self._replayed(model, micro_batches) as replay:
            for rows, features, inputs in self._passes(micro_batches, scored, replay=replay):
                with self._precision():
                    named = scored.name(
                        inputs.layout, features, temperature=temperature, count=count
                    )
                parts = named.split([row.response_length for row in rows])
                found.update((row.sample_id, part) for row, part in zip(rows, parts, strict=True))
        return found

    def use_reference(self, directory: str) -> None:
        if directory != self._reference_directory:
            self._reference_directory = directory
            self._reference = None

    @torch.no_grad()
    def compute_values(self, micro_batches: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
        found: list[tuple[MicroBatch, torch.Tensor]] = []
        with self._replayed("policy", micro_batches) as replay:
            for rows, features, inputs in self._passes(micro_batches, self._policy, replay=replay):
                with self._precision():
                    found.append((rows, self._policy.value(inputs.layout, features)))
        return by_sample(found)

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: LossSpec,
        *,
        keep_outputs: bool = False,
        normalizer: float = 1.0,
    ) -> PassSums:
        with replayed(self._replay, "train", micro_batches) as replay:
            self._begin_losses(micro_batches, normalizer, replay)
            return self._train(micro_batches, loss, replay, keep_outputs=keep_outputs)

    def _train(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: LossSpec,
        replay: PackReplay | None,
        *,
        keep_outputs: bool,
    ) -> PassSums:
        sums, kept = SumsOnDevice(), list[tuple[MicroBatch, torch.Tensor]]()
        for rows, features, inputs in self._passes(micro_batches, self._policy, loss, replay):
            assert inputs.columns is not None
            multiplicity = inputs.layout.multiplicity
            with trained(self._expert_losses, multiplicity):
                with self._expert_load.counting(multiplicity):
                    outputs_T, entropy_T = self._run(inputs, features, loss)
                read = inputs.columns.inputs(loss, outputs_T, entropy_T)
                terms = compute_loss(read, loss)
                if terms.loss.requires_grad:  # rows may pass by all that is trained: text, a tower
                    terms.loss.backward()
            sums.add_terms(terms)
            if keep_outputs:
                kept.append((rows, read.outputs.detach().float()))
        return pass_sums(sums.read(), by_sample(kept))

    @torch.no_grad()
    def _begin_losses(
        self, micro_batches: Sequence[MicroBatch], normalizer: float, replay: PackReplay | None
    ) -> None:
        if (losses := self._expert_losses) is None:
            return
        if losses.start_counting():
            for _, features, inputs in self._passes(micro_batches, self._policy, replay=replay):
                with losses.counts.counting(inputs.layout.multiplicity), self._precision():
                    self._policy.run(inputs.layout, features)
        losses.begin(self._ranks, count_tokens(micro_batches), normalizer)

    def step(
        self, *, normalizer: float, learning_rate: float | None, optim: OptimConfig | None = None
    ) -> StepOutcome:
        rate = self._config.optim.learning_rate if learning_rate is None else learning_rate
        if self._replay is not None:
            self._replay.step()
        counts = self._expert_load.take(self._ranks)
        losses = self._expert_load.take_losses(self._ranks)
        outcome = self._optimizer.step(normalizer, rate, self._reduce, optim=optim)
        if not outcome.skipped_reason:
            self._expert_load.even_out(counts, self._config.experts.bias_update_rate)
        return replace(outcome, metrics=load_metrics(counts) | losses)

    @property
    def _optimizer(self) -> FlatOptimizer:
        """Of what passes train now."""
        if self._lora is not None:
            return self._lora.used.optimizer
        assert self._whole is not None
        return self._whole

    def discard_gradients(self) -> None:
        self._optimizer.clear()
        self._expert_load.clear()

    def stage_checkpoint(self, directory: Path) -> StagedCheckpoint:
        sync = self._config.durable
        if self._lora is not None:
            return self._lora.used.stage(directory, sync=sync)
        tensors, state = _model_tensors(self._policy.model), self._optimizer.state()
        return replica.stage(directory, tensors, state, self.mesh, sync=sync)

    def load_checkpoint(self, directory: Path, *, weights_only: bool = False) -> None:
        self._expert_load.clear()
        if self._lora is not None:
            self._lora.used.load(directory, weights_only=weights_only)
            return
        lora.refuse_checkpoint(directory)
        replica.load(directory, _model_tensors(self._policy.model), self._optimizer, self.mesh)

    def write_shards(self, directory: Path, write: ShardWrite | None = None) -> list[ShardFile]:
        dtype = getattr(torch, self._config.publish_dtype)
        write = write or PublishedShards(keep=False, sync=self._config.durable).submit
        if self._lora is not None:
            return self._lora.used.write(directory, write, dtype)
        published = _published_tensors(self._policy.model)
        files = _write_shards(directory, published, self._policy.model, self.mesh, dtype, write)
        if self._config.head != "policy":
            return files
        source, mesh = Path(self._config.model), self.mesh
        if self._untrained is None:
            self._untrained = untrained_names(source, published)
        untrained = untrained_tensors(
            source, self._untrained, rank=mesh.data_rank, world_size=mesh.data_size
        )
        return files + _write_untrained(directory, untrained, mesh, write)

    def create_adapter(self, name: str, settings: LoraConfig, seed: int | None = None) -> None:
        assert self._lora is not None
        self._lora.create(name, settings, seed)

    def delete_adapter(self, name: str) -> None:
        assert self._lora is not None
        self._lora.delete(name)
        if self._replay is not None:
            self._replay.forget(name)

    def use_adapter(self, name: str) -> None:
        if self._lora is not None:
            self._lora.use(name)
            if self._replay is not None:
                self._replay.use(name)
        self._expert_load.use(name)

    def held_tensors(self) -> HeldTensors:
        model = self._policy.model
        owner = self._optimizer if self._lora is None else self._lora
        return owner.held([*model.parameters(), *model.buffers()])

    def release_spare(self) -> None:
        self._reference = None

    def close(self) -> None:
        self._reference = None

    @contextlib.contextmanager
    def _scorer(self, model: ModelName) -> Iterator[ScoredModel]:
        """The model that is asked for; where there are adapters, the reference is without them."""
        if model == "policy":
            yield self._policy
        elif self._lora is None:
            yield self._load_reference()
        else:
            with self._lora.used.adapters.off():
                yield self._policy

    def _passes(
        self,
        micro_batches: Sequence[MicroBatch],
        scored: ScoredModel,
        loss: LossSpec | None = None,
        replay: PackReplay | None = None,
    ) -> Iterator[tuple[MicroBatch, Features, PassInputs]]:
        """Micro-batches fill an accelerator; a processor is filled by less, within less memory.

        What the next pass computes with is on its way beside the one that runs. The tower runs
        once over the images of a micro-batch, and backward behind its last pass.
        """
        sees = scored.tower is not None
        for run in [[rows] for rows in micro_batches] if sees else [micro_batches]:
            rows = [row for each in run for row in each]
            if not rows:
                continue
            with self._precision():
                features = scored.see(rows)
            leaves = features.cut()

            def make(part: MicroBatch, seen: Features = leaves) -> PassInputs:
                columns = None if loss is None else pack_columns(part, loss)
                named = None if loss is None else pack_named(part, loss)
                experts = None if replay is None else replay.experts_of(part)
                layout = scored.pack(part, seen, experts)
                placed = None if replay is None else replay.place(experts, layout)
                return PassInputs(layout, columns, named, experts=placed)

            parts = (part for each in run if each for part in self._cut(each))
            for part, inputs in self._uploads.ahead(parts, make):
                if replay is not None:
                    replay.before(inputs.experts)
                yield part, leaves, inputs
                if replay is not None:
                    replay.after(part, inputs.layout)
            features.backward(leaves)

    def _cut(self, rows: MicroBatch) -> Iterable[MicroBatch]:
        return split_rows(rows) if self._device.type == "cpu" else [rows]

    def _run(
        self, inputs: PassInputs, features: Features, loss: LossSpec
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs and entropy, or values and none, float32[R]; see `ScoredModel.score`."""
        entropy: EntropyMode = "gradient" if loss.has_entropy_gradient else "metric"
        options: Any = {"temperature": loss.temperature or 1.0, "entropy": entropy}
        with self._precision():
            if loss.loss.head == "value":
                return self._policy.value(inputs.layout, features), None
            return self._policy.score(inputs.layout, features, named_RK=inputs.named, **options)

    def _reduce(self, gradients: torch.Tensor) -> None:
        if self._ranks is not None:
            self._ranks.all_reduce(gradients, "sum")
            self._ranks.end_step()

    def _create_replay(self) -> PackReplay | None:
        mode = self._config.reference.routing_replay
        if mode == "off":
            return None
        scored, over = self._policy, dict[str, Any](ranks=self._ranks, device=self._device)
        replay = PackReplay(mode, scored.model, setting="reference.routing_replay", **over)
        with torch.no_grad(), self._precision():  # a first pass tells what routers choose among
            scored.run(to_device(scored.pack([DUMMY], NOTHING), self._device), NOTHING)
        replay.check()
        return replay

    def _replayed(
        self, model: ModelName, micro_batches: Sequence[MicroBatch]
    ) -> contextlib.AbstractContextManager[PackReplay | None]:
        """What scoring passes go by: the reference chooses for itself."""
        return replayed(self._replay if model == "policy" else None, "score", micro_batches)

    def _load_reference(self) -> ScoredModel:
        """The frozen model, loaded on its first use."""
        if self._reference is None:
            config = self._config
            path = self._reference_directory or config.reference_model or config.model
            self._reference = self._load(path)
            self._reference.model.requires_grad_(False)
        return self._reference

    def _load(self, path: str, head: Head = "policy") -> ScoredModel:
        return ScoredModel.load(
            path,
            self._device,
            head,
            float32_head=self._config.float32_head,
            asked=self._config.operations,
            dtype="bfloat16" if self._config.autocast else "float32",
            longest=self._config.longest_row,
        )

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._config.autocast):
            yield


def _write_shards(
    directory: Path,
    published: Mapping[str, torch.Tensor],
    model: PreTrainedModel,
    mesh: Mesh,
    dtype: torch.dtype,
    write: ShardWrite,
) -> list[ShardFile]:
    """This rank's share of the tensors, as HF names them, in files of about SHARD_BYTES.

    Buffers, such as the biases of routers that choose experts, keep their dtype.
    """
    share = _share(published, mesh)
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


def _write_untrained(
    directory: Path, made: Iterator[dict[str, torch.Tensor]], mesh: Mesh, write: ShardWrite
) -> list[ShardFile]:
    """Write tensors as they come, in files of about SHARD_BYTES."""
    files: list[ShardFile] = []
    waiting: dict[str, torch.Tensor] = {}

    def flush() -> None:
        name = f"untrained-{mesh.data_rank + 1:05d}-{len(files):05d}.safetensors"
        files.append(write(directory, name, dict(waiting), {})())
        waiting.clear()

    for part in made:
        waiting.update(part)
        if sum(tensor.nbytes for tensor in waiting.values()) >= SHARD_BYTES:
            flush()
    if waiting:
        flush()
    return files


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
