"""The second trainer of PPO: it estimates values and learns returns, beside the actor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.client import TrainerClient
from sluice.config import ConfigError
from sluice.loop import trace
from sluice.loop.config import CriticConfig
from sluice.loop.recovery import check_step, wait_for_trainer
from sluice.runtime.security import SecurityConfig
from sluice.samples.blobs import BlobReference


@dataclass(frozen=True)
class CriticPart:
    """What one mini-batch taught the critic."""

    gradients: pb.ForwardBackwardResponse
    step: pb.StepOptimizerResponse


class Critic:
    """A trainer with a value head, and where it is."""

    def __init__(
        self, address: str, config: CriticConfig, security: SecurityConfig, wait_seconds: float
    ) -> None:
        self.config = config
        self.optimizer_step = 0
        self._client = TrainerClient(address, security)
        self._wait_seconds = wait_seconds

    async def begin(self) -> None:
        """Go on from what the trainer holds. Raises ConfigError if it has no value head."""
        trainer = await wait_for_trainer(self._client, self._wait_seconds)
        if trainer.head != "value":
            raise ConfigError(f"critic: the trainer at {self._client.address} has no head: value")
        self.optimizer_step = trainer.step

    async def load(self, checkpoint: str) -> None:
        await wait_for_trainer(self._client, self._wait_seconds)
        self.optimizer_step = (await self._client.load_checkpoint(checkpoint)).step

    async def save(self, checkpoint_id: str) -> str:
        """Raises TrainerLostError if the trainer is at another step than this run."""
        saved = await self._client.save_checkpoint(checkpoint_id)
        check_step(saved.step, self.optimizer_step, "checkpoint of the critic")
        return saved.checkpoint

    async def upload(self, batch_id: str, sample_count: int, blobs: Sequence[BlobReference]) -> str:
        """The rows of the actor's batch, from the same blobs."""
        return (await self._client.upload_batch(batch_id, sample_count, blobs=blobs)).batch

    async def lend_values(self, batch: str, actor: TrainerClient, actor_batch: str) -> None:
        """Estimate values and give them to the actor, whose advantages need them."""
        await self._client.compute_values(batch)
        await actor.put_columns(actor_batch, await self._client.get_columns(batch, ["values"]))

    async def take_returns(self, batch: str, actor: TrainerClient, actor_batch: str) -> None:
        """What the values should have been, from the actor's advantages."""
        await self._client.put_columns(batch, await actor.get_columns(actor_batch, ["returns"]))

    async def learn(self, batch: str, part_id: str, sample_ids: Sequence[str]) -> CriticPart:
        """One optimizer step towards the returns of these samples, all where none are named."""
        with trace.span(trace.CRITIC, "forward_backward"):
            gradients = await self._client.forward_backward(
                batch,
                self.config.loss,
                expected_step=self.optimizer_step,
                part_id=part_id,
                sample_ids=sample_ids,
            )
        with trace.span(trace.CRITIC, "optimizer"):
            step = await self._client.step_optimizer(self.optimizer_step, [part_id])
        self.optimizer_step = step.step
        return CriticPart(gradients, step)

    @asynccontextmanager
    async def learning(
        self, batch: str, part_id: str, sample_ids: Sequence[str]
    ) -> AsyncIterator[asyncio.Task[CriticPart]]:
        """`learn` while the block trains the actor: they sit on different devices."""
        learning = asyncio.create_task(self.learn(batch, part_id, sample_ids), name="critic")
        try:
            yield learning
            await learning
        finally:
            learning.cancel()
            await asyncio.gather(learning, return_exceptions=True)

    async def delete_batch(self, batch: str) -> None:
        await self._client.delete_batch(batch)

    async def close(self) -> None:
        await self._client.close()
