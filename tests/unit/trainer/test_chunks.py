"""Flat ranges of any ranks, written as chunks and read as any other boxes, beside numpy."""

from __future__ import annotations

import itertools
import math
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.backends.chunks import (
    Box,
    BoxData,
    ChunkReader,
    RankFiles,
    UncoveredChunkError,
    boxes,
    cut,
    write_metadata,
)
from services.trainer.staging import LiveTensors
from sluice.weights.convert.stored import METADATA
from sluice.weights.manifest import digest_file

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    begin = draw(st.integers(0, math.prod(shape)))
    return shape, begin, draw(st.integers(begin, math.prod(shape)))


@given(ranges())
@settings(max_examples=300)
def test_boxes_are_the_elements_of_a_range_in_their_order(
    case: tuple[tuple[int, ...], int, int],
) -> None:
    shape, begin, end = case
    whole = np.arange(math.prod(shape)).reshape(shape)
    found: list[int] = []
    made = list(boxes(shape, begin, end))
    for offset, sizes in made:
        part = whole[tuple(slice(o, o + s) for o, s in zip(offset, sizes, strict=True))]
        assert part.shape == sizes
        assert part.size
        found += part.ravel().tolist()
    assert found == list(range(begin, end))
    assert len(made) <= 2 * len(shape) - 1


def _save(
    directory: Path, tensors: dict[str, torch.Tensor], cuts: Sequence[int], limit: int
) -> None:
    """Save by len(cuts) + 1 ranks, each a range of every tensor; cuts are of a hundred."""
    bounds = [0, *sorted(cuts), 100]
    written = []
    for rank, (low, high) in enumerate(itertools.pairwise(bounds)):
        chunks = []
        for key, tensor in tensors.items():
            shape = tuple(tensor.shape)
            first, last = (tensor.numel() * bound // 100 for bound in (low, high))
            place = Box(key, shape, (0,) * len(shape), shape)
            chunks += cut(place, tensor.view(-1)[first:last], first, limit)
        files = RankFiles(rank, chunks, {f"rng/shard_{rank}": bytes([rank])})
        written.append(files.write(directory, threads=1 + rank % 2, sync=False))
    write_metadata(directory, written, sync=False)
    for each in written:
        for name, entry in each.files.items():
            assert digest_file(directory / name) == (entry.size, entry.digest)


@given(
    SHAPES,
    st.lists(st.integers(0, 100), max_size=3),
    st.integers(1, 400),
    st.data(),
)
@settings(max_examples=60)
def test_what_ranges_wrote_is_read_as_any_boxes(
    shape: tuple[int, ...], cuts: list[int], limit: int, data: st.DataObject
) -> None:
    torch.manual_seed(0)
    tensors = {"a": torch.randn(shape), "b": torch.randn(shape).to(torch.bfloat16)}
    with tempfile.TemporaryDirectory() as root:
        _save(Path(root), tensors, cuts, limit)
        reader = ChunkReader(Path(root))
        wanted = []
        for key, tensor in tensors.items():
            for _ in range(2):
                offset = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
                sizes = tuple(
                    data.draw(st.integers(1, size - at))
                    for size, at in zip(shape, offset, strict=True)
                )
                target = torch.full(sizes, torch.nan, dtype=tensor.dtype)
                reader.fill([BoxData(Box(key, shape, offset, sizes), target)])
                area = tuple(slice(o, o + s) for o, s in zip(offset, sizes, strict=True))
                wanted.append((target, tensor[area]))
        reader.read()
        assert all(torch.equal(target, part) for target, part in wanted)
        assert reader.read_object(f"rng/shard_{len(cuts)}") == bytes([len(cuts)])
        assert reader.read_object("rng/shard_9") is None
        whole = {key: torch.empty_like(tensor) for key, tensor in tensors.items()}
        dcp.load(whole, checkpoint_id=root, no_dist=True)  # torch's own way in
        assert all(torch.equal(whole[key], tensor) for key, tensor in tensors.items())


def test_pieces_are_bounded(tmp_path: Path) -> None:
    place = Box("a", (1, 100, 64), (0, 0, 0), (1, 100, 64))
    pieces = cut(place, torch.zeros(6400)[32:], 32, 64 * 4 * 7)
    assert max(piece.data.nbytes for piece in pieces) == 64 * 4 * 7
    assert sum(piece.data.numel() for piece in pieces) == 6400 - 32
    wide = cut(Box("a", (2, 100), (0, 0), (2, 100)), torch.zeros(200), 0, 40)
    assert {piece.data.nbytes for piece in wide} == {40}


def test_a_range_that_nobody_wrote_is_missed(tmp_path: Path) -> None:
    tensor = torch.randn(6, 4)
    place = Box("a", (6, 4), (0, 0), (6, 4))
    half = RankFiles(0, cut(place, tensor.view(-1)[:13]), {})
    other = RankFiles(1, cut(place, tensor.view(-1)[14:], 14), {})
    written = [half.write(tmp_path, threads=1, sync=False)]
    written += [other.write(tmp_path, threads=1, sync=False)]
    with pytest.raises(ValueError, match="invalid fill"):
        write_metadata(tmp_path, written, sync=False)
    write_metadata(tmp_path, written[:1], sync=False)  # torch itself does not look at one rank
    reader = ChunkReader(tmp_path)
    reader.fill([BoxData(place, torch.empty(6, 4))])
    with pytest.raises(UncoveredChunkError, match="'a'"):
        reader.read()
    reader = ChunkReader(tmp_path)
    reader.fill([BoxData(Box("a", (6, 5), (0, 0), (6, 5)), torch.empty(6, 5))])
    with pytest.raises(UncoveredChunkError, match="'a' is"):
        reader.read()
    reader = ChunkReader(tmp_path)
    reader.fill([BoxData(Box("b", (6, 4), (0, 0), (6, 4)), torch.empty(6, 4))])
    with pytest.raises(UncoveredChunkError, match="no tensor 'b'"):
        reader.read()


def test_a_checkpoint_runs_nothing(tmp_path: Path) -> None:
    tensor, made = torch.randn(5, 3), tmp_path / "made"
    _save(tmp_path, {"a": tensor}, [], 1000)

    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (made,)

    metadata = pickle.loads((tmp_path / METADATA).read_bytes())
    metadata.planner_data = Hostile()
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(UncoveredChunkError, match="no description of tensors"):
        ChunkReader(tmp_path)
    assert not made.exists()


def test_padding_beyond_what_was_saved_is_zero(tmp_path: Path) -> None:
    tensor = torch.randn(5, 3)
    _save(tmp_path, {"a": tensor}, [40], 1000)
    target = torch.full((8, 3), torch.nan)
    reader = ChunkReader(tmp_path)
    reader.fill([BoxData(Box("a", (8, 3), (0, 0), (8, 3), padded=True), target)])
    reader.read()
    assert torch.equal(target[:5], tensor)
    assert not target[5:].any()


def test_what_is_kept_is_written_as_it_was(tmp_path: Path) -> None:
    """Tensors change after the first of two is written: a copy is made of the other alone."""
    first, second = torch.arange(4.0), torch.arange(4.0, 8.0)
    live = LiveTensors({"first": first, "second": second})
    assert [tuple(t.shape) for _, t in live.items()] == [(4,), (4,)]
    taken = live["first"]
    live.keep()
    first.zero_()
    second.zero_()
    assert taken.tolist() == [0, 1, 2, 3]
    assert live["second"].tolist() == [4, 5, 6, 7]
    with pytest.raises(KeyError):
        live["second"]  # a copy is not held longer than it is needed
