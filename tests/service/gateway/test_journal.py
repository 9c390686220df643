"""What a journal has after long runs."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from services.gateway.errors import JournalDamagedError
from services.gateway.journal import (
    Checkpoint,
    GatewayJournal,
    Model,
    ModelState,
    SamplerRecord,
    Session,
    TrainingRequest,
    digest_of,
    with_answer,
)
from sluice.config import ConfigError

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


async def test_snapshots_of_a_model_are_told_from_others_and_by_age(tmp_path: Path) -> None:
    journal = GatewayJournal(tmp_path / "journal.sqlite")
    journal._db.execute("PRAGMA synchronous = OFF")
    for number in range(SAMPLERS):
        adapter, path = ("s-0", None) if number % 3 else ("s-1", None)
        if number % 3 == 2:
            path = f"tinker://s:train:0/sampler_weights/{number}"
        await journal.add_sampler(
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


async def test_what_is_behind_a_checkpoint_is_kept_no_longer_than_its_answer(
    tmp_path: Path,
) -> None:
    journal = GatewayJournal(tmp_path / "journal.sqlite")
    journal._db.execute("PRAGMA synchronous = OFF")
    create = TrainingRequest(model=MODEL.id, seq=0, kind="create", digest="0", body=b"{}")
    await journal.add_model(MODEL, create)
    state = ModelState()
    for seq in range(REQUESTS):
        kind = "create" if not seq else "forward_backward" if seq % 2 else "optim_step"
        request = TrainingRequest(
            model=MODEL.id, seq=seq, kind=kind, digest=digest_of(b"x" * 1000), body=b"x" * 1000
        )
        if seq:
            await journal.add_request(request)
        behind = seq - seq % 20
        parts = (str(seq),) if seq % 2 else ()
        state = ModelState(done=seq, step=seq // 2, parts=parts, checkpoint_seq=behind)
        await journal.finish(with_answer(request, "done", "application/json", b"{}"), state, KEPT)
        needed = journal.done_between(MODEL.id, behind, seq)
        assert [each.seq for each in needed] == list(range(behind + 1, seq + 1))
        assert all([(await journal.with_body(each)).body for each in needed])
    (rows,) = journal._db.execute("SELECT count(*) FROM requests").fetchone()
    assert rows <= KEPT + 20
    journal.close()
    again = GatewayJournal(tmp_path / "journal.sqlite")
    assert again.state(MODEL.id) == state
    assert again.loaded_models() == [again.model(MODEL.id)]
    again.close()


async def test_what_a_full_disk_refuses_is_told_as_that_and_leaves_nothing(tmp_path: Path) -> None:
    journal = GatewayJournal(tmp_path / "journal.sqlite")
    create = TrainingRequest(model=MODEL.id, seq=0, kind="create", digest="0", body=b"x" * 9999)
    journal._db.execute("PRAGMA max_page_count = 1")  # not less than it has
    with pytest.raises(sqlite3.OperationalError, match="disk is full"):
        await journal.add_model(MODEL, create)
    assert journal.models() == []
    journal._db.execute("PRAGMA max_page_count = 1000")
    await journal.add_model(MODEL, create)
    assert journal.loaded_models() == [journal.model(MODEL.id)]
    journal.close()


PATH = "tinker://s:train:0/weights/x"
BODY, ANSWER = b"what is asked", b"what is answered"


async def written(path: Path) -> None:
    """A journal with something in each table."""
    journal = GatewayJournal(path)
    await journal.add_session(Session(id="s", created=1.0, seen=1.0, tags=("a", "b")))
    create = TrainingRequest(
        model=MODEL.id, seq=0, kind="create", digest=digest_of(BODY), body=BODY
    )
    await journal.add_model(MODEL, create)
    state = ModelState(done=0, step=3, checkpoint="checkpoints/c")
    named = {"adapter": "s-0", "rank": 2, "alpha": 32.0, "targets": ("q_proj",)}
    times = {"created": 1.0, "expires": 4e9}
    checkpoint = Checkpoint(path=PATH, model=MODEL.id, kind="training", **times, **named)
    sampler = SamplerRecord(id="s:sample:0", session="s", created=1.0, version=7, digest="d")
    answered = with_answer(create, "done", "application/json", ANSWER)
    await journal.finish(answered, state, KEPT, checkpoint, sampler)
    await journal.add_request(replace(create, seq=1, kind="forward_backward"))
    journal.close()


def all_of(journal: GatewayJournal) -> list[object]:
    """What a journal says, or that it says it is damaged."""
    whole = journal.with_body

    def asked(seq: int) -> object:
        found = journal.request(MODEL.id, seq)
        return found and (found, asyncio.run(whole(found)).body if seq else None)

    def at_rest(model: Model | None) -> object:
        return model and replace(model, used=0.0)

    reads: list[Callable[[], object]] = [
        lambda: journal.session("s"),
        lambda: at_rest(journal.model(MODEL.id)),
        lambda: journal.state(MODEL.id),
        lambda: journal.checkpoint(PATH),
        lambda: journal.sampler("s:sample:0"),
        lambda: asked(0),
        lambda: asked(1),
        lambda: [replace(each, used=0.0) for each in journal.loaded_models()],
        lambda: journal.snapshots(MODEL),
        lambda: journal.expired_checkpoints(),
        lambda: journal.done_between(MODEL.id, -1, 0),
    ]
    found: list[object] = []
    for read in reads:
        try:
            found.append(read())
        except JournalDamagedError:
            found.append("damaged")
    return found


def test_a_bit_that_was_flipped_is_never_believed(tmp_path: Path) -> None:
    asyncio.run(written(tmp_path / "whole"))
    data, rng, told = (tmp_path / "whole").read_bytes(), random.Random(7), 0
    journal = GatewayJournal(tmp_path / "whole")
    expected = all_of(journal)
    journal.close()
    texts = (
        b"checkpoints/c",
        b'"step": 3',
        ANSWER,
        BODY,
        b"forward_backward",
        b"done",
        b"s:train:0",
    )
    places = [data.index(text) + rng.randrange(len(text)) for text in texts]
    places += rng.choices([place for place, byte in enumerate(data) if byte], k=250)
    for number, place in enumerate(places):
        path = tmp_path / str(number)
        flipped = bytearray(data)
        flipped[place] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        try:
            journal = GatewayJournal(path)
        except ConfigError:
            told += 1
            continue
        found = all_of(journal)
        journal.close()
        assert [
            (place, mine, theirs)
            for mine, theirs in zip(found, expected, strict=True)
            if mine not in (theirs, "damaged", None, [])
        ] == []
        told += found != expected
    assert told > len(texts)


class Work:
    """Counts tens of instructions of SQLite, in the journal's connections."""

    def __init__(self, journal: GatewayJournal) -> None:
        self.count = 0
        for database in (journal._db, journal._read):
            database.set_progress_handler(self._note, 10)

    def _note(self) -> int:
        self.count += 1
        return 0


