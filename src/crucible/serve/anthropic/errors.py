"""Anthropic's error envelope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from crucible.serve.protocol import ApiError, ErrorKind

OVERLOADED: Final = 529
"""The status for a server that has no room: Anthropic's 429 speaks of the caller's own quota, and there are none."""

_TYPES: Final[Mapping[ErrorKind, str]] = {
    "authentication": "authentication_error",
    "host": "permission_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "overloaded": "overloaded_error",
    "unavailable": "api_error",
    "internal": "api_error",
}
_INVALID: Final = "invalid_request_error"
"""The type of every other one."""


def refusal(error: ApiError, request_id: str) -> tuple[int, dict[str, str], bytes]:
    """As `protocol.Refusal`, for every path of this API."""
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if error.kind == "internal":
        # The official clients send a request that got a 500 two times more; the same one fails the same way.
        headers["x-should-retry"] = "false"
    status = OVERLOADED if error.kind == "overloaded" else error.status
    return status, headers, msgspec.json.encode({**envelope(error), "request_id": request_id})


def envelope(error: ApiError) -> dict[str, Any]:
    """What says what is wrong, as a body and as the data of an event."""
    return {"type": "error", "error": {"type": _TYPES.get(error.kind, _INVALID), "message": error.message}}
