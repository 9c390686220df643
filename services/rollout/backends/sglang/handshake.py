"""What a server is and can do, asked once when it has come up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from services.rollout.backends.sglang.client import RefusedError, SglangClient
from services.rollout.backends.sglang.commands import CONTEXT_MARGIN
from services.rollout.backends.sglang.spans import Version, parse_tag
from sluice.runtime.errors import ServiceError

# path: request schema and the fields of it that are needed
NEEDED = {
    "/generate": ("rid", "input_ids", "return_logprob", "routed_dp_rank", "extra_key"),
    "/abort_request": ("rid",),
    "/pause_generation": ("mode",),
    "/continue_generation": (),
    "/update_weights_from_disk": ("model_path", "weight_version", "flush_cache"),
}
FOR_EXPERTS = {"/generate": ("return_routed_experts",)}
FOR_CHECKSUMS = {"/weights_checker": ("action",)}
FOR_TRANSFERS = {
    "/init_weights_update_group": ("master_address", "rank_offset", "group_name", "backend"),
    "/begin_weight_update": (),
    "/update_weights_from_distributed": ("names", "dtypes", "shapes", "group_name", "load_format"),
    "/end_weight_update": (),
    "/destroy_weights_update_group": ("group_name",),
}


class MissingFeatureError(ServiceError):
    """The SGLang server lacks something that this engine needs; metadata names it."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "SGLANG_FEATURE_MISSING"


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """`serving` is None where the weights were not named by us."""

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


async def shake_hands(
    client: SglangClient, *, checksums: bool, experts: bool = False
) -> Capabilities:
    """What is needed beyond `NEEDED` is for `checksums` and for routed `experts`.

    Raises MissingFeatureError, or EngineFailedError where the server does not answer."""
    try:
        server = await client.get("/server_info")
        offered = await client.get("/openapi.json")
    except RefusedError as error:
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
    tp_size, dp_size = int(server["tp_size"]), int(server["dp_size"])
    return Capabilities(
        release=release,
        dp_size=dp_size,
        tp_size=tp_size,
        pp_size=int(server.get("pp_size", 1)),
        device=str(server.get("device")),
        dtype=str(server.get("dtype")),
        max_length=int(server["max_req_input_len"]) + 6 - CONTEXT_MARGIN,
        cache_tokens=int(server["max_total_num_tokens"]),
        is_incremental=bool(server.get("incremental_streaming_output")),
        is_seeded=bool(server.get("enable_deterministic_inference")),
        can_transfer=dp_size == 1 and not _gap(offered, FOR_TRANSFERS),
        can_sleep=bool(server.get("enable_memory_saver")),
        has_radix_cache=not server.get("disable_radix_cache"),
        is_language_only=bool(server.get("language_only")),
        serving=parse_tag(server.get("weight_version")),
    )


def _gap(offered: Mapping[str, Any], needed: Mapping[str, tuple[str, ...]]) -> str:
    """The first endpoint or field that is not offered; empty when all are."""
    paths = offered.get("paths", {})
    for path, fields in needed.items():
        if "post" not in paths.get(path, {}):
            return path
        known = _fields(offered, paths[path]["post"])
        for name in fields:
            if known and name not in known:
                return f"{path}: {name}"
    return ""


def _fields(offered: Mapping[str, Any], operation: Mapping[str, Any]) -> set[str]:
    """Names in the request body; empty where the document does not say."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    schema = content.get("schema", {})
    for option in (schema, *schema.get("anyOf", ())):
        reference = str(option.get("$ref", ""))
        if reference:
            name = reference.rpartition("/")[2]
            components: Mapping[str, Any] = offered.get("components", {}).get("schemas", {})
            return set(components.get(name, {}).get("properties", {}))
    return set()
