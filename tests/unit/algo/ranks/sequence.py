"""Which collectives run, and what happens where ranks differ in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch

from sluice.algo.collectives import (
    CollectiveMismatchError,
    Collectives,
    create_collectives,
    exchange_rows,
    gather_tokens,
)
from sluice.algo.layout import SequenceLayout
from sluice.algo.logprobs import VocabShard, linear_logprobs
from tests.patience import PATIENCE
from tests.unit.algo.ranks.parity import shard_of
from tests.unit.algo.ranks.toy_model import HIDDEN, VOCAB

WORLD = 4
TIMEOUT = timedelta(seconds=PATIENCE)


def check_same_collectives_with_and_without_tokens(context):
    """What runs is the same on a rank with tokens, without, and whatever needs a gradient."""
    collectives = create_collectives(context.world.group, TIMEOUT)
    layout = SequenceLayout(kind="contiguous", lengths=(2,), size=WORLD)
    held = (layout.token_places // layout.local_length == collectives.rank).any().item()
    values = torch.ones(layout.local_length, requires_grad=held)  # no graph where no token
    gather_tokens(values, collectives, gradient="sum").sum().backward()
    gather_tokens(values, collectives, gradient="own").sum().backward()
    collectives.end_step()
    if held:  # as often as ranks read it, and once more where all compute the same of it
        assert values.grad.sum() == (WORLD + 1) * layout.local_length


def check_rows_go_where_they_are_sent_and_gradients_come_back(context):
    """Rank r sends r + s rows to rank s but for rank 3, which sends none, and to 2 none comes."""
    collectives = create_collectives(context.world.group, TIMEOUT)
    counts = torch.arange(WORLD)[:, None] + torch.arange(WORLD)
    counts[3], counts[:, 2] = 0, 0
    sent, taken = counts[collectives.rank].tolist(), counts[:, collectives.rank].tolist()
    label = [100 * collectives.rank + to for to, count in enumerate(sent) for _ in range(count)]
    rows = torch.tensor(label, dtype=torch.float32)[:, None].repeat(1, 3).requires_grad_()
    found = exchange_rows(rows, collectives, sent=sent, taken=taken)
    came = [100 * at + collectives.rank for at, count in enumerate(taken) for _ in range(count)]
    assert found[:, 0].tolist() == came
    (found * (1 + collectives.rank)).sum().backward()
    collectives.end_step()
    back = [1 + to for to, count in enumerate(sent) for _ in range(count)]
    assert rows.grad[:, 2].tolist() == back
    narrow = collectives.all_to_all(rows.detach().bfloat16(), sent=sent, taken=taken)
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow, found.detach().bfloat16())


@dataclass
class Recorder:
    """Stands where a monitor does and keeps what runs."""

    seen: list = field(default_factory=list)

    def before(self, description):
        self.seen.append(description)


def check_collectives_do_not_depend_on_the_entropy(context):
    columns, shard = shard_of(context.world.rank, False)
    seen = {}
    for mode in ("off", "metric", "gradient"):
        for rows in (6, 0):
            recorder = Recorder()
            vocab = VocabShard(
                start=shard.start,
                size=VOCAB,
                collectives=Collectives(context.world.group, recorder),
            )
            hidden = torch.randn(rows, HIDDEN, requires_grad=True)
            weight = torch.randn(columns, HIDDEN, requires_grad=True)
            targets = torch.zeros(rows, dtype=torch.int64)
            found = linear_logprobs(
                hidden, weight, targets, entropy=mode, vocab=vocab, chunk_rows=2
            )
            found[0].sum().backward()
            seen[mode, rows] = [line.replace(str(rows), "T") for line in recorder.seen]
    assert len(seen["off", 6]) == 3, seen["off", 6]
    assert all(lines == seen["off", 6] for lines in seen.values()), seen


def expect_mismatch(context, act, rank, index, found):
    collectives = create_collectives(context.world.group, TIMEOUT)
    collectives.all_reduce(torch.ones(1), "sum")
    try:
        act(collectives)
        collectives.end_step()
    except CollectiveMismatchError as error:
        assert (error.rank, error.index) == (rank, index), str(error)
        assert f"rank {rank}" in str(error)
        assert found in str(error)
        return
    raise AssertionError("no mismatch was noticed")


def check_monitor_names_a_rank_that_skips(context):
    """Rank 2 runs nothing (as if its loss had no graph) and goes on to the end of the step."""

    def act(collectives):
        if collectives.rank != 2:
            collectives.all_gather(torch.ones(2))

    expect_mismatch(context, act, rank=2, index=1, found="all_gather (2,)")


def check_monitor_names_a_rank_with_another_shape(context):
    def act(collectives):
        collectives.all_reduce(torch.ones(3 if collectives.rank == 1 else 2), "sum")

    expect_mismatch(context, act, rank=1, index=1, found="all_reduce sum (3,)")


def check_monitor_names_a_rank_with_an_extra_collective(context):
    def act(collectives):
        collectives.all_reduce(torch.ones(2), "sum")
        if collectives.rank == 3:
            collectives.all_reduce(torch.ones(2), "max")

    expect_mismatch(context, act, rank=3, index=2, found="all_reduce max (2,)")


def check_monitor_names_a_rank_that_never_comes(context):
    """Rank 2 is busy elsewhere: the first rank says so at the deadline, nobody hangs."""
    collectives = create_collectives(context.world.group, timedelta(seconds=30))
    if context.world.rank == 2:
        return
    try:
        collectives.all_reduce(torch.ones(1), "sum")
    except RuntimeError as error:
        assert context.world.rank != 0 or "Ranks 2 failed to pass" in str(error), str(error)
        return
    raise AssertionError("rank 2 was not missed")
