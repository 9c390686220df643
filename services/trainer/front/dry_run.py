"""What PlanBatch asks: the plan of rows under limits of the caller's own, and nothing run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from services.trainer.front.batches import RowFacts
from sluice.balance.planner import OversizePolicy, Plan, PlanLimits
from sluice.runtime.errors import InvalidFieldError


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the caller would have otherwise than the trainer has it; None leaves it."""

    token_cap: int | None = None
    oversize: OversizePolicy | None = None
    micro_batch_multiple: int | None = None
    max_micro_batches: int | None = None

    def apply(self, limits: PlanLimits) -> PlanLimits:
        """Raises InvalidFieldError for limits that no plan can keep."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        try:
            return replace(limits, **given)
        except ValueError as error:
            name, _, problem = str(error).partition(" ")
            field = "max_tokens_per_micro_batch" if name == "token_cap" else name
            raise InvalidFieldError(field, problem) from None


@dataclass(frozen=True)
class BareRow:
    """A row that only has a length; group None is a group of its own."""

    length: int
    prompt_length: int = 0
    group: int | None = None


@dataclass(frozen=True)
class DryPlan:
    """A plan in rows of `facts`, and what its rows are."""

    facts: RowFacts
    plan: Plan
    shares_prompts: bool

    def token_count(self, rows: Sequence[int]) -> int:
        """Tokens of a micro-batch as run, without padding: what is cut does not count, and a
        shared prompt counts once."""
        facts, cut = self.facts, self.plan.truncated
        whole = sum(cut.get(row, int(facts.lengths[row])) for row in rows)
        if not self.shares_prompts:
            return whole
        first = {int(facts.prompts[row]): row for row in rows}.values()
        repeated = set(rows) - set(first)
        return whole - sum(int(facts.prompt_lengths[row]) for row in repeated)


def describe_bare(rows: Sequence[BareRow]) -> RowFacts:
    """Facts of rows without ids. Raises InvalidFieldError."""
    prompts: dict[tuple[int | str, int], int] = {}
    prompt_of = np.empty(len(rows), dtype=np.int64)
    group_ids = []
    for index, row in enumerate(rows):
        if not 0 < row.length < 1 << 31:
            raise InvalidFieldError(
                f"bare_rows[{index}].length", f"must be positive, got {row.length}"
            )
        if not 0 <= row.prompt_length <= row.length:
            raise InvalidFieldError(
                f"bare_rows[{index}].prompt_length",
                f"is {row.prompt_length}, not within 0..{row.length}",
            )
        group = f"alone {index}" if row.group is None else row.group
        group_ids.append(str(group))
        prompt_of[index] = prompts.setdefault((group, row.prompt_length), len(prompts))
    return RowFacts(
        sample_ids=[""] * len(rows),
        group_ids=group_ids,
        lengths=np.array([row.length for row in rows], dtype=np.int64),
        prompt_lengths=np.array([row.prompt_length for row in rows], dtype=np.int64),
        prompts=prompt_of,
        mask_counts=np.array([row.length - row.prompt_length for row in rows], dtype=np.int64),
        oldest_versions=np.full(len(rows), -1, dtype=np.int64),
        present={},
    )
