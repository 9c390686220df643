"""Records what the operations of this process cost on host and device, and writes it down.

A trace is for https://ui.perfetto.dev or chrome://tracing, what holds an accelerator's memory for
https://pytorch.org/memory_viz. Sums are made of the trace by whoever reads it: torch's own have
crashed the process that was recorded (2.13). torch is imported when something is recorded:
processes without it may name profiles.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice import platform
from sluice.host_memory import HeldMemory, free_memory, give_back
from sluice.imports import uninduced

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DIRECTORY = "profiles"  # of a store
WRITTEN = 16  # times its memory is what a recording takes as it ends (torch 2.13: 7 to 13)
CALLS_WRITTEN = 90  # the same of calls of Python, which `stacks` records (68 to 75)
LEVEL, BLOCK = 6, 1 << 20  # of gzip, and what it is given at once
FREE_SHARE = 0.5  # of the memory that is free which a recording may come to take


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """stacks: with the Python lines of each operation. memory: with what is allocated."""

    stacks: bool = False
    memory: bool = False


class ProfileError(Exception):
    """Nothing is recorded, or not all of it was written; the message says why."""


def new_name() -> str:
    """Returns the name of a profile that begins now; names sort by time."""
    now = time.time()
    return f"{time.strftime('%Y-%m-%dT%H-%M-%S', time.gmtime(now))}.{int(now * 1000) % 1000:03}"


class Recording:
    """Operations from `__init__` to `write`, of the thread that makes it and of devices.

    One at a time in a process: two of torch's end it. Made, stopped and written by the same thread.
    """

    _one = threading.Lock()

    def __init__(self, options: ProfileOptions) -> None:
        """Raises ProfileError, also while another one records."""
        if not self._one.acquire(blocking=False):
            raise ProfileError("another profile records in this process")
        self._options, self._device = options, platform.current()
        self._profiler: Any = None
        with contextlib.ExitStack() as on_error, _told():
            on_error.callback(self._let_go)
            if options.memory:
                self._device.record_allocations()
            self._profiler = self._device.profiler(stacks=options.stacks, memory=options.memory)
            with uninduced():
                self._profiler.start()
            on_error.pop_all()
        self._before = HeldMemory.now()

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Shows the block under a name in the trace."""
        import torch

        with torch.profiler.record_function(what):
            yield

    def too_large(self) -> str:
        """Why to end it now, before there is no memory to write it; empty while there is.

        What else the process has come to hold meanwhile counts too: nobody tells them apart.
        """
        times = CALLS_WRITTEN if self._options.stacks else WRITTEN
        needed, free = times * self._before.growth(), free_memory()
        if needed <= FREE_SHARE * free:
            return ""
        return (
            f"what is recorded may take {needed / 2**30:.1f} GiB of the host's memory as it is "
            f"written, of {free / 2**30:.1f} that are free: ask for less at once"
        )

    def drop(self) -> None:
        """Stop, and write nothing. Raises ProfileError; it is over all the same."""
        with self._ending():
            pass

    def write(self, directory: Path, name: str) -> list[str]:
        """Stop, and write files whose names begin with `name`, each whole or not at all.

        Returns the names of the files. Raises ProfileError; it is over all the same.
        """
        files: list[str] = []
        with self._ending():
            directory.mkdir(parents=True, exist_ok=True)
            with _whole(directory / f"{name}.trace.json.gz", files) as path:
                self._write_trace(path)
            if self._options.memory:
                with _whole(directory / f"{name}.memory.pickle", files) as path:
                    self._device.write_allocations(path)
        return files

    def _write_trace(self, path: Path) -> None:
        """Compressed here: torch does it line by line, which takes longer than all else."""
        with tempfile.TemporaryDirectory(prefix="sluice-profile-") as directory:
            plain = Path(directory, "trace.json")
            self._profiler.export_chrome_trace(str(plain))
            with plain.open("rb") as trace, gzip.open(path, "wb", compresslevel=LEVEL) as packed:
                shutil.copyfileobj(trace, packed, BLOCK)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Stops before the block, and lets go of all after it."""
        try:
            with _told():
                self._device.synchronize()
                self._profiler.stop()
                yield
        finally:
            self._let_go()

    def _let_go(self) -> None:
        # Torch has what was recorded, 3 KB an operation, in a cycle that may be frozen by now, or
        # held by the error that ended it.
        profiler, self._profiler = self._profiler, None
        for part in (getattr(profiler, "profiler", None), profiler):
            getattr(part, "__dict__", {}).clear()
        self._one.release()
        if self._options.memory:
            self._device.forget_allocations()
        give_back()


@contextmanager
def _told() -> Iterator[None]:
    """Raises ProfileError for what torch, a device and a disk raise."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, ImportError, AttributeError) as error:
        raise ProfileError(f"{type(error).__name__}: {error}") from error


@contextmanager
def _whole(path: Path, files: list[str]) -> Iterator[Path]:
    """Gives a path beside it, which takes its place once it is written."""
    beside = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield beside
        if beside.exists():  # of a device that tells of its memory
            beside.replace(path)
            files.append(path.name)
    finally:
        beside.unlink(missing_ok=True)
