"""Where every group of the run stands: issued -> generated -> consumed(step) | dropped(reason).

References and scalars only; the samples lie in the blob store. One SQLite file in the run
directory, in WAL mode, each transition one durable transaction.
"""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import xxhash

from sluice.samples.blobs import BlobReference

_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
  position INTEGER PRIMARY KEY,
  group_id TEXT NOT NULL UNIQUE,
  state TEXT NOT NULL CHECK (state IN ('issued', 'generated', 'consumed', 'dropped')),
  issue_step INTEGER NOT NULL,
  attempts INTEGER NOT NULL DEFAULT 1,
  blob_digest TEXT, blob_size INTEGER,
  sample_count INTEGER, reward_mean REAL, response_tokens INTEGER,
  oldest_step INTEGER,
  newest_step INTEGER,
  consumed_step INTEGER,
  reason TEXT
);
CREATE INDEX IF NOT EXISTS groups_state ON groups (state, position);
CREATE INDEX IF NOT EXISTS groups_consumed ON groups (consumed_step)
  WHERE consumed_step IS NOT NULL;
CREATE TABLE IF NOT EXISTS versions (
  version INTEGER PRIMARY KEY, digest TEXT NOT NULL, step INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS run (id TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS media (
  blob_digest TEXT NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (blob_digest, digest)
);
CREATE INDEX IF NOT EXISTS media_digest ON media (digest);
CREATE TABLE IF NOT EXISTS tasks (
  position INTEGER PRIMARY KEY, environment TEXT NOT NULL, task INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS shares (first_position INTEGER PRIMARY KEY, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS promises (version INTEGER PRIMARY KEY, lost INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS promised_groups (
  position INTEGER NOT NULL, version INTEGER NOT NULL, PRIMARY KEY (position, version)
);
"""


_TABLES = (
    "groups",
    "versions",
    "run",
    "media",
    "tasks",
    "shares",
    "promises",
    "promised_groups",
)
KNOWN_VERSIONS = 64  # whose steps are not looked up again: groups are of the latest
SEAL = "row_digest"  # a column of each: of the others, null in rows that earlier releases wrote


@dataclass(frozen=True, kw_only=True)
class LedgerGroup:
    """A group as the ledger knows it. Steps count optimizer steps taken when it happened.

    environment: its name in a mixture; empty where the run has but one. task: which of that
    environment's tasks; None is the one at its position. media: digests of what its samples were
    shown; min_version, max_version: of the weights in its spans; the ledger does not give these
    back.
    """

    position: int
    group_id: str
    state: str
    issue_step: int
    environment: str = ""
    task: int | None = None
    attempts: int = 1
    blob: BlobReference | None = None
    sample_count: int = 0
    reward_mean: float = 0.0
    response_tokens: int = 0
    oldest_step: int = 0
    newest_step: int = 0
    consumed_step: int | None = None
    media: tuple[str, ...] = ()
    min_version: int = 0
    max_version: int = 0

    @property
    def task_number(self) -> int:
        """Which of its environment's tasks it is of."""
        return self.position if self.task is None else self.task

    def age(self, step: int) -> int:
        """How many steps the weights of `step` are from those that sampled it, at most.

        Those are older, and in a run that went back to a run checkpoint maybe newer.
        """
        return max(step - self.oldest_step, self.newest_step - step)


class Ledger:
    """One writer, the loop. Every method commits before it returns, or with its `transaction`."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, isolation_level=None, timeout=30)
        self._steps: dict[int, int] = {}  # by version, of those that groups were of lately
        with _damage():
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
            self._columns = {t: self._seal_rows(t, names) for t, names in _columns().items()}
            self.run_id = self._identify()
            query = "SELECT COUNT(*) FROM groups WHERE state = 'consumed'"
            self._consumed_count = int(self._db.execute(query).fetchone()[0])
            rows = self._db.execute("SELECT version, lost FROM promises").fetchall()
        self._promised = {int(version) for version, lost in rows if not lost}
        self._lost = {int(version) for version, lost in rows if lost}

    def close(self) -> None:
        self._db.close()

    def check(self) -> None:
        """Raise sqlite3.DatabaseError for any row that is not as it was written."""
        with _damage():
            (answer,) = self._db.execute("PRAGMA integrity_check(1)").fetchone()
            if answer != "ok":
                raise sqlite3.DatabaseError(f"is damaged: {answer}")
            for table, columns in self._columns.items():
                query = f"SELECT rowid FROM {table} WHERE {SEAL} != row_digest({columns}) LIMIT 1"
                if (row := self._db.execute(query).fetchone()) is not None:
                    raise sqlite3.DatabaseError(f"is damaged: row {row[0]} of {table}")

    def _seal_rows(self, table: str, expected: Sequence[str]) -> str:
        """Have triggers digest each row: SQLite itself finds no flipped bit. Its columns."""
        self._db.create_function("row_digest", -1, _row_digest, deterministic=True)
        names = _names(self._db, table)
        if [name for name in names if name != SEAL] != expected:
            raise sqlite3.DatabaseError(f"is damaged: columns of {table}")
        if SEAL not in names:
            self._db.execute(f"ALTER TABLE {table} ADD COLUMN {SEAL} TEXT")
        columns = ", ".join(expected)
        for name, event in (("insert", "INSERT"), ("update", f"UPDATE OF {columns}")):
            self._db.execute(
                f"CREATE TRIGGER IF NOT EXISTS {table}_{name} AFTER {event} ON {table} BEGIN"
                f" UPDATE {table} SET {SEAL} = row_digest({columns}) WHERE rowid = NEW.rowid; END"
            )
        return columns

    def issue(self, groups: Sequence[tuple[int, str]], step: int) -> None:
        """Record (position, group id) before anything is asked of a service."""
        with self.transaction():
            self._db.executemany(
                "INSERT INTO groups (position, group_id, state, issue_step)"
                " VALUES (?, ?, 'issued', ?)",
                [(position, group_id, step) for position, group_id in groups],
            )

    def assign(self, tasks: Iterable[tuple[int, str, int]]) -> None:
        """Record (position, environment, task) of groups of a mixture, with their issue."""
        with self.transaction():
            self._db.executemany(
                "INSERT INTO tasks (position, environment, task) VALUES (?, ?, ?)", tasks
            )

    def task_counts(self, first_position: int = 0) -> dict[str, int]:
        """By environment of a mixture, how many groups at this position and later ones are its."""
        query = "SELECT environment, COUNT(*) FROM tasks WHERE position >= ? GROUP BY environment"
        return dict(self._db.execute(query, (first_position,)).fetchall())

    def record_shares(self, first_position: int, record: str) -> None:
        """Keep how a mixture goes on from this position."""
        self._db.execute(
            "INSERT OR REPLACE INTO shares (first_position, record) VALUES (?, ?)",
            (first_position, record),
        )

    def last_shares(self) -> tuple[int, str] | None:
        """The last of `record_shares`."""
        query = "SELECT first_position, record FROM shares ORDER BY first_position DESC LIMIT 1"
        row = self._db.execute(query).fetchone()
        return None if row is None else (int(row[0]), str(row[1]))

    def reissue(self, groups: Iterable[LedgerGroup]) -> None:
        """Ask again for groups that failed, or whose run ended: that is no attempt of their own."""
        with self.transaction():
            self._db.executemany(
                "UPDATE groups SET attempts = ?, issue_step = ?"
                " WHERE group_id = ? AND state = 'issued'",
                [(group.attempts, group.issue_step, group.group_id) for group in groups],
            )

    def generated(self, group: LedgerGroup, drop_reason: str | None = None) -> bool:
        """Record a group whose blob is durable; false if it was recorded before.

        With a reason it is dropped in the same breath: no run that resumes would train on it.
        """
        assert group.blob is not None
        with self.transaction():
            self._db.executemany(
                "INSERT OR IGNORE INTO media (blob_digest, digest) VALUES (?, ?)",
                [(group.blob.digest, digest) for digest in group.media],
            )
            cursor = self._db.execute(
                "UPDATE groups SET state = ?, reason = ?, blob_digest = ?, blob_size = ?,"
                " sample_count = ?, reward_mean = ?, response_tokens = ?, oldest_step = ?,"
                " newest_step = ? WHERE group_id = ? AND state = 'issued'",
                (
                    "generated" if drop_reason is None else "dropped",
                    drop_reason,
                    group.blob.digest,
                    group.blob.size,
                    group.sample_count,
                    group.reward_mean,
                    group.response_tokens,
                    group.oldest_step,
                    group.newest_step,
                    group.group_id,
                ),
            )
            if self._promised:  # without any there are no rows of an earlier attempt either
                self._note_promised(group)
        return cursor.rowcount == 1

    def _note_promised(self, group: LedgerGroup) -> None:
        """Keep which promised versions may have sampled a group."""
        versions = [v for v in self._promised if group.min_version <= v <= group.max_version]
        self._db.execute("DELETE FROM promised_groups WHERE position = ?", (group.position,))
        self._db.executemany(
            "INSERT INTO promised_groups (position, version) VALUES (?, ?)",
            [(group.position, version) for version in versions],
        )

    def consume(self, group_ids: Iterable[str], step: int) -> None:
        """Record the groups of one optimizer step, all or none. Raises if one is not generated."""
        count = 0
        with self.transaction():
            for count, group_id in enumerate(group_ids, 1):  # noqa: B007
                cursor = self._db.execute(
                    "UPDATE groups SET state = 'consumed', consumed_step = ?"
                    " WHERE group_id = ? AND state = 'generated'",
                    (step, group_id),
                )
                assert cursor.rowcount == 1, f"group {group_id} consumed twice or never generated"
        self._consumed_count += count

    def lose_blob(self, digest: str) -> list[str]:
        """A blob or image is gone or damaged: groups that need it are to be generated again.

        Returns the ids of those that wait.
        """
        rows = self._db.execute(
            "UPDATE groups SET state = 'issued', blob_digest = NULL, blob_size = NULL"
            " WHERE state = 'generated' AND (blob_digest = ? OR blob_digest IN"
            " (SELECT blob_digest FROM media WHERE digest = ?)) RETURNING group_id",
            (digest, digest),
        ).fetchall()
        return [str(group_id) for (group_id,) in rows]

    def put_back(self, group_id: str) -> None:
        """A generated group is to be generated anew, by newer weights."""
        self._db.execute(
            "UPDATE groups SET state = 'issued', blob_digest = NULL, blob_size = NULL"
            " WHERE group_id = ? AND state = 'generated'",
            (group_id,),
        )

    def sample_again(self, after: int) -> int:
        """Groups that weights of later steps sampled are to be generated anew; how many wait."""
        cursor = self._db.execute(
            "UPDATE groups SET state = 'issued', blob_digest = NULL, blob_size = NULL"
            " WHERE state = 'generated' AND newest_step > ?",
            (after,),
        )
        return cursor.rowcount

    def drop(self, group_id: str, reason: str) -> None:
        self._db.execute(
            "UPDATE groups SET state = 'dropped', reason = ?"
            " WHERE group_id = ? AND state IN ('issued', 'generated')",
            (reason, group_id),
        )

    def roll_back(self, step: int) -> int:
        """Returns groups consumed after `step` to `generated`; how many they were."""
        cursor = self._db.execute(
            "UPDATE groups SET state = 'generated', consumed_step = NULL"
            " WHERE +state = 'consumed' AND consumed_step > ?",  # by the index of steps
            (step,),
        )
        self._consumed_count -= cursor.rowcount
        return cursor.rowcount

    def groups(self, state: str) -> list[LedgerGroup]:
        """Groups in a state, by position."""
        cursor = self._db.cursor()
        cursor.row_factory = sqlite3.Row
        query = (
            "SELECT groups.*, environment, task FROM groups LEFT JOIN tasks USING (position)"
            " WHERE state = ? ORDER BY position"
        )
        return [_group_from_row(row) for row in cursor.execute(query, (state,))]

    def needed_blobs(self, step: int) -> set[str]:
        """Digests that a run which goes back to `step` would train on, those of images too."""
        rows = self._db.execute(
            "WITH needed AS (SELECT blob_digest FROM groups WHERE state = 'generated' UNION ALL"
            " SELECT blob_digest FROM groups WHERE consumed_step > ? AND +state = 'consumed')"
            " SELECT blob_digest FROM needed UNION"
            " SELECT digest FROM media JOIN needed USING (blob_digest)",
            (step,),
        )
        return {digest for (digest,) in rows}

    def next_position(self) -> int:
        """The first position never issued."""
        (last,) = self._db.execute("SELECT MAX(position) FROM groups").fetchone()
        return 0 if last is None else last + 1

    def last_issue_step(self) -> int:
        """The highest step that groups were issued at, -1 before the first."""
        (last,) = self._db.execute("SELECT MAX(issue_step) FROM groups").fetchone()
        return -1 if last is None else int(last)

    def last_consumed_step(self) -> int:
        """The last step that consumed groups, 0 before the first."""
        query = (
            "SELECT MAX(consumed_step) FROM groups WHERE +state = 'consumed'"
            " AND consumed_step IS NOT NULL"
        )
        return int(self._db.execute(query).fetchone()[0] or 0)

    def consumed_count(self) -> int:
        return self._consumed_count

    def dropped(self) -> list[int]:
        """Positions of dropped groups, in order."""
        query = "SELECT position FROM groups WHERE state = 'dropped' ORDER BY position"
        return [position for (position,) in self._db.execute(query)]

    def record_version(self, version: int, digest: str, step: int) -> None:
        """Which step a weight version holds; staleness is counted in steps."""
        self._db.execute(
            "INSERT OR REPLACE INTO versions (version, digest, step) VALUES (?, ?, ?)",
            (version, digest, step),
        )
        self._steps.pop(version, None)

    def promise_version(self, version: int) -> None:
        """A version is about to be sent to engines, and not durable before `version_durable`."""
        self._db.execute(
            "INSERT OR REPLACE INTO promises (version, lost) VALUES (?, 0)", (version,)
        )
        self._promised.add(version)

    def version_durable(self, version: int) -> None:
        """A version that may have been promised is in the store."""
        if version in self._promised:
            with self.transaction():
                self._db.execute("DELETE FROM promises WHERE version = ?", (version,))
                self._forget_promised(version)
            self._promised.discard(version)

    def lose_version(self, version: int) -> int:
        """A promised version will never be in the store; how many groups were sampled from it.

        Those that wait to be trained on are dropped, and so are to be those that still come: see
        `lost_version`. To be called once the run has gone back to before it.
        """
        with self.transaction():
            self._db.execute("UPDATE promises SET lost = 1 WHERE version = ?", (version,))
            cursor = self._db.execute(
                "UPDATE groups SET state = 'dropped', reason = ? WHERE state = 'generated' AND"
                " position IN (SELECT position FROM promised_groups WHERE version = ?)",
                (lost_reason(version), version),
            )
            self._forget_promised(version)
        self._promised.discard(version)
        self._lost.add(version)
        return cursor.rowcount

    def _forget_promised(self, version: int) -> None:
        self._db.execute("DELETE FROM promised_groups WHERE version = ?", (version,))

    def promised_versions(self) -> list[int]:
        """Versions that are neither durable nor lost, as far as is known; ascending."""
        return sorted(self._promised)

    def lost_version(self, first: int, last: int) -> int | None:
        """The first version between these that is lost; None if none is."""
        return min((each for each in self._lost if first <= each <= last), default=None)

    def knows_version(self, version: int) -> bool:
        if version in self._steps:
            return True
        query = "SELECT 1 FROM versions WHERE version = ?"
        return self._db.execute(query, (version,)).fetchone() is not None

    def step_of_version(self, version: int) -> int:
        step = self._steps.get(version)
        if step is None:
            query = "SELECT step FROM versions WHERE version = ?"
            row = self._db.execute(query, (version,)).fetchone()
            assert row is not None, f"weight version {version} was not published by this run"
            step = self._steps[version] = int(row[0])
            if len(self._steps) > KNOWN_VERSIONS:
                del self._steps[next(iter(self._steps))]
        return step

    def digest_of_step(self, step: int) -> str:
        """Digest of the weights last published at a step; empty if there are none."""
        query = "SELECT digest FROM versions WHERE step = ? ORDER BY version DESC LIMIT 1"
        row = self._db.execute(query, (step,)).fetchone()
        return "" if row is None else str(row[0])

    def _identify(self) -> str:
        """A name for the run that no other run has, in whatever directory."""
        with self.transaction():
            row = self._db.execute("SELECT id FROM run").fetchone()
            if row is None:
                row = (uuid.uuid4().hex[:12],)
                self._db.execute("INSERT INTO run (id) VALUES (?)", row)
        return str(row[0])

    def become_another(self) -> None:
        """Give the run another name: what it was has gone on under the one that it had."""
        name = uuid.uuid4().hex[:12]
        with self.transaction():
            self._db.execute("UPDATE run SET id = ?", (name,))
        self.run_id = name

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """What the block records is durable together when it ends; nothing of it when it raises."""
        if self._db.in_transaction:
            yield
            return
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:  # a full disk has rolled back already
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def lost_reason(version: int) -> str:
    """Why a group is dropped that was sampled from a lost version."""
    return f"weight version {version} was lost before it was known to be written"


class LedgerDamagedError(Exception):
    """A ledger cannot be read at all; the message names it."""


class SeenGroup(NamedTuple):
    """What is shown of a group: a run has a million of them."""

    group_id: str
    state: str
    consumed_step: int | None
    blob: BlobReference | None


def read_groups(run_dir: Path) -> tuple[list[SeenGroup], int]:
    """Groups of a run by position, and how many rows are damaged and left out; changes nothing.

    No groups where there is no ledger. Raises LedgerDamagedError.
    """
    path = run_dir / "ledger.sqlite"
    if not path.exists():
        return [], 0
    groups, damaged = list[SeenGroup](), 0
    with _reading(path) as database:
        names = _columns()["groups"]
        seal = SEAL if SEAL in _names(database, "groups") else "NULL"
        query = f"SELECT {seal}, {', '.join(names)} FROM groups ORDER BY position"
        name, state, step, digest, size = (
            names.index(each)
            for each in ("group_id", "state", "consumed_step", "blob_digest", "blob_size")
        )
        states: dict[str, str] = {}  # each is held once
        for written, *values in database.execute(query):
            if written is not None and written != _row_digest(*values):
                damaged += 1
                continue
            blob = None
            if values[digest] is not None:
                blob = BlobReference(values[digest], values[size])
            became = states.setdefault(values[state], values[state])
            groups.append(SeenGroup(values[name], became, values[step], blob))
    return groups, damaged


class TrainedGroups(NamedTuple):
    """What a run has trained on. `weights` has by step the digests of what it published then."""

    groups: list[LedgerGroup]
    weights: dict[int, str]


def read_trained(run_dir: Path) -> TrainedGroups:
    """Groups that a run trained on, with what they show, by step and position; changes nothing.

    None where there is no ledger. Raises LedgerDamagedError, for a damaged row of groups too.
    """
    path = run_dir / "ledger.sqlite"
    _, damaged = read_groups(run_dir)
    if damaged:
        raise LedgerDamagedError(f"{path} has {damaged} damaged rows")
    if not path.exists():
        return TrainedGroups([], {})
    with _reading(path) as database:
        media: dict[str, list[str]] = {}
        for blob, digest in database.execute("SELECT blob_digest, digest FROM media ORDER BY 2"):
            media.setdefault(blob, []).append(digest)
        query = "SELECT step, digest FROM versions ORDER BY version"  # the last of a step counts
        weights = {int(step): str(digest) for step, digest in database.execute(query)}
        database.row_factory = sqlite3.Row
        query = (
            "SELECT groups.*, environment, task FROM groups LEFT JOIN tasks USING (position)"
            " WHERE state = 'consumed' ORDER BY consumed_step, position"
        )
        found = [_group_from_row(row) for row in database.execute(query)]
    groups = [
        replace(group, media=tuple(media.get(group.blob.digest, ())))
        for group in found
        if group.blob is not None
    ]
    return TrainedGroups(groups, weights)


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Raises LedgerDamagedError."""
    # no lock and no shared memory are made for a file that nobody writes
    alone = not path.with_name(path.name + "-wal").exists()
    uri = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if alone else ''}"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=5)) as database, _damage():
            yield database
    except (sqlite3.Error, TypeError) as error:
        raise LedgerDamagedError(f"{path} cannot be read: {error}") from None


def groups_of(run_dir: Path, warn: Callable[[str], None]) -> list[SeenGroup] | None:
    """The same; None where nothing can be read. `warn` is told of damage."""
    try:
        groups, damaged = read_groups(run_dir)
    except LedgerDamagedError as error:
        warn(str(error))
        return None
    if damaged:
        warn(f"the ledger has {damaged} damaged rows, which are left out")
    return groups


def _columns() -> dict[str, list[str]]:
    """By table the columns it has in a ledger that is whole."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(_SCHEMA)
        return {table: _names(database, table) for table in _TABLES}


def _names(database: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in database.execute(f"PRAGMA table_info({table})")]


@contextmanager
def _damage() -> Iterator[None]:
    """What is told of a damaged file may be no text either."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise sqlite3.DatabaseError(f"is damaged: {error}") from None


def _row_digest(*values: object) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(values).encode())


def _group_from_row(row: sqlite3.Row) -> LedgerGroup:
    values = {name: row[name] for name in row.keys() if row[name] is not None}  # noqa: SIM118
    values.pop("reason", None)
    values.pop(SEAL, None)
    digest, size = values.pop("blob_digest", None), values.pop("blob_size", 0)
    return LedgerGroup(**values, blob=None if digest is None else BlobReference(digest, size))
