"""Two servers as one: one reads prompts, the other decodes what the first has read.

Each request goes to both at once, with an address and a number (*room*) at which the second finds
the keys and values of the first, as SGLang's own load balancer does it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any

from services.rollout.engine.sglang.client import CONTROL_SECONDS, PREFILL, Json, SglangClient
from services.rollout.errors import EngineFailedError
from sluice.runtime.idempotency import all_of, cancel_all

ROOM_BITS = 63
GRACE_SECONDS = 10.0  # for the decode server to end what the prefill server has given up
PROMPT_LOGPROBS = ("input_token_logprobs", "input_top_logprobs")


class PairClient(SglangClient):
    """Calls both servers; answers are those of the one that decodes. The rest is as with one."""

    def __init__(
        self, url: str, prefill_url: str, bootstrap_host: str, bootstrap_port: int, api_key: str
    ) -> None:
        super().__init__(url, api_key)
        self._prefill = SglangClient(prefill_url, api_key)
        self._bootstrap = {"bootstrap_host": bootstrap_host, "bootstrap_port": bootstrap_port}

    async def get(self, path: str, seconds: float = CONTROL_SECONDS) -> Json:
        """Asks both, so that a pause is over on both; what is answered is of decode."""
        answer, other = await all_of([super().get(path, seconds), self._prefill.get(path, seconds)])
        return {**answer, PREFILL: other} if path == "/server_info" else answer

    async def post(self, path: str, body: Mapping[str, Any], seconds: float) -> Json:
        """Posts to both; `ranks` of an answer are those of both."""
        answer, other = await _both(
            super().post(path, body, seconds), self._prefill.post(path, body, seconds)
        )
        if isinstance(answer.get("ranks"), list) and isinstance(other.get("ranks"), list):
            return {**answer, "ranks": [*answer["ranks"], *other["ranks"]]}
        return answer

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Json, None]:
        """Has one server read the prompt and the other decode; what either lacks ends both.

        Raises EngineFailedError where the prefill server gives up what decode waits for.
        """
        count = len(body["rid"]) if isinstance(body.get("rid"), list) else 0
        paired = {**body, **self._rooms(count)}
        sampling = paired.get("sampling_params")
        if isinstance(sampling, Mapping) and sampling.get("max_new_tokens") == 0:
            # one token is handed over at least; nobody reads it
            paired["sampling_params"] = {**sampling, "max_new_tokens": 1}
        # a rank of the lease is one that decodes; the room says which one reads the prompt
        reading = {name: value for name, value in paired.items() if name != "routed_dp_rank"}
        prompts: dict[int, dict[str, Any]] = {}
        messages: asyncio.Queue[Json | None] = asyncio.Queue()
        prefill = asyncio.create_task(self._read_prompts(reading, prompts), name="prefill")
        decode = asyncio.create_task(self._decode(paired, messages), name="decode")
        wants_prompt = "logprob_start_len" in body
        try:
            while (message := await _next(messages, prefill, decode)) is not None:
                if wants_prompt:
                    await prefill
                    _add_prompt(message, prompts.get(message.get("index", 0), {}))
                yield message
        finally:
            await cancel_all((prefill, decode))

    async def answers(self) -> bool:
        return all(await all_of([super().answers(), self._prefill.answers()]))

    async def close(self) -> None:
        await self._prefill.close()
        await super().close()

    def _rooms(self, count: int) -> dict[str, Any]:
        """A room for each sample; `count` is 0 for one sample without a list."""
        if not count:
            return {**self._bootstrap, "bootstrap_room": secrets.randbits(ROOM_BITS)}
        fields: dict[str, Any] = {name: [value] * count for name, value in self._bootstrap.items()}
        return {**fields, "bootstrap_room": [secrets.randbits(ROOM_BITS) for _ in range(count)]}

    async def _read_prompts(self, body: Json, prompts: dict[int, dict[str, Any]]) -> None:
        """Reads the answer of the prefill server to its end. Raises EngineFailedError."""
        async with contextlib.aclosing(self._prefill.stream(body)) as stream:
            async for message in stream:
                meta = message.get("meta_info", {})
                prompts.setdefault(message.get("index", 0), meta)
                if (meta.get("finish_reason") or {}).get("type") == "abort":
                    await asyncio.sleep(GRACE_SECONDS)
                    raise EngineFailedError("the prefill server gave a request up")

    async def _decode(self, body: Json, messages: asyncio.Queue[Json | None]) -> None:
        async with contextlib.aclosing(super().stream(body)) as stream:
            async for message in stream:
                messages.put_nowait(message)
        messages.put_nowait(None)


async def _next(
    messages: asyncio.Queue[Json | None],
    prefill: asyncio.Task[None],
    decode: asyncio.Task[None],
) -> Json | None:
    """The next message of decode; raises what either leg failed with."""
    while messages.empty():
        getting = asyncio.create_task(messages.get())
        running = [leg for leg in (prefill, decode) if not leg.done()]
        try:
            await asyncio.wait((getting, *running), return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return getting.result()
        finally:
            await cancel_all((getting,))
        for leg in (prefill, decode):
            if leg.done():
                leg.result()
    return messages.get_nowait()


async def _both(*calls: Coroutine[Any, Any, Json]) -> list[Json]:
    """Both to their end; raises what the first failed with that did."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.wait(tasks)
    finally:
        await cancel_all(tasks)
    return [task.result() for task in tasks]


def _add_prompt(message: Json, meta: Mapping[str, Any]) -> None:
    """Puts what prefill says of the prompt in front of what decode says."""
    own = message["meta_info"]
    for name in PROMPT_LOGPROBS:
        if meta.get(name):
            own[name] = [*meta[name], *(own.get(name) or [])]