async def test_a_request_takes_the_same_work_however_many_are_kept(tmp_path: Path) -> None:
    journal = GatewayJournal(tmp_path / "journal.sqlite")
    journal._db.execute("PRAGMA synchronous = OFF")
    create = TrainingRequest(model=MODEL.id, seq=0, kind="create", digest="0", body=b"{}")
    await journal.add_model(MODEL, create)
    took = dict[int, int]()
    for seq in range(601):
        request = replace(create, seq=seq, kind="forward_backward" if seq else "create")
        if seq:
            await journal.add_request(request)
        work = Work(journal)
        answered = with_answer(request, "done", "application/json", b"{}")
        await journal.finish(answered, ModelState(done=seq), KEPT)
        took[seq] = work.count
    assert took[600] <= 2 * took[60]
    journal.close()


async def test_a_pass_takes_the_same_room_however_many_wait_for_a_step(tmp_path: Path) -> None:
    journal = GatewayJournal(tmp_path / "journal.sqlite")
    journal._db.execute("PRAGMA synchronous = OFF")
    journal._db.execute("PRAGMA wal_autocheckpoint = 0")
    create = TrainingRequest(model=MODEL.id, seq=0, kind="create", digest="0", body=b"{}")
    await journal.add_model(MODEL, create)
    size = dict[int, int]()
    state = ModelState(done=0)
    for seq in range(1, 1201):
        kind = "forward" if seq % 2 else "forward_backward"  # as of a loss of the client's own
        request = replace(create, seq=seq, kind=kind)
        await journal.add_request(request)
        parts = state.parts if seq % 2 else (*state.parts, str(seq))
        state = replace(state, done=seq, parts=parts)
        answered = with_answer(request, "done", "application/json", b"{}")
        await journal.finish(answered, state, KEPT)
        size[seq] = size_of(tmp_path / "journal.sqlite-wal")
    assert size[1200] - size[1000] <= 1.1 * (size[300] - size[100])
    assert journal.state(MODEL.id) == state
    with sqlite3.connect(tmp_path / "journal.sqlite") as database:
        database.execute("UPDATE requests SET outcome = 'failed' WHERE seq = 700")
    with pytest.raises(JournalDamagedError, match="state of model"):
        journal.state(MODEL.id)
    journal.close()


