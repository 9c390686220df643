"""Recordings of a process: one at a time, whole files, and the next one after whatever happened."""

from __future__ import annotations

import gc
import gzip
import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from sluice.host_memory import HeldMemory
from sluice.profiler import NAME, ProfileError, ProfileOptions, Recording, new_name
from tests.apart import apart
from tests.patience import PATIENCE


def named_in(path: Path) -> set[str]:
    with gzip.open(path) as trace:
        return {event.get("name") for event in json.load(trace)["traceEvents"]}


def test_a_process_records_one_at_a_time(tmp_path: Path) -> None:
    first = Recording(ProfileOptions())
    with pytest.raises(ProfileError, match="another profile records"):
        Recording(ProfileOptions())
    with first.named("block"):
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert first.write(tmp_path, "one") == ["one.trace.json.gz"]
    assert {"block", "aten::mm"} <= named_in(tmp_path / "one.trace.json.gz")
    Recording(ProfileOptions()).drop()
    second = Recording(ProfileOptions())
    assert second.write(tmp_path, "two") == ["two.trace.json.gz"]
    assert "aten::mm" not in named_in(tmp_path / "two.trace.json.gz")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "one.trace.json.gz",
        "two.trace.json.gz",
    ]


def test_what_cannot_be_written_leaves_nothing_and_bars_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in its place")
    with pytest.raises(ProfileError, match=r"FileExistsError: .*file"):
        Recording(ProfileOptions(memory=True)).write(tmp_path / "file", "rank-0")
    recording = Recording(ProfileOptions(stacks=True))
    assert recording.write(tmp_path / "deep" / "er", "rank-0") == ["rank-0.trace.json.gz"]


def test_names_of_profiles_can_name_them() -> None:
    first, second = new_name(), new_name()
    assert first <= second
    assert NAME.fullmatch(first)


@pytest.mark.parametrize("written", [True, False])
def test_what_was_recorded_goes_as_the_recording_ends(tmp_path: Path, *, written: bool) -> None:
    """It is 3 KB an operation, in a cycle of a few objects that imports may have frozen."""
    recording = Recording(ProfileOptions())
    torch.ones(8).add(1)
    profiler = weakref.ref(recording._profiler.profiler)
    gc.freeze()
    try:
        if written:
            recording.write(tmp_path, "a")
        else:
            recording.drop()
        assert profiler() is None
    finally:
        gc.unfreeze()


def test_what_was_recorded_goes_though_the_error_that_ended_it_stays(tmp_path: Path) -> None:
    apart(fail_to_write, tmp_path)


def fail_to_write(tmp_path: Path) -> None:
    Recording(ProfileOptions()).write(tmp_path, "first")  # torch loads what it keeps
    (tmp_path / "file").write_text("in its place")
    before = HeldMemory.now()
    recording = Recording(ProfileOptions())
    operate(2000)
    recorded = before.growth()
    with pytest.raises(ProfileError) as error:
        recording.write(tmp_path / "file", "a")
    assert HeldMemory.now().allocated - before.allocated < recorded / 2
    assert error.value.__traceback__ is not None


LEAN = """
import sys, tempfile
from pathlib import Path
from sluice.imports import uncompiled
with uncompiled():
    import torch
from sluice.profiler import ProfileOptions, Recording
for options in (ProfileOptions(), ProfileOptions(stacks=True, memory=True)):
    recording = Recording(options)
    torch.ones(8).add(1)
    with tempfile.TemporaryDirectory() as directory:
        recording.write(Path(directory), "a")
print(*(name in sys.modules for name in ("torch._inductor", "sympy")))
print(torch._inductor.__name__)
"""


def test_a_profile_loads_no_compiler_which_is_there_for_who_asks() -> None:
    """Of which torch asks a setting: 70 MiB, for good."""
    command = [sys.executable, "-c", LEAN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.split() == ["False", "False", "torch._inductor"]


def operate(count: int) -> None:
    """So many operations of torch, and four within each."""
    one = torch.ones(8)
    for _ in range(count):
        one.add(1)


def call(count: int) -> None:
    """So many calls of Python."""
    for _ in range(count):
        new_name()


def test_the_memory_of_what_was_recorded_goes_back_to_the_host(tmp_path: Path) -> None:
    apart(record_and_end, tmp_path)


def record_and_end(tmp_path: Path) -> None:
    Recording(ProfileOptions()).write(tmp_path, "first")  # torch loads what it keeps
    before = HeldMemory.now()
    recording = Recording(ProfileOptions())
    operate(2000)
    recorded = before.growth()
    recording._profiler.stop()
    ended = before.growth()
    recording._let_go()
    assert ended > 4 * recorded, "what is recorded grows as it ends"
    assert HeldMemory.now().resident - before.resident < ended / 4


@pytest.mark.parametrize(
    ("options", "work", "count"),
    [
        (ProfileOptions(), operate, 2000),
        (ProfileOptions(memory=True), operate, 2000),
        (ProfileOptions(stacks=True), call, 20_000),
    ],
    ids=["plain", "memory", "stacks"],
)
def test_a_recording_is_too_large_before_it_takes_half_of_what_is_free(
    options: ProfileOptions, work: Callable[[int], None], count: int
) -> None:
    apart(record_with_little_memory, options, work, count)


def record_with_little_memory(
    options: ProfileOptions, work: Callable[[int], None], count: int
) -> None:
    Recording(options).drop()  # torch loads what it keeps
    host, before = psutil.virtual_memory(), HeldMemory.now()
    recording = Recording(options)
    work(count)
    recording._profiler.stop()
    needed = before.growth()
    recording._let_go()
    recording = Recording(options)
    assert recording.too_large() == ""
    work(count)
    for free, said in ((2 * needed, "GiB of the host's memory"), (50 * needed, "")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(psutil, "virtual_memory", lambda free=free: host._replace(available=free))
            found = recording.too_large()
        assert said in found and bool(found) is bool(said), (needed, free, found)
    recording.drop()
