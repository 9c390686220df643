"""Calls of foreign agents become rows that a trainer takes, token by token what was sampled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from openai import AsyncOpenAI

from services.rollout.process import RolloutProcess
from sluice.client import TrainerClient
from sluice.samples.arrow import decode_group, read_metadata
from sluice.samples.blob_store import BlobStore
from sluice.samples.blobs import BlobReference
from sluice.samples.sample import Sample, validate_sample
from tests.patience import PATIENCE
from tests.service.openai.conftest import TEMPLATE, client_of, running_openai
from tests.service.rollout.harness import Store, running_router, wait_for_engines
from tests.service.trainer.harness import ACTIVE, GRPO, PPO, running_trainer, until


class Records:
    """The endpoints beside OpenAI's."""

    def __init__(self, url: str) -> None:
        self._url = url.replace("/v1", "/sluice/v1/groups")

    async def ask(self, method: str, path: str = "", body: Any = None) -> tuple[int, Any]:
        async with httpx2.AsyncClient(timeout=PATIENCE) as client:
            response = await client.request(method, f"{self._url}{path}", json=body)
            return response.status_code, response.json()

    async def reward(self, group: str, **rewards: float) -> None:
        status, body = await self.ask("POST", f"/{group}/rewards", {"rewards": rewards})
        assert status == 200, body

    async def close(self, group: str) -> BlobReference:
        status, body = await self.ask("POST", f"/{group}/close")
        assert status == 200, body
        return BlobReference(body["blob"]["digest"], body["blob"]["size_bytes"])


@pytest.fixture
def records(process: RolloutProcess) -> Records:
    assert process.openai is not None
    return Records(process.openai.url)


def recorded(group: str, session: str) -> dict[str, Any]:
    return {"return_token_ids": True, "sluice_record": {"group": group, "session": session}}


async def chat(
    client: AsyncOpenAI, messages: list[dict], group: str, session: str, **fields: Any
) -> Any:
    settings = {"model": "policy", "max_tokens": 5, "logprobs": True, **fields}
    return await client.chat.completions.create(
        messages=messages, extra_body=recorded(group, session), **settings
    )


def rows_of(store: Store, blob: BlobReference) -> list[Sample]:
    rows = decode_group(BlobStore(store.root, sync=False).get(blob))
    for row in rows:
        validate_sample(row)
    return rows


async def converse(client: AsyncOpenAI, group: str, session: str, turns: int, seed: int) -> list:
    """A conversation by the text of the answers, as agents have it."""
    messages: list[dict] = [{"role": "user", "content": "12"}]
    answers = []
    for turn in range(turns):
        answer = await chat(client, messages, group, session, seed=seed + turn)
        answers.append(answer)
        text = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "3"}]
    return answers


async def test_turns_of_a_session_are_one_sample_with_masked_observations(
    client: AsyncOpenAI, records: Records, store: Store
) -> None:
    answers = await converse(client, "g", "s", turns=3, seed=20)
    await records.reward("g", s=0.5)
    (row,) = rows_of(store, await records.close("g"))
    first, *_, last = answers
    assert row.token_ids[: row.prompt_length].tolist() == first.prompt_token_ids
    assert row.token_ids.tolist() == last.prompt_token_ids + last.choices[0].token_ids
    mask = row.columns["loss_mask"]
    sampled = [token for answer in answers for token in answer.choices[0].token_ids]
    assert row.token_ids[row.prompt_length :][mask].tolist() == sampled
    logprobs = [entry.logprob for a in answers for entry in a.choices[0].logprobs.content]
    np.testing.assert_array_equal(
        row.columns["rollout_logprobs"][mask], np.array(logprobs, np.float32)
    )
    assert not row.columns["rollout_logprobs"][~mask].any()
    assert row.columns["reward"] == 0.5
    assert (row.sample_id, row.group_id) == ("g/0", "g")
    covered = [i for span in row.spans for i in range(span.first_token, span.last_token + 1)]
    assert covered == np.flatnonzero(mask).tolist()


async def test_history_that_was_rewritten_begins_another_sample(
    client: AsyncOpenAI, records: Records, store: Store
) -> None:
    (answer,) = await converse(client, "g", "s", turns=1, seed=1)
    rewritten = [{"role": "user", "content": "98"}]
    other = await chat(client, rewritten, "g", "s")
    await records.reward("g", s=1.0)
    rows = rows_of(store, await records.close("g"))
    assert [row.token_ids[: row.prompt_length].tolist() for row in rows] == [
        answer.prompt_token_ids,
        other.prompt_token_ids,
    ]
    assert rows[1].columns["episode"] == 0.0  # of the same session


