"""A version as a plain HF directory on this host, whatever it is made of in the store."""

from __future__ import annotations

import logging
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import IO

from sluice.durable import LockTimeoutError, try_lock
from sluice.priority import lower_priority, threads_beside
from sluice.weights.checkout import ShardSource, Sources, build_shard, check_out
from sluice.weights.checkpoint import FileIdentity
from sluice.weights.errors import (
    DamagedFileError,
    MissingFileError,
    VersionNotFoundError,
    WeightStoreError,
)
from sluice.weights.manifest import MANIFEST_NAME, FileEntry, Manifest, ShardFile
from sluice.weights.store import Announcement, StoredVersion, WeightStore

logger = logging.getLogger(__name__)

FETCH_SECONDS = 600.0  # for another process of this host to make a version
POLL_SECONDS = 0.01
RECYCLED_CHAIN = 4  # deltas that are applied to an old version sooner than a newer one is copied
DRAFT_SECONDS = 30.0  # without a file more, until who makes a version ahead is waited for no longer
WATCH_SECONDS = 1.0  # between two looks at one draft, for the time between to count
LOCK_SUFFIX = ".lock"
DRAFT_SUFFIX = "-draft"  # behind the number of a version that is made ahead, in place of its digest
MADE_SUFFIX = ".made"  # an empty file beside one that is made
FORMER_FOLDER = "engines"  # `<version>-<digest>`, each with a `.use` that is locked while served


class CachedVersion:
    """A directory of the cache, which is not removed before `release`."""

    def __init__(self, directory: Path, lock: IO[bytes]) -> None:
        self.directory, self._lock = directory, lock

    def release(self) -> None:
        """Let go; may be repeated."""
        self._lock.close()


class _VersionDraft:
    """A version in the making, of which files are made as they are announced. For any thread.

    Until one is made, `directory` may hold it as it was in the version that was recycled.
    """

    def __init__(
        self,
        store: WeightStore,
        found: Announcement,
        directory: Path,
        lock: IO[bytes],
        local: Mapping[int, Path],
        holding: ExitStack,
    ) -> None:
        """`lock` is that of `directory`, `local` as for `check_out`; `holding` keeps that there."""
        self.version, self.directory, self.lock = found.version, directory, lock
        self._store, self._local = store, local
        fetched = tempfile.TemporaryDirectory(
            prefix=f".{directory.name}-", dir=directory.parent, ignore_cleanup_errors=True
        )
        self._scratch = Path(holding.enter_context(fetched))
        self._base: Sources | None = None
        if found.base is not None:
            self._base = Sources(store, found.base, local, self._scratch)
        self._stopped = threading.Event()
        self._builders = threads_beside()  # of shards, at a time
        self._building = threading.Semaphore(self._builders)
        self._made: dict[str, tuple[ShardFile, FileIdentity]] = {}
        self.failed = False  # then nothing of it is of use
        self._holding = holding.pop_all()

    def make(self, found: Announcement) -> Path | None:
        """Make a file that was announced, checked; None where that fails, or nobody wants it."""
        try:
            try:
                return self._make(found)
            except MissingFileError:  # the commit moves what is announced
                return self._make(found)
        except (WeightStoreError, OSError) as error:
            logger.warning("version %d is not made ahead: %s", self.version, error)
            self.failed = True
            self._stopped.set()
            return None

    def _make(self, found: Announcement) -> Path | None:
        shard, delta = replace(found.shard, delta=None), found.shard.delta
        target = self.directory / shard.file_name
        path = self._store.announced_file(found, self._scratch)
        with self._building:
            if self._stopped.is_set():
                return None
            source = ShardSource(path)
            if delta is not None and self._base is not None:
                base = self._base.of(shard.file_name)
                changed = (path, FileEntry(delta.size, delta.digest))
                source = replace(base, deltas=[*base.deltas, changed])
            build_shard(source, shard, target, self._stopped.is_set)
            self._made[shard.file_name] = shard, FileIdentity.of(target)
            target.with_name(target.name + MADE_SUFFIX).touch()
        return target

    def stop(self) -> None:
        """Return once nothing is written any more; with a file half made, none of it is of use."""
        self._stopped.set()
        for _ in range(self._builders):
            self._building.acquire()
        self._building.release(self._builders)  # who comes later sees that it has ended

    def move(self, directory: Path) -> tuple[dict[int, Path], dict[str, ShardFile]]:
        """Move what is there to the empty `directory`: `local` and `made` of `check_out`.

        Raises MissingFileError or DamagedFileError where somebody has changed it.
        """
        for name, (_, identity) in self._made.items():
            if FileIdentity.of(self.directory / name) != identity:
                raise DamagedFileError(name, "has been changed on this host")
        directory.rmdir()
        self.directory.rename(directory)
        local = {v: directory if p == self.directory else p for v, p in self._local.items()}
        return local, {name: shard for name, (shard, _) in self._made.items()}

    def close(self) -> None:
        """Let go of what it was made from; may be repeated."""
        self._holding.close()


