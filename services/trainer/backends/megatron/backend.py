"""The training backend on Megatron-Core. Import this module first: it adapts Megatron."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from itertools import chain, tee
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.trainer.backends.megatron import upstream

upstream.load()  # before anything below imports Megatron

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from services.trainer.backend import (
    Mesh,
    MicroBatch,
    ModelName,
    PassSums,
    StepOutcome,
    TrainingBackend,
)
from services.trainer.backends.expert_load import ExpertLoad, load_metrics
from services.trainer.backends.expert_losses import ExpertLosses, count_tokens
from services.trainer.backends.lora import refuse_checkpoint
from services.trainer.backends.megatron import checkpoint, lora, parallel
from services.trainer.backends.megatron.batch import PackedBatch, pack_batch, upload
from services.trainer.backends.megatron.expert_load import own_tokens, watch_biases, watch_routers
from services.trainer.backends.megatron.expert_losses import watch_logits
from services.trainer.backends.megatron.head import OutputHead
from services.trainer.backends.megatron.kernels import choose_operations
from services.trainer.backends.megatron.model import PolicyModel, create_policy
from services.trainer.backends.megatron.model_config import ModelSource, read_model
from services.trainer.backends.megatron.prediction import METRIC, Prediction
from services.trainer.backends.megatron.quantized_passes import simulate_experts
from services.trainer.backends.megatron.replay import RoutingReplay
from services.trainer.backends.megatron.stepping import Stepper
from services.trainer.backends.megatron.upstream import current_device
from services.trainer.backends.megatron.weights import (
    export_tensors,
    parameters_of,
    repeat,
    write_shards,
)
from services.trainer.backends.routing import Purpose
from services.trainer.backends.sums import SumsOnDevice, pass_sums
from services.trainer.backends.trainable import TrainableError, frozen_tensors
from services.trainer.backends.untrained import untrained_tensors
from services.trainer.config import LoraConfig, OptimConfig, TrainerConfig
from services.trainer.parking import HeldTensors
from services.trainer.staging import StagedCheckpoint
from sluice import platform
from sluice.algo.logprobs import TopLogprobs
from sluice.algo.losses import check_columns, compute_loss
from sluice.algo.spec import LossSpec, required_columns
from sluice.side_copies import Uploads
from sluice.weights.manifest import ShardFile
from sluice.weights.rules.common import PREDICTION
from sluice.weights.shards import PublishedShards, ShardWrite


class MegatronBackend(TrainingBackend):
    """One rank. The default process group must exist; every method is collective."""

    def __init__(self, config: TrainerConfig, mesh: Mesh) -> None:
        self.mesh = mesh
        self._config = config
        self._layout = config.megatron
        platform.current().set_device(int(os.environ.get("LOCAL_RANK", "0")))
        self._device = current_device()
        self._uploads = Uploads(self._device)
        self._groups = parallel.start(
            self._layout,
            seed=config.seed,
            check_timeout=config.ranks.check_timeout,
            timeout=timedelta(seconds=config.ranks.command_timeout),
        )
        self._scales = config.vision.scales(config.optim.learning_rate)
        is_trained = config.lora is None
        source = read_model(
            Path(config.model),
            config.head,
            predicts=is_trained and self._layout.mtp_loss_scaling_factor > 0,
        )
        self._frozen = _frozen_of(source, config)
        self.operations = self._choose(source, adapters=config.lora is not None)
        self._policy = self._create_model(source, self.operations, trained=is_trained)
        if (simulated := config.publish.simulated) is not None:
            simulate_experts(self._policy, simulated)
        adamw = self.operations["adamw"]
        self._lora = lora.training(self._policy, config, mesh, self._groups, adamw)
        self._whole: Stepper | None = None  # of the model itself
        if self._lora is None:
            self._whole = Stepper(
                self._policy, self._layout, config.optim, self._groups, self._scales
            )
        self._reference_directory = ""  # of the settings
        self._expert_load = watch_routers(self._policy, self._device)
        if config.experts.bias_update_rate:
            watch_biases(self._expert_load, self._policy)
        self._expert_losses = watch_logits(config.experts, self._policy, self._expert_load)
        self._passes_of = {"": self._create_passes()}  # each with its own records of routing
        self._passes = self._passes_of[""]

    def compute_logprobs(
        self, micro_batches: Sequence[MicroBatch], *, model: ModelName, temperature: float
    ) -> dict[str, torch.Tensor]:
        batches = self._pack(micro_batches)
        with self._scorer(model) as passes:
            scored = passes.score(batches, temperature=temperature)
        return share_responses(batches, scored, self._device)

    def compute_top_logprobs(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        model: ModelName,
        temperature: float,
        count: int,
    ) -> dict[str, TopLogprobs]:
        batches = self._pack(micro_batches)
        with self._scorer(model) as passes:
            named = passes.name(batches, temperature=temperature, count=count)
        return share_named(batches, named, count, self._device)

    def use_reference(self, directory: str) -> None:
        if directory != self._reference_directory:
            self._reference_directory = directory
            self.release_spare()

    def compute_values(self, micro_batches: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
        batches = self._pack(micro_batches)
        scored = self._passes.score(batches, temperature=1.0)  # values have none
        return share_responses(batches, scored, self._device)

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: LossSpec,
        *,
        keep_outputs: bool = False,
        normalizer: float = 1.0,
    ) -> PassSums:
        batches = self._pack(micro_batches, predicts=self._policy.source.predicts)
        if self._expert_losses is not None:
            self._begin_losses(self._expert_losses, micro_batches, batches, normalizer)
        sums, outputs = self._passes.train(batches, loss)
        kept = share_responses(batches, outputs, self._device) if keep_outputs else {}
        return pass_sums(share_sums(sums.read(), self._device), kept)

    def _begin_losses(
        self,
        losses: ExpertLosses,
        micro_batches: Sequence[MicroBatch],
        batches: Sequence[PackedBatch],
        normalizer: float,
    ) -> None:
        if losses.start_counting():
            self._passes.count(batches, losses.counts)
        scale = self._policy.config.grad_scale_func(torch.ones((), device=self._device))
        tokens = count_tokens(micro_batches) if self.mesh.reports else 0
        losses.begin(self._groups.world, tokens, normalizer * float(scale))

    def step(
        self, *, normalizer: float, learning_rate: float | None, optim: OptimConfig | None = None
    ) -> StepOutcome:
        if self._passes.replay is not None:
            self._passes.replay.step()
        counts = self._expert_load.take(self._groups.world)
        losses = self._expert_load.take_losses(self._groups.world)
        self._groups.end_step()
        if self._lora is not None:
            rate = self._config.optim.learning_rate if learning_rate is None else learning_rate
            outcome = self._lora.used.step(normalizer, rate, optim)
        else:
            outcome = self._stepper.step(normalizer=normalizer, learning_rate=learning_rate)
            self._policy.share_embedding()
        if not outcome.skipped_reason:
            self._expert_load.even_out(counts, self._config.experts.bias_update_rate)
        return replace(outcome, metrics=load_metrics(counts) | losses)

    @property
    def _stepper(self) -> Stepper:
        assert self._whole is not None
        return self._whole

    def discard_gradients(self) -> None:
        if self._lora is not None:
            self._lora.used.clear()
        else:
            self._stepper.clear()
        self._expert_load.clear()

    def stage_checkpoint(self, directory: Path) -> StagedCheckpoint:
        if self._lora is not None:
            return self._lora.used.stage(directory, sync=self._config.durable)
        return checkpoint.stage(
            self._policy,
            self._stepper,
            self._layout,
            self._groups,
            directory,
            scales=self._scales,
            frozen=self._frozen,
            durable=self._config.durable,
        )

    def load_checkpoint(self, directory: Path, *, weights_only: bool = False) -> None:
        self._expert_load.clear()
        if self._lora is not None:
            self._lora.used.load(directory, weights_only=weights_only)
            return
        refuse_checkpoint(directory)
        checkpoint.load(
            self._policy,
            self._stepper,
            self._layout,
            directory,
            scales=self._scales,
            frozen=self._frozen,
        )
        self._stepper.clear()
        self._policy.share_embedding()

    def write_shards(self, directory: Path, write: ShardWrite | None = None) -> list[ShardFile]:
        write = write or PublishedShards(keep=False, sync=self._config.durable).submit
        if self._lora is not None:
            return self._lora.used.write(directory, write, self._policy.config.params_dtype)
        policy, mesh = self._policy, self.mesh
        untrained = untrained_tensors(
            policy.source.directory, policy.untrained, rank=mesh.rank, world_size=mesh.world_size
        )
        return write_shards(
            chain(repeat(export_tensors(policy.tensors), policy.repeated), untrained),
            directory,
            rank=self.mesh.rank,
            max_bytes=self._layout.max_shard_bytes,
            write=write,
        )

    def create_adapter(self, name: str, settings: LoraConfig, seed: int | None = None) -> None:
        assert self._lora is not None
        self._lora.create(name, settings, seed)
        self._passes_of[name] = self._create_passes()

    def delete_adapter(self, name: str) -> None:
        assert self._lora is not None
        self._lora.delete(name)
        self._passes_of.pop(name, None)

    def use_adapter(self, name: str) -> None:
        if self._lora is not None:
            self._lora.use(name)
            self._passes = self._passes_of[name]
        self._expert_load.use(name)

    def held_tensors(self) -> HeldTensors:
        models = self._policy.models
        tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
        return (self._lora or self._stepper).held(tensors)

    def release_spare(self) -> None:
        self.__dict__.pop("_reference", None)  # of the cached property

    def close(self) -> None:
        dist.destroy_process_group(self._groups.checkpoint)
        parallel.stop()

    @contextmanager
    def _scorer(self, model: ModelName) -> Iterator[ChunkPasses]:
        """Passes of the model that is asked for; of adapters the base is the reference."""
        if model == "policy":
            yield self._passes
        elif self._lora is None:
            yield self._reference
        else:
            with self._lora.used.adapters.off():
                yield self._base

    @cached_property
    def _base(self) -> ChunkPasses:
        """The policy's model without replayed routing: with adapters off, the reference."""
        return ChunkPasses(
            chunks=self._policy.chunks, head=self._policy.head, uploads=self._uploads
        )

    @cached_property
    def _reference(self) -> ChunkPasses:
        """A second, untrained model; made when it is first asked for."""
        config = self._config
        directory = self._reference_directory or config.reference_model or config.model
        source = read_model(Path(directory))
        policy = self._create_model(source, self._choose(source), trained=False)
        sees = policy.source.images is not None
        return ChunkPasses(chunks=policy.chunks, head=policy.head, uploads=self._uploads, sees=sees)

    def _choose(self, source: ModelSource, *, adapters: bool = False) -> dict[str, str]:
        asked = self._config.operations
        return choose_operations(source, self._layout, asked, self._device, adapters=adapters)

    def _create_model(
        self, source: ModelSource, operations: Mapping[str, str], *, trained: bool
    ) -> PolicyModel:
        return create_policy(
            source,
            self._layout,
            operations,
            device=self._device,
            tensor=self._groups.tensor,
            trained=trained,
            frozen=self._frozen,
            float32_head=self._config.float32_head,
        )

    def _create_passes(self) -> ChunkPasses:
        mode, policy = self._layout.routing_replay, self._policy
        replay = None
        if mode != "off":
            replay = RoutingReplay(mode, policy.models, policy.source, policy.config, self._groups)
        sees = policy.source.images is not None
        return ChunkPasses(
            chunks=policy.chunks,
            head=policy.head,
            uploads=self._uploads,
            replay=replay,
            sees=sees,
            prediction=policy.prediction,
            load=self._expert_load,
            losses=self._expert_losses,
            followed=partial(own_tokens, groups=self._groups, config=policy.config),
        )

    def _pack(
        self, micro_batches: Sequence[MicroBatch], *, predicts: bool = False
    ) -> list[PackedBatch]:
        """Interleaved pipelines take groups of micro-batches: dummies fill the last one."""
        missing = -len(micro_batches) % self._layout.micro_batch_multiple
        return [
            pack_batch(
                rows,
                self._layout,
                context=self._groups.context,
                merge_size=self._policy.source.merge_size,
                predicts=predicts,
            )
            for rows in [*micro_batches, *([()] * missing)]
        ]


