"""What clients asked for and were told, in one SQLite file that outlives the process.

A training request is written before it is answered for, and its answer together with the state
that it leaves: a gateway that is killed anywhere goes on from there, and does nothing twice.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sluice.config import ConfigError
from sluice.durable import owned

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
    body BLOB, outcome TEXT, media TEXT, answer BLOB, PRIMARY KEY (model, seq));
CREATE TABLE IF NOT EXISTS checkpoints (
    path TEXT PRIMARY KEY, model TEXT NOT NULL, kind TEXT NOT NULL, created REAL NOT NULL,
    expires REAL, about TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, created REAL NOT NULL, clients INTEGER NOT NULL,
    about TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS samplers_of_session ON samplers (session, created);
CREATE INDEX IF NOT EXISTS models_of_session ON models (session);
CREATE INDEX IF NOT EXISTS checkpoints_of_model ON checkpoints (model, created);
"""
FORMAT = 1
NUMBERS = ("adapter", "rank", "alpha", "targets", "train_attn", "train_mlp")


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
    nobody's but the gateway's. lineage: how often the model was brought back.
    """

    done: int = -1
    step: int = 0
    parts: tuple[str, ...] = ()
    checkpoint: str = ""
    checkpoint_seq: int = -1
    checkpoint_step: int = 0
    owns: bool = False
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


class GatewayJournal:
    """The file. One process has it at a time."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError, and DirectoryError where another gateway has it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._claim = owned(path.parent, path.name)
        self._claim.__enter__()
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA journal_mode = WAL")
            for (found,) in self._db.execute("PRAGMA quick_check"):
                if found != "ok":
                    raise sqlite3.DatabaseError(found)
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(SCHEMA)
            row = self._one("SELECT number FROM format")
            if row is None:
                self._db.execute("INSERT INTO format VALUES (?)", (FORMAT,))
            elif row["number"] != FORMAT:
                raise sqlite3.DatabaseError(f"it is of another release: format {row['number']}")
        except sqlite3.DatabaseError as error:
            self._claim.__exit__(None, None, None)
            raise ConfigError(f"journal: {path} cannot be read: {error}") from None

    def close(self) -> None:
        self._db.close()
        self._claim.__exit__(None, None, None)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """All changes of the block, or none."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:  # a full disk has rolled back already
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def add_session(self, session: Session) -> None:
        about = _about(session, ("tags", "user_metadata", "display_name"))
        values = (session.id, session.created, session.seen, None, about)
        self._db.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?)", values)

    def session(self, session_id: str) -> Session | None:
        row = self._one("SELECT * FROM sessions WHERE id = ?", session_id)
        return None if row is None else _session(row)

    def sessions(self) -> list[Session]:
        """The newest first."""
        return [_session(r) for r in self._all("SELECT * FROM sessions ORDER BY created DESC")]

    def silent_sessions(self, since: float) -> list[Session]:
        """Those that live, without a sign of life since then."""
        rows = self._all("SELECT * FROM sessions WHERE finished IS NULL AND seen < ?", since)
        return [_session(row) for row in rows]

    def note_seen(self, session_id: str | None = None) -> None:
        """A sign of life of a session; of none: of all that live."""
        where, more = ("id = ?", (session_id,)) if session_id else ("finished IS NULL", ())
        self._db.execute(f"UPDATE sessions SET seen = ? WHERE {where}", (time.time(), *more))

    def finish_session(self, session_id: str, why: str) -> None:
        """The first reason stands."""
        self._db.execute(
            "UPDATE sessions SET finished = ? WHERE id = ? AND finished IS NULL", (why, session_id)
        )

    def add_model(self, model: Model, create: TrainingRequest) -> None:
        """With its first request."""
        about = _about(
            model,
            (*NUMBERS, "seed", "user_metadata"),
        )
        state = json.dumps(asdict(ModelState()))
        values = (model.id, model.session, model.created, model.used, None, about, state)
        with self._together():
            self._db.execute("INSERT INTO models VALUES (?, ?, ?, ?, ?, ?, ?)", values)
            self._add(create)

    def model(self, model_id: str) -> Model | None:
        row = self._one("SELECT * FROM models WHERE id = ?", model_id)
        return None if row is None else _model(row)

    def models(self, session_id: str | None = None) -> list[Model]:
        """The newest first."""
        where, more = ("WHERE session = ?", (session_id,)) if session_id else ("", ())
        rows = self._all(f"SELECT * FROM models {where} ORDER BY created DESC", *more)
        return [_model(row) for row in rows]

    def loaded_models(self) -> list[Model]:
        return [_model(row) for row in self._all("SELECT * FROM models WHERE unloaded IS NULL")]

    def state(self, model_id: str) -> ModelState:
        row = self._one("SELECT state FROM models WHERE id = ?", model_id)
        assert row is not None, model_id
        found = json.loads(row["state"])
        return ModelState(**{**found, "parts": tuple(found["parts"])})

    def keep_state(self, model_id: str, state: ModelState) -> None:
        text = json.dumps(asdict(state))
        self._db.execute("UPDATE models SET state = ? WHERE id = ?", (text, model_id))

    def unload(self, model_id: str, why: str) -> None:
        """What was asked of it is forgotten; what was answered stays."""
        with self._together():
            self._db.execute(
                "UPDATE models SET unloaded = ? WHERE id = ? AND unloaded IS NULL", (why, model_id)
            )
            self._db.execute("UPDATE requests SET body = NULL WHERE model = ?", (model_id,))

    def add_request(self, request: TrainingRequest) -> None:
        self._add(request)

    def _add(self, request: TrainingRequest) -> None:
        values = (request.model, request.seq, request.kind, request.digest, request.body)
        self._db.execute(
            "INSERT INTO requests (model, seq, kind, digest, body) VALUES (?, ?, ?, ?, ?)", values
        )

    def request(self, model_id: str, seq: int) -> TrainingRequest | None:
        row = self._one("SELECT * FROM requests WHERE model = ? AND seq = ?", model_id, seq)
        return None if row is None else TrainingRequest(**row)

    def waiting(self, model_id: str) -> int:
        """Requests of a model that are not done."""
        row = self._one(
            "SELECT count(*) AS n FROM requests WHERE model = ? AND outcome IS NULL", model_id
        )
        return 0 if row is None else int(row["n"])

    def done_since(self, model_id: str, seq: int) -> list[TrainingRequest]:
        """Requests behind `seq` that were done and succeeded, in order, with their bodies."""
        rows = self._all(
            "SELECT * FROM requests WHERE model = ? AND seq > ? AND outcome = 'done' ORDER BY seq",
            model_id,
            seq,
        )
        return [TrainingRequest(**row) for row in rows]

    def finish(
        self,
        request: TrainingRequest,
        state: ModelState,
        kept_answers: int,
        checkpoint: Checkpoint | None = None,
        sampler: SamplerRecord | None = None,
    ) -> None:
        """Keep the answer of a request with all that it changes, at once."""
        answered = (request.outcome, request.media, request.answer, request.model, request.seq)
        with self._together():
            self._db.execute(
                "UPDATE requests SET outcome = ?, media = ?, answer = ? "
                "WHERE model = ? AND seq = ?",
                answered,
            )
            self.keep_state(request.model, state)
            self._db.execute(
                "UPDATE models SET used = ? WHERE id = ?", (time.time(), request.model)
            )
            if checkpoint is not None:
                self._put_checkpoint(checkpoint)
            if sampler is not None:
                self._add_sampler(sampler)
            self._db.execute(
                "UPDATE requests SET body = NULL WHERE model = ? AND outcome NOTNULL "
                "AND (seq <= ? OR outcome = 'failed' OR kind NOT IN ('create', "
                "'forward_backward', 'optim_step', 'load'))",
                (request.model, state.checkpoint_seq),
            )
            self._db.execute(
                "DELETE FROM requests WHERE model = ? AND seq < ? AND body IS NULL",
                (request.model, state.done - kept_answers),
            )
            self._db.execute(
                "UPDATE requests SET answer = NULL WHERE model = ? AND seq < ?",
                (request.model, state.done - kept_answers),
            )

    def _put_checkpoint(self, checkpoint: Checkpoint) -> None:
        about = _about(
            checkpoint,
            (*NUMBERS, "checkpoint", "version", "digest", "user_metadata"),
        )
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
        row = self._one(
            "SELECT * FROM checkpoints WHERE path = ? AND (expires IS NULL OR expires > ?)",
            path,
            time.time(),
        )
        return None if row is None else _checkpoint(row)

    def checkpoints(self, model_id: str | None = None) -> list[Checkpoint]:
        """The newest first."""
        where, more = ("WHERE model = ?", (model_id,)) if model_id else ("", ())
        rows = self._all(f"SELECT * FROM checkpoints {where} ORDER BY created DESC", *more)
        return [_checkpoint(row) for row in rows]

    def expired_checkpoints(self) -> list[Checkpoint]:
        rows = self._all("SELECT * FROM checkpoints WHERE expires <= ?", time.time())
        return [_checkpoint(row) for row in rows]

    def set_expiry(self, path: str, expires: float | None) -> None:
        self._db.execute("UPDATE checkpoints SET expires = ? WHERE path = ?", (expires, path))

    def remove_checkpoint(self, path: str) -> None:
        self._db.execute("DELETE FROM checkpoints WHERE path = ?", (path,))

    def add_sampler(self, sampler: SamplerRecord) -> None:
        self._add_sampler(sampler)

    def _add_sampler(self, sampler: SamplerRecord) -> None:
        about = _about(sampler, ("path", "adapter", "version", "digest"))
        values = (sampler.id, sampler.session, sampler.created, 0, about)
        self._db.execute("INSERT OR REPLACE INTO samplers VALUES (?, ?, ?, ?, ?)", values)

    def sampler(self, sampler_id: str) -> SamplerRecord | None:
        row = self._one("SELECT * FROM samplers WHERE id = ?", sampler_id)
        return None if row is None else _sampler(row)

    def samplers(self, session_id: str) -> list[SamplerRecord]:
        rows = self._all("SELECT * FROM samplers WHERE session = ? ORDER BY created", session_id)
        return [_sampler(row) for row in rows]

    def snapshots(self, model: Model, behind: int = 0, most: int = -1) -> list[SamplerRecord]:
        """Samplers of a model whose weights have no name, the newest first.

        Behind the newest so many, and `most` of them; -1 is all.
        """
        rows = self._all(
            "SELECT * FROM samplers WHERE session = ? AND json_extract(about, '$.adapter') = ? "
            "AND json_extract(about, '$.path') IS NULL ORDER BY created DESC LIMIT ? OFFSET ?",
            model.session,
            model.adapter,
            most,
            behind,
        )
        return [_sampler(row) for row in rows]

    def join_sampler(self, sampler_id: str) -> int:
        """Return a number that no other client of the sampler has."""
        row = self._one(
            "UPDATE samplers SET clients = clients + 1 WHERE id = ? RETURNING clients", sampler_id
        )
        assert row is not None, sampler_id
        return int(row["clients"])

    def _one(self, query: str, *values: Any) -> sqlite3.Row | None:
        row: sqlite3.Row | None = self._db.execute(query, values).fetchone()
        return row

    def _all(self, query: str, *values: Any) -> list[sqlite3.Row]:
        return self._db.execute(query, values).fetchall()


def _about(value: Any, names: Sequence[str]) -> str:
    return json.dumps({name: getattr(value, name) for name in names})


def _read(row: sqlite3.Row) -> dict[str, Any]:
    found = {key: value for key, value in dict(row).items() if key not in ("about", "state")}
    about = json.loads(row["about"])
    for name in ("tags", "targets"):
        if name in about:
            about[name] = tuple(about[name])
    return {**found, **about}


def _session(row: sqlite3.Row) -> Session:
    return Session(**_read(row))


def _model(row: sqlite3.Row) -> Model:
    return Model(**_read(row))


def _checkpoint(row: sqlite3.Row) -> Checkpoint:
    return Checkpoint(**_read(row))


def _sampler(row: sqlite3.Row) -> SamplerRecord:
    return SamplerRecord(**_read(row))


def digest_of(body: bytes) -> str:
    """Tells requests from others, and from damaged ones."""
    return hashlib.sha256(body).hexdigest()


def with_answer(
    request: TrainingRequest, outcome: str, media: str, answer: bytes
) -> TrainingRequest:
    """The request, done."""
    return replace(request, outcome=outcome, media=media, answer=answer, body=None)
