"""Executes the commands of the front on the device thread."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from services.trainer.backend import (
    CriticBackend,
    ModelName,
    PassSums,
    TrainingBackend,
    create_backend,
)
from services.trainer.config import TrainerConfig
from services.trainer.errors import CheckpointMismatchError
from services.trainer.rank.advantages import add_advantages
from services.trainer.rank.failures import FAILURES
from services.trainer.rank.group import find_mesh, join_group, leave_group
from services.trainer.rank.publishing import RankPublisher
from services.trainer.rank.table import RowTable
from sluice import faults
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.balance.planner_inputs import OversizePolicy
from sluice.runtime.errors import DataLossError, NotFoundError, ServiceError
from sluice.runtime.wire import advantage_from_proto, blob_to_proto, loss_from_proto
from sluice.samples.blobs import BlobDigestError, BlobNotFoundError, BlobStore

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
        cuts = config.oversize_policy is OversizePolicy.TRUNCATE
        cap = config.max_tokens_per_micro_batch * backend.mesh.context_size
        table = RowTable(blobs, max_tokens=cap if cuts else 0)
        return cls(backend, blobs, table, RankPublisher(config, backend))

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
        except BlobNotFoundError as error:
            result.error.CopyFrom(NotFoundError("blob", error.digest).to_status())
        except BlobDigestError as error:
            result.error.CopyFrom(DataLossError(str(error), blob=error.expected).to_status())
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
