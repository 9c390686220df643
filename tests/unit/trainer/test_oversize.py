"""Rows above the cap: refused by name, cut, or run alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.trainer.config import TrainerConfig
from services.trainer.controller.planning import Planner
from services.trainer.controller.uploads import bare, find_facts
from services.trainer.errors import OversizeSampleError
from services.trainer.rank.table import RowTable
from services.trainer.rows import RowLimits
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.balance.planner import OversizePolicy, PlanLimits
from sluice.config import parse_config
from sluice.runtime.wire import blob_to_proto
from sluice.samples.arrow import encode_group
from sluice.samples.blob_store import BlobStore
from sluice.samples.sample import Sample, VersionSpan, truncate_sample, validate_sample
from tests.unit.trainer.rows import make_batch, make_sample, make_samples
from tests.unit.trainer.test_planning import SHAPE


def long_sample() -> Sample:
    """A prompt of 2, a response of 6 with every second token trained on, two versions."""
    sample = make_sample(
        "g/0",
        [1, 2],
        [3, 4, 5, 6, 7, 8],
        reward=1.5,
        loss_mask=np.array([True, False] * 3),
        rollout_logprobs=np.arange(6, dtype=np.float32),
    )
    spans = (VersionSpan(version=1, digest="a", first_token=0, last_token=1),)
    spans += (VersionSpan(version=2, digest="b", first_token=2, last_token=4),)
    spans += (VersionSpan(version=3, digest="c", first_token=5, last_token=5),)
    experts = np.arange(7 * 4, dtype=np.int16).reshape(7, 2, 2)
    return Sample(**{**vars(sample), "spans": spans, "routed_experts": experts})


def test_a_truncate_sample_is_well_formed() -> None:
    sample = truncate_sample(long_sample(), 6)
    validate_sample(sample)
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert sample.columns["loss_mask"].tolist() == [True, False, True, False]  # type: ignore[union-attr]
    assert sample.columns["reward"] == 1.5
    assert [(s.version, s.first_token, s.last_token) for s in sample.spans] == [
        (1, 0, 1),
        (2, 2, 3),
    ]
    assert sample.routed_experts is not None and len(sample.routed_experts) == 5
    assert truncate_sample(long_sample(), 8).token_ids.tolist() == long_sample().token_ids.tolist()


def test_the_policy_decides(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path, sync=False)
    blob = blobs.put(encode_group([make_sample("f/0", [1], [2, 3]), long_sample()]))

    def lengths(policy: OversizePolicy, cap: int = 5) -> list[int]:
        limits = RowLimits(vocabulary_size=50, max_tokens=cap, oversize=policy)
        return find_facts(blobs, blob, limits).lengths.tolist()

    with pytest.raises(OversizeSampleError) as caught:
        lengths(OversizePolicy.ERROR)
    assert caught.value.metadata == {"sample_id": "g/0", "length": "8", "cap": "5"}
    assert lengths(OversizePolicy.TRUNCATE) == [3, 5]
    assert lengths(OversizePolicy.ALONE) == [3, 8]
    with pytest.raises(OversizeSampleError):  # nothing of the response would be left
        lengths(OversizePolicy.TRUNCATE, cap=2)


@pytest.mark.parametrize(
    "model",
    [
        {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 6},
        {
            "model_type": "opt",
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "ffn_dim": 8,
        },
    ],
    ids=["gpt2", "opt"],
)
def test_a_row_ends_where_the_learned_positions_of_the_model_do(
    tmp_path: Path, model: dict[str, Any]
) -> None:
    """A rank has no position for the rest, whatever a micro-batch holds."""
    positions = model.get("n_positions", 2048)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50, **model}))
    values = {"model": str(tmp_path), "backend": "fsdp", "store": str(tmp_path)}

    def admit(policy: str, length: int) -> int:
        config = parse_config(TrainerConfig, values | {"oversize_policy": policy})
        sample = make_sample("g/0", [1], [2] * (length - 1))
        return len(RowLimits.from_config(config).admit(sample).token_ids)

    for policy in ("error", "truncate", "alone"):
        assert admit(policy, positions) == positions
    assert admit("truncate", positions + 1) == positions
    for policy in ("error", "alone"):
        with pytest.raises(OversizeSampleError, match=f"has learned {positions} positions") as made:
            admit(policy, positions + 1)
        assert made.value.metadata["cap"] == str(positions)


def test_front_and_rank_cut_alike(tmp_path: Path) -> None:
    """Trained tokens are counted as the rank trains on them: the loss is divided by them."""
    limits = RowLimits(vocabulary_size=50, max_tokens=5, oversize=OversizePolicy.TRUNCATE)
    blobs = BlobStore(tmp_path, sync=False)
    reference = blobs.put(encode_group([long_sample()]))
    facts = find_facts(blobs, reference, limits)
    table = RowTable(blobs, limits)
    blob = blob_to_proto(reference)
    rows = pb.BlobRows(blob=blob, indices=[0], rows=[0])
    table.add(pb.AddRows(batch_id="b", blobs=[rows]))
    row = table.rows("b")[0]
    assert len(row.token_ids) == facts.lengths[0] == 5
    assert int(row.loss_mask.sum()) == facts.mask_counts[0] == 2
    # Columns that come later fit the row as it is now.
    late = truncate_sample(long_sample(), 5)
    blob = blob_to_proto(blobs.put(encode_group([bare(late)])))
    table.set_columns(
        pb.SetColumns(batch_id="b", rows=pb.BlobRows(blob=blob, indices=[0], rows=[0]))
    )
    assert row.columns["rollout_logprobs"].tolist() == [0.0, 1.0, 2.0]


def test_a_pass_names_the_sample_that_does_not_fit() -> None:
    """The cap of the ranks may be another than when the rows came."""
    batch = make_batch(make_samples([[2], [30]]))
    limits = PlanLimits(token_cap=16)
    with pytest.raises(OversizeSampleError) as caught:
        Planner(SHAPE, limits).plan(batch, np.arange(1, 2))
    assert caught.value.metadata["sample_id"] == "g1/0"
    alone = PlanLimits(token_cap=16, oversize=OversizePolicy.ALONE)
    plan = Planner(SHAPE, alone).plan(batch, np.arange(2))
    assert sorted(plan.ranks[0]) == [(0,), (1,)]
