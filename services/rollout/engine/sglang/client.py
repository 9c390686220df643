"""Speaks SGLang's HTTP API, as much of it as an engine needs. Every call has a deadline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import httpx2

from services.rollout.engine.versions import Version, parse_tag
from services.rollout.errors import EngineFailedError
from sluice.platform import NPU
from sluice.runtime.errors import InvalidFieldError, ServiceError

CONNECT_SECONDS = 30.0  # also of the last of hundreds that connect at once on a busy machine
PROBE_SECONDS = 5.0
CONTROL_SECONDS = 30.0
CONTEXT_MARGIN = 8  # places of the context that SGLang keeps to itself
UNLIMITED = httpx2.Limits(max_connections=None, max_keepalive_connections=64)

Json = dict[str, Any]


class SGLangRefusedError(Exception):
    """SGLang answered with an error; `status` is HTTP's."""

    def __init__(self, path: str, status: int, message: str) -> None:
        self.path, self.status, self.message = path, status, message
        super().__init__(f"{path} was refused with {status}: {message}")


class SglangClient:
    """Calls one server. Raises EngineFailedError where it cannot be reached or breaks off."""

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
        """Posts. Raises SGLangRefusedError for an answer of 400 or more, or of `success: false`."""
        answer = await self._call("POST", path, body, seconds)
        if answer.get("success") is False:
            raise SGLangRefusedError(path, 200, str(answer.get("message", "")))
        return answer

    async def delete(self, path: str, body: Mapping[str, Any], seconds: float) -> Json:
        return await self._call("DELETE", path, body, seconds)

    async def answers(self) -> bool:
        """Whether it is up; asks for nothing that costs a generation."""
        try:
            await self.get("/model_info", PROBE_SECONDS)
        except (EngineFailedError, SGLangRefusedError):
            return False
        return True

    async def is_healthy(self) -> bool:
        """Whether an encoder-only server is up, whose health is cheap to ask for."""
        try:
            await self._call("GET", "/health", None, PROBE_SECONDS)
        except (EngineFailedError, SGLangRefusedError):
            return False
        return True

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Json, None]:
        """Yields what /generate sends, message by message; leaving it stops the request.

        Raises SGLangRefusedError, also for what SGLang refuses once it has begun to answer.
        """
        try:
            request = self._http.build_request("POST", "/generate", json=body)
            response = await self._http.send(request, stream=True)
            try:
                if response.status_code >= 400:
                    raise SGLangRefusedError(
                        "/generate", response.status_code, _message(await response.aread())
                    )
                async for line in _lines(response.aiter_bytes()):
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    message = json.loads(data)
                    if isinstance(error := message.get("error"), dict):  # behind a status of 200
                        status, text = int(error.get("code") or 500), error.get("message")
                        raise SGLangRefusedError("/generate", status, str(text)[:500])
                    yield message
            finally:
                # closed by halves, as where this task is cancelled meanwhile, it stays in the pool
                await asyncio.shield(response.aclose())
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
        timeout = httpx2.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))
        try:
            response = await self._http.request(method, path, json=body, timeout=timeout)
        except httpx2.HTTPError as error:
            raise EngineFailedError(f"SGLang at {path}: {_named(error)}") from error
        if response.status_code >= 400:
            raise SGLangRefusedError(path, response.status_code, _message(response.content))
        try:
            answer = json.loads(response.content) if response.content else None
        except ValueError:  # a plain word
            answer = None
        return answer if isinstance(answer, dict) else {}


def refusal(error: SGLangRefusedError, field: str) -> Exception:
    """Returns a caller's error for a refused request: a bad field, or an engine that fails."""
    if error.status < 500:
        return InvalidFieldError(field, error.message)
    return EngineFailedError(str(error))


def batch(items: Sequence[Any]) -> Any:
    """Returns one item as itself: SGLang answers it without an index."""
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


# path: request schema and the fields of it that are needed
NEEDED = {
    "/generate": ("rid", "input_ids", "return_logprob", "routed_dp_rank", "extra_key"),
    "/abort_request": ("rid",),
    "/pause_generation": ("mode",),
    "/continue_generation": (),
    "/update_weights_from_disk": ("model_path", "weight_version", "flush_cache"),
}
FOR_EXPERTS = {"/generate": ("return_routed_experts",)}
FOR_ADAPTERS = {
    "/generate": ("lora_path",),
    "/load_lora_adapter": ("lora_name", "lora_path"),
    "/unload_lora_adapter": ("lora_name",),
}
FOR_CHECKSUMS = {"/weights_checker": ("action",)}
FOR_TRANSFERS = {
    "/init_weights_update_group": ("master_address", "rank_offset", "group_name", "backend"),
    "/begin_weight_update": (),
    "/update_weights_from_distributed": ("names", "dtypes", "shapes", "group_name", "load_format"),
    "/end_weight_update": (),
    "/destroy_weights_update_group": ("group_name",),
}


FOR_PROFILES = {
    "/start_profile": ("output_dir", "num_steps", "activities", "profile_prefix"),
    "/stop_profile": (),
}
PREFILL = "prefill_server_info"  # of the server that reads prompts, in that of the one that decodes


