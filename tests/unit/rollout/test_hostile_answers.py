"""What a reward service answers over HTTP that is no answer: refused, and its size never held."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.rollout.environments.environment import Response, Reward, Task
from services.rollout.environments.graders.grader import create_grader
from services.rollout.environments.graders.remote import RewardServiceError
from sluice.host_memory import peak_memory
from tests.apart import apart
from tests.patience import PATIENCE

GOOD = json.dumps({"rewards": [0.25]}).encode()


@asynccontextmanager
async def answering(*parts: bytes) -> AsyncIterator[str]:
    """A server that writes these, whatever it is asked, as fast as they are read."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = [line.split(b":") for line in head.lower().split(b"\r\n")]
        length = next(int(line[1]) for line in lines if line[0] == b"content-length")
        await reader.readexactly(length)
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


def headed(body: bytes, *lines: str, status: str = "200 OK") -> bytes:
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *lines]
    return "".join(f"{line}\r\n" for line in [*head, ""]).encode() + body


async def graded(url: str, name: str = "remote", **values: Any) -> list[Reward]:
    settings = {"url": url, "deadline_seconds": PATIENCE, "attempt_seconds": PATIENCE, **values}
    found = create_grader(name, settings).grade(Task(prompt="2+2?"), [Response(text="4")])
    assert isinstance(found, Awaitable)
    rewards: list[Reward] = await found
    return rewards


async def test_answers_that_are_good_are_read() -> None:
    for body in (
        GOOD,
        b" " * (1 << 20) + GOOD,
        b"\xef\xbb\xbf" + GOOD,
        GOOD.decode().encode("utf-16"),
    ):
        async with answering(headed(body)) as url:
            assert [each.reward for each in await graded(url)] == [0.25]


def test_an_answer_without_end_costs_no_memory() -> None:
    apart(ask_for_endless_answers)


def ask_for_endless_answers() -> None:
    before = peak_memory()
    asyncio.run(endless_answers())
    assert peak_memory() - before < 160 << 20  # of 384 MiB


async def endless_answers() -> None:
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with answering(head, *[chunk] * 384) as url:
        with pytest.raises(RewardServiceError, match="more than 4194304 bytes"):
            await graded(url)
    refusal = b"HTTP/1.1 400 No\r\nContent-Length: 402653184\r\n\r\n"
    async with answering(refusal, *[b"x" * (1 << 20)] * 384) as url:
        with pytest.raises(RewardServiceError, match="HTTP 400: xxx"):
            await graded(url)


async def test_what_unpacks_to_anything_is_refused_unread() -> None:
    for body in (gzip.compress(bytes(1 << 28), 9), gzip.compress(GOOD)):
        async with answering(headed(body, "Content-Encoding: gzip")) as url:
            with pytest.raises(RewardServiceError, match="answers as gzip, unasked"):
                await graded(url)


def said(text: str, **choice: Any) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}, **choice}]}).encode()


@pytest.mark.parametrize(
    "text",
    ["Score: 1e400", "Score: 0x5", "Score: 5,5", "Score: 1_0", "Score: 9th", "Score:\n* 8 of 9"],
)
async def test_a_judge_that_says_half_a_number_says_none(text: str) -> None:
    async with answering(headed(said(text))) as url:
        with pytest.raises(RewardServiceError, match="says no score"):
            await graded(url, "judge", model="m")


@pytest.mark.parametrize(
    ("text", "ending", "share"),
    [
        ("Score: 1", "length", None),  # of a 10, perhaps
        ("Score: 7.", "length", None),
        ("Score: 1", "stop", 0.1),
        ("Score: 7.", "stop", 0.7),
        ("Score: 7/10", "length", 0.7),
        ("Score: 7\nfor", "length", 0.7),
        ("**Score:** 7", "stop", 0.7),
        ("**Score: 7**", "stop", 0.7),
        ("Score: **7.5** of 10", "length", 0.75),
        ("Score: **1", "length", None),
    ],
)
async def test_a_judge_that_is_cut_off_in_its_number_says_none(
    text: str, ending: str, share: float | None
) -> None:
    async with answering(headed(said(text, finish_reason=ending))) as url:
        if share is None:
            with pytest.raises(RewardServiceError, match="cut off by max_tokens"):
                await graded(url, "judge", model="m")
        else:
            assert [each.reward for each in await graded(url, "judge", model="m")] == [share]
