"""The model that is served, as Anthropic's `/v1/models` shows it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from crucible.serve.protocol import ApiError, Served


def models(served: Served) -> dict[str, Any]:
    """The list of `GET /v1/models`, in one page. Aliases are no models of their own."""
    entry = _entry(served)
    return {"data": [entry], "has_more": False, "first_id": entry["id"], "last_id": entry["id"]}


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
            "not_found", f"model: there is no such model here; this server's is {served.model_id}", param="model"
        )


def _entry(served: Served) -> dict[str, Any]:
    return {
        "type": "model",
        "id": served.model_id,
        "display_name": served.model_id,
        "created_at": datetime.fromtimestamp(served.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": served.context,
        "max_tokens": served.context,
    }
