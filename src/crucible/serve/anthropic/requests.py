"""Anthropic's requests: their fields, which of them are refused, and the conversation that they hold.

Every field of Anthropic's is honoured, or refused by name unless its value asks for nothing, or without effect by what
it is. Null stands for a field that is left out. Sampling fields that Anthropic has not are honoured under their usual
names; the official client sends them by its `extra_body`.

Three things that Anthropic leaves to its models are decided here. Without `temperature` decoding is greedy, as on
every surface, so that `top_p` and `top_k` need it. Turns of one role that follow each other stay turns of their own,
which the model's chat template writes as it does any others: only so has a conversation the same tokens on every
surface. And the blocks of a content are put together with nothing in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec

from crucible.serve.anthropic.models import check_model
from crucible.serve.protocol import ApiError, Generate, Sampling, Served

Content: TypeAlias = str | list[dict[str, Any]]
"""Text, or blocks of it."""


class Turn(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An element of `messages`. If the last one is an assistant's, the model goes on with its text."""

    role: Literal["user", "assistant", "system"]
    content: Content


class Conversation(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/messages/count_tokens`: what a prompt is made of, then what has no effect, then what is refused
    unless it asks for nothing."""

    model: str
    messages: list[Turn]
    system: Content | None = None

    cache_control: Any = None

    thinking: Any = None
    tools: Any = None
    tool_choice: Any = None
    mcp_servers: Any = None
    container: Any = None
    context_management: Any = None
    output_config: Any = None
    output_format: Any = None
    speed: Any = None


class MessagesRequest(Conversation, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/messages`: first the fields that are `Generate`'s, then the others that are honoured, then those
    that have no effect, because they are about billing, caching or abuse, and one that is refused."""

    # Those of `Sampling`, again: a struct has one base.
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None

    stop_sequences: list[str] | None = None
    stream: bool | None = None

    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    user_profile_id: str | None = None
    diagnostics: dict[str, Any] | None = None

    inference_geo: Any = None


_NO_TOOLS: Final = "no tool can be called here"
_UNSUPPORTED: Final[Mapping[str, tuple[Sequence[Any], str]]] = {
    "thinking": ([{"type": "disabled"}], "this model does not think before it answers"),
    "tools": ([[]], _NO_TOOLS),
    "tool_choice": ([{"type": "auto"}, {"type": "none"}], _NO_TOOLS),
    "mcp_servers": ([[]], _NO_TOOLS),
    "container": ([{}], _NO_TOOLS),
    "context_management": ([{}, {"edits": []}], "a conversation is taken as it is"),
    # High is how much effort Anthropic's models make unasked.
    "output_config": ([{}, {"effort": "high"}], "neither the output's format nor an effort can be asked for"),
    "output_format": ([], "the output cannot be held to a format"),
    "speed": (["standard"], "this server has one speed"),
    "inference_geo": ([], "this server does not know where it is"),
}
"""Fields that cannot be honoured: the values that ask for nothing, and why any other is refused."""

_BLOCKS: Final = frozenset(
    {
        "image",
        "document",
        "search_result",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "tool_result",
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
        "container_upload",
    }
)
"""Types of blocks that Anthropic knows beside text."""

_BLOCK_FIELDS: Final = frozenset({"type", "text", "cache_control", "citations"})
"""Of a text block; the last two are without effect: nothing is cached, and nothing cited."""


def check(request: Conversation, served: Served) -> None:
    """Raises ApiError for an unknown model and for fields that cannot be honoured."""
    check_model(served, request.model)
    for name, (no_ops, reason) in _UNSUPPORTED.items():
        value = _without_nulls(getattr(request, name, None))
        if value is not None and value not in no_ops:
            raise ApiError("unsupported", f"{name} is not supported: {reason}", param=name)


def conversation(request: Conversation) -> list[dict[str, Any]]:
    """The native request's `messages`. An empty `system` is none.

    Raises:
        ApiError: there are no turns; or a block is malformed, or no text.
    """
    if not request.messages:
        raise ApiError("invalid", "messages is empty; at least one message is needed", param="messages")
    messages: list[dict[str, Any]] = []
    if system := _text("system", request.system or ""):
        messages.append({"role": "system", "content": system})
    for index, turn in enumerate(request.messages):
        messages.append({"role": turn.role, "content": _text(f"messages[{index}].content", turn.content)})
    return messages


def generate(request: MessagesRequest) -> Generate:
    """The native request. Raises ApiError as `conversation`, or for want of `max_tokens`."""
    if request.max_tokens is None:
        raise ApiError("invalid", "max_tokens is missing; this API requires it", param="max_tokens")
    same = {name: getattr(request, name) for name in Sampling.__struct_fields__}
    return Generate(messages=conversation(request), stop=request.stop_sequences, **same)


def _without_nulls(value: Any) -> Any:
    return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value


def _text(at: str, content: Content) -> str:
    if isinstance(content, str):
        return content
    return "".join([_block_text(f"{at}[{index}]", block) for index, block in enumerate(content)])


def _block_text(at: str, block: dict[str, Any]) -> str:
    kind, text = block.get("type"), block.get("text")
    if isinstance(kind, str) and kind in _BLOCKS:
        raise ApiError("unsupported", f"{at} is of type {kind}, which is not supported: only text is", param=at)
    if kind != "text":
        raise ApiError("invalid", f'{at}.type must be "text"', param=f"{at}.type")
    if not isinstance(text, str):
        raise ApiError("invalid", f"{at}.text must be a string", param=f"{at}.text")
    if unknown := block.keys() - _BLOCK_FIELDS:
        name = min(unknown)
        raise ApiError("invalid", f"{at} has the unknown field {name!a:.62}", param=at)
    return text
