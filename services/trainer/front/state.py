"""What the front knows of its policy."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.trainer.front.batches import BatchRegistry
from services.trainer.front.gradients import GradientLedger


@dataclass(frozen=True)
class PassScalars:
    """What a pass over rows came to, over all ranks."""

    loss: float
    token_count: int
    metrics: dict[str, float]
    micro_batch_count: int
    silent_row_count: int = 0


@dataclass(frozen=True)
class PublishedWeights:
    """A version of the store that this trainer published or that its checkpoint names."""

    version: int
    digest: str


@dataclass(eq=False)
class TrainerState:
    """Everything that a checkpoint or a restart of the ranks changes.

    weights: the latest published version that the parameters descend from. checkpoint: the
    name of the one that ranks restart from.
    """

    step: int = 0
    skipped_count: int = 0
    skips_in_a_row: int = 0
    last_skip: str = ""
    weights: PublishedWeights | None = None
    checkpoint: str = ""
    batches: BatchRegistry = field(default_factory=BatchRegistry)
    ledger: GradientLedger[PassScalars] = field(default_factory=GradientLedger)
