"""Bodies of requests, read in bounded memory."""

from __future__ import annotations

from starlette.requests import Request

from crucible.serve.protocol import ApiError


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body.

    Raises:
        ApiError: it has more than `limit` bytes, whatever its headers say, or its content type is not JSON.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError("media_type", "content-type must be application/json")
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told) > limit:
        raise _too_large(limit)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    return ApiError("too_large", f"the body has more than the {limit:,} bytes that are allowed")
