"""Which experts training is to take again: what rows bring (R3), or what was recorded here (R2).

R2 ("recorded"): the pass that computes old log-probs records the experts, training takes them
again until the next such pass after a step (arXiv 2507.18071). R3 ("rollout"): rows bring the
experts of the engine (`Row.routed_experts`), for old log-probs and for training (2510.11370).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from services.trainer.backend import Row

Mode = Literal["recorded", "rollout"]
Purpose = Literal["score", "train"]


@dataclass(frozen=True)
class RoutingShape:
    """Of a model: its mixture layers, the experts of each, and how many a token goes to."""

    layers: int
    experts: int
    choices: int

    def anything(self, tokens: int, layers: int | None = None) -> torch.Tensor:
        """Return distinct experts int16[tokens, layers, choices] for what no loss depends on."""
        layers = self.layers if layers is None else layers
        return torch.arange(self.choices, dtype=torch.int16).repeat(tokens, layers, 1)

    def fault_of(self, row: Row) -> str:
        """Return what keeps the experts that a row brings from being taken; empty for nothing."""
        named = f"sample {row.sample_id!r}"
        experts, length = row.routed_experts, len(row.token_ids)
        if experts is None:
            return f"{named} has no routed_experts; set engine.routed_experts: true of its engine"
        wanted = (self.layers, self.choices)
        if len(experts) not in (length, length - 1) or tuple(experts.shape[1:]) != wanted:
            return (
                f"{named}: routed_experts are {tuple(experts.shape)} for {length} tokens, "
                f"{wanted[0]} mixture layers and {wanted[1]} choices"
            )
        if experts.numel() and not 0 <= int(experts.min()) <= int(experts.max()) < self.experts:
            return f"{named}: a routed expert is not among {self.experts}"
        return ""


@dataclass(frozen=True)
class RoutingRecord:
    """Experts int16[tokens, layers, choices] of a row, and the tokens they were recorded for."""

    token_ids: torch.Tensor
    experts: torch.Tensor


def record_fault(row: Row, record: RoutingRecord | None) -> str:
    """Return what keeps a record from being taken for a row; empty for nothing."""
    named = f"sample {row.sample_id!r}"
    if record is None:
        return (
            f"{named}: no experts were recorded; compute its old log-probs first "
            "(algorithm.loss.old_logprobs: old of a run)"
        )
    if not torch.equal(record.token_ids, row.token_ids):
        return f"{named}: experts were recorded for other tokens"
    return ""
