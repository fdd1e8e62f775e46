"""From what a user gives to the token ids of a prompt: one way for the library, the commands and the service."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from crucible.engine.request import RequestError
from crucible.models import ModelText
from crucible.tokenizer.chat import ChatTemplate, Message

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""


class Prompts:
    """How prompts are written for one model. May be shared between threads."""

    def __init__(self, model: ModelText) -> None:
        self.tokenizer = model.tokenizer
        self.template = ChatTemplate(model.tokenizer, model.chat_template, model.special_tokens)
        self._prefix_ids = model.prefix_ids

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt: of ordinary text, behind the token with which the model's texts begin if it has such
        a one; or the ids that were given.

        Raises:
            RequestError: it is neither.
        """
        if isinstance(prompt, str):
            return (*self._prefix_ids, *self.tokenizer.encode(prompt))
        if not isinstance(prompt, Iterable) or isinstance(prompt, bytes):
            raise RequestError(f"a prompt must be text or token ids, not {prompt!r:.60}")
        return tuple(prompt)

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a conversation, ready for the reply: see `tokenizer.chat.ChatTemplate.encode`."""
        ids = self.template.encode(messages)
        # A chat template in Jinja writes the first token itself.
        return (*self._prefix_ids, *ids) if self.template.source is None else tuple(ids)
