"""The model that is served, as OpenAI's `/v1/models` shows it."""

from __future__ import annotations

from typing import Any

from crucible.serve.protocol import ApiError, Served


def models(served: Served) -> dict[str, Any]:
    """The list of `GET /v1/models`. Aliases are no models of their own."""
    return {"object": "list", "data": [_entry(served)]}


def model(served: Served, name: str) -> dict[str, Any]:
    """The model of `GET /v1/models/{name}`, by its id or an alias.

    Raises:
        ApiError: it is not the one that is served.
    """
    check_model(served, name)
    return _entry(served)


def check_model(served: Served, name: str) -> None:
    """Raises ApiError if no model of this name is served: never is one answered for by another."""
    if not served.answers_to(name):
        raise ApiError(
            "not_found",
            f"there is no such model here; this server's is {served.model_id}",
            param="model",
            code="model_not_found",
        )


def _entry(served: Served) -> dict[str, Any]:
    return {"id": served.model_id, "object": "model", "created": served.created, "owned_by": "crucible"}
