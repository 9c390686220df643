"""Where this rank stands among the others, and the process group they share."""

from __future__ import annotations

import datetime
import logging
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist

from services.trainer.backend import (
    CriticBackend,
    Mesh,
    ModelName,
    PassSums,
    TrainingBackend,
    create_backend,
)
from services.trainer.config import TrainerConfig
from services.trainer.errors import CheckpointMismatchError
from services.trainer.rank.failures import FAILURES
from services.trainer.rank.publishing import RankPublisher
from services.trainer.rank.table import OwnedRow, RowTable
from services.trainer.rows import RowLimits
from sluice import faults, platform
from sluice.algo.advantages import AdvantageColumns, AdvantageRow, compute_advantages
from sluice.algo.moments import Moments
from sluice.algo.spec import AdvantageSpec
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.runtime.errors import ServiceError
from sluice.runtime.wire import advantage_from_proto, blob_to_proto, loss_from_proto
from sluice.samples.blobs import BlobStore


def find_mesh(config: TrainerConfig, rank: int, world_size: int) -> Mesh:
    """The place of a rank under the backend's layout; raises ValueError if none fits."""
    if config.backend == "megatron":
        from services.trainer.backends.megatron.layout import mesh_of

        return mesh_of(config.megatron, rank, world_size)
    return Mesh(rank=rank, world_size=world_size, data_rank=rank, data_size=world_size)


def join_group(config: TrainerConfig, mesh: Mesh) -> None:
    """Meet the other ranks at MASTER_ADDR:MASTER_PORT. Collectives end with the command timeout.

    A single rank of the reference backend needs no group.
    """
    if mesh.world_size == 1 and config.backend == "reference":
        return
    timeout = datetime.timedelta(seconds=config.ranks.command_timeout)
    dist.init_process_group(
        platform.current().collective,
        timeout=timeout,
        rank=mesh.rank,
        world_size=mesh.world_size,
        store=_local_store(mesh, timeout) if config.ranks.launch == "local" else None,
    )


def _local_store(mesh: Mesh, timeout: datetime.timedelta) -> dist.Store:
    """Where ranks of one host meet: at a socket of the front's, for loopback alone."""
    listener = int(os.environ["MASTER_LISTEN_FD"]) if mesh.rank == 0 else None
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        mesh.world_size,
        is_master=mesh.rank == 0,
        timeout=timeout,
        master_listen_fd=listener,
    )


def leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


REWARDS = ("reward", "raw_reward")


def add_advantages(
    rows: dict[int, OwnedRow],
    spec: AdvantageSpec,
    command: pb.AdvantagesCommand,
    result: pb.CommandResult,
) -> None:
    """Add the columns, or answer with the moments that whitening needs of every rank."""
    order = sorted(rows)
    inputs = [_input(rows[position]) for position in order]
    given = command.moments
    whole = Moments(given.count, given.mean, given.m2) if command.HasField("moments") else None
    found = compute_advantages(inputs, spec, lambda own: own if whole is None else whole)
    result.advantages.moments.count = found.moments.count
    result.advantages.moments.mean = found.moments.mean
    result.advantages.moments.m2 = found.moments.m2
    if command.moments_only:
        return
    for index, position in enumerate(order):
        rows[position].columns["advantages"] = found.advantages[index]
        if found.returns is not None:
            rows[position].columns["returns"] = found.returns[index]
    result.advantages.has_returns = found.returns is not None
    _report(rows, order, spec, found, result)


def _input(row: OwnedRow) -> AdvantageRow:
    return AdvantageRow(
        sample_id=row.sample_id,
        group_id=row.group_id,
        loss_mask=row.loss_mask,
        rewards={name: row.scalars[name] for name in REWARDS if name in row.scalars},
        columns=row.columns,
        episode=int(row.scalars["episode"]) if "episode" in row.scalars else None,
    )


