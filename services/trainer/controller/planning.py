"""Who owns which rows, in which micro-batches they run, and what their losses weigh."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from services.trainer.backends.families import keeps_rows_apart, shares_prompts
from services.trainer.config import TrainerConfig
from services.trainer.controller.state import Batch, PassPlan
from services.trainer.errors import OversizeSampleError
from sluice.algo.aggregation import weigh_samples
from sluice.algo.spec import LossSpec
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.balance.planner import (
    MicroBatchPlan,
    OversizePolicy,
    OversizeRowError,
    PlanLimits,
    PlanRows,
    TransformerShape,
    assign_owners,
    plan_micro_batches,
    row_costs,
)
from sluice.runtime.errors import InvalidFieldError
from sluice.samples.sample import RowFacts


@dataclass(frozen=True)
class PassWeights:
    """Factor of each selected row's token losses, and their share of the step's divisor."""

    weights: np.ndarray  # float64, in the order of the selection
    normalizer: float


@dataclass(frozen=True)
class Packing:
    """How a backend lays the rows of a micro-batch side by side.

    shares_prompts: a prompt of several rows stands there once. row_multiple: rows are padded to
    a multiple of so many tokens.
    """

    shares_prompts: bool = True
    row_multiple: int = 1

    def lengths(self, lengths: np.ndarray, cap: int) -> np.ndarray:
        """Return the tokens rows take; what fits a micro-batch alone still does when padded."""
        padded = -(-lengths // self.row_multiple) * self.row_multiple
        return np.where(lengths > cap, lengths, np.minimum(padded, cap))


def packing_of(config: TrainerConfig, context_size: int) -> Packing:
    """Return how the configured backend packs on ranks of this context parallelism."""
    if config.backend == "reference":
        return Packing(shares_prompts=not keeps_rows_apart(config.model))
    if config.backend == "fsdp" and context_size == 1:
        return Packing(shares_prompts=shares_prompts(config.model))
    kind = config.fsdp.cp_layout if config.backend == "fsdp" else config.megatron.cp_layout
    chunks = 2 * context_size if context_size > 1 and kind == "zigzag" else 1
    return Packing(shares_prompts=False, row_multiple=chunks)


def limits_of(config: TrainerConfig, layout: trainer_pb.ParallelLayout) -> PlanLimits:
    """Return the limits of plans for these ranks; `layout` is empty before they are known."""
    interleaved = layout.virtual_pipeline > 1
    return PlanLimits(
        token_cap=config.max_tokens_per_micro_batch,
        context_size=max(1, layout.context),
        data_size=max(1, layout.data),
        micro_batch_multiple=layout.pipeline if interleaved else 1,
        oversize=OversizePolicy(config.oversize_policy),
    )


NO_CUTS: Mapping[int, int] = {}
EVEN = 1.005  # largest by mean cost of a rank that is not worth another prompt pass
STEADY, RANGES = 1.02, 8  # the same of each eighth of a batch, where groups are kept whole


@dataclass(frozen=True)
class Siblings:
    """Rows that share a prompt: int64[N], which set of them, and which place in it.

    Sets are numbered by when they first come. counts: rows of each. least: the micro-batches
    that it needs at least.
    """

    set_of: np.ndarray
    place: np.ndarray
    counts: np.ndarray
    least: np.ndarray

    @classmethod
    def of(cls, facts: RowFacts, cap: int) -> Siblings:
        _, first, index = np.unique(facts.prompts, return_index=True, return_inverse=True)
        set_of = np.argsort(np.argsort(first))[index]
        first.sort()
        counts = np.bincount(set_of)
        order = np.argsort(set_of, kind="stable")
        place = np.empty_like(set_of)
        place[order] = np.arange(len(order)) - (np.cumsum(counts) - counts)[set_of[order]]
        prompts = facts.prompt_lengths
        responses = np.bincount(set_of, facts.lengths - prompts)
        least = np.ceil(responses / np.maximum(cap - prompts[first], 1)).astype(np.int64)
        return cls(set_of, place, counts, np.clip(least, 1, counts))

    def parts(self, split: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Split every set into 2 ** `split` times as many parts as it needs, even ones.

        None leaves sets whole. Returns the part of each row, and the first row of each part; parts
        are in order.
        """
        whole = np.ones_like(self.counts)
        part_counts = whole if split is None else np.minimum(self.least << split, self.counts)
        start = (np.cumsum(part_counts) - part_counts)[self.set_of]
        part_of = start + self.place * part_counts[self.set_of] // self.counts[self.set_of]
        _, first_row = np.unique(part_of, return_index=True)
        return part_of, first_row


