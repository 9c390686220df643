"""Recorded groups of one store, as two workers see them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.rollout.config import OpenAIConfig
from services.rollout.engine.interface import Delta, FinishReason
from services.rollout.openai import recorder as recorders
from services.rollout.openai.generation import Answer
from services.rollout.openai.prompts import Prompt
from services.rollout.openai.recorder import Recorder
from services.rollout.openai.requests import Record
from sluice.runtime.http import ApiError
from sluice.samples.blob_store import BlobStore
from sluice.samples.sample import VersionSpan

PROMPT = Prompt("p", (1, 2, 3))
OLD, NEW = Record(group="g", session="old"), Record(group="g", session="new")


class Letters:
    """A token is a letter."""

    def decode(self, ids: Sequence[Sequence[int]], *, special: bool = False) -> list[str]:
        return ["".join(chr(65 + each % 26) for each in one) for one in ids]


def recorder(root: Path, **settings: int) -> Recorder:
    tokenizer: Any = Letters()
    config = OpenAIConfig(**settings)
    return Recorder(root / "records", BlobStore(root, sync=False), tokenizer, config)


def answer(first: int) -> list[Answer]:
    ids = tuple(range(first, first + 3))
    delta = Delta(
        index=0,
        token_ids=ids,
        logprobs=(-1.0,) * 3,
        logprobs_t1=(-1.0,) * 3,
        spans=(VersionSpan(version=1, digest="d", first_token=0, last_token=2),),
        finish_reason=FinishReason.STOP,
    )
    return [Answer(delta, "x")]


def counts(described: dict[str, Any]) -> dict[str, int]:
    """Samples of each session."""
    return {name: len(each["samples"]) for name, each in described["sessions"].items()}


@pytest.mark.parametrize("calls", [1, 2, 5], ids=["shorter", "as long", "longer"])
async def test_a_group_that_another_worker_recorded_anew_is_read_anew(
    tmp_path: Path, calls: int
) -> None:
    """Also when its file has the inode of the old one, which file systems use again at once."""
    first, second = recorder(tmp_path), recorder(tmp_path)
    path, spare = tmp_path / "records" / "g.open", tmp_path / "spare"
    for token in (10, 20):
        await second.add(OLD, PROMPT, answer(token), [()])
    os.link(path, spare)  # keeps the inode
    await first.delete("g")
    for token in range(calls):
        await first.add(NEW, PROMPT, answer(30 + token), [()])
    spare.write_bytes(path.read_bytes())
    spare.replace(path)
    assert counts(await second.describe("g")) == {"new": calls}
    await second.add(NEW, PROMPT, answer(50), [()])
    for reader in (first, second, recorder(tmp_path)):
        assert counts(await reader.describe("g")) == {"new": calls + 1}
    await first.reward("g", {"new": 1.0})
    await second.close("g")
    assert counts(await first.describe("g")) == {"new": calls + 1}


async def test_a_first_line_that_a_crash_cut_off_is_written_again(tmp_path: Path) -> None:
    await recorder(tmp_path).add(OLD, PROMPT, answer(10), [()])
    path = tmp_path / "records" / "g.open"
    whole = path.read_bytes()
    for cut in range(whole.index(b"\n") + 2):
        path.write_bytes(whole[:cut])
        await recorder(tmp_path).add(NEW, PROMPT, answer(20), [()])
        assert counts(await recorder(tmp_path).describe("g")) == {"new": 1}, f"cut at {cut}"


async def test_a_byte_that_changed_on_the_disk_is_never_a_sample(tmp_path: Path) -> None:
    writer = recorder(tmp_path)
    await writer.add(OLD, PROMPT, answer(10), [()])
    await writer.add(NEW, PROMPT, answer(20), [()])
    path = tmp_path / "records" / "g.open"
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        flipped = bytes([whole[place] ^ 1])
        path.write_bytes(whole[:place] + flipped + whole[place + 1 :])
        with pytest.raises(ApiError, match=r"g\.open is not as it was written") as refused:
            await recorder(tmp_path).describe("g")
        assert (refused.value.status, refused.value.code) == (409, "record_damaged")
    path.write_bytes(whole[:-1] + b"x")
    with pytest.raises(ApiError, match="not as it was written"):
        await recorder(tmp_path).add(NEW, PROMPT, answer(30), [()])
    path.write_bytes(whole[:-40])
    with pytest.raises(ApiError, match="not as it was written"):
        await writer.add(NEW, PROMPT, answer(30), [()])  # which has read on from further than that
    await writer.delete("g")
    assert await writer.names() == {"open": [], "closed": []}


async def test_lines_of_an_earlier_release_are_read(tmp_path: Path) -> None:
    await recorder(tmp_path).add(OLD, PROMPT, answer(10), [()])
    path = tmp_path / "records" / "g.open"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"".join(line.partition(b"\t")[0] + b"\n" for line in lines))
    await recorder(tmp_path).add(NEW, PROMPT, answer(20), [()])
    assert counts(await recorder(tmp_path).describe("g")) == {"old": 1, "new": 1}


async def test_no_more_groups_are_open_or_kept_than_the_settings_say(tmp_path: Path) -> None:
    here = recorder(tmp_path, open_groups=2, kept_groups=1)
    for name in ("a", "b", "c"):
        await here.add(Record(group=f"{name}-open", session="s"), PROMPT, answer(1), [()])
        await here.add(Record(group=name, session="s"), PROMPT, answer(1), [()])
        with pytest.raises(ApiError) as caught:
            await here.add(Record(group="more", session="s"), PROMPT, answer(1), [()])
        assert (caught.value.status, caught.value.code) == (429, "too_many_groups")
        await here.delete(f"{name}-open")
        await here.reward(name, {"s": 1.0})
        await here.close(name)
    assert await here.names() == {"open": [], "closed": ["c"]}


async def test_no_open_group_is_read_again_while_no_other_worker_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more groups than fit, each call read the whole of its own."""
    tokenizer: Any = Letters()
    blobs = BlobStore(tmp_path, sync=False)
    here = Recorder(tmp_path / "records", blobs, tokenizer, OpenAIConfig(), sync=False)
    read = list[bytes]()
    decode = recorders.decode_line
    monkeypatch.setattr(recorders, "decode_line", lambda line: read.append(line) or decode(line))
    for _ in range(2):
        for number in range(300):
            await here.add(Record(group=f"g{number}", session="s"), PROMPT, answer(1), [()])
    assert not read
    await here.reward("g0", {"s": 1.0})
    await here.close("g0")
    assert counts(await here.describe("g0")) == {"s": 2}
    assert len(read) == 5, "what is closed is read when somebody asks"


async def test_a_group_that_was_just_closed_is_kept_though_the_clock_was_set_back(
    tmp_path: Path,
) -> None:
    here = recorder(tmp_path, kept_groups=1)
    for name in ("a", "b"):
        await here.add(Record(group=name, session="s"), PROMPT, answer(1), [()])
        await here.reward(name, {"s": 1.0})
        await here.close(name)
        later = time.time() + 3600  # as it was when this was written
        os.utime(tmp_path / "records" / f"{name}.closed", (later, later))
        assert await here.names() == {"open": [], "closed": [name]}