class HostCache:
    """Whole versions of one store below `root`, a directory that only this host uses.

    Besides those held, the newest `keep` stay: the next version may be made from one of them. That
    can begin ahead of its commit: of the processes of the host one makes it, in a draft that it
    locks. All calls but `stage` block.
    """

    def __init__(
        self,
        root: Path,
        store: WeightStore,
        *,
        keep: int = 2,
        fetch_seconds: float = FETCH_SECONDS,
        draft_seconds: float = DRAFT_SECONDS,
    ) -> None:
        self._root, self._store = root, store
        self._keep, self._seconds, self._draft_seconds = keep, fetch_seconds, draft_seconds
        self._closed = threading.Event()
        self._builders = ThreadPoolExecutor(
            threads_beside(), "weight-ahead", initializer=lower_priority
        )
        self._drafting = threading.Lock()
        self._draft: _VersionDraft | None = None
        self._ended = 0  # versions up to this one are not made ahead any more
        self._seen: tuple[Path, int] | None = None  # the draft of another process, as of `_since`
        self._since = self._looked = 0.0

    def close(self) -> None:
        """Calls no longer wait for other processes: those that do, raise. Nothing is staged."""
        self._closed.set()

    def stage(self, found: Announcement) -> Future[Path | None]:
        """Make a file of a version that is not committed yet, by threads that let others go first.

        The answer is where it lies, checked: it stays until `drop`, and moves at the commit. None
        where it comes with `take`. Raises WeightStoreError or OSError.
        """
        return self._builders.submit(self._stage, found)

    def finish(self, version: int) -> None:
        """Make the rest of a version that is committed now, if it was begun here."""
        if self._has_draft(version):
            try:
                self.take(version).release()
            except (WeightStoreError, OSError) as error:  # whoever needs it is told
                logger.warning("version %d is not made ahead: %s", version, error)

    def drop(self, version: int) -> None:
        """Leave nothing of what was made ahead of a version, and of older ones."""
        draft = self._end_draft(version)
        if draft is not None:
            self._clear_draft(draft)

    def take(self, version: int) -> CachedVersion:
        """Hold a version, fetched from the store if it is not here; only what is not here is.

        Raises LockTimeoutError when another process does not get done with it, in time or before
        `close`, OSError when the disk is full, and what `check_out` raises; nothing is left then.
        """
        manifest = self._store.manifest(version)
        self._root.mkdir(parents=True, exist_ok=True)
        directory = self._directory(manifest)
        deadline = time.monotonic() + self._seconds
        while True:
            lock = self._lock_file(directory)
            try:
                if self._hold(lock, manifest, directory):
                    self.drop(version)  # another process was faster
                    return CachedVersion(directory, lock)
            except BaseException:
                lock.close()
                raise
            lock.close()
            # flock has no form with a deadline
            if time.monotonic() >= deadline or self._closed.wait(POLL_SECONDS):
                raise LockTimeoutError(directory, self._seconds)

    def discard(self, version: int) -> None:
        """Forget a version whose bytes have turned out to be damaged, unless others hold it."""
        self._remove(self._directory(self._store.manifest(version)))

    def _hold(self, lock: IO[bytes], manifest: Manifest, directory: Path) -> bool:
        """Return whether `lock` holds the version now; it is made if nobody else makes it."""
        path = directory / MANIFEST_NAME
        made = not path.is_file() and try_lock(lock.fileno())
        if made and not path.is_file():
            if self._is_made_ahead(manifest.version):
                return False
            self._make(manifest, directory)
        if not (try_lock(lock.fileno(), shared=True) and path.is_file()):
            return False
        if made:
            self._trim()
        return True

    def _stage(self, found: Announcement) -> Path | None:
        if found.shard.delta is not None and found.base is None:
            return None  # a trainer of the release before does not say
        draft, name = self._draft_directory(found.version), found.shard.file_name
        while found.version > self._ended and not self._closed.is_set():
            if not self._lock_path(draft).exists():
                with suppress(VersionNotFoundError):  # not committed yet
                    directory = self._directory(self._store.get(found.version))
                    if (directory / MANIFEST_NAME).is_file():
                        return directory / name
            with self._drafting:
                own = self._draft or self._begin(found)
            if own is not None:
                return own.make(found) if own.version == found.version else None
            if (draft / (name + MADE_SUFFIX)).exists():
                return draft / name
            if self._stands_still(draft):
                return None
            self._closed.wait(POLL_SECONDS)
        return None

    def _begin(self, found: Announcement) -> _VersionDraft | None:
        """Begin to make a version ahead; None where another process does, or it has ended."""
        if found.version <= self._ended:
            return None
        self._root.mkdir(parents=True, exist_ok=True)
        self._remove_drafts()
        directory = self._draft_directory(found.version)
        lock = self._lock_file(directory)
        if not try_lock(lock.fileno()):
            lock.close()
            return None
        with ExitStack() as undoing, ExitStack() as holding:
            undoing.enter_context(lock)
            undoing.callback(self._clear, directory)
            directory.mkdir()
            former = self._take_former(found.version, found.base, directory)
            if former is None:
                local = self._hold_chain(found.version, found.base, holding)
            else:
                local = {former: directory}
            self._draft = _VersionDraft(self._store, found, directory, lock, local, holding)
            undoing.pop_all()
        return self._draft

    def _end_draft(self, version: int) -> _VersionDraft | None:
        """Make nothing ahead of a version and older ones any more; what was, for the caller."""
        with self._drafting:
            self._ended = max(self._ended, version)
            if self._draft is None or self._draft.version > version:
                return None
            draft, self._draft = self._draft, None
        draft.stop()
        return draft

    def _clear_draft(self, draft: _VersionDraft) -> None:
        draft.close()
        self._clear(draft.directory)
        draft.lock.close()

    def _has_draft(self, version: int) -> bool:
        return self._draft is not None and self._draft.version == version

    def _is_made_ahead(self, version: int) -> bool:
        """Whether another process makes the version ahead, and gets on with it."""
        draft = self._draft_directory(version)
        if self._has_draft(version):
            return False
        self._remove(draft)  # if its owner is gone
        return self._lock_path(draft).exists() and not self._stands_still(draft)

    def _stands_still(self, draft: Path) -> bool:
        """Whether a draft of another process has got no file more for long, while watched."""
        try:
            seen = (draft, draft.stat().st_mtime_ns)
        except FileNotFoundError:
            seen = (draft, 0)
        now = time.monotonic()
        if seen != self._seen or now - self._looked > WATCH_SECONDS:
            self._seen, self._since = seen, now
        self._looked = now
        return now - self._since > self._draft_seconds

    def _remove_drafts(self) -> None:
        """Remove those of processes that are gone."""
        for directory in self._root.glob("[0-9]*" + DRAFT_SUFFIX):
            self._remove(directory)

    def _make(self, manifest: Manifest, directory: Path) -> None:
        self._remove_parts(directory)
        partial = self._root / f".{directory.name}-{secrets.token_hex(4)}"
        partial.mkdir()
        draft = self._end_draft(manifest.version)
        try:
            self._check_out(manifest, partial, draft)
            shutil.rmtree(directory, ignore_errors=True)  # that has lost its manifest
            partial.rename(directory)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        finally:
            if draft is not None:
                self._clear_draft(draft)

    def _check_out(self, manifest: Manifest, partial: Path, draft: _VersionDraft | None) -> None:
        if self._go_on(manifest, partial, draft):
            return
        if draft is not None:
            draft.close()  # what it was made from may turn out to be damaged
        with ExitStack() as holding:
            local = self._hold_chain(manifest.version, manifest.base, holding)
            try:
                check_out(self._store, manifest.version, partial, local)
                return
            except WeightStoreError as error:
                if not local:
                    raise
                logger.warning("made anew without what is on this host: %s", error)
        for base in local.values():
            self._remove(base)
        for path in partial.iterdir():
            path.unlink()
        check_out(self._store, manifest.version, partial)

    def _go_on(self, manifest: Manifest, partial: Path, draft: _VersionDraft | None) -> bool:
        """Go on from what was made ahead, or turn a version of the chain that nobody uses any more
        into this one, if there is either.

        `partial` is empty again where that fails.
        """
        try:
            if draft is not None and draft.version == manifest.version and not draft.failed:
                local, made = draft.move(partial)
            elif former := self._take_former(manifest.version, manifest.base, partial):
                local, made = {former: partial}, {}
            else:
                return False
            check_out(self._store, manifest.version, partial, local, made)
            return True
        except (WeightStoreError, OSError) as error:
            logger.warning("version %d is made anew: %s", manifest.version, error)
        for path in partial.iterdir():
            path.unlink()
        return False

    def _chain(self, version: int, base: int | None) -> Iterator[Manifest]:
        """What a version of this base is made of, newest first."""
        while base is not None and base < version:
            link = self._store.manifest(base)
            yield link
            version, base = link.version, link.base

    def _take_former(self, version: int, base: int | None, partial: Path) -> int | None:
        """Move the files of the version to recycle into the empty `partial`; its number."""
        others = {int(path.name[:8]) for path in self._root.glob("[0-9]*-*") if path.is_dir()}
        stay = set(sorted({*others, version})[-self._keep :])
        for link in islice(self._chain(version, base), RECYCLED_CHAIN):
            directory = self._directory(link)
            if link.version in stay or not (directory / MANIFEST_NAME).is_file():
                continue
            with self._lock_file(directory) as lock:
                if not try_lock(lock.fileno()):
                    continue  # it is in use
                (directory / MANIFEST_NAME).unlink()
                partial.rmdir()
                directory.rename(partial)
                self._lock_path(directory).unlink()
                return link.version
        return None

    def _hold_chain(self, version: int, base: int | None, holding: ExitStack) -> dict[int, Path]:
        """Lock the nearest version of the chain that is here, while it is read."""
        for link in self._chain(version, base):
            directory = self._directory(link)
            if not directory.is_dir():
                continue
            lock = holding.enter_context(self._lock_file(directory))
            if try_lock(lock.fileno(), shared=True) and (directory / MANIFEST_NAME).is_file():
                return {link.version: directory}
        return {}

    def _trim(self) -> None:
        self._remove_drafts()
        found = (path for path in self._root.glob("[0-9]*-*") if path.is_dir())
        versions = sorted(path for path in found if not path.name.endswith(DRAFT_SUFFIX))
        for directory in versions[: -self._keep]:
            self._remove(directory)
        for lock_path in self._root.glob("[0-9]*" + LOCK_SUFFIX):
            directory = lock_path.with_suffix("")
            if not directory.is_dir():  # it was never finished
                self._remove(directory)
        self._remove_former()

    def _remove_former(self) -> None:
        """Remove what SGLang engines of the release before kept below the root, but for what one
        of them serves or fetches now: it holds a lock."""
        former = self._root / FORMER_FOLDER
        with ExitStack() as holding:
            locks = [holding.enter_context(path.open("ab")) for path in former.glob("*.[lu]*")]
            idle = [Path(lock.name) for lock in locks if try_lock(lock.fileno())]
            for path in idle:
                if path.suffix == ".use":
                    shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                    path.unlink()
            if len(idle) == len(locks):
                shutil.rmtree(former, ignore_errors=True)

    def _remove(self, directory: Path) -> None:
        """Remove a version that nobody holds."""
        with self._lock_file(directory) as lock:
            if try_lock(lock.fileno()):
                self._clear(directory)

    def _clear(self, directory: Path) -> None:
        """Remove a version whose lock is ours, and the lock."""
        if directory.is_dir():
            directory.rename(self._root / f".{directory.name}-{secrets.token_hex(4)}")
        self._remove_parts(directory)
        self._lock_path(directory).unlink()

    def _remove_parts(self, directory: Path) -> None:
        """Remove what a process that died left of a version, whose lock is ours."""
        for left in self._root.glob(f".{directory.name}-*"):
            shutil.rmtree(left, ignore_errors=True)

    def _directory(self, version: Manifest | StoredVersion) -> Path:
        """Named after the digest too: a store may be made anew."""
        return self._root / f"{version.version:08d}-{version.digest}"

    def _draft_directory(self, version: int) -> Path:
        return self._root / f"{version:08d}{DRAFT_SUFFIX}"

    def _lock_file(self, directory: Path) -> IO[bytes]:
        return self._lock_path(directory).open("ab")

    def _lock_path(self, directory: Path) -> Path:
        return directory.with_name(directory.name + LOCK_SUFFIX)
