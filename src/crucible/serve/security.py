"""Who may ask: checked before anything of a request is read."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection
from typing import Final

from starlette.datastructures import Headers

from crucible.serve.protocol import ApiError

PUBLIC_PATHS: Final = frozenset({"/health"})
"""Answered without a key, for load balancers."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_host(headers: Headers, allowed: Collection[str]) -> None:
    """Raises ApiError for a Host that is neither an address, nor this machine's own name, nor allowed.

    A web page can make a browser send requests to a name of its own that then resolves to this machine (DNS
    rebinding); the name in Host gives it away. An address cannot be rebound.
    """
    host = _without_port(headers.get("host", "")).lower().rstrip(".")
    if host in allowed or host == "localhost" or host.endswith(".localhost"):
        return
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ApiError("host", "this host name is not served here; --allow-host adds one") from None


def check_key(headers: Headers, key: str | None) -> None:
    """Raises ApiError unless the key is that of `x-api-key` or of a Bearer authorization. None asks for none."""
    if key is None:
        return
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = [headers.get("x-api-key", ""), token.strip(" ") if scheme.lower() == "bearer" else ""]
    # All are compared, in a time that does not depend on how much of one is right.
    # Bytes as they came: a server reads headers as Latin-1, an environment keeps what is no UTF-8 as surrogates.
    expected = key.encode(errors="surrogateescape")
    if not sum(hmac.compare_digest(one.encode("latin-1"), expected) for one in given):
        raise ApiError("authentication", "a valid key is needed, as `Authorization: Bearer` or as `x-api-key`")


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, _ = host.partition(":")
    return name
