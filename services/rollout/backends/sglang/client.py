"""SGLang's HTTP API, as much of it as an engine needs. Every call has a deadline."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import httpx2

from services.rollout.errors import EngineFailedError
from sluice.runtime.errors import InvalidFieldError

CONNECT_SECONDS = 5.0
CONTROL_SECONDS = 30.0
UNLIMITED = httpx2.Limits(max_connections=None, max_keepalive_connections=64)

Json = dict[str, Any]


class RefusedError(Exception):
    """SGLang answered with an error; `status` is HTTP's."""

    def __init__(self, path: str, status: int, message: str) -> None:
        self.path, self.status, self.message = path, status, message
        super().__init__(f"{path} was refused with {status}: {message}")


class SglangClient:
    """One server. Raises EngineFailedError where it cannot be reached or breaks off."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url
        self._http = httpx2.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            limits=UNLIMITED,
            timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
            trust_env=False,  # a proxy of this machine has no part in it
        )

    async def get(self, path: str, seconds: float = CONTROL_SECONDS) -> Json:
        return await self._call("GET", path, None, seconds)

    async def post(self, path: str, body: Mapping[str, Any], seconds: float) -> Json:
        """Raises RefusedError for an answer of 400 or more, or one that says `success: false`."""
        answer = await self._call("POST", path, body, seconds)
        if answer.get("success") is False:
            raise RefusedError(path, 200, str(answer.get("message", "")))
        return answer

    async def delete(self, path: str, body: Mapping[str, Any], seconds: float) -> Json:
        return await self._call("DELETE", path, body, seconds)

    async def answers(self) -> bool:
        """Whether it is up; asks for nothing that costs a generation."""
        try:
            await self.get("/model_info", CONNECT_SECONDS)
        except (EngineFailedError, RefusedError):
            return False
        return True

    async def is_healthy(self) -> bool:
        """The same for an encoder-only server, whose health is cheap to ask for."""
        try:
            await self._call("GET", "/health", None, CONNECT_SECONDS)
        except (EngineFailedError, RefusedError):
            return False
        return True

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Json, None]:
        """What /generate sends, message by message; leaving it tells the server to stop."""
        try:
            async with self._http.stream("POST", "/generate", json=body) as response:
                if response.status_code >= 400:
                    raise RefusedError(
                        "/generate", response.status_code, _message(await response.aread())
                    )
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line[5:].strip()
                    if data == "[DONE]":
                        return
                    yield json.loads(data)
        except httpx2.HTTPError as error:
            raise EngineFailedError(f"SGLang broke off: {_named(error)}") from error
        raise EngineFailedError("SGLang broke off before the end of its answer")

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float
    ) -> Json:
        if self._http.is_closed:
            raise EngineFailedError("the connection to SGLang was closed")
        timeout = httpx2.Timeout(seconds, connect=CONNECT_SECONDS)
        try:
            response = await self._http.request(method, path, json=body, timeout=timeout)
        except httpx2.HTTPError as error:
            raise EngineFailedError(f"SGLang at {path}: {_named(error)}") from error
        if response.status_code >= 400:
            raise RefusedError(path, response.status_code, _message(response.content))
        try:
            answer = json.loads(response.content) if response.content else None
        except ValueError:  # a plain word
            answer = None
        return answer if isinstance(answer, dict) else {}


def refusal(error: RefusedError, field: str) -> Exception:
    """What a refused request is to its caller: a bad field, or an engine that fails."""
    if error.status < 500:
        return InvalidFieldError(field, error.message)
    return EngineFailedError(str(error))


def batch(items: Sequence[Any]) -> Any:
    """One item as itself: SGLang answers it without an index."""
    return list(items) if len(items) > 1 else items[0]


def _message(content: bytes) -> str:
    try:
        document = json.loads(content)
    except ValueError:
        return content.decode(errors="replace")[:500]
    if not isinstance(document, dict):
        return str(document)[:500]
    error = document.get("error", document)
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
