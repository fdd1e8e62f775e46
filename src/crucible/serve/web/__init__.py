"""The web page at `/`: files of this package, which a browser may load from here and nothing else from anywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

_FILES: Final = Path(__file__).parent / "static"
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # What would make HTML of a string is off altogether, so no text of a model can become markup.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS: Final = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    # Kept, but asked for again each time: an upgrade shows at once, and costs no bytes where there was none.
    "cache-control": "no-cache",
}


def _paths() -> dict[str, Path]:
    files = {f"/web/{path.name}": path for path in sorted(_FILES.iterdir()) if path.suffix in _TYPES}
    return {"/": files.pop("/web/index.html"), **files}


PATHS: Final = frozenset(_paths())
"""Answered without a key: a browser has none before the page has asked for it, and nothing here is secret."""


def add_web(app: FastAPI) -> None:
    """Add the page's paths to an application."""
    for path, file in _paths().items():
        app.add_api_route(path, _sends(file), methods=["GET", "HEAD"], include_in_schema=False)


def _sends(file: Path) -> Callable[[Request], Awaitable[Response]]:
    content = file.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "content-type": _TYPES[file.suffix], "etag": tag}

    async def send(request: Request) -> Response:
        known = [one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")]
        if tag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    return send