class Planner:
    """Plans passes over batches for one model and one set of ranks."""

    def __init__(
        self, shape: TransformerShape, limits: PlanLimits, packing: Packing | None = None
    ) -> None:
        self._shape, self.limits, self.packing = shape, limits, packing or Packing()
        self._most = 0  # tokens that ranks have memory for, where that is less

    def settle(self, limits: PlanLimits, packing: Packing) -> None:
        """Take the limits of new ranks, which have no more memory than those before."""
        self.limits, self.packing = limits, packing
        if 0 < self._most < limits.token_cap:
            self.lower(self._most)

    def lower(self, token_cap: int) -> None:
        """Plan smaller micro-batches than the settings have; a longer row is one by itself."""
        self._most = token_cap
        self.limits = replace(self.limits, token_cap=token_cap, oversize=OversizePolicy.ALONE)

    def own(self, facts: RowFacts) -> np.ndarray:
        """Choose the data-parallel rank of each row, int64[N], balanced by cost over any range.

        Siblings that share a prompt stay together: all of them, so that one rank reads them, where
        that is as even, over any eighth of the rows too; else as many as one micro-batch holds,
        unless the ranks are done earlier when more of them encode it: then half as many do, or a
        quarter.
        """
        data_size = self.limits.data_size
        costs, prompt_costs = self._costs(facts, np.arange(len(facts.lengths)))
        if data_size == 1 or not len(costs):
            return np.zeros(len(costs), dtype=np.int64)
        siblings, own_costs = Siblings.of(facts, self.limits.cap), costs - prompt_costs
        best, least, ideal = np.empty(0, dtype=np.int64), np.inf, 0.0
        eighth = np.arange(len(costs)) * RANGES // len(costs)
        for split in itertools.chain([None], itertools.count()):
            if split is not None and not prompt_costs.any():
                return assign_owners(costs, data_size)
            part_of, first_row = siblings.parts(split)
            part_costs = np.bincount(part_of, own_costs) + prompt_costs[first_row]
            owners = assign_owners(part_costs, data_size)[part_of]
            _, firsts = np.unique(siblings.set_of * data_size + owners, return_index=True)
            loads = np.bincount(owners, own_costs, data_size)  # and each prompt once on a rank
            loads += np.bincount(owners[firsts], prompt_costs[firsts], data_size)
            largest, ideal = float(loads.max()), ideal or float(loads.mean())
            if split is None:
                ranges = np.bincount(eighth * data_size + owners, costs, RANGES * data_size)
                steady = ranges.reshape(RANGES, data_size)
                if not (steady.max(axis=1) <= STEADY * steady.mean(axis=1)).all():
                    continue
            if largest < least:
                best, least = owners, largest
            if largest <= EVEN * ideal or len(first_row) == len(costs):
                return best
        raise AssertionError("not reached")

    def plan(self, batch: Batch, selection: np.ndarray) -> PassPlan:
        """Return micro-batches of the selected rows, where they lie.

        Passes over the same rows of a batch have one plan.
        """
        plan = self.find(batch, selection)
        if plan is None:
            key = self._key(selection)
            solved = self.solve(batch.facts, batch.owners, selection, self.limits)
            plan = PassPlan(solved.ranks)
            batch.last_plan = key, plan
        return plan

    def find(self, batch: Batch, selection: np.ndarray) -> PassPlan | None:
        """Return the plan of these rows where it takes no time; None where it has to be made."""
        if not len(selection):
            dummy = ((),) * self.limits.micro_batch_multiple
            return PassPlan((dummy,) * self.limits.data_size)
        last = batch.last_plan
        return last[1] if last is not None and last[0] == self._key(selection) else None

    def _key(self, selection: np.ndarray) -> Hashable:
        return self.limits, self.packing, selection.tobytes()

    def solve(
        self, facts: RowFacts, owners: np.ndarray, selection: np.ndarray, limits: PlanLimits
    ) -> MicroBatchPlan:
        """Plan the selected rows, in rows of `facts`.

        Raises OversizeSampleError, and GroupTooLargeError under `max_micro_batches`.
        """
        costs, prompt_costs = self._costs(facts, selection)
        rows = selection.tolist()
        shares, sees = self.packing.shares_prompts, bool(facts.patches)
        lengths = self.packing.lengths(facts.lengths[selection], limits.cap)
        try:
            plan = plan_micro_batches(
                PlanRows(
                    lengths=lengths,
                    costs=costs,
                    owners=owners[selection],
                    groups=facts.prompts[selection] if shares or sees else None,
                    prompt_lengths=facts.prompt_lengths[selection]
                    if shares or not sees
                    else np.zeros_like(lengths),  # siblings share images alone
                    prompt_costs=prompt_costs if shares or sees else None,
                ),
                limits,
            )
        except OversizeRowError as error:
            row = rows[error.row]
            raise OversizeSampleError(facts.sample_ids[row], row, error.length, error.cap) from None
        return replace(
            plan,
            ranks=tuple(
                tuple(tuple(rows[index] for index in micro_batch) for micro_batch in rank)
                for rank in plan.ranks
            ),
            leftover=tuple(rows[index] for index in plan.leftover),
            truncated={rows[index]: kept for index, kept in plan.truncated.items()},
        )

    def _costs(self, facts: RowFacts, selection: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Costs of whole rows, and what a further sibling in a micro-batch saves of them.

        The tower sees an image of the prompt once for all siblings, however the backend packs.
        """
        lengths, lengths_of = np.unique(facts.lengths[selection], return_inverse=True)
        prompts, prompts_of = np.unique(facts.prompt_lengths[selection], return_inverse=True)
        costs, _ = row_costs(self._shape, lengths.tolist(), [])
        _, prompt_costs = row_costs(self._shape, [], prompts.tolist())
        row_costs_N = np.asarray(costs)[lengths_of]
        saved_N = np.asarray(prompt_costs)[prompts_of]
        if not self.packing.shares_prompts:
            saved_N = np.zeros_like(row_costs_N)
        if facts.patches and (tower := self._shape.tower) is not None:
            for index, row in enumerate(selection.tolist()):
                prompt, behind = (
                    sum(map(tower.flops, patches)) for patches in facts.patches.get(row, ((), ()))
                )
                row_costs_N[index] += prompt + behind
                saved_N[index] += prompt
        return row_costs_N, saved_N


def weigh_pass(batch: Batch, selection: np.ndarray, loss: LossSpec) -> PassWeights:
    """Compute weights and divisor of a selection, such that divisors of disjoint selections add up.

    That of `sum` is 1 for all of a step. A group's weight counts its tokens in the whole batch and
    its divisor is 1 over all its rows, so that a group may be spread over calls.
    """
    counts, episodes = batch.mask_counts, batch.episode_keys()
    whole = weigh_samples(loss, counts.tolist(), batch.facts.group_ids, episodes)
    weights = np.asarray(whole.weights, dtype=np.float64)[selection]
    if loss.aggregation == "sum":
        return PassWeights(weights, float(counts[selection].any()))
    if loss.aggregation == "constant":
        assert loss.constant_length is not None
        return PassWeights(weights, loss.constant_length * _episode_share(episodes, selection))
    return PassWeights(weights, float((weights * counts[selection]).sum()))


def _episode_share(keys: Sequence[Hashable], selection: np.ndarray) -> float:
    """Episodes of a selection: one that is spread over several counts by its rows."""
    rows = Counter(keys)
    return math.fsum(1 / rows[keys[row]] for row in selection.tolist())


def find_missing(
    batch: Batch, selection: np.ndarray, columns: Sequence[str]
) -> tuple[int, list[str]] | None:
    """Find the first selected row that lacks any of `columns`, and which ones."""
    absent = np.zeros(len(selection), dtype=np.bool_)
    present = {name: batch.present.get(name) for name in columns}
    for rows in present.values():
        absent |= True if rows is None else ~rows[selection]
    if not absent.any():
        return None
    row = int(selection[np.argmax(absent)])
    lacking = [name for name, rows in present.items() if rows is None or not rows[row]]
    return row, sorted(lacking)


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
    """A row that only has a length; group None is a group of its own.

    prompt_patches, patches: of every image in the prompt, and behind it.
    """

    length: int
    prompt_length: int = 0
    group: int | None = None
    prompt_patches: tuple[int, ...] = ()
    patches: tuple[int, ...] = ()


@dataclass(frozen=True)
class DryPlan:
    """A plan in rows of `facts`, and what its rows are."""

    facts: RowFacts
    plan: MicroBatchPlan
    shares_prompts: bool

    def token_count(self, rows: Sequence[int]) -> int:
        """Tokens of a micro-batch as run, without padding: what is cut does not count, and a
        shared prompt counts once."""
        cut = self.plan.truncated
        return count_tokens(self.facts, rows, shares_prompts=self.shares_prompts, cut=cut)


def count_tokens(
    facts: RowFacts, rows: Sequence[int], *, shares_prompts: bool, cut: Mapping[int, int] = NO_CUTS
) -> int:
    """Count the tokens of a micro-batch as run, without padding; `cut` has what rows keep."""
    whole = sum(cut.get(row, int(facts.lengths[row])) for row in rows)
    if not shares_prompts:
        return whole
    first = {int(facts.prompts[row]): row for row in rows}.values()
    repeated = set(rows) - set(first)
    return whole - sum(int(facts.prompt_lengths[row]) for row in repeated)


def describe_bare(rows: Sequence[BareRow]) -> RowFacts:
    """Return facts of rows without ids. Raises InvalidFieldError."""
    prompts: dict[tuple[int | str, int, tuple[int, ...]], int] = {}
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
        for name in ("prompt_patches", "patches"):
            if (least := min(getattr(row, name), default=1)) < 1:
                raise InvalidFieldError(
                    f"bare_rows[{index}].{name}", f"must be positive, got {least}"
                )
        group = f"alone {index}" if row.group is None else row.group
        group_ids.append(str(group))
        prompt = group, row.prompt_length, row.prompt_patches
        prompt_of[index] = prompts.setdefault(prompt, len(prompts))
    return RowFacts(
        sample_ids=[""] * len(rows),
        group_ids=group_ids,
        lengths=np.array([row.length for row in rows], dtype=np.int64),
        prompt_lengths=np.array([row.prompt_length for row in rows], dtype=np.int64),
        prompts=prompt_of,
        mask_counts=np.array([row.length - row.prompt_length for row in rows], dtype=np.int64),
        oldest_versions=np.full(len(rows), -1, dtype=np.int64),
        temperatures=np.full(len(rows), np.nan),
        episodes=np.zeros(len(rows)),
        present={},
        patches={
            index: (row.prompt_patches, row.patches)
            for index, row in enumerate(rows)
            if row.prompt_patches or row.patches
        },
    )