def _report(
    rows: dict[int, OwnedRow],
    order: list[int],
    spec: AdvantageSpec,
    found: AdvantageColumns,
    result: pb.CommandResult,
) -> None:
    sums = result.sums
    for name, (total, weight) in found.metrics.items():
        sums.metrics[name].sum, sums.metrics[name].weight = total, weight
    column = spec.reward_column or "reward"
    rewards = [rows[row].scalars[column] for row in order if column in rows[row].scalars]
    sums.metrics["reward"].sum, sums.metrics["reward"].weight = math.fsum(rewards), len(rewards)
    if not order:
        return
    masks_T = torch.cat([rows[row].loss_mask for row in order])
    sizes_T = torch.where(masks_T, torch.cat(found.advantages).abs(), 0.0)
    absolute = sums.metrics["advantage_abs"]
    absolute.sum, absolute.weight = float(sizes_T.double().sum()), int(masks_T.sum())
    lengths = torch.tensor([len(rows[row].loss_mask) for row in order])
    owner_T = torch.repeat_interleave(torch.arange(len(order)), lengths)
    speaks = torch.zeros(len(order), dtype=torch.bool)
    speaks[owner_T[sizes_T > 0]] = True
    # A NaN is no zero: `>` alone would call its row silent and hide it.
    speaks[owner_T[sizes_T.isnan()]] = True
    result.advantages.silent_rows.extend(
        row for row, loud in zip(order, speaks.tolist(), strict=True) if not loud
    )


logger = logging.getLogger(__name__)

MODELS: dict[int, tuple[ModelName, str]] = {
    trainer_pb.ComputeLogprobsRequest.MODEL_POLICY: ("policy", "old_logprobs"),
    trainer_pb.ComputeLogprobsRequest.MODEL_REFERENCE: ("reference", "reference_logprobs"),
}


