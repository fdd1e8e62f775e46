"""What requests for chat and for plain completions have in common: their fields, and which are refused.

Every field of OpenAI's is honoured, or refused by name unless its value asks for nothing, or without effect by what it
is. Null stands for a field that is left out. Sampling fields that OpenAI has not are honoured under their usual names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from crucible.serve.openai.models import check_model
from crucible.serve.protocol import ApiError, Generate, Sampling, Served


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How a stream is to be told.

    Attributes:
        include_usage: a last chunk without choices has the usage, the others say null.
        continuous_usage_stats: with include_usage, all chunks have the usage so far. vLLM's, sent by benchmarks.
        include_obfuscation: padding that hides the lengths of tokens; only false can be honoured.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Request(Sampling, kw_only=True, forbid_unknown_fields=True):
    """Fields of both endpoints: first those that are `Generate`'s, then the others that are honoured, then those that
    have no effect, because they are about billing, storing, caching or abuse."""

    n: int | None = None
    stop: str | list[str] | None = None

    model: str
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """The name and the value of the field that limits the output."""
        if self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        return "max_completion_tokens", self.max_completion_tokens


_SAME_FIELDS: Final = (*Sampling.__struct_fields__, "n", "stop")

Unsupported = Mapping[str, tuple[Sequence[Any], str]]
"""Fields that cannot be honoured: the values that ask for nothing, and why any other is refused."""


def check(request: Request, served: Served, unsupported: Unsupported) -> None:
    """Raises ApiError for an unknown model, fields that contradict each other, and those that cannot be honoured."""
    check_model(served, request.model)
    for name, (no_ops, reason) in unsupported.items():
        value = getattr(request, name)
        if value is not None and value not in no_ops:
            raise ApiError("unsupported", f"{name} is not supported: {reason}", param=name)
    _check_limits(request)
    _check_stream_options(request)


def _check_limits(request: Request) -> None:
    if None not in (limits := {request.max_tokens, request.max_completion_tokens}) and len(limits) > 1:
        raise ApiError(
            "invalid",
            f"max_tokens is {request.max_tokens} and max_completion_tokens is {request.max_completion_tokens}: they "
            "mean the same, so send one of them",
            param="max_completion_tokens",
        )


def _check_stream_options(request: Request) -> None:
    options = request.stream_options
    if options is None:
        return
    if not request.stream:
        raise ApiError("invalid", "stream_options is for streams: it needs stream to be true", param="stream_options")
    if options.include_obfuscation:
        raise ApiError(
            "unsupported",
            "stream_options.include_obfuscation is not supported: chunks are as long as their text makes them",
            param="stream_options.include_obfuscation",
        )
    if options.continuous_usage_stats and not options.include_usage:
        raise ApiError(
            "invalid",
            "stream_options.continuous_usage_stats needs include_usage to be true",
            param="stream_options.continuous_usage_stats",
        )


def generate(request: Request, **fields: Any) -> Generate:
    """The native request, but for the fields that are not the same for both endpoints."""
    same = {name: getattr(request, name) for name in _SAME_FIELDS}
    return Generate(**{**same, "max_tokens": request.limit[1], **fields})
