"""Copies beside what computes: nothing is read before it is there, nothing written while copied."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice import platform, side_copies
from sluice.platform import Platform, PlatformError
from sluice.side_copies import Downloads, Fills, Uploads, map_tensors
from sluice.weights.shards import PublishedShards
from tests.lazy_device import LazyDevice, lazy_device

HOST = torch.device("cpu")
DTYPES = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.uint8]


@dataclass(frozen=True)
class Tree:
    tensors: tuple[torch.Tensor, ...]
    named: dict[str, torch.Tensor]
    absent: torch.Tensor | None = None
    count: int = 3


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> LazyDevice:
    device = lazy_device()
    monkeypatch.setattr(platform, "current", lambda: device)
    return device


def some(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


shapes = st.lists(st.integers(0, 40), max_size=3)
tensors = st.builds(some, shapes, st.sampled_from(DTYPES), st.integers(0, 1 << 30))
small_tensors = st.builds(
    some,
    st.lists(st.integers(0, 12), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 1 << 30),
)
trees = st.builds(
    Tree,
    st.lists(tensors, max_size=4).map(tuple),
    st.dictionaries(st.sampled_from("abc"), tensors, max_size=3),
)


def every(tree: Tree) -> list[torch.Tensor]:
    return [*tree.tensors, *tree.named.values()]


@given(st.lists(trees, max_size=7))
def test_what_passes_compute_with_is_what_was_made(values: list[Tree]) -> None:
    device = lazy_device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "current", lambda: device)
        for number, (item, found) in enumerate(
            Uploads(HOST).ahead(range(len(values)), values.__getitem__)
        ):
            assert item == number and (found.absent, found.count) == (None, 3)
            for mine, wanted in zip(every(found), every(values[item]), strict=True):
                assert mine.dtype == wanted.dtype and torch.equal(mine, wanted)
    assert len(device.copies) == len(values)


def numbers(count: int) -> list[torch.Tensor]:
    return [torch.full((1000,), float(number)) for number in range(count)]


def uploaded(count: int) -> list[torch.Tensor]:
    values = numbers(count)
    return [found.clone() for _, found in Uploads(HOST).ahead(range(count), values.__getitem__)]


def test_the_next_pass_is_on_its_way_when_one_begins(lazy: LazyDevice) -> None:
    uploaded(4)
    assert lazy.journal == [
        *("begin 0", "begin 1", "await 0"),
        *("end 0", "begin 2", "await 1"),  # a buffer is filled again when its copy has ended
        *("end 1", "begin 3", "await 2"),
        "await 3",
    ]


def test_without_the_waits_this_would_show(
    lazy: LazyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(map(torch.equal, uploaded(4), numbers(4)))
    with monkeypatch.context() as patch:
        patch.setattr(LazyDevice, "await_event", lambda self, event: None)
        assert not any(map(torch.equal, uploaded(2), numbers(2)))
    monkeypatch.setattr(side_copies._Pinned, "settle", lambda self: None)
    with pytest.raises(AssertionError, match="before its end"):
        uploaded(3)


@pytest.mark.parametrize("word", ["off", "on"])
def test_side_streams_may_be_off(
    lazy: LazyDevice, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setenv("SLUICE_SIDE_STREAMS", word)
    assert all(map(torch.equal, uploaded(3), numbers(3)))
    assert len(lazy.copies) == {"on": 3, "off": 0}[word]


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_SIDE_STREAMS", "maybe")
    platform.current.cache_clear()
    with pytest.raises(PlatformError, match="SLUICE_SIDE_STREAMS must be on or off"):
        platform.current()


# a hundred pieces of each, not ten thousand
@given(st.lists(small_tensors, max_size=5), st.integers(16, 300))
def test_memory_of_a_device_is_filled_piece_by_piece(
    values: list[torch.Tensor], piece_bytes: int
) -> None:
    device = lazy_device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "current", lambda: device)
        patch.setattr(side_copies, "PIECE_BYTES", piece_bytes)
        fills = Fills()
        kinds = [torch.bfloat16 if value.is_floating_point() else value.dtype for value in values]
        into = [torch.empty(v.shape, dtype=kind) for v, kind in zip(values, kinds, strict=True)]
        for memory, value in zip(into, values, strict=True):
            given_away = value.clone()
            fills.begin(memory, given_away)
            given_away.zero_()
        fills.settle()
    for memory, value in zip(into, values, strict=True):
        assert torch.equal(memory, value.to(memory.dtype))


@given(st.lists(tensors, max_size=6))
def test_bytes_are_read_one_after_the_other(values: list[torch.Tensor]) -> None:
    device = lazy_device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "current", lambda: device)
        stream = device.side_stream()
        wanted = [(value, torch.float32) for value in values]
        found = [data.tobytes() for data in Downloads().read(wanted, stream)]
    assert found == [value.float().numpy().tobytes() for value in values]


@pytest.mark.parametrize("keep", [True, False])
def test_files_that_are_published_beside(lazy: LazyDevice, tmp_path: Path, keep: bool) -> None:
    """Cast while they are copied, as versions and as deltas of them."""
    shards = PublishedShards(keep=keep, sync=False)
    values = {f"t{number}": torch.randn(300, 7) for number in range(5)}
    casts = dict.fromkeys(values, torch.bfloat16)
    for version in range(3):
        directory = tmp_path / str(version)
        directory.mkdir()
        shards.begin(version - 1 if keep and version else None)
        report = shards.write(directory, "model.safetensors", values, casts)
        shards.finish(version)
        plain = PublishedShards(keep=False, sync=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLUICE_SIDE_STREAMS", "off")
            other = tmp_path / f"{version}-plain"
            other.mkdir()
            plain.begin(None)
            expected = plain.write(other, "model.safetensors", values, casts)
        assert (report.digest, report.tensors) == (expected.digest, expected.tensors)
        assert (report.delta is not None) == (keep and version > 0)
        values["t3"].view(-1)[version] += 1
    assert lazy.copies


def test_a_platform_copies_on_the_stream_and_marks_its_end() -> None:
    said: list[str] = []

    class Stream:
        def wait_stream(self, other: object) -> None:
            said.append(f"side waits for {other}")

        def __enter__(self) -> None:
            said.append("enter")

        def __exit__(self, *_: object) -> None:
            said.append("exit")

    class Event:
        def record(self, stream: object) -> None:
            said.append("record")

    class Current:
        def wait_event(self, event: object) -> None:
            said.append("current waits")

        def __str__(self) -> str:
            return "current"

    class Tensor:
        device = SimpleNamespace(type="some")

        def copy_(self, source: object, non_blocking: bool) -> None:
            said.append(f"copy {non_blocking}")

        def record_stream(self, stream: object) -> None:
            said.append("keep")

    class Some(Platform):
        @property
        def module(self) -> Any:
            return SimpleNamespace(
                Stream=Stream, Event=Event, current_stream=Current, stream=lambda stream: stream
            )

    some_device = Some("some", "gloo", "")
    stream = some_device.side_stream()
    tensor: Any = Tensor()
    event = some_device.begin_copy(tensor, torch.ones(2), stream)
    some_device.await_event(event)
    assert said == [
        *("side waits for current", "enter", "copy True", "keep", "record", "exit"),
        "current waits",
    ]


def test_tensors_are_found_wherever_they_are() -> None:
    tree = {"a": (torch.ones(2), [torch.ones(3)], None, "text"), "b": Tree((torch.ones(1),), {})}
    found: list[int] = []
    doubled = map_tensors(tree, lambda tensor: (found.append(len(tensor)), tensor * 2)[1])
    assert found == [2, 3, 1] and doubled["a"][3] == "text"  # type: ignore[index]


def test_what_has_no_tensors_is_no_copy() -> None:
    plain = {"a": [1, Tree((), {})], "b": (None,)}
    assert map_tensors(plain, torch.clone) is plain
    mixed = {"plain": plain, "tensor": torch.ones(1)}
    assert map_tensors(mixed, torch.clone)["plain"] is plain
