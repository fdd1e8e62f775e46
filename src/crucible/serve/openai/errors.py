"""OpenAI's error envelope: `message`, `type`, `param` and `code`, always all four."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from crucible.serve.protocol import ApiError, ErrorKind

_TYPES: Final[Mapping[ErrorKind, str]] = {
    "overloaded": "rate_limit_error",
    "unavailable": "server_error",
    "internal": "server_error",
}
_INVALID: Final = "invalid_request_error"
"""The type of every other one: OpenAI says so of a wrong key as well."""

_CODES: Final[Mapping[ErrorKind, str]] = {
    "invalid": "invalid_value",
    "unsupported": "unsupported_parameter",
    "too_long": "context_length_exceeded",
    "authentication": "invalid_api_key",
    "host": "host_not_allowed",
    "not_found": "not_found",
    "method": "method_not_allowed",
    "too_large": "request_too_large",
    "media_type": "unsupported_media_type",
    "overloaded": "rate_limit_exceeded",
    "unavailable": "service_unavailable",
    "internal": "internal_error",
}
"""Of errors that have none of their own."""

_OPENAI_CODES: Final = {"unknown_field": "unknown_parameter", "missing_field": "missing_required_parameter"}
"""For codes that OpenAI words in another way."""


def envelope(error: ApiError) -> bytes:
    """The JSON that says what is wrong, as a body and as the data of an event."""
    code = error.code or _CODES[error.kind]
    return msgspec.json.encode(
        {
            "error": {
                "message": error.message,
                "type": _TYPES.get(error.kind, _INVALID),
                "param": error.param,
                "code": _OPENAI_CODES.get(code, code),
            }
        }
    )


def refusal(error: ApiError, request_id: str) -> tuple[int, dict[str, str], bytes]:
    """As `protocol.Refusal`. OpenAI names the request in a header alone, which is none of this layer's."""
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if error.kind == "internal":
        # The official clients send a request that got a 500 two times more; the same one fails the same way.
        headers["x-should-retry"] = "false"
    return error.status, headers, envelope(error)
