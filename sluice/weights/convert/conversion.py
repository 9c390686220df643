"""Writing the files of a conversion: threads, memory, progress, and what a crash leaves behind.

Files grow in a hidden directory beside the target, under a lock that dies with its owner, and
appear under the target's name in one rename after all of them are on the disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
import xxhash

from sluice import faults
from sluice.durable import LockTimeoutError, locked, sync_path, write_new
from sluice.place import Place
from sluice.weights.checkpoint import INDEX_NAME, companion_files
from sluice.weights.convert.adapters import is_adapter, plan_adapter
from sluice.weights.convert.options import ConvertOptions, OptionError
from sluice.weights.convert.pieces import Content, FileRange, Files
from sluice.weights.convert.plan import (
    RECORD,
    check_files,
    digest_record,
    edited_files,
    plan_conversion,
)
from sluice.weights.convert.stored import COMMON, CONFIG, METADATA
from sluice.weights.convert.work import (
    JOURNAL,
    Check,
    Control,
    ConversionReport,
    Group,
    Journal,
    TensorTask,
    Work,
    is_same_work,
)
from sluice.weights.errors import (
    BusyTargetError,
    DamagedFileError,
    DiskFullError,
    FileDigestError,
    MissingFileError,
    TargetExistsError,
    TensorDigestError,
)
from sluice.weights.manifest import digest_bytes, digest_file
from sluice.weights.rules.packing import InexactTensorError

W = TypeVar("W", bound=Group | Check)
LOCK_SECONDS = 0.5  # after which another conversion has the target
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def staging_of(target: Path) -> Path:
    """Return the directory in which a conversion to `target` grows."""
    return target.with_name(f".{target.name}.converting")


@contextlib.contextmanager
def locked_target(target: Path) -> Iterator[None]:
    """Keep others from `target`. Raises BusyTargetError, or TargetExistsError for one without a
    name, such as `.` or `/`."""
    if not target.name:
        raise TargetExistsError(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    path = target.with_name(f".{target.name}.lock")
    with contextlib.ExitStack() as stack:
        try:  # more than once: its last holder may just be removing it
            stack.enter_context(locked(path, timeout_seconds=LOCK_SECONDS))
        except LockTimeoutError as error:
            raise BusyTargetError(target) from error
        stack.callback(path.unlink, missing_ok=True)
        yield


class Execution:
    """One run of a plan in a staging directory, up to files that are whole."""

    def __init__(
        self,
        work: Work,
        staging: Path,
        files: Files,
        control: Control,
        *,
        workers: int,
        sync: bool,
    ) -> None:
        self._work, self._staging = work, staging
        self._files, self._control = files, control
        self._workers, self._sync = workers, sync
        self._out: dict[str, int] = {}
        self._left: dict[str, int] = {}
        self._lock = threading.Lock()
        self._memory = _Memory(2 * max(self._work.largest_group, self._largest_need()))
        self._on_the_way: dict[tuple[FileRange, ...], list[Check]] = {}
        self.digests: dict[str, str] = {}

    def run(self, fingerprint: str) -> None:
        """Write what is missing; afterwards `digests` holds every tensor's, by task name."""
        self._begin()
        if not is_same_work(self._staging, fingerprint):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self._staging)  # all of it, or nothing is written beside it
        self._staging.mkdir(exist_ok=True)
        with Journal(self._staging, fingerprint) as journal:
            try:
                self._open_files()
                self._write_groups(journal)
            finally:
                for descriptor in self._out.values():
                    os.close(descriptor)
            self._work.finish(self._staging)
            for name, data in self._work.texts.items():
                (self._staging / name).unlink(missing_ok=True)
                write_new(self._staging / name, data, sync=self._sync)

    def compare(self, known: Mapping[str, str]) -> None:
        """Read all of the files that an earlier run has finished, with its digests by task name.

        Raises DamagedFileError, MissingFileError and CancelledConversionError.
        """
        self._begin()
        for file in self._work.files:
            for offset, data in file.frames:
                found = bytearray(len(data))
                self._files.read_at(self._staging / file.name, offset, memoryview(found))
                if found != data:
                    raise DamagedFileError(file.name, f"is damaged around byte {offset}")

        def check(group: Group) -> None:
            for task in group.tasks:
                if self._digest(task) != known.get(task.name):
                    raise DamagedFileError(task.file, f"is damaged in tensor {task.name!r}")
            self._advance(group.size, len(group.tasks), resumed=True)

        self._in_threads(self._work.groups, check)

    def _begin(self) -> None:
        progress = self._control.progress
        progress.total_bytes = self._work.size
        progress.total_tensors = sum(len(group.tasks) for group in self._work.groups)
        progress.started = time.monotonic()

    def _open_files(self) -> None:
        free = shutil.disk_usage(self._staging).free  # a full disk is known before anything
        there = sum(path.stat().st_blocks * 512 for path in self._staging.iterdir())
        if self._work.size > free + there:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for file in self._work.files:
            descriptor = os.open(
                self._staging / file.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
            self._out[file.name] = descriptor
            self._left[file.name] = 0
            os.ftruncate(descriptor, file.size)
            if file.size:
                _reserve(descriptor, file.size)
            for offset, data in file.frames:
                _write_at(descriptor, memoryview(data), offset)
        for group in self._work.groups:
            for task in group.tasks:
                self._left[task.file] += 1
        for name, left in self._left.items():
            if not left:  # no tensor is in it, after the last of which it would be synced
                self._sync_file(name)

    def _write_groups(self, journal: Journal) -> None:
        def do(item: Group | Check) -> None:
            if isinstance(item, Check):
                _compare(item, self._hash(item.content))
            else:
                self._do(item, journal)

        items: tuple[Group | Check, ...] = (*self._work.groups, *self._checks())
        self._in_threads(items, do)

    def _in_threads(self, items: Sequence[W], do: Callable[[W], None]) -> None:
        waiting = _Queue(items)
        failed = threading.Event()

        def work() -> None:
            try:
                for item in waiting:
                    if failed.is_set():
                        return
                    do(item)
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(self._workers, thread_name_prefix="convert") as pool:
            running = [pool.submit(work) for _ in range(self._workers)]
        for future in running:
            future.result()

    def _do(self, group: Group, journal: Journal) -> None:
        digests_before = journal.finished.get(group.name)
        if digests_before is not None and self._is_written(group, digests_before):
            digests = digests_before
            self._advance(group.size, len(group.tasks), resumed=True)
        else:
            if digests_before is not None:
                journal.forget(group.name)
            with self._memory.taken(group.working_bytes):
                digests = {task.name: self._write(task) for task in group.tasks}
            journal.add(group.name, digests)
            faults.point("convert.group")
        with self._lock:
            self.digests |= digests
            for task in group.tasks:
                self._left[task.file] -= 1
            complete = {task.file for task in group.tasks if not self._left[task.file]}
        for name in complete:
            self._sync_file(name)

    def _is_written(self, group: Group, known: dict[str, str]) -> bool:
        if set(known) != {task.name for task in group.tasks}:
            return False
        return all(self._digest(task) == known[task.name] for task in group.tasks)

    def _checks(self) -> list[Check]:
        """Split the checks: return those that no tensor is written of byte for byte."""
        copied = {
            task.content.pieces
            for group in self._work.groups
            for task in group.tasks
            if task.content.is_copy
        }
        apart = [check for check in self._work.checks if check.content.pieces not in copied]
        for check in self._work.checks:
            if check.content.pieces in copied:
                self._on_the_way.setdefault(check.content.pieces, []).append(check)
        return apart

    def _digest(self, task: TensorTask) -> str:
        piece = FileRange(self._staging / task.file, task.offset, task.content.size)
        return self._hash(Content(task.content.dtype, task.content.shape, (piece,)))

    def _hash(self, content: Content) -> str:
        hasher = xxhash.xxh3_128()
        for view in self._files.stream(content):
            self._control.check()
            hasher.update(view)
        return hasher.hexdigest()

    def _write(self, task: TensorTask) -> str:
        hasher, offset = xxhash.xxh3_128(), task.offset
        narrowed = task.content.dtype is torch.float16 and not task.content.is_copy
        for view in self._files.stream(task.content):
            self._control.check()
            if narrowed and not np.isfinite(np.frombuffer(view, np.float16)).all():
                raise InexactTensorError(f"{task.name!r} has numbers that float16 cannot hold")
            hasher.update(view)
            _write_at(self._out[task.file], view, offset)
            offset += len(view)
            self._advance(len(view), 0)
        assert offset == task.offset + task.content.size, task.name
        self._advance(0, 1)
        digest = hasher.hexdigest()
        if task.content.is_copy:
            for check in self._on_the_way.get(task.content.pieces, ()):
                _compare(check, digest)
        return digest

    def _advance(self, size: int, tensors: int, *, resumed: bool = False) -> None:
        with self._lock:
            progress = self._control.progress
            progress.done_bytes += size
            progress.done_tensors += tensors
            progress.resumed_bytes += size if resumed else 0

    def _sync_file(self, name: str) -> None:
        if self._sync:
            os.fsync(self._out[name])

    def _largest_need(self) -> int:
        return max((group.working_bytes for group in self._work.groups), default=0) // 2


class _Queue(Generic[W]):
    """Work for threads: each stays with a file as long as it can, for writers of one wait."""

    def __init__(self, items: Sequence[W]) -> None:
        self._lock = threading.Lock()
        by_file: dict[str, deque[W]] = {}
        for item in items:
            file = "" if isinstance(item, Check) else item.tasks[0].file
            by_file.setdefault(file, deque()).append(item)
        self._free = [deque(sorted(line, key=_place)) for line in by_file.values()]
        self._taken: list[deque[W]] = []

    def __iter__(self) -> Iterator[W]:
        while (line := self._take()) is not None:
            while line:
                try:
                    item = line.popleft()
                except IndexError:  # another thread helped
                    break
                yield item

    def _take(self) -> deque[W] | None:
        with self._lock:
            if self._free:
                self._taken.append(self._free.pop(0))
                return self._taken[-1]
            longest = max(self._taken, key=len, default=None)
            return longest or None


def _place(item: Group | Check) -> int:
    """Return where in its file an item is written: files grow from front to back."""
    return 0 if isinstance(item, Check) else item.tasks[0].offset


def _compare(check: Check, digest: str) -> None:
    if digest != check.digest and check.is_file:
        raise FileDigestError(check.name, check.digest, digest)
    if digest != check.digest:
        raise TensorDigestError(check.name, check.digest, digest, check.place)


class _Memory:
    """Bytes that threads may use together; one alone may always go on."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0
        self._free = threading.Condition()

    @contextlib.contextmanager
    def taken(self, size: int) -> Iterator[None]:
        with self._free:
            while self._used and self._used + size > self._limit:
                self._free.wait(timeout=1.0)
            self._used += size
        try:
            yield
        finally:
            with self._free:
                self._used -= size
                self._free.notify_all()


@contextlib.contextmanager
def full_disk_as(target: Path, needed: int) -> Iterator[None]:
    """Turn an OSError of a full disk into DiskFullError."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise DiskFullError(target, needed, os.strerror(error.errno)) from error
        raise


def publish(staging: Path, target: Path, record: object) -> None:
    """Let `target` appear, whole, with a record of how it was made."""
    (staging / RECORD).unlink(missing_ok=True)
    write_new(staging / RECORD, (json.dumps(record, indent=1) + "\n").encode())
    sync_path(staging)
    faults.point("convert.whole")
    (staging / JOURNAL).unlink()
    staging.rename(target)
    sync_path(target.parent)


def _reserve(descriptor: int, size: int) -> None:
    """Have the file system find all of the room at once, where it can.

    Not by os.posix_fallocate: where a file system cannot, libc writes to every block of the file.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fallocate = getattr(libc, "fallocate64", None) or getattr(libc, "fallocate", None)
    if fallocate is None:
        return
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(descriptor, 0, 0, size):
        number = ctypes.get_errno()
        if number in FULL:
            raise OSError(number, os.strerror(number))


def _write_at(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


OWN_FILES = (METADATA, CONFIG, COMMON, INDEX_NAME)  # small files that only we write


@dataclass(frozen=True)
class Result:
    """A finished conversion. `digests` are xxh3-128 by the names under which parts are stored."""

    target: Place
    size: int
    largest_group: int
    report: ConversionReport
    digests: Mapping[str, str]


def convert(
    source: Path, target: Path, options: ConvertOptions, control: Control | None = None
) -> Result:
    """Convert `source` to the new directory `target`.

    A run that was killed is taken up by the next one with the same arguments; a run that failed or
    was stopped leaves nothing; a run that is done is not done again. Raises OptionError,
    TargetExistsError, BusyTargetError, DiskFullError, CancelledConversionError,
    TensorDigestError and what else `sluice.weights.errors` has.
    """
    control = control or Control()
    options.check()
    if is_adapter(source):
        return _convert_adapter(source, target, options, control)
    _refuse_peft(options)
    with locked_target(target), Files() as files:
        work = plan_conversion(source, options, files)
        fingerprint = _fingerprint(source, options, work)
        if target.exists():
            left = Execution(work, target, files, control, workers=options.workers, sync=False)
            return _finished(target, work, fingerprint, left)
        staging = staging_of(target)
        run = Execution(work, staging, files, control, workers=options.workers, sync=options.sync)
        try:
            with full_disk_as(target, work.size):
                run.run(fingerprint)
                record = _record(source, options, work, fingerprint)
                record["digests"] = dict(sorted(run.digests.items()))
                record["files"] = {
                    name: digest_file(staging / name)[1]
                    for name in OWN_FILES
                    if (staging / name).is_file()
                }
                if options.to == "hf":
                    record["headers"] = {
                        file.name: digest_bytes(data)
                        for file in work.files
                        for _, data in file.frames
                    }
                record["companions"] = {
                    path.name: digest_file(path)[1] for path in companion_files(staging)
                }
                publish(staging, target, record | {"record": digest_record(record)})
        except BaseException:
            if not control.keep.is_set():
                shutil.rmtree(staging, ignore_errors=True)
            raise
    return _result(target, work, run.digests)


def _refuse_peft(options: ConvertOptions) -> None:
    if options.to == "peft":
        raise OptionError("peft is a form of adapters; the source holds whole weights")


def _convert_adapter(
    source: Path, target: Path, options: ConvertOptions, control: Control
) -> Result:
    """Merge an adapter, or write it as peft's folder: all of it again after a kill."""
    with locked_target(target):
        if target.exists():
            raise TargetExistsError(target)
        planned, staging = plan_adapter(source, options), staging_of(target)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
            with full_disk_as(target, planned.size):
                report, digests = planned.write(staging, options, control)
            if options.sync:
                for path in staging.iterdir():
                    sync_path(path)
                sync_path(staging)
            faults.point("convert.whole")
            staging.rename(target)
            sync_path(target.parent)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    return Result(target, planned.size, 0, report, digests)


def validate(source: Path, target: Path, options: ConvertOptions) -> Result:
    """Plan what `convert` would do, from names and shapes alone. Raises alike, but for bytes."""
    options.check()
    if target.exists():
        raise TargetExistsError(target)
    if is_adapter(source):
        planned = plan_adapter(source, options)
        return Result(target, planned.size, 0, ConversionReport(), {})
    _refuse_peft(options)
    with Files() as files:
        return _result(target, plan_conversion(source, options, files), {})


def _result(target: Path, work: Work, digests: Mapping[str, str]) -> Result:
    return Result(target, work.size, work.largest_group, work.report, dict(digests))


def _finished(target: Path, work: Work, fingerprint: str, left: Execution) -> Result:
    """Read the result of a run that ended before, and all that is left of it.

    Raises TargetExistsError if it was another, DamagedFileError where not all of it is left.
    """
    try:
        record = json.loads((target / RECORD).read_bytes())
        same, digests = record["fingerprint"] == fingerprint, dict(record["digests"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TargetExistsError(target) from error
    if not same:
        raise TargetExistsError(target)
    try:
        _check_left(target, work)
        left.compare(digests)
    except (DamagedFileError, FileDigestError, MissingFileError) as error:
        raise DamagedFileError(
            error.file_name,
            f"of {str(target)!r}, a finished conversion, is not as it was written: remove that to "
            f"convert again ({error})",
        ) from error
    notes = (*work.report.notes, *edited_files(target))
    return _result(target, replace(work, report=replace(work.report, notes=notes)), digests)


def _check_left(target: Path, work: Work) -> None:
    """Look for every file, by its size, and at all of those that are small.

    Raises DamagedFileError, FileDigestError or MissingFileError.
    """
    check_files(target)
    for name in work.texts:
        if not (target / name).is_file():
            raise MissingFileError(name)
    for file in work.files:
        path = target / file.name
        if not path.is_file() or path.stat().st_size != file.size:
            raise MissingFileError(file.name, f"is missing, or has not {file.size} bytes")


def _fingerprint(source: Path, options: ConvertOptions, work: Work) -> str:
    """Hash the source's files by name, size and time, the options and the layout of the target."""
    hasher = xxhash.xxh3_128()
    inputs = {piece.path for g in work.groups for t in g.tasks for piece in t.content.pieces}
    for directory in (source, options.model, options.origin):
        paths = [] if directory is None else directory.iterdir()
        # Hidden ones are, but for one, marks of conversions whose targets lie in there too.
        inputs |= {path for path in paths if path.name[0] != "." or path.name == METADATA}
    for path in sorted(path for path in inputs if path is not None and path.is_file()):
        stat = path.stat()
        hasher.update(json.dumps([str(path.resolve()), stat.st_size, stat.st_mtime_ns]).encode())
    hasher.update(json.dumps(options.describe(), sort_keys=True).encode())
    for file in work.files:
        hasher.update(json.dumps([file.name, file.size]).encode())
    return hasher.hexdigest()


def _record(
    source: Path, options: ConvertOptions, work: Work, fingerprint: str
) -> dict[str, object]:
    """Describe how the target was made; its digests are checked when it is a source."""
    return {
        "format": 1,
        "source": source.name,
        "fingerprint": fingerprint,
        "options": options.describe(),
        "report": asdict(work.report),
    }
