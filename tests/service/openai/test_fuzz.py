"""Whatever comes over the OpenAI port, a caller is told what is wrong with it, in OpenAI's form."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from services.rollout.process import RolloutProcess
from tests.patience import PATIENCE
from tests.service.openai.conftest import running_openai
from tests.service.rollout.harness import SERVER, Store
from tools.fuzz_openai import extreme_messages, fuzz_openai, random_messages


async def test_no_message_is_an_internal_error_or_hangs(
    process: RolloutProcess, store: Store
) -> None:
    assert process.openai is not None
    extreme = random.Random(7).sample(list(extreme_messages()), 400)
    messages = itertools.chain(extreme, random_messages(7, 400))
    findings = await fuzz_openai(process.openai.url, messages, seconds=PATIENCE)
    assert findings.messages == 800
    assert (findings.internal, findings.hung, findings.formless) == ([], [], [])
    records = sorted(path.name for path in (store.root / "records").iterdir())
    assert set(records) <= {".lock", "fuzz.open", "fuzz.closed"}, "an odd name made a file"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ('{"prompt": ' + "[" * 100_000, "invalid_json", None),
        ('{"prompt": ' + "[" * 300 + "]" * 300 + "}", "invalid_value", "prompt"),
        ('{"prompt": "a\\ud800"}', "invalid_value", "prompt"),
        ('{"a\\udfff": 1}', "invalid_value", "a\\udfff"),
        ('{"prompt": "1", "temperature": NaN}', "invalid_json", None),
        ('{"prompt": "1", "temperature": 1e999}', "invalid_value", "temperature"),
        ('{"prompt": "1", "temperature": -1}', "invalid_value", "temperature"),
        ('{"prompt": "1", "temperature": 1e308}', "invalid_value", "temperature"),
        ('{"prompt": "1", "temperature": "1"}', "invalid_value", "temperature"),
        ('{"prompt": "1", "n": 1' + "0" * 5000 + "}", "invalid_json", None),
        ('{"prompt": "1", "n": 2147483647}', "invalid_value", "n"),
        ('{"prompt": "1", "n": true}', "invalid_value", "n"),
        ('{"prompt": "1", "n": "2"}', "invalid_value", "n"),
        ('{"prompt": "1", "max_tokens": 9223372036854775808}', "invalid_value", "max_tokens"),
        ('{"prompt": "1", "max_tokens": -1}', "invalid_value", "max_tokens"),
        ('{"prompt": "1", "logprobs": 21}', "invalid_value", "logprobs"),
        ('{"prompt": "1", "seed": 4611686018427387904}', "invalid_value", "seed"),
        ('{"prompt": "1", "seed": ""}', "invalid_value", "seed"),
        ('{"prompt": "1", "stream": "no"}', "invalid_value", "stream"),
        ('{"prompt": ""}', "invalid_value", "prompt"),
        (
            '{"prompt": "1", "sluice_record": '
            '{"group": "g", "session": "s", "min_version": 9223372036854775808}}',
            "invalid_value",
            "sluice_record.min_version",
        ),
        (
            '{"prompt": "1", "sluice_record": '
            '{"group": "g", "session": "s", "exact_version": 9223372036854775808}}',
            "invalid_value",
            "sluice_record.exact_version",
        ),
    ],
)
async def test_a_field_out_of_range_is_named(
    process: RolloutProcess, body: str, code: str, param: str | None
) -> None:
    assert process.openai is not None
    async with httpx2.AsyncClient(timeout=PATIENCE) as client:
        answer = await client.post(process.openai.url + "/completions", content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param), error


async def test_numbers_next_to_nothing_are_greedy_and_cost_no_neighbour_anything(
    process: RolloutProcess,
) -> None:
    assert process.openai is not None
    small = [{"temperature": value} for value in (0, 1e-8, 1e-40, 5e-324)]
    small += [{"top_p": 1e-30}, {"top_p": 5e-324}]
    async with httpx2.AsyncClient(timeout=PATIENCE) as client:

        async def complete(**body: float) -> str:
            url = f"{process.openai.url}/completions"  # type: ignore[union-attr]
            answer = await client.post(url, json={"prompt": "12=", "max_tokens": 4, **body})
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]

        plain = [complete(seed=number) for number in range(8)]
        texts = await asyncio.gather(*(complete(**each) for each in small), *plain)
        assert len(set(texts[: len(small)])) == 1
        assert texts[len(small) :] == [await complete(seed=number) for number in range(8)]


async def test_what_a_caller_sent_is_short_and_legible_in_the_refusal(
    process: RolloutProcess,
) -> None:
    assert process.openai is not None
    long = "x" * 5000
    bodies: list[dict[str, Any]] = [
        {"prompt": "1", "model": long},
        {"prompt": "1", long: 1},
        {"prompt": "1", "sluice_record": {"group": long, "session": "s"}},
        {"prompt": "1", "sluice_record": {"group": "../x", "session": "a\0"}},
    ]
    async with httpx2.AsyncClient(timeout=PATIENCE) as client:
        for body in bodies:
            answer = await client.post(process.openai.url + "/completions", json=body)
            assert 400 <= answer.status_code < 500 and len(answer.content) < 2000
        header = {"X-Sluice-Record": ""}
        answer = await client.post(
            process.openai.url + "/completions", json={"prompt": "1"}, headers=header
        )
        assert answer.status_code == 400, "a call that was to be recorded was not"


def token_file(directory: Path) -> Path:
    path = directory / "token"
    path.write_text("open sesame")
    return path


async def test_a_key_in_a_broken_request_is_in_no_answer_and_no_log(
    store: Store, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = {**SERVER, "security": {"token_file": str(token_file(tmp_path))}}
    caplog.set_level("DEBUG")
    async with running_openai(store, model, server=server) as process:
        assert process.openai is not None
        where = urlsplit(process.openai.url)
        for rest in (b"\0", b"\r\n open sesame", b"x" * 20_000, b"\r\nopen sesame"):
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer open sesame" + rest)
            writer.write(b"\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), PATIENCE)
            writer.close()
            assert answer.split()[1] == b"400" and b"invalid_http" in answer
            assert b"sesame" not in answer
    assert "sesame" not in caplog.text


async def test_a_key_of_any_bytes_is_refused_and_a_body_that_never_comes_is_given_up(
    store: Store, model: Path, tmp_path: Path
) -> None:
    server = {**SERVER, "security": {"token_file": str(token_file(tmp_path))}}
    settings = {"server": server, "openai": {"request_seconds": 0.3}}
    async with running_openai(store, model, **settings) as process:
        assert process.openai is not None
        for key, status, code in (
            (b"\xff\xfe", 401, "invalid_api_key"),
            (b"open sesame", 408, "body_timed_out"),
        ):
            parts = urlsplit(process.openai.url)
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
                b"Connection: close\r\nAuthorization: Bearer %b\r\n\r\n{" % key
            )
            async with asyncio.timeout(PATIENCE):
                head, _, body = (await reader.readuntil(b"}}")).partition(b"\r\n\r\n")
            writer.close()
            assert int(head.split()[1]) == status
            assert json.loads(body)["error"]["code"] == code
