"""The fsdp backend: one model cut over all ranks; those of a tensor or context group share rows.

Every rank runs the same passes: what a micro-batch is, and not what is in it, decides which
collectives run. A rank without rows runs a dummy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.trainer.backend import (
    Mesh,
    MicroBatch,
    ModelName,
    PassSums,
    Row,
    StepOutcome,
    TrainingBackend,
)
from services.trainer.backends import lora
from services.trainer.backends.expert_load import load_metrics, watch_biases, watch_experts
from services.trainer.backends.expert_losses import count_tokens, trained, watch_logits
from services.trainer.backends.families import check_replay
from services.trainer.backends.fsdp import checkpoint
from services.trainer.backends.fsdp.context import create_context, pack_context
from services.trainer.backends.fsdp.expert_parallel import check_spread, create_experts
from services.trainer.backends.fsdp.export import Export
from services.trainer.backends.fsdp.model import Asked, ShardedModel, load_model
from services.trainer.backends.fsdp.optimizer import ShardedOptimizer, local_part
from services.trainer.backends.fsdp.tensor_parallel import (
    TENSOR,
    TensorRanks,
    check_targets,
    create_mesh,
    unsharded,
)
from services.trainer.backends.muon import hidden_matrices
from services.trainer.backends.packing import (
    DUMMY,
    PackedLayout,
    PassInputs,
    images_of,
    pack,
)
from services.trainer.backends.quantized_passes import simulate_experts
from services.trainer.backends.replay import PackReplay, replayed
from services.trainer.backends.sums import SumsOnDevice, by_sample, pass_sums
from services.trainer.backends.trainable import frozen_parameters
from services.trainer.config import Head, LoraConfig, OptimConfig, TrainerConfig
from services.trainer.parking import HeldTensors
from services.trainer.staging import StagedCheckpoint
from sluice import platform
from sluice.algo.collectives import create_collectives
from sluice.algo.logprobs import EntropyMode, TopLogprobs
from sluice.algo.losses import check_columns, compute_loss, pack_columns, pack_named
from sluice.algo.spec import LossSpec, required_columns
from sluice.samples.sample import top_columns
from sluice.side_copies import Uploads
from sluice.vision import Features, Patches
from sluice.weights.manifest import ShardFile
from sluice.weights.shards import PublishedShards, ShardWrite


class FsdpBackend(TrainingBackend):
    """One rank. The default process group must exist; every method is collective.

    Models run without dropout: log-probs are then the same whenever they are computed.
    """

    def __init__(self, config: TrainerConfig, mesh: Mesh) -> None:
        self.mesh = mesh
        self._config = config
        current = platform.current()
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        current.set_device(local_rank)
        self._device = current.device(local_rank)
        if config.fsdp.cpu_offload and self._device.type == "cpu":
            raise ValueError("fsdp.cpu_offload needs an accelerator: there is none to offload from")
        current.seed_all(config.seed)
        self._uploads = Uploads(self._device)
        timeout = timedelta(seconds=config.ranks.command_timeout)
        replicas = config.fsdp.replicas
        self._cut_over = create_mesh(mesh, self._device.type, timeout, replicas)
        check = config.ranks.check_timeout
        world = dist.group.WORLD
        assert world is not None
        self._ranks = create_collectives(world, check)
        self._tensor: TensorRanks | None = None
        if mesh.tensor_size > 1:
            own = self._cut_over[TENSOR]
            self._tensor = TensorRanks(own, create_collectives(own.get_group(), check))
        self._context = create_context(mesh, config.ranks.check_timeout, timeout)
        self._experts = create_experts(mesh, self._device.type, timeout, config.fsdp, check)
        self._writers = dist.new_group(backend="gloo", timeout=timeout)  # of checkpoints
        self._policy = self._load(config.model, head=config.head)
        if self._experts is not None:
            check_spread(self._policy.model)
        if (simulated := config.publish.simulated) is not None:
            simulate_experts(self._policy.model, simulated, read=unsharded)
        self._expert_load = watch_experts(self._policy.model, self._device)
        if config.experts.bias_update_rate:
            watch_biases(self._expert_load, self._policy.model)
        self._expert_losses = watch_logits(config.experts, self._policy.model, self._expert_load)
        self._reference: ShardedModel | None = None
        self._reference_directory = ""  # of the settings
        self.operations = self._policy.operations
        adamw = self.operations["adamw"]
        if config.lora is not None:
            self._check_targets(config.lora)
        self._lora = lora.training(
            self._policy.model,
            config,
            mesh,
            self._ranks,
            self._device,
            adamw,
            adapted=lora.adapted if self._tensor is None else self._tensor.adapted,
        )
        if self._lora is None:
            parameters = self._policy.parameters()
            for name in frozen_parameters(config, self._policy.model):
                parameters[name].requires_grad_(False)
        self._replay = self._create_replay()
        self._start(self._policy)
        if self._replay is not None:
            self._replay.check()
        self._whole: ShardedOptimizer | None = None  # of the model itself
        if self._lora is None:
            parameters = self._policy.parameters()
            scales = config.vision.scales(config.optim.learning_rate)
            self._whole = ShardedOptimizer(
                parameters,
                config.optim,
                self._ranks,
                self._device,
                scales=scales,
                is_counted=self._policy.is_counted,
                adamw=adamw,
                matrices=hidden_matrices(self._policy.model, config.optim),
                mesh=self._policy.mesh,
            )
        dtype = getattr(torch, config.publish_dtype)
        source = Path(config.model) if config.head == "policy" else None
        self._export = Export(self._policy, dtype, source)

    def compute_logprobs(
        self, micro_batches: Sequence[MicroBatch], *, model: ModelName, temperature: float
    ) -> dict[str, torch.Tensor]:
        asked = Asked(temperature=temperature)
        with self._scorer(model) as scorer, self._replayed(model, micro_batches) as replay:
            return self._score(scorer, micro_batches, asked, replay)

    @torch.no_grad()
    def compute_top_logprobs(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        model: ModelName,
        temperature: float,
        count: int,
    ) -> dict[str, TopLogprobs]:
        asked = Asked(temperature=temperature, top_count=count)
        found: dict[str, TopLogprobs] = {}
        with self._scorer(model) as scorer, self._replayed(model, micro_batches) as replay:
            for rows, inputs in self._passes(scorer, micro_batches, replay=replay):
                named = scorer.root(inputs.layout, asked, inputs.patches)
                if rows:
                    parts = named.split([row.response_length for row in rows])
                    found.update((r.sample_id, part) for r, part in zip(rows, parts, strict=True))
            scorer.release()
        return found

    def use_reference(self, directory: str) -> None:
        if directory != self._reference_directory:
            self._reference_directory = directory
            self._reference = None

    def compute_values(self, micro_batches: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
        with self._replayed("policy", micro_batches) as replay:
            return self._score(self._policy, micro_batches, Asked(), replay)

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: LossSpec,
        *,
        keep_outputs: bool = False,
        normalizer: float = 1.0,
    ) -> PassSums:
        self._check_columns(micro_batches, loss)
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
        asked = _asked_of(loss)
        passes = self._passes(self._policy, micro_batches, loss, replay)
        for index, (rows, inputs) in enumerate(passes):
            is_last = index == len(micro_batches) - 1
            self._policy.root.set_requires_gradient_sync(
                is_last or self._config.fsdp.reduce == "micro_batch"
            )
            asked_here = replace(asked, named=inputs.named)
            counted = inputs.layout.multiplicity if rows else None
            with trained(self._expert_losses, counted):
                with self._expert_load.counting(counted):
                    outputs_T, entropy_T = self._policy.root(
                        inputs.layout, asked_here, inputs.patches
                    )
                if not rows:
                    (outputs_T.sum() * 0.0).backward()
                    continue
                assert inputs.columns is not None
                read = inputs.columns.inputs(loss, outputs_T, entropy_T)
                terms = compute_loss(read, loss)
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
            for rows, inputs in self._passes(self._policy, micro_batches, replay=replay):
                with losses.counts.counting(inputs.layout.multiplicity if rows else None):
                    self._policy.root(inputs.layout, Asked(is_trunk=True), inputs.patches)
            self._policy.release()
        tokens = count_tokens(micro_batches) if self.mesh.reports else 0
        losses.begin(self._ranks, tokens, normalizer, is_counted=self._is_first)

    def step(
        self, *, normalizer: float, learning_rate: float | None, optim: OptimConfig | None = None
    ) -> StepOutcome:
        rate = self._config.optim.learning_rate if learning_rate is None else learning_rate
        if self._replay is not None:
            self._replay.step()
        if self._tensor is not None:
            self._tensor.collectives.end_step()
        if self._context is not None:
            self._context.end_step()
        if self._experts is not None:
            self._experts.collectives.end_step()
        counts = self._expert_load.take(self._ranks, is_counted=self._is_first)
        losses = self._expert_load.take_losses(self._ranks, is_counted=self._is_first)
        optimizer = self._optimizer
        if isinstance(optimizer, lora.AdapterTraining):
            outcome = optimizer.step(normalizer, rate, optim)
        else:
            outcome = optimizer.step(normalizer, rate)
        if not outcome.skipped_reason:
            self._expert_load.even_out(counts, self._config.experts.bias_update_rate)
        return replace(outcome, metrics=load_metrics(counts) | losses)

    @property
    def _is_first(self) -> bool:
        """Whether it is this one of the tensor ranks that have the same tokens."""
        return self._tensor is None or self._tensor.collectives.rank == 0

    @property
    def _optimizer(self) -> ShardedOptimizer | lora.AdapterTraining:
        """Of what passes train now."""
        if self._lora is not None:
            return self._lora.used
        assert self._whole is not None
        return self._whole

    def discard_gradients(self) -> None:
        self._optimizer.clear()
        self._expert_load.clear()

    def stage_checkpoint(self, directory: Path) -> StagedCheckpoint:
        if isinstance(optimizer := self._optimizer, lora.AdapterTraining):
            return optimizer.stage(directory, sync=self._config.durable)
        return checkpoint.stage(
            self._policy,
            optimizer,
            directory,
            self._writers,
            durable=self._config.durable,
        )

    def load_checkpoint(self, directory: Path, *, weights_only: bool = False) -> None:
        self._expert_load.clear()
        if isinstance(optimizer := self._optimizer, lora.AdapterTraining):
            optimizer.load(directory, weights_only=weights_only)
            return
        lora.refuse_checkpoint(directory)
        checkpoint.load(self._policy, optimizer, directory, self._writers)

    def write_shards(self, directory: Path, write: ShardWrite | None = None) -> list[ShardFile]:
        write = write or PublishedShards(keep=False, sync=self._config.durable).submit
        if self._lora is not None:
            return self._lora.used.write(directory, write, self._export.dtype)
        return self._export.write(directory, write)

    def create_adapter(self, name: str, settings: LoraConfig, seed: int | None = None) -> None:
        assert self._lora is not None
        self._check_targets(settings)
        self._lora.create(name, settings, seed)

    def _check_targets(self, settings: LoraConfig) -> None:
        if self._tensor is not None:
            check_targets(self._policy.model, settings.targets)

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
        parts = [local_part(p.detach()) for p in (*model.parameters(), *model.buffers())]
        if self._lora is not None:
            return self._lora.held(parts)
        assert self._whole is not None
        held = self._whole.held()
        return HeldTensors([*parts, *held.state], held.gradients)

    def release_spare(self) -> None:
        self._reference = None

    def close(self) -> None:
        self._reference = None
        dist.destroy_process_group(self._writers)

    def _load(self, path: str, *, head: Head = "policy") -> ShardedModel:
        return load_model(
            path,
            self._cut_over,
            self._tensor,
            self._experts,
            self._device,
            self._config.fsdp,
            head=head,
            float32_head=self._config.float32_head,
            asked=self._config.operations,
            longest=self._config.longest_row,
        )

    @contextmanager
    def _scorer(self, model: ModelName) -> Iterator[ShardedModel]:
        """The model that is asked for; where there are adapters, the reference is without them."""
        if model == "policy":
            yield self._policy
        elif self._lora is None:
            yield self._load_reference()
        else:
            with self._lora.used.adapters.off():
                yield self._policy

    def _load_reference(self) -> ShardedModel:
        """The frozen model, loaded on its first use."""
        if self._reference is None:
            config = self._config
            path = self._reference_directory or config.reference_model or config.model
            self._reference = self._load(path)
            self._reference.model.requires_grad_(False)
        return self._reference

    def _create_replay(self) -> PackReplay | None:
        mode, setting = self._config.fsdp.routing_replay, "fsdp.routing_replay"
        if mode == "off":
            return None
        model = self._policy.model
        check_replay(model.config.model_type, setting)
        over: Any = {"ranks": self._ranks, "context": self._context, "device": self._device}
        return PackReplay(mode, model, setting=setting, **over)

    def _replayed(
        self, model: ModelName, micro_batches: Sequence[MicroBatch]
    ) -> AbstractContextManager[PackReplay | None]:
        """What scoring passes go by: the reference chooses for itself."""
        return replayed(self._replay if model == "policy" else None, "score", micro_batches)

    def _start(self, sharded: ShardedModel) -> None:
        """A first pass: torch settles where parts are kept in it, before the optimizer looks."""
        temperature = 1.0 if self._config.head == "policy" else None
        self._score(sharded, [[]], Asked(temperature=temperature))

    def _passes(
        self,
        sharded: ShardedModel,
        micro_batches: Sequence[MicroBatch],
        loss: LossSpec | None = None,
        replay: PackReplay | None = None,
    ) -> Iterator[tuple[MicroBatch, PassInputs]]:
        """Each with the images that are to be seen; one that no row shows where there are none.

        What the next pass computes with is on its way beside the one that runs.
        """
        rules = sharded.rules

        def make(rows: MicroBatch) -> PassInputs:
            patches, merge_size, features = None, 0, Features()
            if rules is not None:
                images = images_of(rows)
                patches = Patches.read(images, rules) if images else Patches.blank(rules)
                merge_size, features = rules.merge_size, Features(starts=patches.starts)
            experts = None if replay is None else replay.experts_of(rows)
            layout: PackedLayout
            if self._context is not None:
                layout = pack_context(rows or [DUMMY], self._config.fsdp, self._context)
            else:
                shares = sharded.shares_prompts
                options: Any = {"shares_prompts": shares, "experts": experts}
                layout = pack(rows or [DUMMY], merge_size, features, **options)
            placed = None if replay is None else replay.place(experts, layout)
            if loss is None:
                return PassInputs(layout, patches=patches, experts=placed)
            columns = pack_columns(rows, loss) if rows else None
            named = pack_named(rows or [_dummy_of(loss)], loss)
            return PassInputs(layout, columns, named, patches, placed)

        for rows, inputs in self._uploads.ahead(micro_batches, make):
            if replay is not None:
                replay.before(inputs.experts)
            yield rows, inputs
            if replay is not None:
                replay.after(rows, inputs.layout)

    @torch.no_grad()
    def _score(
        self,
        sharded: ShardedModel,
        micro_batches: Sequence[MicroBatch],
        asked: Asked,
        replay: PackReplay | None = None,
    ) -> dict[str, torch.Tensor]:
        found: list[tuple[MicroBatch, torch.Tensor]] = []
        for rows, inputs in self._passes(sharded, micro_batches, replay=replay):
            outputs_T, _ = sharded.root(inputs.layout, asked, inputs.patches)
            if rows:
                found.append((rows, outputs_T.float()))
        sharded.release()
        return by_sample(found)

    def _check_columns(self, micro_batches: Sequence[MicroBatch], loss: LossSpec) -> None:
        """Ahead of the passes, inside which other ranks would wait for this one."""
        needed = required_columns(loss)
        for row in (row for rows in micro_batches for row in rows):
            check_columns(needed, row.columns, f"sample {row.sample_id}")


def _dummy_of(loss: LossSpec) -> Row:
    """The dummy, with tokens that a teacher named where the loss reads some."""
    if not loss.loss.top_count:
        return DUMMY
    ids, _ = top_columns(loss.loss.top_count)
    return DUMMY._replace(columns={ids: torch.zeros(1, loss.loss.top_count, dtype=torch.int32)})


def _asked_of(loss: LossSpec) -> Asked:
    if loss.loss.head == "value":
        return Asked()
    entropy: EntropyMode = "gradient" if loss.has_entropy_gradient else "metric"
    return Asked(temperature=loss.temperature or 1.0, entropy=entropy)
