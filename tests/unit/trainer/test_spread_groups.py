"""Groups whose rows lie on several ranks: the advantages are those of groups kept whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.controller.passes import SiblingTable, merge_moments
from services.trainer.rank.table import OwnedRow, add_advantages, report_scores
from sluice.algo.spec import AdvantageSpec
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.runtime.wire import advantage_to_proto
from sluice.samples.sample import Sample
from tests.unit.trainer.rows import make_batch, make_sample

KL = {"kl_coefficient": 0.3, "old_logprobs": "old"}
SPECS = [
    AdvantageSpec(name="grpo"),
    AdvantageSpec(name="grpo", scale_by_std=False, whiten=True),
    AdvantageSpec(name="grpo", **KL),
    AdvantageSpec(name="rloo"),
    AdvantageSpec(name="rloo", **KL),
    AdvantageSpec(name="reinforce_plus_plus_baseline"),
    AdvantageSpec(name="reinforce_plus_plus_baseline", whiten=False, **KL),
    AdvantageSpec(name="reinforce_plus_plus", **KL),
    AdvantageSpec(name="gae", gamma=0.9, gae_lambda=0.8),
    AdvantageSpec(name="gae", whiten=True, **KL),
]


@st.composite
def spread_groups(draw: st.DrawFn) -> tuple[list[Sample], list[int], int]:
    """Rows, the rank of each, and how many ranks there are."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    samples = []
    for group in range(draw(st.integers(1, 4))):
        several = draw(st.booleans())  # samples an episode
        for index in range(draw(st.integers(1, 5))):
            length = int(random.integers(1, 6))
            column = lambda: random.normal(size=length).astype(np.float32)  # noqa: B023, E731
            sample = make_sample(
                f"g{group}/{index}",
                [1],
                [2] * length,
                loss_mask=random.random(length) < 0.8,
                reward=float(random.normal()),
                old_logprobs=column(),
                reference_logprobs=column(),
                values=column(),
            )
            if several:
                episode = {"episode": float(index // 2)}
                sample = replace(sample, columns={**sample.columns, **episode})
            samples.append(sample)
    count = draw(st.integers(2, 4))
    places = st.integers(0, count - 1)
    owners = draw(st.lists(places, min_size=len(samples), max_size=len(samples)))
    return samples, owners, count


def held(samples: Sequence[Sample]) -> dict[int, OwnedRow]:
    rows = {}
    for row, sample in enumerate(samples):
        arrays = {k: v for k, v in sample.columns.items() if isinstance(v, np.ndarray)}
        mask = arrays.pop("loss_mask")
        rows[row] = OwnedRow(
            sample_id=sample.sample_id,
            group_id=sample.group_id,
            token_ids=torch.from_numpy(sample.token_ids.astype(np.int64)),
            prompt_length=sample.prompt_length,
            loss_mask=torch.from_numpy(mask),
            columns={name: torch.from_numpy(values) for name, values in arrays.items()},
            scalars={k: float(v) for k, v in sample.columns.items() if isinstance(v, float)},
        )
    return rows


def by_ranks(
    samples: Sequence[Sample], owners: Sequence[int], count: int, spec: AdvantageSpec
) -> list[np.ndarray]:
    """Advantages as the controller has the ranks compute them."""
    batch, everything = make_batch(samples, owners), held(samples)
    rows_of = [np.flatnonzero(batch.owners == rank) for rank in range(count)]
    tables = [{row: everything[row] for row in rows.tolist()} for rows in rows_of]
    relative: list[list[float] | None] = [None] * count
    if spec.compares_siblings:
        answers = [pb.CommandResult() for _ in tables]
        for table, answer in zip(tables, answers, strict=True):
            report_scores(table, spec, answer)
        results = [answer.advantages for answer in answers]
        width = spec.estimator.width
        scores, _ = SiblingTable.gather(batch, rows_of, results, width).relate(batch, spec)
        relative = [scores[rows].tolist() for rows in rows_of]
    command = pb.AdvantagesCommand(advantage=advantage_to_proto(spec))
    if spec.whitens:
        command.moments_only = True
        answers = [pb.CommandResult() for _ in tables]
        for table, answer, given_ in zip(tables, answers, relative, strict=True):
            add_advantages(table, spec, command, answer, given_)
        command.moments_only = False
        moments = merge_moments([answer.advantages.moments for answer in answers])
        command.moments.CopyFrom(moments)
    for table, given_ in zip(tables, relative, strict=True):
        add_advantages(table, spec, command, pb.CommandResult(), given_)
    return [everything[row].columns["advantages"].numpy() for row in range(len(samples))]


def by_hand(samples: Sequence[Sample], spec: AdvantageSpec) -> list[np.ndarray]:
    """The same in float64, from the formulas, with the groups whole."""
    gamma, smoothing = spec.gamma or 1.0, spec.gae_lambda or 1.0
    masks = [np.asarray(sample.columns["loss_mask"]) for sample in samples]
    kl = []
    for sample, mask in zip(samples, masks, strict=True):
        old = np.asarray(sample.columns["old_logprobs"], dtype=np.float64)
        gap = old - np.asarray(sample.columns["reference_logprobs"], dtype=np.float64)
        kl.append(np.where(mask, (spec.kl_coefficient or 0.0) * gap, 0.0))
    scores = np.array([float(sample.columns["reward"]) for sample in samples])
    if spec.name in ("grpo", "rloo"):
        scores -= [each.sum() for each in kl]
    final = scores.copy()
    for group in {sample.group_id for sample in samples}:
        rows = [row for row, sample in enumerate(samples) if sample.group_id == group]
        episodes: dict[object, list[float]] = {}
        for row in rows:
            key = samples[row].columns.get("episode", f"row {row}")
            episodes.setdefault(key, []).append(scores[row])
        means = {key: np.mean(values) for key, values in episodes.items()}
        mean, count = np.mean(list(means.values())), len(means)
        for row in rows if spec.compares_siblings else ():
            own = means[samples[row].columns.get("episode", f"row {row}")]
            if spec.name == "rloo":
                others = (own - mean) * count / (count - 1) if count > 1 else 0.0
                final[row] = others + (scores[row] - own if count > 1 else 0.0)
                continue
            final[row] = scores[row] - mean
            if spec.name == "grpo" and spec.scale_by_std is not False and count > 1:
                own_squares = [np.mean((np.array(v) - mean) ** 2) for v in episodes.values()]
                final[row] /= np.sqrt(sum(own_squares) / (count - 1)) + 1e-6
    found = []
    for row, (sample, mask) in enumerate(zip(samples, masks, strict=True)):
        advantages = np.where(mask, final[row], 0.0)
        if spec.name not in ("grpo", "rloo"):
            trained, carry, following = np.flatnonzero(mask), 0.0, 0.0
            for token in trained[::-1]:
                step = -kl[row][token] + (final[row] if token == trained[-1] else 0.0)
                if spec.name == "gae":
                    value = float(np.asarray(sample.columns["values"])[token])
                    step += gamma * following - value
                    carry, following = step + gamma * smoothing * carry, value
                else:
                    carry = step + gamma * carry
                advantages[token] = carry
        found.append(advantages)
    if spec.whitens:
        every = np.concatenate([a[mask] for a, mask in zip(found, masks, strict=True)])
        spread = np.std(every, ddof=1) if len(every) > 1 else 0.0
        mean = every.mean() if len(every) else 0.0
        found = [
            np.where(mask, (a - mean) / (spread + 1e-8), 0.0)
            for a, mask in zip(found, masks, strict=True)
        ]
    return found


@pytest.mark.parametrize(
    "spec", SPECS, ids=lambda spec: f"{spec.name}-{spec.has_kl}-{spec.whitens}"
)
@settings(max_examples=25)
@given(case=spread_groups())
def test_advantages_do_not_depend_on_where_rows_lie(
    case: tuple[list[Sample], list[int], int], spec: AdvantageSpec
) -> None:
    samples, owners, count = case
    spread = by_ranks(samples, owners, count, spec)
    whole = by_ranks(samples, [0] * len(samples), 1, spec)
    for found, other, exact in zip(spread, whole, by_hand(samples, spec), strict=True):
        if not spec.whitens:
            np.testing.assert_array_equal(found, other)  # to the bit
        np.testing.assert_allclose(found, other, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found, exact, rtol=2e-4, atol=2e-4)