class Executor:
    """One rank's backend and rows."""

    def __init__(
        self,
        backend: TrainingBackend,
        blobs: BlobStore,
        table: RowTable,
        publisher: RankPublisher,
    ) -> None:
        self._backend, self._blobs, self._table = backend, blobs, table
        self._publisher = publisher

    @classmethod
    def load(cls, config: TrainerConfig) -> Executor:
        """Build the backend this rank runs."""
        torch.set_num_threads(config.threads)
        mesh = find_mesh(config, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        join_group(config, mesh)
        backend = create_backend(config.backend, config, mesh)
        blobs = BlobStore(config.store, sync=config.durable)
        limits = RowLimits.from_config(config, backend.mesh.context_size)
        return cls(backend, blobs, RowTable(blobs, limits), RankPublisher(config, backend))

    def describe(self) -> pb.RankReady:
        mesh = self._backend.mesh
        layout = trainer_pb.ParallelLayout(
            data=mesh.data_size,
            tensor=mesh.tensor_size,
            pipeline=mesh.pipeline_size,
            context=mesh.context_size,
            expert=mesh.expert_size,
            virtual_pipeline=mesh.virtual_pipeline_size,
        )
        return pb.RankReady(layout=layout, data_rank=mesh.data_rank, reports=mesh.reports)

    def close(self) -> None:
        self._publisher.close()
        self._backend.close()
        leave_group()

    def execute(self, command: pb.FollowResponse) -> pb.CommandResult:
        """The answer to a command; an error is an answer too, and the next command goes on."""
        name = command.WhichOneof("command") or ""
        result = pb.CommandResult(sequence=command.sequence)
        try:
            getattr(self, f"_{name}")(getattr(command, name), result)
            faults.point(f"rank{self._backend.mesh.rank}.{name}")
        except ServiceError as error:
            result.error.CopyFrom(error.to_status())
        except FAILURES as error:  # the rank is fit for the next command
            logger.error("%s failed", name, exc_info=error)
            message = f"{type(error).__name__} in {name}: {error}"
            result.error.CopyFrom(ServiceError(message).to_status())
        return result

    def _add_rows(self, command: pb.AddRows, result: pb.CommandResult) -> None:
        self._table.add(command)

    def _drop_batch(self, command: pb.DropBatch, result: pb.CommandResult) -> None:
        self._table.drop(command.batch_id)

    def _set_columns(self, command: pb.SetColumns, result: pb.CommandResult) -> None:
        self._table.set_columns(command)

    def _read_columns(self, command: pb.ReadColumns, result: pb.CommandResult) -> None:
        data = self._table.spool_columns(command.batch_id, command.columns)
        result.columns.CopyFrom(blob_to_proto(self._blobs.put(data)))

    def _compute_logprobs(self, command: pb.LogprobsCommand, result: pb.CommandResult) -> None:
        model, column = MODELS[command.model]
        micro_batches = self._table.micro_batches(command.batch_id, command.micro_batches)
        found = self._backend.compute_logprobs(
            micro_batches, model=model, temperature=command.temperature
        )
        rows = self._table.rows(command.batch_id)
        positions = [row for part in command.micro_batches for row in part.rows]
        new, rollout, masks = [], [], []
        for position in positions:
            row = rows[position]
            row.columns[column] = values_T = found[row.sample_id]
            new.append(values_T)
            masks.append(row.loss_mask)
            rollout.append(
                row.columns.get("rollout_logprobs", torch.full_like(values_T, torch.nan))
            )
        if positions:
            _sum_logprobs(torch.cat(new), torch.cat(rollout), torch.cat(masks), result.sums)

    def _compute_values(self, command: pb.ValuesCommand, result: pb.CommandResult) -> None:
        assert isinstance(self._backend, CriticBackend), "the configuration allows no other"
        micro_batches = self._table.micro_batches(command.batch_id, command.micro_batches)
        found = self._backend.compute_values(micro_batches)
        rows = self._table.rows(command.batch_id)
        total = result.sums.metrics["value"]
        for position in (row for part in command.micro_batches for row in part.rows):
            row = rows[position]
            row.columns["values"] = values_T = found[row.sample_id]
            total.sum += float(values_T[row.loss_mask].double().sum())
            result.sums.token_count += int(row.loss_mask.sum())
        total.weight = result.sums.token_count

    def _compute_advantages(self, command: pb.AdvantagesCommand, result: pb.CommandResult) -> None:
        spec = advantage_from_proto(command.advantage)
        add_advantages(self._table.rows(command.batch_id), spec, command, result)

    def _forward_backward(self, command: pb.GradientsCommand, result: pb.CommandResult) -> None:
        micro_batches = self._table.micro_batches(command.batch_id, command.micro_batches)
        sums = self._backend.forward_backward(micro_batches, loss_from_proto(command.loss))
        result.sums.CopyFrom(_sums_to_proto(sums))

    def _step(self, command: pb.StepCommand, result: pb.CommandResult) -> None:
        outcome = self._backend.step(
            normalizer=command.normalizer, learning_rate=command.learning_rate
        )
        result.step.grad_norm = outcome.grad_norm
        result.step.learning_rate = outcome.learning_rate
        result.step.skipped_reason = outcome.skipped_reason

    def _discard(self, command: pb.DiscardCommand, result: pb.CommandResult) -> None:
        self._backend.discard_gradients()

    def _save(self, command: pb.SaveCommand, result: pb.CommandResult) -> None:
        self._backend.save_checkpoint(Path(command.directory))

    def _load(self, command: pb.LoadCommand, result: pb.CommandResult) -> None:
        try:
            self._backend.load_checkpoint(Path(command.directory))
        except (OSError, ValueError) as error:
            raise CheckpointMismatchError(str(error)) from error

    def _publish(self, command: pb.PublishCommand, result: pb.CommandResult) -> None:
        self._publisher.publish(command, result)

    def _open_transfer(self, command: pb.OpenTransferCommand, result: pb.CommandResult) -> None:
        self._publisher.open_transfer(command, result)

    def _send_weights(self, command: pb.SendWeightsCommand, result: pb.CommandResult) -> None:
        self._publisher.send(command, result)


def _sum_logprobs(
    new_T: torch.Tensor, rollout_T: torch.Tensor, mask_T: torch.Tensor, sums: pb.PassSums
) -> None:
    """Sums of the new column and of its distance from the engine's, over trained tokens."""
    count = int(mask_T.sum())
    sums.token_count = count
    sums.metrics["logprob"].sum = float(new_T[mask_T].double().sum())
    sums.metrics["logprob"].weight = count
    both_T = mask_T & ~rollout_T.isnan()
    if both_T.any():
        distance_T = (new_T - rollout_T)[both_T].abs().double()
        mismatch = sums.metrics["rollout_mismatch"]
        mismatch.sum, mismatch.weight = float(distance_T.sum()), float(both_T.sum())
        mismatch.max = float(distance_T.max())


def _sums_to_proto(sums: PassSums) -> pb.PassSums:
    return pb.PassSums(
        loss=sums.loss,
        token_count=sums.token_count,
        metrics={
            name: pb.WeightedSum(sum=total, weight=weight)
            for name, (total, weight) in sums.metrics.items()
        },
    )
