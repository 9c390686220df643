"""The rows of a rank: taken from blobs, changed by columns, given back in blobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.rank.table import RowTable, add_advantages, report_scores
from sluice.algo.packed_rows import InvalidAdvantageError
from sluice.algo.spec import AdvantageSpec
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.runtime.wire import advantage_to_proto, blob_to_proto
from sluice.samples.arrow import decode_group, encode_group
from sluice.samples.blob_store import BlobStore
from tests.unit.trainer.rows import LIMITS, make_sample


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path, sync=False)


@pytest.fixture
def table(blobs: BlobStore) -> RowTable:
    """Rows 4 and 6 of a batch: the first and the third of a blob of three."""
    samples = [
        make_sample("g/0", [1, 2], [3, 4], reward=1.0, weight=0.5),
        make_sample("g/1", [1, 2], [5], reward=2.0),
        make_sample(
            "g/2",
            [1, 2],
            [6, 7, 8],
            reward=3.0,
            loss_mask=np.array([True, False, True]),
            rollout_logprobs=np.array([-1, -2, -3], dtype=np.float32),
        ),
    ]
    rows = pb.BlobRows(
        blob=blob_to_proto(blobs.put(encode_group(samples))), indices=[0, 2], rows=[4, 6]
    )
    table = RowTable(blobs, LIMITS)
    table.add(pb.AddRows(batch_id="b", blobs=[rows]))
    return table


def test_only_the_own_rows_are_held_under_their_positions(table: RowTable) -> None:
    rows = table.rows("b")
    assert sorted(rows) == [4, 6]
    assert rows[6].sample_id == "g/2"
    assert rows[6].token_ids.tolist() == [1, 2, 6, 7, 8]
    assert rows[6].token_ids.dtype == torch.int64
    assert rows[6].loss_mask.tolist() == [True, False, True]
    assert rows[4].loss_mask.tolist() == [True, True], "absent is all true"


def test_the_weight_of_a_sample_multiplies_its_loss_weight(table: RowTable) -> None:
    plan = [pb.MicroBatchRows(rows=[6, 4], loss_weights=[0.25, 3.0]), pb.MicroBatchRows()]
    (first, second), dummy = table.micro_batches("b", plan)
    assert (first.sample_id, first.loss_weight) == ("g/2", 0.25)
    assert (second.sample_id, second.loss_weight) == ("g/0", 1.5)
    assert dummy == []


def test_columns_that_were_set_come_back(table: RowTable, blobs: BlobStore) -> None:
    bare = make_sample("g/2", [], [])
    new = {"advantages": np.array([1, 2, 3], dtype=np.float32), "reward": 9.0}
    changed = encode_group([type(bare)(**{**vars(bare), "columns": new, "prompt_length": 0})])
    rows = pb.BlobRows(blob=blob_to_proto(blobs.put(changed)), indices=[0], rows=[6])
    table.set_columns(pb.SetColumns(batch_id="b", rows=rows))
    names = ["advantages", "reward", "rollout_logprobs", "values"]
    first, second = decode_group(table.spool_columns("b", names))
    assert dict(first.columns) == {"reward": 1.0}, "a row without a column leaves it out"
    assert second.columns["advantages"].tolist() == [1, 2, 3]
    assert second.columns["rollout_logprobs"].tolist() == [-1, -2, -3]
    assert second.columns["reward"] == 9.0
    table.drop("b")
    with pytest.raises(KeyError):
        table.rows("b")


def test_rows_of_zero_advantage_are_reported_and_nan_is_none(table: RowTable) -> None:
    rows = table.rows("b")
    spec = AdvantageSpec(name="provided")
    command = pb.AdvantagesCommand(batch_id="b", advantage=advantage_to_proto(spec))
    rows[4].columns["advantages"] = torch.zeros(2)
    # the second token of the other row is masked
    for values, silent in (([0.0, torch.nan, 0.0], [4, 6]), ([2.0, 5.0, 0.0], [4])):
        rows[6].columns["advantages"] = torch.tensor(values)
        result = pb.CommandResult()
        add_advantages(rows, spec, command, result)
        assert list(result.advantages.silent_rows) == silent
    rows[6].columns["advantages"] = torch.tensor([torch.nan, 0.0, 0.0])
    with pytest.raises(InvalidAdvantageError, match="advantage of nan"):
        add_advantages(rows, spec, command, pb.CommandResult())


def test_whitening_asks_for_moments_first_and_uses_those_of_all_ranks(table: RowTable) -> None:
    rows = table.rows("b")
    spec = AdvantageSpec(name="reinforce_plus_plus")
    command = pb.AdvantagesCommand(advantage=advantage_to_proto(spec), moments_only=True)
    asked = pb.CommandResult()
    add_advantages(rows, spec, command, asked)
    assert "advantages" not in rows[4].columns
    assert asked.advantages.moments.count == 4.0, "trained tokens"
    everyone = pb.TokenMoments(count=8.0, mean=1.0, m2=28.0)  # standard deviation 2
    command = pb.AdvantagesCommand(advantage=advantage_to_proto(spec), moments=everyone)
    add_advantages(rows, spec, command, pb.CommandResult())
    assert rows[4].columns["advantages"].tolist() == pytest.approx([0.0, 0.0])
    assert rows[6].columns["advantages"].tolist() == pytest.approx([1.0, 0.0, 1.0])


def test_an_estimator_takes_no_column_of_several_numbers_a_token(blobs: BlobStore) -> None:
    """What a teacher names is for the loss: it stays with its row, whatever is exchanged."""
    draws = np.random.default_rng(0)
    found = []
    for is_taught in (False, True):
        samples = []
        for index in range(4):
            wide: dict[str, Any] = {}
            if is_taught:
                named = [draws.permutation(9)[:3] for _ in range(2)]
                wide["teacher_top_ids/3"] = np.stack(named).astype(np.int32)
                taught = np.log(np.array([[0.5, 0.3, 0.1]] * 2, dtype=np.float32))
                wide["teacher_top_logprobs/3"] = taught
            samples.append(make_sample(f"g/{index}", [1], [2, 3], reward=float(index), **wide))
        blob = blob_to_proto(blobs.put(encode_group(samples)))
        table = RowTable(blobs, LIMITS)
        rows = pb.BlobRows(blob=blob, indices=range(4), rows=range(4))
        table.add(pb.AddRows(batch_id="b", blobs=[rows]))
        held, spec = table.rows("b"), AdvantageSpec(name="grpo")
        assert any(values.ndim > 1 for values in held[0].columns.values()) is is_taught
        scores, advantages = pb.CommandResult(), pb.CommandResult()
        report_scores(held, spec, scores)
        add_advantages(
            held, spec, pb.AdvantagesCommand(advantage=advantage_to_proto(spec)), advantages
        )
        found.append((scores, advantages, held[3].columns["advantages"].tolist()))
    assert found[0] == found[1]
    assert found[0][0].ByteSize() < 200 and found[0][2][0] > 0