async def test_of_several_choices_one_goes_on_and_none_counts_twice(
    client: AsyncOpenAI, records: Records, store: Store
) -> None:
    (answer,) = await converse(client, "g", "s", turns=1, seed=1)
    messages = [
        {"role": "user", "content": "12"},
        {"role": "assistant", "content": answer.choices[0].message.content},
        {"role": "user", "content": "3"},
    ]
    forked = await chat(client, messages, "g", "s", n=3)
    await records.reward("g", s=1.0)
    rows = rows_of(store, await records.close("g"))
    assert len(rows) == 3
    trained = sum(int(np.sum(r.columns.get("loss_mask", np.ones(r.response_length)))) for r in rows)
    sampled = len(answer.choices[0].token_ids) + sum(len(c.token_ids) for c in forked.choices)
    assert trained == sampled


async def test_streams_and_texts_and_the_header_are_recorded(
    process: RolloutProcess, records: Records, store: Store
) -> None:
    async with client_of(process, default_headers={"X-Sluice-Record": "g/text"}) as client:
        tokens: list[int] = []
        async for chunk in await client.completions.create(
            model="policy",
            prompt="12=",
            max_tokens=6,
            stream=True,
            extra_body={"return_token_ids": True},
        ):
            tokens += getattr(chunk.choices[0], "token_ids", [])
    await records.reward("g", text=1)
    (row,) = rows_of(store, await records.close("g"))
    assert row.token_ids.tolist() == [1, 2, 10, *tokens]


async def test_tokens_past_a_stop_string_are_not_recorded(
    client: AsyncOpenAI, records: Records, store: Store
) -> None:
    request: dict[str, Any] = {"model": "policy", "prompt": "12=", "max_tokens": 40, "seed": 3}
    free = (await client.completions.create(**request)).choices[0].text
    cut = await client.completions.create(**request, stop=free[2], extra_body=recorded("g", "s"))
    await records.reward("g", s=0)
    (row,) = rows_of(store, await records.close("g"))
    assert row.token_ids.tolist() == [1, 2, 10, *cut.choices[0].token_ids]
    assert row.finish_reason == "stop"
    assert row.response_length == free.index(free[2]) + 1


async def test_a_text_that_parts_before_the_end_of_a_stop_string_is_another_sample(
    client: AsyncOpenAI, records: Records, store: Store
) -> None:
    request: dict[str, Any] = {"model": "policy", "prompt": "12=", "max_tokens": 40, "seed": 3}
    free = (await client.completions.create(**request)).choices[0].text
    stop = free[2:4]
    await client.completions.create(**request, stop=stop, extra_body=recorded("g", "s"))
    request["prompt"] = "12=" + free[: free.find(stop)] + stop[1] + "9="  # not what was sampled
    await client.completions.create(**request, extra_body=recorded("g", "s"))
    await records.reward("g", s=0)
    assert len(rows_of(store, await records.close("g"))) == 2


async def test_a_group_survives_its_worker_and_a_cut_off_line(
    store: Store, model: Path, process: RolloutProcess
) -> None:
    async with client_of(process) as client:
        await converse(client, "g", "s", turns=1, seed=1)
    file = store.root / "records" / "g.open"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"session": "s", "thr')  # what a crash leaves
    async with running_openai(store, model, engine_id="rollout-1") as second:
        async with client_of(second) as client:
            await converse(client, "g", "t", turns=2, seed=4)
        assert second.openai is not None
        records = Records(second.openai.url)
        await records.reward("g", s=1, t=0)
        blob = await records.close("g")
    assert [row.columns["reward"] for row in rows_of(store, blob)] == [1, 0]


