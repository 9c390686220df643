"""Sums of a pass over micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from services.trainer.backend import MicroBatch, PassSums
from sluice.algo.losses import LossTerms

LOSS, TOKENS = "loss", "tokens"


@dataclass
class SumsOnDevice:
    """Sums of a pass; they leave the device once, at its end, so that nothing waits before."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, name: str, value: torch.Tensor) -> None:
        value = value.detach().double()  # token counts stay exact
        self.values[name] = self.values[name] + value if name in self.values else value

    def add_metric(self, name: str, total: torch.Tensor, weight: torch.Tensor) -> None:
        self.add(f"{name}/sum", total)
        self.add(f"{name}/weight", weight)

    def add_terms(self, terms: LossTerms) -> None:
        self.add(LOSS, terms.loss)
        self.add(TOKENS, terms.token_count)
        for name, (total, weight) in terms.metrics.items():
            self.add_metric(name, total, weight)

    def read(self) -> dict[str, float]:
        names = list(self.values)
        if not names:
            return {}
        stacked = torch.stack([self.values[name] for name in names]).tolist()
        return dict(zip(names, stacked, strict=True))


def pass_sums(sums: Mapping[str, float], outputs: Mapping[str, torch.Tensor]) -> PassSums:
    """Return what was read, as a pass answers."""
    names = [name.removesuffix("/sum") for name in sums if name.endswith("/sum")]
    return PassSums(
        loss=sums.get(LOSS, 0.0),
        token_count=round(sums.get(TOKENS, 0.0)),
        metrics={name: (sums[f"{name}/sum"], sums[f"{name}/weight"]) for name in names},
        outputs=outputs,
    )


def by_sample(scored: Iterable[tuple[MicroBatch, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The outputs of every row, on the host; one wait for all."""
    found: dict[str, torch.Tensor] = {}
    for rows, outputs_T in scored:
        parts = outputs_T.cpu().split([row.response_length for row in rows])
        found.update((row.sample_id, part) for row, part in zip(rows, parts, strict=True))
    return found
