"""Refusals in the form that OpenAI's clients know."""

from __future__ import annotations

from typing import Any

import grpc
from aiohttp import web
from pydantic import ValidationError

from sluice.client import RemoteError
from sluice.runtime.errors import ServiceError

_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 503,
    grpc.StatusCode.FAILED_PRECONDITION: 503,  # no weights yet, or others than asked for
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
_CODES = {"PROMPT_TOO_LONG": "context_length_exceeded"}  # where OpenAI has a name of its own


class ApiError(Exception):
    """`code` is for programs; `param` names the field at fault."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error")
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }

    def response(self) -> web.Response:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return web.json_response(self.body(), status=self.status, headers=headers)


REFUSALS = (ApiError, ServiceError, RemoteError, ValidationError, TimeoutError, web.HTTPException)
Refusal = ApiError | ServiceError | RemoteError | ValidationError | TimeoutError | web.HTTPException


def api_error(error: Refusal) -> ApiError:
    """Any of REFUSALS in OpenAI's form."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ServiceError | RemoteError):
        code = _CODES.get(error.reason, error.reason.lower() or error.code.name.lower())
        param = error.metadata.get("field")
        return ApiError(_STATUS.get(error.code, 500), code, str(error), param)
    if isinstance(error, ValidationError):
        return _of_field(error)
    if isinstance(error, TimeoutError):
        return ApiError(504, "request_timed_out", "the request took longer than is allowed")
    return ApiError(error.status, error.reason.lower().replace(" ", "_"), error.reason)


def _of_field(error: ValidationError) -> ApiError:
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, "unknown_parameter", f"unknown parameter: {param}", param)
    return ApiError(400, "invalid_value", f"{param or 'request'}: {first['msg']}", param)
