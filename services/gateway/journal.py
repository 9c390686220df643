"""What clients asked for and were told, in one SQLite file that outlives the process.

A training request is written before it is answered for, and its answer together with the state
that it leaves: a gateway that is killed anywhere goes on from there, and does nothing twice.
What is read was written so: rows bear digests of themselves.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import xxhash

from services.gateway.errors import JournalDamagedError
from sluice.config import ConfigError
from sluice.durable import owned
from sluice.runtime import waits
from sluice.runtime.idempotency import settle

logger = logging.getLogger(__name__)

SCHEMA = """
CREATE TABLE IF NOT EXISTS format (number INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, created REAL NOT NULL, seen REAL NOT NULL, finished TEXT,
    about TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, created REAL NOT NULL, used REAL NOT NULL,
    unloaded TEXT, about TEXT NOT NULL, state TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS requests (
    model TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL, digest TEXT NOT NULL,
    body BLOB, outcome TEXT, media TEXT, answer BLOB, seal TEXT NOT NULL,
    PRIMARY KEY (model, seq));
CREATE TABLE IF NOT EXISTS checkpoints (
    path TEXT PRIMARY KEY, model TEXT NOT NULL, kind TEXT NOT NULL, created REAL NOT NULL,
    expires REAL, about TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, created REAL NOT NULL, clients INTEGER NOT NULL,
    about TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS commits (number INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS samplers_of_session ON samplers (session, created);
CREATE INDEX IF NOT EXISTS models_of_session ON models (session);
CREATE INDEX IF NOT EXISTS checkpoints_of_model ON checkpoints (model, created);
CREATE INDEX IF NOT EXISTS checkpoints_of_kind ON checkpoints (model, kind, created);
CREATE INDEX IF NOT EXISTS checkpoints_by_age ON checkpoints (created);
CREATE INDEX IF NOT EXISTS checkpoints_by_expiry ON checkpoints (expires) WHERE expires NOTNULL;
CREATE INDEX IF NOT EXISTS models_by_age ON models (created);
CREATE INDEX IF NOT EXISTS sessions_by_age ON sessions (created);
CREATE INDEX IF NOT EXISTS requests_with_body ON requests (model, seq) WHERE body NOTNULL;
CREATE INDEX IF NOT EXISTS requests_without_body ON requests (model, seq) WHERE body IS NULL;
"""
FORMAT = 2
LOCK_SECONDS = 60.0  # so long is somebody waited for who writes to the file beside the gateway
REQUESTS = (  # without their bodies
    "SELECT model, seq, kind, digest, outcome, media, answer, seal FROM requests WHERE model = ?"
)
NUMBERS = ("adapter", "rank", "alpha", "targets", "train_attn", "train_mlp")

# Columns that stand for themselves, and that the text beside them bears the digest of.
SESSION_KEY = ("id", "created")
MODEL_KEY = SAMPLER_KEY = ("id", "session", "created")
CHECKPOINT_KEY = ("path", "model", "kind", "created", "expires")


@dataclass(frozen=True, kw_only=True)
class Session:
    """A client. `finished`: why it ended; None while it lives."""

    id: str
    created: float
    seen: float
    finished: str | None = None
    tags: tuple[str, ...] = ()
    user_metadata: Mapping[str, Any] | None = None
    display_name: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """Where a model's requests have led. `parts`: passes whose gradients wait for a step.

    checkpoint: the one to go back to, `checkpoint_seq` the request that it is of; `owns` it: it is
    nobody's but the gateway's. unnamed: others that may be in the store, and that are to go.
    lineage: how often the model was brought back.
    """

    done: int = -1
    step: int = 0
    parts: tuple[str, ...] = ()
    checkpoint: str = ""
    checkpoint_seq: int = -1
    checkpoint_step: int = 0
    owns: bool = False
    unnamed: tuple[str, ...] = ()
    lineage: int = 0


@dataclass(frozen=True, kw_only=True)
class Model:
    """A training run: an adapter of the trainer. `unloaded`: why; None while it is trained."""

    id: str
    session: str
    created: float
    used: float
    unloaded: str | None = None
    adapter: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    user_metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """A training request at its place. `outcome`: None until it is done; then done or failed.

    digest: `digest_of` its body, which goes once nobody needs it any more.
    """

    model: str
    seq: int
    kind: str
    digest: str
    body: bytes | None = None
    outcome: str | None = None
    media: str | None = None
    answer: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a `tinker://` path names: state to train on from, or weights to sample from."""

    path: str
    model: str
    kind: str  # training or sampler
    created: float
    expires: float | None = None
    adapter: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    train_attn: bool = True
    train_mlp: bool = True
    checkpoint: str = ""  # of the trainer
    version: int = 0  # of the store
    digest: str = ""
    user_metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class SamplerRecord:
    """A sampling session. `version` 0: the base."""

    id: str
    session: str
    created: float
    clients: int = 0
    path: str | None = None
    adapter: str = ""
    version: int = 0
    digest: str = ""


P = ParamSpec("P")
T = TypeVar("T")
Change = Callable[Concatenate["GatewayJournal", P], T]
Awaited = Callable[Concatenate["GatewayJournal", P], Coroutine[Any, Any, T]]


async def to_its_end(doing: asyncio.Future[T]) -> T:
    """Wait for what a thread does; a cancellation comes behind it, with the caller's next await."""
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        await settle(doing)
        caller = asyncio.current_task()
        assert caller is not None
        caller.uncancel()
        caller.cancel()
        return doing.result()


def _in_thread(work: Change[P, T]) -> Awaited[P, T]:
    """Do it in the journal's thread, behind what was asked for before.

    The disk may take its time: nobody but the caller waits for it.
    """

    @functools.wraps(work)
    async def call(self: GatewayJournal, *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        doing = loop.run_in_executor(self._thread, lambda: work(self, *args, **kwargs))
        with waits.waiting(f"disk of {self._path}: {work.__name__.replace('_', ' ')}"):
            return await to_its_end(doing)

    return call


def _change(work: Change[P, T]) -> Awaited[P, T]:
    """Do it in the journal's thread: all changes, or none."""

    @functools.wraps(work)
    def together(self: GatewayJournal, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._commit():
            return work(self, *args, **kwargs)

    return _in_thread(together)


class CommitCount:
    """How many commits a journal has had, in a file beside it.

    SQLite reads a write-ahead log up to the first place that is damaged, and goes back to the
    commit before that in silence. The count is written behind each commit and left to the system
    to bring to the disk: it may say less than there were, and never more.
    """

    def __init__(self, journal: Path) -> None:
        self.path = journal.with_name(f"{journal.name}.commits")
        if not journal.exists():
            self.path.unlink(missing_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)

    def read(self) -> int:
        """0 where it says nothing, or nothing that was written so."""
        number, _, digest = os.pread(self._file, 64, 0).decode(errors="replace").partition(" ")
        return int(number) if digest and digest == _digest(number) else 0

    def write(self, number: int) -> None:
        text = f"{number:020d}"
        try:
            os.pwrite(self._file, f"{text} {_digest(text)}".encode(), 0)
        except OSError as error:  # the commit stands
            logger.error("%s: %s", self.path, error)

    def close(self) -> None:
        os.close(self._file)


class GatewayJournal:
    """The file. One process has it at a time.

    Reading one row raises JournalDamagedError where it is not as it was written; lists leave such
    rows out, and the log names them.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError, and DirectoryError where another gateway has it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._claim = owned(path.parent, path.name)
        self._claim.__enter__()
        self._path = path
        try:
            self._count = CommitCount(path)
        except OSError as error:
            self._claim.__exit__(None, None, None)
            raise ConfigError(f"journal: {path}: {error}") from None
        self._thread = ThreadPoolExecutor(1, "journal")
        try:
            self._db = self._connect()
            self._db.execute("PRAGMA journal_mode = WAL")
            for (found,) in self._db.execute("PRAGMA integrity_check"):
                if found != "ok":
                    raise sqlite3.DatabaseError(found)
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(SCHEMA)
            if _schema_of(self._db) != _schema_of(_new_database()):
                raise sqlite3.DatabaseError("it is damaged, or of another release")
            self._read = self._connect()
            self._read.execute("PRAGMA query_only = ON")
            row = self._one("SELECT number FROM format")
            if row is None:
                self._db.execute("INSERT INTO format VALUES (?)", (FORMAT,))
            elif row["number"] != FORMAT:
                raise sqlite3.DatabaseError(f"it is of another release: format {row['number']}")
            self._check_commits()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the latter: of its message
            self._count.close()
            self._claim.__exit__(None, None, None)
            raise ConfigError(f"journal: {path} cannot be read: {error}") from None

    def _check_commits(self) -> None:
        """Raises DatabaseError for a journal that has had more commits than it has."""
        row = self._one("SELECT number FROM commits")
        if row is None:
            self._db.execute("INSERT INTO commits VALUES (0)")
        has, had = 0 if row is None else row["number"], self._count.read()
        if not isinstance(has, int):
            raise sqlite3.DatabaseError("its number of commits is none")
        if has < had:
            raise sqlite3.DatabaseError(
                f"it went back by {had - has} commits, from {had}: its -wal file is damaged or "
                f"gone, or it is an older copy. Remove {self._count.path} to go on from there: "
                "what was answered since is forgotten"
            )
        self._count.write(has)

    def _connect(self) -> sqlite3.Connection:
        found = sqlite3.connect(
            self._path, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False
        )
        found.row_factory = sqlite3.Row
        found.text_factory = lambda data: data.decode(errors="replace")
        return found

    def close(self) -> None:
        self._thread.shutdown()
        self._read.close()
        self._db.close()
        self._count.close()
        self._claim.__exit__(None, None, None)

    @contextmanager
    def _commit(self) -> Iterator[None]:
        """All changes of the block, or none."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            count = "UPDATE commits SET number = number + 1 RETURNING number"
            ((number,),) = self._db.execute(count).fetchall()
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # a full disk has rolled back already
                self._db.execute("ROLLBACK")
            raise
        self._count.write(number)

    @_change
    def add_session(self, session: Session) -> None:
        about = _about(session, ("tags", "user_metadata", "display_name"), SESSION_KEY)
        values = (session.id, session.created, session.seen, None, about)
        self._db.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?)", values)

    def session(self, session_id: str) -> Session | None:
        row = self._one("SELECT * FROM sessions WHERE id = ?", session_id)
        return None if row is None else self._session(row)

    def sessions(self, most: int = -1, behind: int = 0) -> list[Session]:
        """The newest first; `most` of them, -1 is all, behind the newest so many."""
        query = "SELECT * FROM sessions ORDER BY created DESC LIMIT ? OFFSET ?"
        return self._whole(self._session, self._all(query, most, behind))

    def session_end(self, session_id: str) -> str | None:
        """Why a session has ended, whatever else of it is damaged.

        Empty while it lives; None where there is none.
        """
        row = self._one("SELECT finished FROM sessions WHERE id = ?", session_id)
        return None if row is None else str(row["finished"] or "")

    def silent_sessions(self, since: float) -> list[str]:
        """Those that live, without a sign of life since then."""
        rows = self._all("SELECT id FROM sessions WHERE finished IS NULL AND seen < ?", since)
        return [row["id"] for row in rows]

    @_change
    def note_seen(self, session_id: str | None = None) -> None:
        """A sign of life of a session; of none: of all that live."""
        where, more = ("id = ?", (session_id,)) if session_id else ("finished IS NULL", ())
        self._db.execute(f"UPDATE sessions SET seen = ? WHERE {where}", (time.time(), *more))

    @_change
    def finish_session(self, session_id: str, why: str) -> None:
        """The first reason stands."""
        self._db.execute(
            "UPDATE sessions SET finished = ? WHERE id = ? AND finished IS NULL", (why, session_id)
        )

    @_change
    def add_model(self, model: Model, create: TrainingRequest) -> None:
        """With its first request."""
        about = _about(model, (*NUMBERS, "seed", "user_metadata"), MODEL_KEY)
        state = _sealed(_state_values(ModelState()), model.id)
        values = (model.id, model.session, model.created, model.used, None, about, state)
        self._db.execute("INSERT INTO models VALUES (?, ?, ?, ?, ?, ?, ?)", values)
        self._add(create)

    def model(self, model_id: str) -> Model | None:
        row = self._one("SELECT * FROM models WHERE id = ?", model_id)
        return None if row is None else self._model(row)

    def models(self, most: int = -1, behind: int = 0) -> list[Model]:
        """As `sessions`."""
        query = "SELECT * FROM models ORDER BY created DESC LIMIT ? OFFSET ?"
        return self._whole(self._model, self._all(query, most, behind))

    def models_of(self, session_id: str) -> list[Model]:
        """The newest first."""
        query = "SELECT * FROM models WHERE session = ? ORDER BY created DESC"
        return self._whole(self._model, self._all(query, session_id))

    def loaded_models(self) -> list[Model]:
        return self._whole(self._model, self._all("SELECT * FROM models WHERE unloaded IS NULL"))

    def state(self, model_id: str) -> ModelState:
        row = self._one("SELECT state FROM models WHERE id = ?", model_id)
        assert row is not None, model_id
        what = f"the state of model {model_id}"
        found = self._unsealed(what, row["state"], model_id)
        parts = found["parts"]
        if isinstance(parts, dict):
            passes = self._passes(model_id, parts["first"], found["done"])
            if len(passes) != parts["count"]:
                raise self._damaged(what)
            parts = passes
        names = tuple(found.get("unnamed", ()))
        return ModelState(**{**found, "parts": tuple(parts), "unnamed": names})

    def _passes(self, model_id: str, first: int, last: int) -> list[str]:
        """The parts that passes have made, as their rows have them."""
        rows = self._all(
            "SELECT seq FROM requests WHERE model = ? AND seq BETWEEN ? AND ? "
            "AND kind = 'forward_backward' AND outcome = 'done' ORDER BY seq",
            model_id,
            first,
            last,
        )
        return [str(row["seq"]) for row in rows]

    @_change
    def keep_state(self, model_id: str, state: ModelState) -> None:
        self._keep_state(model_id, state)

    def _keep_state(self, model_id: str, state: ModelState) -> None:
        text = _sealed(_state_values(state), model_id)
        self._db.execute("UPDATE models SET state = ? WHERE id = ?", (text, model_id))

    @_change
    def unload(self, model_id: str, why: str) -> None:
        """What was asked of it is forgotten; what was answered stays."""
        self._db.execute(
            "UPDATE models SET unloaded = ? WHERE id = ? AND unloaded IS NULL", (why, model_id)
        )
        self._db.execute(
            "UPDATE requests SET body = NULL WHERE model = ? AND body NOTNULL", (model_id,)
        )

    @_change
    def add_request(self, request: TrainingRequest) -> None:
        self._add(request)

    def _add(self, request: TrainingRequest) -> None:
        told = (request.model, request.seq, request.kind, request.digest, request.body)
        self._db.execute(
            "INSERT INTO requests (model, seq, kind, digest, body, seal) VALUES (?, ?, ?, ?, ?, ?)",
            (*told, _seal_of(request)),
        )

    def request(self, model_id: str, seq: int) -> TrainingRequest | None:
        """Without its body."""
        row = self._one(f"{REQUESTS} AND seq = ?", model_id, seq)
        return None if row is None else self._request(row)

    @_in_thread
    def with_body(self, request: TrainingRequest) -> TrainingRequest:
        """Raises JournalDamagedError."""
        found = self._db.execute(
            "SELECT body FROM requests WHERE model = ? AND seq = ?", (request.model, request.seq)
        ).fetchone()
        body = None if found is None else found["body"]
        if not isinstance(body, bytes) or digest_of(body) != request.digest:
            raise self._damaged(f"request {request.seq} of {request.model}")
        return replace(request, body=body)

    def _request(self, row: sqlite3.Row) -> TrainingRequest:
        values = dict(row)
        seal = values.pop("seal")
        request = TrainingRequest(**values)
        if seal != _seal_of(request):
            raise self._damaged(f"request {request.seq} of {request.model}")
        return request

    def _damaged(self, what: str) -> JournalDamagedError:
        return JournalDamagedError(f"{self._path} is damaged: {what}")

    def waiting(self, model_id: str) -> int:
        """Requests of a model that are not done."""
        row = self._one(
            "SELECT count(*) AS n FROM requests WHERE model = ? AND outcome IS NULL", model_id
        )
        return 0 if row is None else int(row["n"])

    def waiting_behind(self, model_id: str, seq: int) -> list[TrainingRequest]:
        """The first requests behind `seq` that are not done, with no gap between them."""
        rows = self._all(f"{REQUESTS} AND seq > ? AND outcome IS NULL ORDER BY seq", model_id, seq)
        found = [self._request(row) for row in rows]
        return [each for place, each in enumerate(found) if each.seq == found[0].seq + place]

    def done_between(self, model_id: str, first: int, last: int) -> list[TrainingRequest]:
        """Requests behind `first` that succeeded, in order, without their bodies."""
        rows = self._all(f"{REQUESTS} AND seq > ? AND seq <= ? ORDER BY seq", model_id, first, last)
        return [each for each in map(self._request, rows) if each.outcome == "done"]

    @_change
    def finish(
        self,
        request: TrainingRequest,
        state: ModelState,
        kept_answers: int,
        checkpoint: Checkpoint | None = None,
        sampler: SamplerRecord | None = None,
    ) -> None:
        """Keep the answer of a request with all that it changes, at once."""
        told = (request.outcome, request.media, request.answer, _seal_of(request))
        answered = (*told, request.model, request.seq)
        self._db.execute(
            "UPDATE requests SET outcome = ?, media = ?, answer = ?, seal = ? "
            "WHERE model = ? AND seq = ?",
            answered,
        )
        self._keep_state(request.model, state)
        self._db.execute("UPDATE models SET used = ? WHERE id = ?", (time.time(), request.model))
        if checkpoint is not None:
            self._put_checkpoint(checkpoint)
        if sampler is not None:
            self._add_sampler(sampler, "REPLACE")
        self._db.execute(
            "UPDATE requests SET body = NULL WHERE model = ? AND body NOTNULL AND seq <= ? "
            "AND outcome NOTNULL",
            (request.model, state.checkpoint_seq),
        )
        self._db.execute(
            "UPDATE requests SET body = NULL WHERE model = ? AND seq = ? AND (outcome = "
            "'failed' OR kind NOT IN ('create', 'forward_backward', 'optim_step', 'load'))",
            (request.model, request.seq),
        )
        self._db.execute(
            "DELETE FROM requests WHERE model = ? AND seq < ? AND body IS NULL",
            (request.model, state.done - kept_answers),
        )

    def _put_checkpoint(self, checkpoint: Checkpoint) -> None:
        names = (*NUMBERS, "checkpoint", "version", "digest", "user_metadata")
        about = _about(checkpoint, names, CHECKPOINT_KEY)
        values = (
            checkpoint.path,
            checkpoint.model,
            checkpoint.kind,
            checkpoint.created,
            checkpoint.expires,
            about,
        )
        self._db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?)", values)

    def checkpoint(self, path: str) -> Checkpoint | None:
        """Unless it has expired."""
        row = self._one("SELECT * FROM checkpoints WHERE path = ?", path)
        found = None if row is None else self._checkpoint(row)
        if found is None or (found.expires is not None and found.expires <= time.time()):
            return None
        return found

    def checkpoints(self, most: int = -1, behind: int = 0) -> list[Checkpoint]:
        """As `sessions`."""
        query = "SELECT * FROM checkpoints ORDER BY created DESC LIMIT ? OFFSET ?"
        return self._whole(self._checkpoint, self._all(query, most, behind))

    def checkpoints_of(self, model_id: str, kind: str = "", most: int = -1) -> list[Checkpoint]:
        """The newest first; of one kind, if it is given."""
        where, more = ("AND kind = ?", (kind,)) if kind else ("", ())
        query = f"SELECT * FROM checkpoints WHERE model = ? {where} ORDER BY created DESC LIMIT ?"
        return self._whole(self._checkpoint, self._all(query, model_id, *more, most))

    def count(self, table: Literal["sessions", "models", "checkpoints"]) -> int:
        """How many of them there are."""
        row = self._one(f"SELECT count(*) AS n FROM {table}")
        assert row is not None
        return int(row["n"])

    def expired_checkpoints(self) -> list[Checkpoint]:
        rows = self._all("SELECT * FROM checkpoints WHERE expires <= ?", time.time())
        return self._whole(self._checkpoint, rows)

    @_change
    def set_expiry(self, checkpoint: Checkpoint, expires: float | None) -> None:
        self._put_checkpoint(replace(checkpoint, expires=expires))

    @_change
    def remove_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Forget a path, unless it names another by now."""
        self._db.execute(
            "DELETE FROM checkpoints WHERE path = ? AND created = ?",
            (checkpoint.path, checkpoint.created),
        )

    @_change
    def add_sampler(self, sampler: SamplerRecord) -> None:
        """Unless it is there."""
        self._add_sampler(sampler, "IGNORE")

    def _add_sampler(self, sampler: SamplerRecord, known: str) -> None:
        about = _about(sampler, ("path", "adapter", "version", "digest"), SAMPLER_KEY)
        values = (sampler.id, sampler.session, sampler.created, 0, about)
        self._db.execute(f"INSERT OR {known} INTO samplers VALUES (?, ?, ?, ?, ?)", values)

    def sampler(self, sampler_id: str) -> SamplerRecord | None:
        row = self._one("SELECT * FROM samplers WHERE id = ?", sampler_id)
        return None if row is None else self._sampler(row)

    def samplers(self, session_id: str) -> list[SamplerRecord]:
        rows = self._all("SELECT * FROM samplers WHERE session = ? ORDER BY created", session_id)
        return self._whole(self._sampler, rows)

    def snapshots(self, model: Model, behind: int = 0, most: int = -1) -> list[SamplerRecord]:
        """Samplers of a model whose weights have no name, the newest first.

        Behind the newest so many, and `most` of them; -1 is all.
        """
        rows = self._all(
            "SELECT * FROM samplers WHERE session = ? AND CASE WHEN json_valid(about) THEN "
            "json_extract(about, '$.adapter') = ? AND json_extract(about, '$.path') IS NULL END "
            "ORDER BY created DESC LIMIT ? OFFSET ?",
            model.session,
            model.adapter,
            most,
            behind,
        )
        return self._whole(self._sampler, rows)

    @_change
    def join_sampler(self, sampler_id: str) -> int:
        """Return a number that no other client of the sampler has."""
        row = self._one(
            "UPDATE samplers SET clients = clients + 1 WHERE id = ? RETURNING clients", sampler_id
        )
        assert row is not None, sampler_id
        return int(row["clients"])

    @_in_thread
    def look(self, read: Callable[[], T]) -> T:
        """Read many rows while others are answered."""
        return read()

    def _one(self, query: str, *values: Any) -> sqlite3.Row | None:
        row: sqlite3.Row | None = self._read.execute(query, values).fetchone()
        return row

    def _all(self, query: str, *values: Any) -> list[sqlite3.Row]:
        return self._read.execute(query, values).fetchall()

    def _whole(self, read: Callable[[sqlite3.Row], T], rows: Sequence[sqlite3.Row]) -> list[T]:
        found = []
        for row in rows:
            try:
                found.append(read(row))
            except JournalDamagedError as error:
                logger.error("%s", error)
        return found

    def _session(self, row: sqlite3.Row) -> Session:
        return Session(**self._values("session", row, SESSION_KEY))

    def _model(self, row: sqlite3.Row) -> Model:
        return Model(**self._values("model", row, MODEL_KEY))

    def _checkpoint(self, row: sqlite3.Row) -> Checkpoint:
        return Checkpoint(**self._values("checkpoint", row, CHECKPOINT_KEY))

    def _sampler(self, row: sqlite3.Row) -> SamplerRecord:
        return SamplerRecord(**self._values("sampler", row, SAMPLER_KEY))

    def _values(self, what: str, row: sqlite3.Row, key: Sequence[str]) -> dict[str, Any]:
        found = {name: value for name, value in dict(row).items() if name not in ("about", "state")}
        about = self._unsealed(f"{what} {row[0]}", row["about"], *(row[name] for name in key))
        for name in ("tags", "targets"):
            if name in about:
                about[name] = tuple(about[name])
        return {**found, **about}

    def _unsealed(self, what: str, text: str, *key: Any) -> dict[str, Any]:
        """What `_sealed` made text of. Raises JournalDamagedError."""
        try:
            values: dict[str, Any] = json.loads(text)
            if values.pop("seal") == _digest(values, *key):
                return values
        except (ValueError, TypeError, AttributeError, KeyError):  # no JSON, or other values
            pass
        raise self._damaged(what)


def _new_database() -> sqlite3.Connection:
    database = sqlite3.connect(":memory:")
    database.executescript(SCHEMA)
    return database


def _schema_of(database: sqlite3.Connection) -> list[Any]:
    rows = database.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY name")
    return [tuple(row) for row in rows]


def _state_values(state: ModelState) -> dict[str, Any]:
    """Of parts the first and their number: the rest is in the rows of the passes."""
    parts = state.parts
    values = asdict(replace(state, parts=()))
    return {**values, "parts": {"first": int(parts[0]), "count": len(parts)} if parts else []}


def _about(value: Any, names: Sequence[str], key: Sequence[str]) -> str:
    values = {name: getattr(value, name) for name in names}
    return _sealed(values, *(getattr(value, name) for name in key))


def _sealed(values: Mapping[str, Any], *key: Any) -> str:
    """JSON with a digest of itself and of what is written beside it."""
    return json.dumps({**values, "seal": _digest(values, *key)})


def _digest(*values: Any) -> str:
    return str(xxhash.xxh3_64_hexdigest(json.dumps(values, default=repr).encode()))


def _seal_of(request: TrainingRequest) -> str:
    answer: Any = request.answer
    if isinstance(answer, bytes):  # a damaged one may be anything
        answer = xxhash.xxh3_64_hexdigest(answer)
    told = (request.model, request.seq, request.kind, request.digest, request.outcome)
    return _digest(*told, request.media, answer)


def digest_of(body: bytes) -> str:
    """Tells requests from others, and from damaged ones."""
    return hashlib.sha256(body).hexdigest()


def with_answer(
    request: TrainingRequest, outcome: str, media: str, answer: bytes
) -> TrainingRequest:
    """The request, done."""
    return replace(request, outcome=outcome, media=media, answer=answer, body=None)