class MissingFeatureError(ServiceError):
    """The SGLang server lacks something that this engine needs; metadata names it."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "SGLANG_FEATURE_MISSING"


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """`serving` is None where the weights were not named by us.

    `lora_rank`: of the largest adapter that it takes, 0 for none; `lora_targets`: of which layers.
    `rank_count`: of processes that hold a part of the model, all copies and servers together.
    `can_hold`: a pause holds what runs. `overlaps`: it prepares a step while the device has one,
    which it can be asked to wait for.
    """

    release: str
    dp_size: int
    tp_size: int
    pp_size: int
    device: str
    dtype: str
    max_length: int
    cache_tokens: int
    is_incremental: bool
    is_seeded: bool
    can_transfer: bool
    can_sleep: bool
    has_radix_cache: bool
    is_language_only: bool
    serving: Version | None
    can_hold: bool = True
    overlaps: bool = False
    quantization: str = ""
    rank_count: int = 1
    can_profile: bool = False
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()


async def shake_hands(
    client: SglangClient, *, checksums: bool, experts: bool = False
) -> Capabilities:
    """Asks a server what it can do; `checksums` and routed `experts` need more than `NEEDED`.

    Raises MissingFeatureError, or EngineFailedError where the server does not answer.
    """
    try:
        server = await client.get("/server_info")
        offered = await client.get("/openapi.json")
    except SGLangRefusedError as error:
        raise MissingFeatureError(str(error), feature=error.path) from error
    release = str(server.get("version", "unknown"))
    gap = _gap(offered, NEEDED | (FOR_CHECKSUMS if checksums else {}))
    if experts and not gap:
        gap = _gap(offered, FOR_EXPERTS)
    if gap:
        raise MissingFeatureError(
            f"SGLang {release} has no {gap}; this engine needs it", feature=gap, version=release
        )
    if experts and not server.get("enable_return_routed_experts"):
        raise MissingFeatureError(
            f"SGLang {release} was started without enable_return_routed_experts; "
            "engine.routed_experts needs it",
            feature="enable_return_routed_experts",
            version=release,
        )
    takes_adapters = bool(server.get("enable_lora")) and not _gap(offered, FOR_ADAPTERS)
    # ranks of attention are counted apart by newer releases, whatever they were asked for by
    dp_size = int(server["dp_size"]) * int(server.get("attn_dp_size") or 1)
    tp_size, pp_size = int(server["tp_size"]), int(server.get("pp_size") or 1)
    return Capabilities(
        release=release,
        dp_size=dp_size,
        tp_size=tp_size,
        pp_size=pp_size,
        device=str(server.get("device")),
        dtype=str(server.get("dtype")),
        max_length=int(server["max_req_input_len"]) + 6 - CONTEXT_MARGIN,
        cache_tokens=int(server["max_total_num_tokens"]),
        is_incremental=bool(server.get("incremental_streaming_output")),
        is_seeded=bool(server.get("enable_deterministic_inference")),
        # all stages of a pipeline would join a group as the same ranks (0.5.23)
        can_transfer=dp_size == pp_size == 1 and not _gap(offered, FOR_TRANSFERS),
        can_sleep=bool(server.get("enable_memory_saver")),
        has_radix_cache=not server.get("disable_radix_cache"),
        is_language_only=bool(server.get("language_only")),
        serving=parse_tag(server.get("weight_version")),
        can_hold=pp_size == 1 and not server.get("enable_pdmux"),  # loops without a pause (0.5.23)
        overlaps=not server.get("disable_overlap_schedule") and not _gap(offered, FOR_CHECKSUMS),
        quantization=str(server.get("quantization") or ""),
        rank_count=sum(_ranks_of(each) for each in (server, server.get(PREFILL)) if each),
        # the profiler of NPUs names its files itself
        can_profile=server.get("device") != NPU.device_type and not _gap(offered, FOR_PROFILES),
        lora_rank=int(server.get("max_lora_rank") or 0) if takes_adapters else 0,
        lora_targets=tuple(server.get("lora_target_modules") or ()),
    )


def _ranks_of(server: Mapping[str, Any]) -> int:
    """Processes of one server: ranks of attention are among those of tensors."""
    copies = 1 if server.get("enable_dp_attention") else int(server["dp_size"])
    return copies * int(server["tp_size"]) * int(server.get("pp_size") or 1)


async def _lines(parts: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yields lines, which end with a newline: a sampled text may hold other ends, as U+2028 is."""
    begun = list[bytes]()
    async for part in parts:
        first, *others = part.split(b"\n")
        begun.append(first)
        for other in others:
            yield b"".join(begun)
            begun = [other]
    yield b"".join(begun)


def _gap(offered: Mapping[str, Any], needed: Mapping[str, tuple[str, ...]]) -> str:
    """Returns the first endpoint or field that is not offered; empty when all are."""
    paths = offered.get("paths", {})
    for path, fields in needed.items():
        if "post" not in paths.get(path, {}):
            return path
        names = _fields(offered, paths[path]["post"])
        for name in fields:
            if names and name not in names:
                return f"{path}: {name}"
    return ""


def _fields(offered: Mapping[str, Any], operation: Mapping[str, Any]) -> set[str]:
    """Returns names in the request body; empty where the document does not say."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    schema = content.get("schema", {})
    for option in (schema, *schema.get("anyOf", ())):
        reference = str(option.get("$ref", ""))
        if reference:
            name = reference.rpartition("/")[2]
            components: Mapping[str, Any] = offered.get("components", {}).get("schemas", {})
            return set(components.get(name, {}).get("properties", {}))
    return set()