@pytest.fixture(scope="session")
def caller(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, whose digits are tool calls; templates would write them another way."""
    directory = shutil.copytree(model, tmp_path_factory.mktemp("caller") / "model")
    file = directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    for digit in "0123456789":
        arguments = f'{{"name": "add",  "arguments": {{"a":{digit}}}}}'
        words[f"<tool_call>{arguments}</tool_call>"] = words.pop(digit)
    file.write_text(json.dumps(tokenizer))
    (directory / "chat_template.jinja").write_text(TEMPLATE.partition("{% if tools %}")[0])
    return directory


@contextlib.asynccontextmanager
async def worker_process(
    store: Store, model: Path, router: str, folder: Path
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """An episode worker in a process of its own, and the address of its OpenAI port."""
    file = folder / f"{secrets.token_hex(4)}.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.rollout", "--roles", '["episodes"]'),
        *("--router", router, "--store", str(store.root), "--tokenizer", str(model)),
        *("--openai", "{}", "--server.address_file", str(file)),
    )
    try:
        async with asyncio.timeout(PATIENCE):
            while not file.exists():
                assert process.returncode is None
                await asyncio.sleep(0.02)
            url = json.loads(file.read_text())["openai_url"]
            async with httpx2.AsyncClient(timeout=PATIENCE) as client:
                while (await client.get(url.replace("/v1", "/health"))).status_code != 200:
                    await asyncio.sleep(0.02)
        yield process, url
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_call_and_its_result_are_one_sample_though_their_worker_is_killed(
    store: Store, caller: Path, tmp_path: Path
) -> None:
    """A session goes on in the next process from the very tokens of the call."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "="}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    settings: dict[str, Any] = {"model": "policy", "tools": tools, "max_tokens": 1}
    async with contextlib.AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router())
        address = router.server.address
        await stack.enter_async_context(
            running_openai(store, caller, router=address, openai=None, engine_id="engine")
        )
        await wait_for_engines(address, 1)
        async with (
            worker_process(store, caller, address, tmp_path) as (process, url),
            AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as client,
        ):
            for seed in range(100):
                answer = await client.chat.completions.create(
                    messages=messages, seed=seed, **settings
                )
                if answer.choices[0].message.tool_calls:
                    break
            settings["seed"] = seed
            plain = await chat(client, messages, "g", "plain", **settings)
            streamed = await client.chat.completions.create(
                messages=messages, stream=True, extra_body=recorded("g", "stream"), **settings
            )
            deltas = [chunk.choices[0].delta async for chunk in streamed]
            process.kill()
        calls = {
            "plain": [call.model_dump() for call in plain.choices[0].message.tool_calls],
            "stream": [
                call.model_dump(exclude={"index"})
                for delta in deltas
                for call in delta.tool_calls or []
            ],
        }
        async with (
            worker_process(store, caller, address, tmp_path) as (_, url),
            AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as client,
        ):
            for session, each in calls.items():
                called = {"role": "assistant", "content": None, "tool_calls": each}
                result = {"role": "tool", "tool_call_id": each[0]["id"], "content": "="}
                await chat(client, [*messages, called, result], "g", session, max_tokens=1)
            records = Records(url)
            await records.reward("g", plain=1, stream=0)
            rows = rows_of(store, await records.close("g"))
    assert [row.columns["reward"] for row in rows] == [1, 0]
    for row in rows:
        assert int(row.columns["loss_mask"].sum()) == 2
        assert row.token_ids[row.prompt_length] < 10, "the call is trained on as it was sampled"


async def test_what_is_missing_is_named(client: AsyncOpenAI, records: Records) -> None:
    assert (await records.ask("GET", "/nothing"))[0] == 404
    await converse(client, "g", "s", turns=1, seed=1)
    status, body = await records.ask("POST", "/g/close")
    assert (status, body["error"]["code"], body["error"]["param"]) == (409, "reward_missing", "s")
    status, body = await records.ask("POST", "/g/rewards", {"rewards": {"other": 1}})
    assert (status, body["error"]["code"]) == (404, "session_not_found")
    await records.reward("g", s=1)
    first = await records.close("g")
    assert await records.close("g") == first
    with pytest.raises(Exception, match="is closed"):
        await converse(client, "g", "s", turns=1, seed=1)
    assert (await records.ask("GET"))[1] == {"open": [], "closed": ["g"]}


async def test_a_blob_stays_until_its_group_is_deleted(
    client: AsyncOpenAI, records: Records, store: Store
) -> None:
    await converse(client, "g", "s", turns=1, seed=1)
    await records.reward("g", s=1)
    blob = await records.close("g")
    blobs = BlobStore(store.root, sync=False)
    assert read_metadata(blobs.get(blob))["environment"] == "openai"
    assert blobs.collect(grace_seconds=-1) == []
    assert (await records.ask("DELETE", "/g"))[0] == 200
    assert blobs.collect(grace_seconds=-1) == [blob.digest]


async def test_a_trainer_steps_on_what_was_recorded(
    client: AsyncOpenAI, records: Records, store: Store, model: Path, tmp_path: Path
) -> None:
    sessions = [converse(client, "g", f"s{i}", turns=2, seed=10 * i) for i in range(4)]
    await asyncio.gather(*sessions)
    await records.reward("g", s0=1, s1=0, s2=0.5, s3=0)
    blob = await records.close("g")
    rows = rows_of(store, blob)
    with running_trainer(tmp_path / "trainer", model, store=str(store.root)) as running:
        async with running.client() as trainer:
            assert isinstance(trainer, TrainerClient)
            await until(trainer, lambda now: now.state == ACTIVE)
            uploaded = await trainer.upload_batch("agents", len(rows), blobs=[blob])
            await trainer.compute_advantages(uploaded.batch, GRPO)
            passed = await trainer.forward_backward(
                uploaded.batch, PPO, expected_step=0, part_id="all"
            )
            stepped = await trainer.step_optimizer(0, ["all"])
    masks = [row.columns.get("loss_mask", np.ones(row.response_length)) for row in rows]
    assert passed.token_count == sum(int(np.sum(mask)) for mask in masks)
    assert passed.metrics["rollout_mismatch"] < 1e-4  # the very tokens, under the very weights
    assert stepped.step == 1
    assert stepped.grad_norm > 0
