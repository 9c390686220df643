"""What a journal has after long runs."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from services.gateway.journal import (
    GatewayJournal,
    Model,
    ModelState,
    SamplerRecord,
    TrainingRequest,
    with_answer,
)

MODEL = Model(
    id="s:train:0",
    session="s",
    created=1.0,
    used=1.0,
    adapter="s-0",
    rank=2,
    alpha=32.0,
    targets=("q_proj",),
)
SAMPLERS, REQUESTS, KEPT = 3000, 400, 16


def test_snapshots_of_a_model_are_told_from_others_and_by_age(tmp_path: Path) -> None:
    journal = GatewayJournal(tmp_path / "journal.sqlite")
    journal._db.execute("PRAGMA synchronous = OFF")
    for number in range(SAMPLERS):
        adapter, path = ("s-0", None) if number % 3 else ("s-1", None)
        if number % 3 == 2:
            path = f"tinker://s:train:0/sampler_weights/{number}"
        journal.add_sampler(
            SamplerRecord(
                id=f"s:sample:{number}",
                session="s",
                created=float(number),
                path=path,
                adapter=adapter,
                version=number,
            )
        )
    own = [number for number in range(SAMPLERS) if number % 3 == 1][::-1]
    assert [each.version for each in journal.snapshots(MODEL)] == own
    assert [each.version for each in journal.snapshots(MODEL, 63, 2)] == own[63:65]
    journal.close()


def test_what_is_behind_a_checkpoint_is_kept_no_longer_than_its_answer(tmp_path: Path) -> None:
    journal = GatewayJournal(tmp_path / "journal.sqlite")
    journal._db.execute("PRAGMA synchronous = OFF")
    create = TrainingRequest(model=MODEL.id, seq=0, kind="create", digest="0", body=b"{}")
    journal.add_model(MODEL, create)
    state = ModelState()
    for seq in range(REQUESTS):
        kind = "create" if not seq else "forward_backward" if seq % 2 else "optim_step"
        request = TrainingRequest(
            model=MODEL.id, seq=seq, kind=kind, digest=str(seq), body=b"x" * 1000
        )
        if seq:
            journal.add_request(request)
        behind = seq - seq % 20
        state = ModelState(done=seq, step=seq // 2, parts=("1", "2"), checkpoint_seq=behind)
        journal.finish(with_answer(request, "done", "application/json", b"{}"), state, KEPT)
        needed = journal.done_since(MODEL.id, behind)
        assert [each.seq for each in needed] == list(range(behind + 1, seq + 1))
        assert all(each.body for each in needed)
    (rows,) = journal._db.execute("SELECT count(*) FROM requests").fetchone()
    assert rows <= KEPT + 20
    journal.close()
    again = GatewayJournal(tmp_path / "journal.sqlite")
    assert again.state(MODEL.id) == state
    assert again.loaded_models() == [again.model(MODEL.id)]
    again.close()


def test_what_a_full_disk_refuses_is_told_as_that_and_leaves_nothing(tmp_path: Path) -> None:
    journal = GatewayJournal(tmp_path / "journal.sqlite")
    create = TrainingRequest(model=MODEL.id, seq=0, kind="create", digest="0", body=b"x" * 9999)
    journal._db.execute("PRAGMA max_page_count = 1")  # not less than it has
    with pytest.raises(sqlite3.OperationalError, match="disk is full"):
        journal.add_model(MODEL, create)
    assert journal.models() == []
    journal._db.execute("PRAGMA max_page_count = 1000")
    journal.add_model(MODEL, create)
    assert journal.loaded_models() == [journal.model(MODEL.id)]
    journal.close()