@dataclass(frozen=True, kw_only=True)
class ChunkPasses:
    """Runs micro-batches through the chunks of one model. `head` is None but on the last stage."""

    chunks: Sequence[Any]  # modules, wrapped for gradients if they are to be trained
    head: OutputHead | None
    uploads: Uploads
    replay: RoutingReplay | None = None
    sees: bool = False  # chunks are given the batch, for its images
    prediction: Prediction | None = None  # trained beside the policy
    load: ExpertLoad | None = None  # of experts, in passes that are trained on
    losses: ExpertLosses | None = None  # of routers, in these
    followed: Callable[[PackedBatch], torch.Tensor] = attrgetter("followed")

    def train(
        self, batches: Sequence[PackedBatch], spec: LossSpec
    ) -> tuple[SumsOnDevice, list[torch.Tensor]]:
        """Adds the gradients of the summed loss; nothing is reduced over ranks.

        Returns its sums, and the outputs as `score` does. Raises MissingColumnError.
        """
        sums, outputs, needed = SumsOnDevice(), list[torch.Tensor](), required_columns(spec)
        for batch in batches:  # ahead of the pass, inside which only the last stage would raise
            for row in batch.rows:
                check_columns(needed, row.columns, f"sample {row.sample_id}")
        with self._replayed("train", batches), ExitStack() as stack:
            for chunk in self.chunks:
                if isinstance(chunk, DistributedDataParallel):
                    stack.enter_context(chunk.no_sync())
            finish = partial(self._loss, spec=spec, sums=sums, outputs=outputs)
            self._run(batches, finish, trained=spec, load=self.load)
        return sums, outputs

    @torch.no_grad()
    def count(self, batches: Sequence[PackedBatch], load: ExpertLoad) -> None:
        """Runs the layers of every batch, as in training, for what they send to experts."""

        def keep(_: PackedBatch, output: torch.Tensor, non_loss_data: bool) -> torch.Tensor:
            return output.new_zeros(())

        with self._replayed("train", batches):
            self._run(batches, keep, load=load)

    @torch.no_grad()
    def score(self, batches: Sequence[PackedBatch], *, temperature: float) -> list[torch.Tensor]:
        """Returns float32[R] of every batch, log-probs or values; [] but on the last stage."""
        scored: list[torch.Tensor] = []

        def keep(batch: PackedBatch, output: torch.Tensor, non_loss_data: bool) -> torch.Tensor:
            assert self.head is not None and non_loss_data
            responses = self.head.responses(output, batch, temperature=temperature, entropy="off")
            scored.append(responses.outputs.float())
            return responses.outputs

        with self._replayed("score", batches):
            self._run(batches, keep)
        return scored

    @torch.no_grad()
    def name(
        self, batches: Sequence[PackedBatch], *, temperature: float, count: int
    ) -> list[TopLogprobs]:
        """Returns the likeliest tokens of every batch; [] but on the last stage."""
        named: list[TopLogprobs] = []

        def keep(batch: PackedBatch, output: torch.Tensor, non_loss_data: bool) -> torch.Tensor:
            assert self.head is not None and non_loss_data
            named.append(self.head.name(output, batch, temperature=temperature, count=count))
            return named[-1].logprobs

        with self._replayed("score", batches):
            self._run(batches, keep)
        return named

    @contextmanager
    def _replayed(self, purpose: Purpose, batches: Sequence[PackedBatch]) -> Iterator[None]:
        if self.replay is None:
            yield
            return
        self.replay.begin(purpose, batches)
        try:
            yield
        finally:
            self.replay.end()

    def _loss(
        self,
        batch: PackedBatch,
        output: torch.Tensor,
        *,
        spec: LossSpec,
        sums: SumsOnDevice,
        outputs: list[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """A loss as the schedule wants it: its sum, a count (unused here) and what to keep."""
        assert self.head is not None and batch.columns is not None
        responses = self.head.responses(
            output,
            batch,
            temperature=spec.temperature or 1.0,
            entropy="gradient" if spec.has_entropy_gradient else "metric",
        )
        columns = batch.columns.inputs(spec, responses.outputs, responses.entropy)
        terms = compute_loss(columns, spec)
        sums.add_terms(terms)
        outputs.append(columns.outputs.detach().float())
        loss = terms.loss
        if self.prediction is not None:
            more, (total, weight) = self.prediction.loss(output, batch, self.head)
            loss = loss + more
            sums.add_metric(METRIC, total, weight)
        count = torch.zeros((), dtype=torch.int, device=loss.device)
        return loss, count, {}

    def _run(
        self,
        batches: Sequence[PackedBatch],
        finish: Callable[..., Any],
        trained: LossSpec | None = None,
        load: ExpertLoad | None = None,
    ) -> None:
        """trained: the loss of which gradients are wanted, if any is. load: what counts."""
        spec = None if self.head is None else trained
        names = self.head is not None and not self.head.gives_values
        uploaded = upload(batches, self.uploads, spec, names=names)

        def step(
            iterator: Iterator[PackedBatch], chunk: torch.nn.Module
        ) -> tuple[torch.Tensor, Callable[..., Any]]:
            batch, index = next(iterator), self.chunks.index(chunk)
            if self.replay is not None:
                self.replay.before(index, batch)
            arguments: dict[str, Any] = {
                "input_ids": batch.token_ids,
                "position_ids": batch.position_ids,
                "attention_mask": None,  # the runs of the pack say what is masked
                "labels": None,  # the loss is made from hidden states
                "packed_seq_params": batch.runs,
            }
            if self.sees:
                arguments["batch"] = batch
            inner = chunk.module if isinstance(chunk, DistributedDataParallel) else chunk
            if isinstance(inner, Float16Module):  # what is not trained is not wrapped for gradients
                arguments["fp32_output"] = False
            with ExitStack() as stack:
                if load is not None:
                    stack.enter_context(load.counting(self.followed(batch)))
                if trained is not None and self.losses is not None:
                    stack.enter_context(self.losses.trained(self.followed(batch)))
                output = chunk(**arguments)
            if self.replay is not None:
                self.replay.after(index, batch)
            return output, partial(finish, batch)

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=list(tee(uploaded, len(self.chunks))),
            model=list(self.chunks),
            num_microbatches=len(batches),
            seq_length=0,  # packs differ in length, stages exchange shapes
            micro_batch_size=1,
            forward_only=trained is None,
            collect_non_loss_data=trained is None,
        )


def _frozen_of(source: ModelSource, config: TrainerConfig) -> frozenset[str]:
    """The tensors of the checkpoint that are not trained. Raises TrainableError."""
    parameters = parameters_of(source.weights)
    frozen = frozen_tensors(config, parameters)
    predicting = [names for name, names in parameters.items() if name.startswith(PREDICTION)]
    if predicting and all(names[0] in frozen for each in predicting for names in each):
        raise TrainableError(
            "megatron.mtp_loss_scaling_factor has no effect: trainable freezes all of the layer of "
            "multi-token prediction"
        )
    return frozen


def share_responses(
    batches: Sequence[PackedBatch], scored: Sequence[torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Returns sample_id -> float32[response] on the CPU, from the last stage's `scored`.

    Collective over the pipeline.
    """
    rows = [row for batch in batches for row in batch.rows]
    lengths = [row.response_length for row in rows]
    parts = torch.split(_share(scored, (sum(lengths),), torch.float32, device).cpu(), lengths)
    return {row.sample_id: part.clone() for row, part in zip(rows, parts, strict=True)}


def share_named(
    batches: Sequence[PackedBatch], named: Sequence[TopLogprobs], count: int, device: torch.device
) -> dict[str, TopLogprobs]:
    """Returns what the last stage's `named` says, by sample_id, on the CPU.

    Collective over the pipeline.
    """
    rows = [row for batch in batches for row in batch.rows]
    lengths = [row.response_length for row in rows]
    flat, wide = (sum(lengths),), (sum(lengths), count)
    whole = TopLogprobs(
        _share([each.logprobs for each in named], flat, torch.float32, device),
        _share([each.ids for each in named], wide, torch.int32, device),
        _share([each.top for each in named], wide, torch.float32, device),
    )
    parts = whole.split(lengths)
    return {row.sample_id: part for row, part in zip(rows, parts, strict=True)}


def _share(
    parts: Sequence[torch.Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The last stage's parts in one, on every stage."""
    if parts:
        whole = torch.cat(list(parts)).to(dtype)
    else:
        whole = torch.empty(tuple(shape), dtype=dtype, device=device)
    _from_last_stage(whole)
    return whole


def share_sums(sums: dict[str, float], device: torch.device) -> dict[str, float]:
    """Returns the last stage's `sums` on every stage. Collective over the pipeline."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return sums
    encoded = json.dumps(sums).encode()
    length = torch.tensor(len(encoded), dtype=torch.int64, device=device)
    _from_last_stage(length)
    data = torch.zeros(int(length), dtype=torch.uint8)
    if parallel_state.is_pipeline_last_stage():
        data = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    data = data.to(device)
    _from_last_stage(data)
    decoded: dict[str, float] = json.loads(bytes(data.tolist()))
    return decoded


def _from_last_stage(tensor: torch.Tensor) -> None:
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast(
            tensor,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
