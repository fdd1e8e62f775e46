"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from crucible.serve.openai.answer import Answer
from crucible.serve.openai.logprobs import content
from crucible.serve.openai.requests import Request, Unsupported, check, generate
from crucible.serve.protocol import ApiError, Burst, Call, Choice, Reply, Served, TokenScore
from crucible.serve.wire import read_json


class ChatRequest(Request, kw_only=True, forbid_unknown_fields=True):
    """The body: what is honoured, what has no effect without tools, then what is refused unless it asks for nothing.

    What a message may hold is for the model's chat template to say.
    """

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None

    parallel_tool_calls: bool | None = None
    prediction: Any = None

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    moderation: Any = None


_NO_TOOLS: Final = "no tool can be called here"
_TEXT_ONLY: Final = "this model reads and writes text alone"
_UNSUPPORTED: Final[Unsupported] = {
    "tools": ([[]], _NO_TOOLS),
    "tool_choice": (["none", "auto"], _NO_TOOLS),
    "functions": ([[]], _NO_TOOLS),
    "function_call": (["none", "auto"], _NO_TOOLS),
    "response_format": ([{"type": "text"}], 'the output cannot be held to a format; only {"type": "text"} is allowed'),
    "modalities": ([["text"]], _TEXT_ONLY),
    "audio": ([], _TEXT_ONLY),
    # No client sends it unasked, and who asks for an effort expects a reasoning that would not come.
    "reasoning_effort": (["none"], "this model does not reason before it answers"),
    "verbosity": (["medium"], "this model cannot be told how much to say"),
    "web_search_options": ([], "nothing is searched for here"),
    "moderation": ([], "nothing is moderated here"),
}
_PARTS: Final = frozenset({"image_url", "input_audio", "file", "refusal"})
"""Parts of a message that OpenAI knows beside text."""


class ChatAnswer(Answer):
    """The reply: messages of an assistant."""

    def __init__(self, request: ChatRequest, served: Served) -> None:
        super().__init__(
            request, served, id_prefix="chatcmpl", whole_type="chat.completion", chunk_type="chat.completion.chunk"
        )

    def _choice(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"message": message, "logprobs": None if choice.scores is None else content(choice.scores)}

    def _opening(self, burst: Burst) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def _piece(self, index: int, text: str, scores: Sequence[TokenScore] | None) -> dict[str, Any]:
        return {"delta": {"content": text}, "logprobs": None if scores is None else content(scores)}

    def _closing(self) -> dict[str, Any]:
        return {"delta": {}, "logprobs": None}


class Chat:
    """A `Surface`."""

    def read(self, body: bytes, served: Served) -> tuple[list[Call], Reply]:
        """As `Surface.read`."""
        request = read_json(body, ChatRequest)
        check(request, served, _UNSUPPORTED)
        if request.top_logprobs and not request.logprobs:
            raise ApiError("invalid", "top_logprobs needs logprobs to be true", param="top_logprobs")
        native = generate(
            request,
            messages=[_message(f"messages[{index}]", message) for index, message in enumerate(request.messages)],
            logprobs=request.top_logprobs or 0 if request.logprobs else None,
        )
        names = {"max_tokens": request.limit[0], "logprobs": "top_logprobs"}
        return [Call(request=native, names=names)], ChatAnswer(request, served)


def _message(at: str, message: dict[str, Any]) -> dict[str, Any]:
    """A message without the fields that say nothing: clients send a reply's back as they got them."""
    parts = message.get("content")
    for index, part in enumerate(parts if isinstance(parts, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _PARTS:
            at_part = f"{at}.content[{index}]"
            raise ApiError("unsupported", f"{at_part} is of type {kind}: {_TEXT_ONLY}", param=at_part)
    return {name: value for name, value in message.items() if name == "content" or value not in (None, [])}


CHAT: Final = Chat()
