"""The reference backend: one transformers model per rank, data-parallel over ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from services.trainer.backend import (
    CriticBackend,
    Mesh,
    MicroBatch,
    ModelName,
    PassSums,
    StepOutcome,
)
from services.trainer.backends.reference import storage
from services.trainer.backends.reference.model import ScoredModel
from services.trainer.backends.reference.storage import FlatOptimizer
from services.trainer.config import TrainerConfig
from sluice import platform
from sluice.algo.inputs import pack_rows
from sluice.algo.logprobs import EntropyMode
from sluice.algo.losses import compute_loss
from sluice.algo.spec import LossSpec
from sluice.weights.manifest import ShardFile
from sluice.weights.shards import write_shard
from sluice.weights.writer import ShardWrite


class ReferenceBackend(CriticBackend):
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
        self._policy = ScoredModel.load(config.model, self._device, config.head)
        self._reference: ScoredModel | None = None
        self._optimizer = FlatOptimizer(self._policy.model, config.optim)

    @torch.no_grad()
    def compute_logprobs(
        self, micro_batches: Sequence[MicroBatch], *, model: ModelName, temperature: float
    ) -> dict[str, torch.Tensor]:
        scored = self._policy if model == "policy" else self._load_reference()
        found: dict[str, torch.Tensor] = {}
        for rows in micro_batches:
            if not rows:
                continue
            with self._precision():
                logprobs_T, _ = scored.score(rows, temperature=temperature, entropy="off")
            parts = logprobs_T.float().cpu().split([row.response_length for row in rows])
            found.update((row.sample_id, part) for row, part in zip(rows, parts, strict=True))
        return found

    @torch.no_grad()
    def compute_values(self, micro_batches: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for rows in micro_batches:
            if not rows:
                continue
            with self._precision():
                values_T = self._policy.value(rows).cpu()
            parts = values_T.split([row.response_length for row in rows])
            found.update((row.sample_id, part) for row, part in zip(rows, parts, strict=True))
        return found

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss: LossSpec) -> PassSums:
        total, tokens = 0.0, 0
        sums: dict[str, tuple[float, float]] = {}
        for rows in micro_batches:
            if not rows:
                continue
            outputs_T, entropy_T = self._run(rows, loss)
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

    def save_checkpoint(self, directory: Path) -> None:
        storage.save(directory, self._policy.model, self._optimizer, self.mesh)

    def load_checkpoint(self, directory: Path) -> None:
        storage.load(directory, self._policy.model, self._optimizer, self.mesh)

    def write_shards(self, directory: Path, write: ShardWrite | None = None) -> list[ShardFile]:
        dtype = getattr(torch, self._config.publish_dtype)
        write = write or partial(write_shard, sync=self._config.durable)
        return storage.write_shards(directory, self._policy.model, self.mesh, dtype, write)

    def close(self) -> None:
        self._reference = None

    def _run(self, rows: MicroBatch, loss: LossSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs and entropy, or values and none, float32[R]."""
        entropy: EntropyMode = "gradient" if loss.has_entropy_gradient else "metric"
        with self._precision():
            if loss.name == "value":
                return self._policy.value(rows), None
            return self._policy.score(rows, temperature=loss.temperature or 1.0, entropy=entropy)

    def _reduce(self, gradients: torch.Tensor) -> None:
        if self.mesh.world_size > 1:
            dist.all_reduce(gradients)

    def _load_reference(self) -> ScoredModel:
        """The frozen model, loaded on its first use."""
        if self._reference is None:
            path = self._config.reference_model or self._config.model
            self._reference = ScoredModel.load(path, self._device)
            self._reference.model.requires_grad_(False)
        return self._reference

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._config.autocast):
            yield
