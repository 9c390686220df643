"""Advantages of the rows of one rank."""

from __future__ import annotations

import math

import torch

from services.trainer.rank.table import OwnedRow
from sluice.algo.advantages import AdvantageColumns, AdvantageRow, compute_advantages
from sluice.algo.moments import Moments
from sluice.algo.spec import AdvantageSpec
from sluice.api.trainer.v1 import worker_service_pb2 as pb

REWARDS = ("reward", "raw_reward")


def add_advantages(
    rows: dict[int, OwnedRow],
    spec: AdvantageSpec,
    command: pb.AdvantagesCommand,
    result: pb.CommandResult,
) -> None:
    """Add the columns, or answer with the moments that whitening needs of every rank."""
    order = sorted(rows)
    inputs = [_input(rows[position]) for position in order]
    given = command.moments
    whole = Moments(given.count, given.mean, given.m2) if command.HasField("moments") else None
    found = compute_advantages(inputs, spec, lambda own: own if whole is None else whole)
    result.advantages.moments.count = found.moments.count
    result.advantages.moments.mean = found.moments.mean
    result.advantages.moments.m2 = found.moments.m2
    if command.moments_only:
        return
    for index, position in enumerate(order):
        rows[position].columns["advantages"] = found.advantages[index]
        if found.returns is not None:
            rows[position].columns["returns"] = found.returns[index]
    result.advantages.has_returns = found.returns is not None
    _report(rows, order, spec, found, result)


def _input(row: OwnedRow) -> AdvantageRow:
    return AdvantageRow(
        sample_id=row.sample_id,
        group_id=row.group_id,
        loss_mask=row.loss_mask,
        rewards={name: row.scalars[name] for name in REWARDS if name in row.scalars},
        columns=row.columns,
        episode=int(row.scalars["episode"]) if "episode" in row.scalars else None,
    )


def _report(
    rows: dict[int, OwnedRow],
    order: list[int],
    spec: AdvantageSpec,
    found: AdvantageColumns,
    result: pb.CommandResult,
) -> None:
    sums = result.sums
    for name, (total, weight) in found.metrics.items():
        sums.metrics[name].sum, sums.metrics[name].weight = total, weight
    column = spec.reward_column or "reward"
    rewards = [rows[row].scalars[column] for row in order if column in rows[row].scalars]
    sums.metrics["reward"].sum, sums.metrics["reward"].weight = math.fsum(rewards), len(rewards)
    if not order:
        return
    masks_T = torch.cat([rows[row].loss_mask for row in order])
    sizes_T = torch.where(masks_T, torch.cat(found.advantages).abs(), 0.0)
    absolute = sums.metrics["advantage_abs"]
    absolute.sum, absolute.weight = float(sizes_T.double().sum()), int(masks_T.sum())
    lengths = torch.tensor([len(rows[row].loss_mask) for row in order])
    owner_T = torch.repeat_interleave(torch.arange(len(order)), lengths)
    speaks = torch.zeros(len(order), dtype=torch.bool)
    speaks[owner_T[sizes_T > 0]] = True
    # A NaN is no zero: `>` alone would call its row silent and hide it.
    speaks[owner_T[sizes_T.isnan()]] = True
    result.advantages.silent_rows.extend(
        row for row, loud in zip(order, speaks.tolist(), strict=True) if not loud
    )
