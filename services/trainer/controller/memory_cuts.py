"""Smaller micro-batches, where ranks have no memory for those that were planned.

How rows are spread over micro-batches changes no gradient but by the order of its sums, so a run
goes on. What cannot be cut is told, with what would make room.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from services.trainer import metrics
from services.trainer.config import TrainerConfig
from services.trainer.controller.planning import Planner, count_tokens
from services.trainer.controller.state import Batch, PassPlan
from services.trainer.errors import OutOfMemoryError, RankError, RankLostError
from sluice import platform
from sluice.runtime.errors import ServiceError

logger = logging.getLogger(__name__)

FAILED = RankError | RankLostError


class MemoryCuts:
    """Lowers what a micro-batch may hold, for as long as the controller lives."""

    def __init__(self, config: TrainerConfig, planner: Planner) -> None:
        self._config, self._planner = config, planner
        metrics.MICRO_BATCH_TOKENS.set(config.max_tokens_per_micro_batch)

    @property
    def redoes_in_place(self) -> bool:
        """Whether ranks are fit for another pass behind one that failed in its middle.

        Those that exchange tensors within a pass are not: they may have parted there.
        """
        return self._config.backend == "reference"

    def cut(self, batch: Batch, plan: PassPlan, data_rank: int, error: FAILED) -> None:
        """Halve the largest micro-batch of several rows that the rank had.

        Raises OutOfMemoryError where it had none, or none of more than half of what a row by
        itself has: that is what does not fit.
        """
        facts, shares = batch.facts, self._planner.packing.shares_prompts
        sizes = {
            rows: count_tokens(facts, rows, shares_prompts=shares)
            for rows in plan.ranks[data_rank]
            if rows
        }
        if not sizes:  # it only takes part in what ranks compute together
            raise self.explain(error) from error
        metrics.OUT_OF_MEMORY.inc()
        tokens = max((size for rows, size in sizes.items() if len(rows) > 1), default=0)
        alone = max((size for rows, size in sizes.items() if len(rows) == 1), default=0)
        if 2 * tokens <= alone:
            row = max((rows[0] for rows in sizes), key=lambda row: int(facts.lengths[row]))
            raise OutOfMemoryError(
                f"{error}; its longest row, {facts.sample_ids[row]!r} of "
                f"{facts.lengths[row]} tokens, is a micro-batch by itself already. What makes "
                f"room: {', '.join(self._remedies(error))}",
                rank=error.rank,
                sample_id=facts.sample_ids[row],
                length=int(facts.lengths[row]),
            ) from error
        before = self._planner.limits.token_cap
        self._planner.lower(max(1, tokens // 2 // self._planner.limits.context_size))
        after = self._planner.limits.token_cap
        metrics.MICRO_BATCH_TOKENS.set(after)
        logger.warning(
            "%s; a micro-batch of it had %d tokens: from now on they have %d at most "
            "(max_tokens_per_micro_batch was %d; set it so, and no pass is lost to finding out)",
            *(error, tokens, after, before),
        )

    def explain(self, error: ServiceError) -> OutOfMemoryError:
        """Say what makes room for what cannot be cut, such as optimizer state."""
        metrics.OUT_OF_MEMORY.inc()
        return OutOfMemoryError(
            f"{error}. What makes room: {', '.join(self._remedies(error))}", **error.metadata
        )

    def _remedies(self, error: ServiceError) -> Iterator[str]:
        """Settings that are not in use, those that cost least first."""
        config = self._config
        joining = error.metadata.get("joining")
        if joining and not (config.transfer.enabled and config.transfer.medium == "handles"):
            gib = int(error.metadata["in_pieces"]) / 2**30
            yield (
                f"{joining} in the trainer's environment, as {gib:.1f} GiB lie in pieces between "
                "what is in use (not beside an SGLang that sleeps)"
            )
        if config.backend == "reference":
            if not config.autocast:
                yield "autocast: true"
            yield "backend: fsdp or megatron, which cut the model over ranks (ranks.count)"
        if config.backend == "fsdp":
            if config.fsdp.dtype == "float32":
                yield "fsdp.dtype: bfloat16"
            if not config.fsdp.activation_checkpointing:
                yield "fsdp.activation_checkpointing: true"
            elif not config.fsdp.activation_offload:
                yield "fsdp.activation_offload: true"
            if not config.fsdp.cpu_offload and platform.declared() is not platform.CPU:
                yield "fsdp.cpu_offload: true"
            yield "more ranks (ranks.count), of which fsdp.context shares long rows"
        if config.backend == "megatron":
            if config.megatron.dtype == "float32":
                yield "megatron.dtype: bfloat16"
            if config.megatron.recompute != "full":
                yield "megatron.recompute: full"
            if config.megatron.distributed_optimizer and not config.megatron.optimizer_offload:
                yield "megatron.optimizer_offload: 1"
            yield (
                "more ranks (ranks.count) for megatron.tensor, pipeline and expert, and for "
                "megatron.context, which shares long rows"
            )
        if config.lora is None:
            yield "lora"
        yield "shorter samples"
