"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Final

import msgspec

from crucible.serve.anthropic.answer import MessageAnswer
from crucible.serve.anthropic.requests import Conversation, MessagesRequest, check, conversation, generate
from crucible.serve.protocol import Call, Generate, Reply, Served
from crucible.serve.wire import read_json


class Messages:
    """A `Surface`."""

    def read(self, body: bytes, served: Served) -> tuple[list[Call], Reply]:
        """As `Surface.read`. Clients send a `max_tokens` of many thousands by default, so it is clamped."""
        request = read_json(body, MessagesRequest)
        check(request, served)
        call = Call(request=generate(request), clamps_max_tokens=True, names={"stop": "stop_sequences"})
        return [call], MessageAnswer(served, streams=bool(request.stream))


class CountTokens:
    """The endpoint that generates nothing, and tells the number of a prompt's tokens."""

    def read(self, body: bytes, served: Served) -> Call:
        """From a request's body to the call whose prompt is to be counted. Raises as `Surface.read`."""
        request = read_json(body, Conversation)
        check(request, served)
        return Call(request=Generate(messages=conversation(request)))

    def reply(self, num_tokens: int) -> bytes:
        """The body of the reply."""
        return msgspec.json.encode({"input_tokens": num_tokens})


MESSAGES: Final = Messages()
COUNT_TOKENS: Final = CountTokens()