def size_of(file: Path) -> int:
    return file.stat().st_size


def copy_of(journal: Path, name: str) -> Path:
    """Its files as a process that was killed leaves them."""
    folder = journal.parent / name
    folder.mkdir()
    for file in journal.parent.glob(f"{journal.name}*"):
        if not file.name.endswith("-shm"):
            (folder / file.name).write_bytes(file.read_bytes())
    return folder / journal.name


async def test_a_journal_that_went_back_is_refused(tmp_path: Path) -> None:
    """SQLite reads a write-ahead log up to the first place that is damaged, and says nothing."""
    path = tmp_path / "journal.sqlite"
    journal = GatewayJournal(path)
    for number in range(5):
        await journal.add_session(Session(id=f"s{number}", created=1.0, seen=1.0))
    early = copy_of(path, "early")
    await journal.add_session(Session(id="late", created=1.0, seen=1.0))
    names = ("whole", "flipped", "cut", "header", "without", "alone", "unread")
    copies = {name: copy_of(path, name) for name in names}
    journal.close()

    def log(name: str) -> Path:
        return copies[name].with_name("journal.sqlite-wal")

    data = log("flipped").read_bytes()
    log("flipped").write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    log("cut").write_bytes(data[:-1])
    log("header").write_bytes(b"?" + data[1:])
    log("without").unlink()
    commits = f"{path.name}.commits"
    (copies["alone"].parent / commits).unlink()
    (copies["unread"].parent / commits).write_bytes(b"no number")
    for name in ("flipped", "cut", "header", "without"):
        with pytest.raises(ConfigError, match=r"went back.*\.commits"):
            GatewayJournal(copies[name])
        copies[name].with_name(commits).unlink()  # to go on from there
        GatewayJournal(copies[name]).close()
    for name in ("whole", "alone", "unread"):
        again = GatewayJournal(copies[name])
        assert again.session("late")
        again.close()
    copies["whole"].write_bytes(early.read_bytes())
    with pytest.raises(ConfigError, match="went back"):
        GatewayJournal(copies["whole"])
    copies["whole"].unlink()
    GatewayJournal(copies["whole"]).close()  # begun anew


async def test_a_page_takes_the_same_work_however_many_there_are(tmp_path: Path) -> None:
    journal = GatewayJournal(tmp_path / "journal.sqlite")
    journal._db.execute("PRAGMA synchronous = OFF")
    create = TrainingRequest(model=MODEL.id, seq=0, kind="create", digest="0", body=b"{}")
    named = {"adapter": "s-0", "rank": 2, "alpha": 32.0, "targets": ()}

    async def add(numbers: range) -> None:
        for number in numbers:
            name, created = f"s:train:{number}", float(number)
            model = replace(MODEL, id=name, created=created)
            await journal.add_model(model, replace(create, model=name))
            kind = "training" if number % 10 else "sampler"
            journal._put_checkpoint(
                Checkpoint(path=name, model=MODEL.id, kind=kind, created=created, **named)
            )

    def look() -> int:
        work, total = Work(journal), journal.count("models")
        newest = list(map(float, range(total - 1, -1, -1)))
        assert [each.created for each in journal.models(20)] == newest[:20]
        assert [each.created for each in journal.models(20, 10)] == newest[10:30]
        assert [each.created for each in journal.checkpoints(20, 10)] == newest[10:30]
        for kind, place in (("training", 0), ("sampler", 9)):
            (last,) = journal.checkpoints_of(MODEL.id, kind, 1)
            assert last.created == newest[place]
        assert journal.expired_checkpoints() == []
        return work.count

    await add(range(100))
    few = look()
    await add(range(100, 1000))
    assert look() <= 2 * few
    assert len(journal.checkpoints_of(MODEL.id)) == len(journal.models()) == 1000
    journal.close()
