"""Results of a pass made known on every pipeline stage, so that all ranks answer alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from services.trainer.backend import Row
from services.trainer.backends.megatron.batch import PackedBatch
from services.trainer.backends.megatron.head import OutputHead
from services.trainer.backends.megatron.replay import Purpose, RoutingReplay
from sluice.algo.inputs import check_columns, pack_rows
from sluice.algo.losses import compute_loss
from sluice.algo.spec import LossSpec, required_columns


def share_responses(
    batches: Sequence[PackedBatch], scored: Sequence[torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """sample_id -> float32[response] on the CPU, from the last stage's `scored`.

    Collective over the pipeline.
    """
    rows = [row for batch in batches for row in batch.rows]
    lengths = [row.response_length for row in rows]
    if scored:
        flat = torch.cat(list(scored)).float()
    else:
        flat = torch.empty(sum(lengths), dtype=torch.float32, device=device)
    _from_last_stage(flat)
    parts = torch.split(flat.cpu(), lengths)
    return {row.sample_id: part.clone() for row, part in zip(rows, parts, strict=True)}


def share_sums(sums: dict[str, float], device: torch.device) -> dict[str, float]:
    """The last stage's `sums` on every stage. Collective over the pipeline."""
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


def build_forward_kwargs(batch: PackedBatch) -> dict[str, Any]:
    """Arguments of the model for `batch`, on every pipeline stage, trained or scored."""
    return {
        "input_ids": batch.token_ids,
        "position_ids": batch.position_ids,
        "attention_mask": None,  # the runs of the pack say what is masked
        "labels": None,  # the loss is made from hidden states
        "packed_seq_params": batch.runs,
    }


def check_rows(rows: Sequence[Row], spec: LossSpec) -> None:
    """Raises MissingColumnError ahead of a pass: inside it only the last stage would."""
    for row in rows:
        check_columns(required_columns(spec), row.columns, f"sample {row.sample_id}")


@dataclass
class SumsOnDevice:
    """Sums of a pass; they leave the device once, at its end."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, name: str, value: torch.Tensor) -> None:
        value = value.detach().double()  # token counts stay exact
        self.values[name] = self.values[name] + value if name in self.values else value

    def read(self) -> dict[str, float]:
        names = list(self.values)
        if not names:
            return {}
        stacked = torch.stack([self.values[name] for name in names]).tolist()
        return dict(zip(names, stacked, strict=True))


@dataclass(frozen=True, kw_only=True)
class ChunkPasses:
    """Runs micro-batches through the chunks of one model. `head` is None but on the last stage."""

    chunks: Sequence[Any]  # modules, wrapped for gradients if they are to be trained
    head: OutputHead | None
    replay: RoutingReplay | None = None

    def train(self, batches: Sequence[PackedBatch], spec: LossSpec) -> SumsOnDevice:
        """Add the gradients of the summed loss; nothing is reduced over ranks."""
        sums = SumsOnDevice()
        check_rows([row for batch in batches for row in batch.rows], spec)
        with self._replayed("train", batches), ExitStack() as stack:
            for chunk in self.chunks:
                stack.enter_context(chunk.no_sync())
            self._run(batches, partial(self._loss, spec=spec, sums=sums), forward_only=False)
        return sums

    @torch.no_grad()
    def score(self, batches: Sequence[PackedBatch], *, temperature: float) -> list[torch.Tensor]:
        """float32[R] of every batch in order: log-probs, or values; [] but on the last stage."""
        scored: list[torch.Tensor] = []

        def keep(batch: PackedBatch, output: torch.Tensor, non_loss_data: bool) -> torch.Tensor:
            assert self.head is not None and non_loss_data
            found = self.head.responses(output, batch, temperature=temperature, entropy="off")
            scored.append(found.outputs.float())
            return found.outputs

        with self._replayed("score", batches):
            self._run(batches, keep, forward_only=True)
        return scored

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
        self, batch: PackedBatch, output: torch.Tensor, *, spec: LossSpec, sums: SumsOnDevice
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """A loss as the schedule wants it: its sum, a count (unused here) and what to keep."""
        assert self.head is not None
        found = self.head.responses(
            output,
            batch,
            temperature=spec.temperature or 1.0,
            entropy="gradient" if spec.has_entropy_gradient else "metric",
        )
        terms = compute_loss(pack_rows(batch.rows, spec, found.outputs, found.entropy), spec)
        sums.add("loss", terms.loss)
        sums.add("tokens", terms.token_count)
        for name, (total, weight) in terms.metrics.items():
            sums.add(f"{name}/sum", total)
            sums.add(f"{name}/weight", weight)
        count = torch.zeros((), dtype=torch.int, device=terms.loss.device)
        return terms.loss, count, {}

    def _run(
        self, batches: Sequence[PackedBatch], finish: Callable[..., Any], *, forward_only: bool
    ) -> None:
        def step(
            iterator: Iterator[PackedBatch], chunk: torch.nn.Module
        ) -> tuple[torch.Tensor, Callable[..., Any]]:
            batch, index = next(iterator), self.chunks.index(chunk)
            if self.replay is not None:
                self.replay.before(index, batch)
            arguments = build_forward_kwargs(batch)
            if isinstance(getattr(chunk, "module", chunk), Float16Module):
                arguments["fp32_output"] = False
            output = chunk(**arguments)
            if self.replay is not None:
                self.replay.after(index, batch)
            return output, partial(finish, batch)

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(batches) for _ in self.chunks],
            model=list(self.chunks),
            num_microbatches=len(batches),
            seq_length=0,  # packs differ in length, stages exchange shapes
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
