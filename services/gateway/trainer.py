"""Calls to the trainer about one adapter, by request ids that a repeat of the call has too."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import numpy as np

from services.gateway.journal import Model
from sluice.algo.spec import LossSpec
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.client import TrainerClient, new_request_id
from sluice.runtime import wire
from sluice.runtime.errors import RemoteError
from sluice.samples.sample import Sample

OLD = "old_logprobs"  # of the policy as it stands


@dataclass(frozen=True)
class AdamParams:
    """Numbers of one step."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


class AdapterTrainer(TrainerClient):
    """TrainerService, for a caller who names its requests."""

    async def find(self, adapter: str) -> pb.TrainedAdapter | None:
        """The adapter as the trainer has it; None where it has none of that name."""
        trainer = await self.get()
        return next((each for each in trainer.adapters if each.adapter == adapter), None)

    async def create(self, model: Model, request_id: str) -> None:
        request = pb.CreateAdapterRequest(
            adapter=model.adapter,
            rank=model.rank,
            alpha=model.alpha,
            targets=model.targets,
            seed=model.seed,
            request_id=request_id,
        )
        await self._call(self.stub.CreateAdapter, request)

    async def upload(self, batch_id: str, samples: Sequence[Sample], adapter: str) -> str:
        """Register rows in place of what an earlier try left under that name."""
        header = pb.BatchHeader(
            batch_id=batch_id,
            sample_count=len(samples),
            request_id=new_request_id(),
            adapter=adapter,
        )

        async def messages() -> AsyncIterator[pb.UploadBatchRequest]:
            yield pb.UploadBatchRequest(header=header)
            for sample in samples:
                yield pb.UploadBatchRequest(sample=wire.sample_to_proto(sample))

        try:
            response = await self._call(self.stub.UploadBatch, messages())
        except RemoteError as error:
            if error.reason != "BATCH_EXISTS":
                raise
            await self.delete_batch(f"batches/{batch_id}")
            header.request_id = new_request_id()
            response = await self._call(self.stub.UploadBatch, messages())
        return str(response.batch)

    async def logprobs(self, batch: str, count: int, adapter: str) -> list[np.ndarray]:
        """Log-probs of the targets of all rows, float32, in order."""
        await self.compute_logprobs(batch, adapter=adapter)
        return await self._kept_logprobs(batch, count)

    async def passed_logprobs(self, batch: str, count: int, adapter: str) -> list[np.ndarray]:
        """Those that `add_gradients` has left in a batch."""
        try:
            return await self._kept_logprobs(batch, count)
        except KeyError:  # it went over rows that were uploaded anew since
            return await self.logprobs(batch, count, adapter)

    async def _kept_logprobs(self, batch: str, count: int) -> list[np.ndarray]:
        columns = await self.get_columns(batch, [OLD])
        return [np.asarray(columns[str(index)][OLD], np.float32) for index in range(count)]

    async def add_gradients(
        self, batch: str, loss: LossSpec, step: int, part_id: str, adapter: str, request_id: str
    ) -> float:
        """The loss, summed."""
        request = pb.ForwardBackwardRequest(
            batch=batch,
            loss=wire.loss_to_proto(loss),
            expected_step=step,
            part_id=part_id,
            request_id=request_id,
            adapter=adapter,
            keep_logprobs=True,
        )
        return float((await self._call(self.stub.ForwardBackward, request)).loss)

    async def take_step(
        self, step: int, parts: Sequence[str], params: AdamParams, adapter: str, request_id: str
    ) -> pb.StepOptimizerResponse:
        adam = pb.AdamSettings(
            beta1=params.beta1,
            beta2=params.beta2,
            epsilon=params.eps,
            weight_decay=params.weight_decay,
            max_grad_norm=params.grad_clip_norm,
        )
        request = pb.StepOptimizerRequest(
            expected_step=step,
            part_ids=parts,
            learning_rate=params.learning_rate,
            request_id=request_id,
            adapter=adapter,
            adam=adam,
        )
        return await self._call(self.stub.StepOptimizer, request)

    async def load(
        self,
        checkpoint: str,
        adapter: str,
        request_id: str,
        *,
        saved_adapter: str = "",
        weights_only: bool = False,
    ) -> int:
        """The step that it holds."""
        request = pb.LoadCheckpointRequest(
            checkpoint=checkpoint,
            request_id=request_id,
            adapter=adapter,
            saved_adapter=saved_adapter,
            weights_only=weights_only,
        )
        answer = await self._operate(self.stub.LoadCheckpoint, request, pb.LoadCheckpointResponse)
        return int(answer.step)

    async def publish(self, adapter: str, request_id: str) -> pb.PublishWeightsResponse:
        request = pb.PublishWeightsRequest(request_id=request_id, adapter=adapter)
        return await self._operate(self.stub.PublishWeights, request, pb.PublishWeightsResponse)
