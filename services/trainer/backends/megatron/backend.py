"""The training backend on Megatron-Core. Import this module first: it adapts Megatron."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path

import torch

from services.trainer.backends.megatron import upstream

upstream.load()  # before anything below imports Megatron

from megatron.core import parallel_state  # noqa: E402

from services.trainer.backend import (  # noqa: E402
    CriticBackend,
    Mesh,
    MicroBatch,
    ModelName,
    PassSums,
    StepOutcome,
)
from services.trainer.backends.megatron import parallel  # noqa: E402
from services.trainer.backends.megatron.batch import (  # noqa: E402
    PackedBatch,
    check_tokens,
    pack_batch,
)
from services.trainer.backends.megatron.checkpoint import (  # noqa: E402
    PendingSave,
    begin_save,
    describe,
    load,
)
from services.trainer.backends.megatron.config import MegatronConfig  # noqa: E402
from services.trainer.backends.megatron.forward import (  # noqa: E402
    ChunkPasses,
    share_responses,
    share_sums,
)
from services.trainer.backends.megatron.policy import (  # noqa: E402
    PolicyModel,
    create_policy,
)
from services.trainer.backends.megatron.replay import RoutingReplay  # noqa: E402
from services.trainer.backends.megatron.stepping import Stepper  # noqa: E402
from services.trainer.backends.megatron.upstream import current_device  # noqa: E402
from services.trainer.backends.megatron.weights import write_shards  # noqa: E402
from services.trainer.config import TrainerConfig  # noqa: E402
from sluice import platform  # noqa: E402
from sluice.algo.spec import LossSpec  # noqa: E402
from sluice.weights.manifest import ShardFile  # noqa: E402
from sluice.weights.shards import write_shard  # noqa: E402
from sluice.weights.writer import ShardWrite  # noqa: E402

SAVE_SECONDS = 1800.0  # that the files of a checkpoint may take


class MegatronBackend(CriticBackend):
    """One rank. The default process group must exist; every method is collective."""

    def __init__(self, config: TrainerConfig, mesh: Mesh) -> None:
        self.mesh = mesh
        self._config = config
        self._layout = config.megatron
        platform.current().set_device(int(os.environ.get("LOCAL_RANK", "0")))
        self._device = current_device()
        parallel.start(self._layout, seed=config.seed)
        self._policy = create_policy(
            Path(config.model), self._layout, device=self._device, head=config.head
        )
        self._stepper = Stepper(self._policy, self._layout, config.optim)
        self._replay = _create_replay(self._policy, self._layout)
        self._passes = ChunkPasses(
            chunks=self._policy.chunks, head=self._policy.head, replay=self._replay
        )

    def compute_logprobs(
        self, micro_batches: Sequence[MicroBatch], *, model: ModelName, temperature: float
    ) -> dict[str, torch.Tensor]:
        batches = self._pack(micro_batches)
        passes = self._passes if model == "policy" else self._reference
        scored = passes.score(batches, temperature=temperature)
        return share_responses(batches, scored, self._device)

    def compute_values(self, micro_batches: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
        batches = self._pack(micro_batches)
        scored = self._passes.score(batches, temperature=1.0)  # values have none
        return share_responses(batches, scored, self._device)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss: LossSpec) -> PassSums:
        sums = self._passes.train(self._pack(micro_batches), loss).read()
        sums = share_sums(sums, self._device)
        names = [name.removesuffix("/sum") for name in sums if name.endswith("/sum")]
        return PassSums(
            loss=sums.get("loss", 0.0),
            token_count=round(sums.get("tokens", 0.0)),
            metrics={name: (sums[f"{name}/sum"], sums[f"{name}/weight"]) for name in names},
        )

    def step(self, *, normalizer: float, learning_rate: float | None) -> StepOutcome:
        if self._replay is not None:
            self._replay.step()
        return self._stepper.step(normalizer=normalizer, learning_rate=learning_rate)

    def discard_gradients(self) -> None:
        self._stepper.clear()

    def save_checkpoint(self, directory: Path) -> None:
        pending = self.begin_checkpoint(directory)
        self.finish_checkpoint(pending, directory)

    def begin_checkpoint(self, directory: Path) -> PendingSave:
        """Copy the state and write it from a thread; other calls may come before the finish."""
        return begin_save(
            self._policy, self._stepper, self._layout, directory, durable=self._config.durable
        )

    def finish_checkpoint(
        self, pending: PendingSave, directory: Path, timeout: float = SAVE_SECONDS
    ) -> None:
        """Make the checkpoint valid once all ranks have written. Raises CheckpointWriteError."""
        pending.finish(timeout)
        describe(self._policy, self._layout, directory)

    def load_checkpoint(self, directory: Path) -> None:
        load(self._policy, self._stepper, self._layout, directory)
        self._stepper.clear()

    def write_shards(self, directory: Path, write: ShardWrite | None = None) -> list[ShardFile]:
        return write_shards(
            self._policy.tensors,
            directory,
            rank=self.mesh.rank,
            max_bytes=self._layout.max_shard_bytes,
            write=write or partial(write_shard, sync=self._config.durable),
        )

    def close(self) -> None:
        parallel.stop()

    @cached_property
    def _reference(self) -> ChunkPasses:
        """A second, untrained model; made when it is first asked for."""
        directory = Path(self._config.reference_model or self._config.model)
        policy: PolicyModel = create_policy(
            directory, self._layout, device=self._device, trained=False
        )
        return ChunkPasses(chunks=policy.chunks, head=policy.head)

    def _pack(self, micro_batches: Sequence[MicroBatch]) -> list[PackedBatch]:
        """Interleaved pipelines take groups of micro-batches: dummies fill the last one."""
        multiple = self._layout.micro_batch_multiple
        missing = -len(micro_batches) % multiple
        rank = parallel_state.get_context_parallel_rank()
        for rows in micro_batches:
            check_tokens(rows, self._policy.source.shape.vocab)
        return [
            pack_batch(rows, self._layout, context_rank=rank, device=self._device)
            for rows in [*micro_batches, *([()] * missing)]
        ]


def _create_replay(policy: PolicyModel, config: MegatronConfig) -> RoutingReplay | None:
    if config.routing_replay == "off":
        return None
    return RoutingReplay(config.routing_replay, policy.models, policy.source, policy.config)
