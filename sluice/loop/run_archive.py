"""Run checkpoints in a bucket: what a run goes on from where its directory is gone.

loops/<run_dir>/log/<8 digits>               a claim, or a run checkpoint and the files beside it
loops/<run_dir>/alive/<8 digits>             of a claim: changes while its loop lives
loops/<run_dir>/pieces/<8 digits>/<digest>   of files, by the claim that they were written under

A bucket has no locks. Entries of the log have numbers without gaps, and each is written on the
condition that its number is new. A loop begins with a claim, which stays for ever: a loop of
before, should it still live, meets it at the next number of its own, and ends. Each loop removes
pieces of claims up to its own alone, so that one which was stopped for long does no harm.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sluice import faults
from sluice.bucket import ObjectBucket, ObjectsError, each_of, quoted
from sluice.config import ConfigError
from sluice.durable import replace_file, temporary_path, write_pieces
from sluice.loop.claims import BEATS, OVER, RunTakenError, shown_alive, wait_for_silence
from sluice.loop.journal import JOURNAL
from sluice.loop.ledger import Ledger
from sluice.loop.run_directory import (
    LEDGER,
    RUN_CHECKPOINTS,
    RunCheckpoint,
    RunDirectoryError,
    document_of,
    latest_run_checkpoint,
    write_run_checkpoint,
)
from sluice.loop.tracking import METRICS
from sluice.weights.errors import FileDigestError
from sluice.weights.manifest import digest_bytes, seal, unseal

logger = logging.getLogger(__name__)

ARCHIVES = "loops"
LOG, ALIVE, PIECES = "log", "alive", "pieces"
FORMAT, SEAL = 1, "entry_digest"
PIECE_BYTES = 1 << 20
IDENTITY = "archive.json"  # which directory of a host this is
BESIDE = (METRICS, JOURNAL)  # files of a run that only ever grow, besides the ledger


class _PieceError(Exception):
    """A piece of a file is gone or damaged."""


@dataclass(frozen=True)
class Claim:
    """By whom a run was taken up. `directory` is that of a host, under a name of its own."""

    directory: str
    host: str
    process: int
    takeover_seconds: float

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


@dataclass(frozen=True)
class Cut:
    """A run checkpoint, and the files of the run directory when it was recorded.

    run: the ledger's id. claim: under which it was written. files: bytes and digests of pieces.
    """

    run: str
    claim: int
    run_checkpoint: RunCheckpoint
    files: Mapping[str, tuple[int, Sequence[str]]]

    def pieces(self) -> set[tuple[int, str]]:
        """Return claims and digests."""
        return {(self.claim, name) for _, names in self.files.values() for name in names}


class RunArchive:
    """Run checkpoints of one run in a bucket; once it has `claim`ed them, one loop's alone.

    Calls block. What the bucket refuses is a RunDirectoryError.
    """

    def __init__(
        self, store: str, run_dir: Path, takeover_seconds: float, bucket: ObjectBucket | None = None
    ) -> None:
        """`bucket` is the store, with deadlines of its own. Raises ValueError for a URL that
        names no bucket."""
        self._root = f"{ARCHIVES}/{quoted(os.path.normpath(run_dir))}"
        self.url = f"{store}/{self._root}"
        self.notes: list[str] = []  # what a user should know of what was found
        self._bucket = bucket or ObjectBucket(store)
        self._run_dir, self._seconds = run_dir, takeover_seconds
        self._number = 0  # of the entry written last
        self._claimed = 0  # the number of the claim
        self._verified = time.monotonic()
        self._uploaded = set[str]()  # digests of pieces that are there under this claim
        self._turn = threading.Lock()  # of who writes entries, or looks for others'

    @property
    def beat_seconds(self) -> float:
        """Seconds between two signs of life."""
        return self._seconds / BEATS

    # what was there before

    def read(self) -> dict[int, Claim | Cut | str]:
        """Return entries by number; of one that cannot be read, what is wrong."""
        with self._errors():
            return self._read_all()

    def _read_all(self) -> dict[int, Claim | Cut | str]:
        keys = self._keys(LOG)
        return dict(zip(map(_number, keys), each_of(self._read, keys), strict=True))

    def _read(self, key: str) -> Claim | Cut | str:
        try:
            document = unseal(self._bucket.get(key), SEAL, key)
            if document["format"] != FORMAT:
                raise RunDirectoryError(f"{key} in {self.url} was written by a newer release")
            if "claim_of" in document:
                return Claim(**document["claim_of"])
            files = {name: (int(size), list(p)) for name, (size, p) in document["files"].items()}
            cut = RunCheckpoint(**document["cut"])
            return Cut(str(document["run"]), int(document["claim"]), cut, files)
        except (ValueError, KeyError, TypeError, AttributeError, FileDigestError) as error:
            return f"{type(error).__name__}: {error}"
        except FileNotFoundError:
            return "it is gone"

    def sign_of_life(self, claim: int) -> bytes | None:
        """Return what its loop has written last to show that it lives."""
        with self._errors():
            try:
                return self._bucket.get(self._alive(claim))
            except FileNotFoundError:
                return None

    def is_here(self, claim: Claim | None) -> bool:
        """Whether a claim was made from this directory of this host, whose loop is this one now."""
        return claim is not None and (claim.directory, claim.host) == (
            self._identity(),
            socket.gethostname(),
        )

    def restore(self, entries: Mapping[int, Claim | Cut | str], *, resume: bool) -> None:
        """Have the run directory as the newest run checkpoint here that is intact has it.

        One that wrote here last is left as it is, but for a run checkpoint that it did not come to
        write. Raises ConfigError for a run that is not to be resumed, or another one's directory,
        RunDirectoryError where nothing is intact.
        """
        cuts = {n: each for n, each in entries.items() if isinstance(each, Cut)}
        damaged = {n: each for n, each in entries.items() if isinstance(each, str)}
        if not cuts and not damaged:
            return
        if not resume:
            raise ConfigError(
                f"run_dir: {self.url} holds run checkpoints of {self._run_dir}; give resume: true "
                "(--resume) to go on with them, or another run_dir"
            )
        has_ledger = (self._run_dir / LEDGER).exists()
        last = [each for _, each in sorted(entries.items()) if isinstance(each, Claim)]
        if has_ledger and last and last[-1].directory == self._identity():
            self._catch_up(cuts)
            return
        for number, cut in sorted(cuts.items(), reverse=True):
            try:
                self._replace(cut, [each for n, each in cuts.items() if n <= number])
            except _PieceError as error:
                damaged[number] = str(error)
                continue
            for each, why in sorted(damaged.items()):
                if each > number:
                    self.notes.append(f"{self.url}: entry {each} is damaged and left out: {why}")
            self.notes.append(
                f"{self._run_dir} is that of step {cut.run_checkpoint.step} in {self.url}"
            )
            return
        newest = max(damaged)
        raise RunDirectoryError(
            f"{self.url}: no run checkpoint is intact; the newest, entry {newest}: "
            f"{damaged[newest]}"
        )

    def _catch_up(self, cuts: Mapping[int, Cut]) -> None:
        """Write the run checkpoint here that was in the bucket when its loop died."""
        self._check_run(list(cuts.values()))
        directory = self._run_dir / RUN_CHECKPOINTS
        newest = latest_run_checkpoint(directory)
        if not cuts:
            return
        cut = cuts[max(cuts)].run_checkpoint
        is_aside = (directory / f"{cut.step:08}.json.damaged").exists()
        if not is_aside and (newest is None or newest.step < cut.step):
            write_run_checkpoint(directory, cut)

    def _check_run(self, cuts: Sequence[Cut]) -> None:
        ledger = Ledger(self._run_dir / LEDGER)
        try:
            run_id, has_groups = ledger.run_id, ledger.next_position() > 0
        finally:
            ledger.close()
        if cuts and has_groups and run_id != cuts[-1].run:
            raise ConfigError(
                f"run_dir: {self._run_dir} holds another run than {self.url}; give another run_dir"
            )

    def _replace(self, cut: Cut, older: Iterable[Cut]) -> None:
        """Raises _PieceError, with nothing changed."""
        self._run_dir.mkdir(parents=True, exist_ok=True)
        if (self._run_dir / LEDGER).exists():
            self._check_run([cut])
        fetched = dict[str, Path]()
        try:
            for name, (size, pieces) in cut.files.items():
                path = fetched[name] = temporary_path(self._run_dir, name)
                write_pieces(path, self._fetch(cut.claim, size, pieces))
            self._put_aside()
            for each in older:
                write_run_checkpoint(self._run_dir / RUN_CHECKPOINTS, each.run_checkpoint)
            faults.point("archive.cuts_restored")
            for name, path in sorted(fetched.items(), key=lambda item: item[0] == LEDGER):
                path.replace(self._run_dir / name)  # the ledger last: it makes this a run
            faults.point("archive.restored")
        finally:
            for path in fetched.values():
                path.unlink(missing_ok=True)

    def _fetch(self, claim: int, size: int, pieces: Sequence[str]) -> Iterator[bytes]:
        left = size
        for digest in pieces:
            try:
                data = self._bucket.get(self._piece(claim, digest))
            except FileNotFoundError:
                raise _PieceError(f"{self._piece(claim, digest)} is gone") from None
            if digest_bytes(data) != digest:
                raise _PieceError(f"{self._piece(claim, digest)} is damaged")
            left -= len(data)
            yield data
        if left:
            raise _PieceError(f"a file of {size} bytes has {size - left}")

    def _put_aside(self) -> None:
        """Keep what an earlier loop of this directory has left, under another name."""
        names = (RUN_CHECKPOINTS, *BESIDE, f"{LEDGER}-wal", f"{LEDGER}-shm", LEDGER)
        found = [path for name in names if (path := self._run_dir / name).exists()]
        if not found:
            return
        aside = temporary_path(self._run_dir, "replaced")
        aside.mkdir()
        for path in found:
            path.rename(aside / path.name)
        self.notes.append(f"what {self._run_dir} held of an earlier loop is in {aside}")

    # what this loop writes

    def claim(self, newest: int) -> None:
        """Take the run up after the entry `newest`. Raises RunTakenError for one who was faster."""
        identity = self._identity()
        claim = Claim(identity, socket.gethostname(), os.getpid(), self._seconds)
        self._number = newest
        # a nonce: the same process may claim twice, and only its own content counts as its own
        self._append({"claim_of": asdict(claim), "nonce": secrets.token_hex(8)})
        self._claimed = self._number
        faults.point("archive.claimed")

    def record(self, run_checkpoint: RunCheckpoint, run_id: str) -> None:
        """Make this the place to go on from, wherever. Raises RunTakenError."""
        with self._snapshot() as snapshot, self._errors():
            files = {LEDGER: self._upload(snapshot)}
            for name in BESIDE:
                with suppress(FileNotFoundError):  # a run without steps
                    files[name] = self._upload(self._run_dir / name)
        faults.point("archive.uploaded")
        self._append(
            {
                "run": run_id,
                "claim": self._claimed,
                "cut": document_of(run_checkpoint),
                "files": files,
            }
        )
        faults.point("archive.recorded")

    @contextmanager
    def _snapshot(self) -> Iterator[Path]:
        """The ledger as it is now, page by page: pages that stay keep their place."""
        for left in self._run_dir.glob("snapshot.*"):
            left.unlink(missing_ok=True)
        path = temporary_path(self._run_dir, "snapshot")
        try:
            with (
                closing(sqlite3.connect(self._run_dir / LEDGER, timeout=30)) as ledger,
                closing(sqlite3.connect(path)) as copy,
            ):
                copy.execute("PRAGMA synchronous=OFF")  # it is no file to keep
                ledger.backup(copy)
            yield path
        finally:
            for left in self._run_dir.glob(f"{path.name}*"):
                left.unlink(missing_ok=True)

    def _upload(self, path: Path) -> tuple[int, list[str]]:
        """Put the pieces of a file that are not there yet; what lies beyond its size of now
        belongs to the next time."""
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size

            def put(start: int) -> str:
                data = os.pread(file.fileno(), min(PIECE_BYTES, size - start), start)
                digest = digest_bytes(data)
                if digest not in self._uploaded:
                    self._bucket.put(self._piece(self._claimed, digest), data)
                return digest

            digests = each_of(put, range(0, size, PIECE_BYTES))
        self._uploaded |= set(digests)
        return size, digests

    def _append(self, document: Mapping[str, Any]) -> None:
        data = seal({"format": FORMAT, **document}, SEAL)
        with self._turn, self._errors():
            if not self._bucket.put_once(self._entry(self._number + 1), data):
                raise self._taken()
            self._number += 1
            self._verified = time.monotonic()

    def verify(self) -> None:
        """Raise RunTakenError if another loop has taken the run over."""
        with self._errors():
            self._look()

    async def attend(self) -> None:
        """The same, where this process may have been stopped since it last looked."""
        if time.monotonic() - self._verified > 2 * self.beat_seconds:
            await asyncio.to_thread(self.verify)

    def _look(self) -> None:
        with self._turn:
            if self._bucket.exists(self._entry(self._number + 1)):
                raise self._taken()
            self._verified = time.monotonic()

    def _taken(self) -> RunTakenError:
        entry = self._read(self._entry(self._number + 1))
        whom = entry if isinstance(entry, Claim) else "another loop"
        return RunTakenError(f"run_dir: {whom} has taken over {self.url}; this loop ends")

    def retain(self, steps: Iterable[int]) -> None:
        """Remove run checkpoints of other steps, and pieces that no other one needs.

        Raises RunTakenError, and ObjectsError: then all is left for the next time.
        """
        wanted, kept = set(steps), dict[int, tuple[int, Cut]]()
        entries = self._read_all()
        for number, entry in entries.items():
            if isinstance(entry, Cut) and entry.run_checkpoint.step in wanted:
                kept[entry.run_checkpoint.step] = (number, entry)  # the last one of a step
        numbers = {number for number, _ in kept.values()}
        needed = set[tuple[int, str]]().union(*(cut.pieces() for _, cut in kept.values()))
        pieces = [key for key in self._keys(PIECES) if _claimed(key)[0] <= self._claimed]
        signs = [key for key in self._keys(ALIVE) if _number(key) < self._claimed]
        self._look()  # what was listed is no other loop's
        spare = [n for n, e in entries.items() if isinstance(e, Cut) and n not in numbers]
        self._bucket.delete(self._entry(number) for number in spare)
        faults.point("archive.retained")
        self._bucket.delete([*signs, *(key for key in pieces if _claimed(key) not in needed)])
        self._uploaded = {digest for claim, digest in needed if claim == self._claimed}

    def beat(self, count: int) -> None:
        """Show that this loop lives. Raises RunTakenError once another has taken the run over."""
        with self._errors():
            self._bucket.put(self._alive(self._claimed), b"%d" % count)
            self._look()

    def end(self) -> None:
        """Let go of the run: another loop need not wait."""
        with suppress(ObjectsError):
            self._bucket.put(self._alive(self._claimed), OVER)

    def _entry(self, number: int) -> str:
        return f"{self._root}/{LOG}/{number:08d}"

    def _alive(self, claim: int) -> str:
        return f"{self._root}/{ALIVE}/{claim:08d}"

    def _piece(self, claim: int, digest: str) -> str:
        return f"{self._root}/{PIECES}/{claim:08d}/{digest}"

    def _keys(self, folder: str) -> list[str]:
        return sorted(self._bucket.keys(f"{self._root}/{folder}"))

    def _identity(self) -> str:
        with suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads((self._run_dir / IDENTITY).read_bytes())["directory"])
        data = json.dumps({"directory": secrets.token_hex(16)}).encode()
        self._run_dir.mkdir(parents=True, exist_ok=True)
        replace_file(self._run_dir / IDENTITY, data, temporary=self._run_dir)
        return self._identity()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except ObjectsError as error:
            raise RunDirectoryError(f"run checkpoints: {error}") from error


@asynccontextmanager
async def owned_archive(archive: RunArchive, *, resume: bool) -> AsyncIterator[RunArchive]:
    """Have a run in a bucket to oneself, its directory as it is there, while the block lasts.

    Raises RunTakenError while another loop shows that it lives, and out of the block once one has
    taken over; ConfigError and RunDirectoryError as `RunArchive.restore`.
    """
    entries = await asyncio.to_thread(archive.read)
    await _wait_for_silence(archive, entries)
    await asyncio.to_thread(partial(archive.restore, entries, resume=resume))
    await asyncio.to_thread(archive.claim, max(entries, default=0))
    async with shown_alive(archive):
        yield archive


async def _wait_for_silence(archive: RunArchive, entries: Mapping[int, Claim | Cut | str]) -> None:
    """Wait until the loop that wrote last is seen to be dead. Raises RunTakenError for one that
    lives. No clock of another host is asked: it is looked at for so long."""
    number = max((n for n, each in entries.items() if not isinstance(each, Cut)), default=0)
    entry = entries.get(number)
    claim = entry if isinstance(entry, Claim) else None
    if not number or archive.is_here(claim):  # its directory is locked by this process
        return
    seconds = claim.takeover_seconds if claim else 0.0
    whom = str(claim or "another loop")
    refusal = f"run_dir: {whom} trains this run ({archive.url}); stop it, or give another run_dir"
    await wait_for_silence(archive, number, seconds, whom, refusal)


def _number(key: str) -> int:
    return int(key.rpartition("/")[2])


def _claimed(key: str) -> tuple[int, str]:
    """Return claim and digest of a piece."""
    _, claim, digest = key.rsplit("/", 2)
    return int(claim), digest
