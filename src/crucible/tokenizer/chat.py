"""From the messages of a conversation to token ids: one function, for every surface.

A model that comes with a chat template has its conversations written by it; `tokenizer/template.py` renders it and
records which characters are the template's own. Control tokens are looked for in those alone, so that `<|im_end|>`
in a message is encoded as the text that it is. Between two control tokens the template's text and the messages' are
encoded together, in one piece, because the tokenizer's merges reach over the border between them: the ids are those
that `transformers` gives, as long as no message holds a control token.

What this cannot do: a template whose markers are ordinary text (`[INST]`, or those of the plain template below)
leaves nothing by which to tell them from a user's. And a template that makes its control tokens by operations of
which no record is kept (`upper`, `%`) gets them as text.

A model without a template is spoken to in plain text:

    System: Answer briefly.

    User: Where is Paris?

    Assistant:
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from crucible.errors import CrucibleError
from crucible.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from crucible.tokenizer.template import Template, Written

Message = Mapping[str, Any]
"""`role`, one of ROLES, and `content`: text, or a list of parts `{"type": "text", "text": ...}`, which are joined. An
assistant's content may be null. Other fields are for templates that know them."""

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
"""`developer` is another name for `system`; `tool` is for templates that know it."""

_PLAIN_NAMES: Final = {"system": "System", "user": "User", "assistant": "Assistant"}
_NOT_WRITTEN: Final = "\0"
"""Stands for each character that the template did not write; no control token has it."""


class ChatError(CrucibleError):
    """Messages that cannot be put before a model: the message names `messages[i]` and the field."""


class ChatTemplate:
    """How one model is spoken to.

    Args:
        tokenizer: the model's.
        source: its chat template in Jinja; None for the plain one.
        special_tokens: what the template finds under names such as `bos_token`, by name.
    """

    def __init__(
        self, tokenizer: Tokenizer, source: str | None = None, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self.special_tokens = dict(special_tokens or {})

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a prompt that the model answers: the conversation, then the beginning of an assistant's turn.

        If the last message is an assistant's, its turn is the one left open: the model goes on with that text.

        Raises:
            ChatError: there are no messages, or one is malformed.
            TemplateError: the template is malformed, or refuses the conversation.
            TokenizerError: a character is not in the vocabulary.
        """
        if self.source is None:
            return self.tokenizer.encode(_plain(_checked(messages, frozenset())))
        return self._encode_written(self._render(messages))

    def render(self, messages: Sequence[Message]) -> str:
        """The text of which `encode` gives the ids, control tokens and all. Raises as `encode`."""
        if self.source is None:
            return _plain(_checked(messages, frozenset()))
        return "".join([self._render(messages)])

    # ---- text -------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _template(self) -> Template:
        from crucible.tokenizer.template import Template

        assert self.source is not None, "the plain template is no Jinja"
        return Template(self.source)

    def _render(self, messages: Sequence[Message]) -> Written:
        from crucible.tokenizer.template import written

        checked = _checked(messages, self._template.names)
        mark = self._unused_character(checked) if checked[-1]["role"] == "assistant" else None
        at = f"messages[{len(checked) - 1}]"
        if mark is not None:
            if checked[-1].get("tool_calls"):
                raise ChatError(f"{at} has tool_calls, and no text to go on from")
            # The space shows whether the template trims contents.
            checked[-1]["content"] += mark + " "
        # Roles are checked to be known ones, and a template may make control tokens of them.
        text = self._template.render(
            {
                "messages": [message | {"role": written(message["role"])} for message in checked],
                "add_generation_prompt": mark is None,
                "tools": None,
                "documents": None,
                **{name: written(token) for name, token in self.special_tokens.items()},
            }
        )
        if mark is not None and mark not in text:
            raise ChatError(f"{at} is an assistant's to go on from, and the chat template leaves out its text")
        return text if mark is None else _open_turn(text, mark)

    def _unused_character(self, messages: Sequence[Message]) -> str:
        """One to mark where the last message ends: of private use, unless the messages have all of those."""
        taken = set(self.source or "").union(json.dumps(messages, ensure_ascii=False))
        return next(chr(code) for code in range(0xE000, 0x110000) if chr(code) not in taken)

    # ---- ids --------------------------------------------------------------------------------------------------

    def _encode_written(self, text: Written) -> list[int]:
        """Control tokens, where the template wrote them, by their ids; what is between them as ordinary text."""
        texts, control_ids, start = [], [], 0
        plain = "".join([text])
        for begin, end, token_id in self._find_control(plain, text.by_template):
            texts.append(plain[start:begin])
            control_ids.append(token_id)
            start = end
        texts.append(plain[start:])
        first, rest = self.tokenizer.encode(texts[0]), self._inside.encode_batch(texts[1:])
        return first + [i for control_id, ids in zip(control_ids, rest, strict=True) for i in (control_id, *ids)]

    def _find_control(self, text: str, by_template: bytes) -> Iterator[tuple[int, int, int]]:
        """Begin, end and id of each control token, by the rules of the `tokenizers` library: of several at one place
        the longest, and with white space around it that its `lstrip` and `rstrip` take."""
        own = "".join([c if is_own else _NOT_WRITTEN for c, is_own in zip(text, by_template, strict=True)])
        past = 0
        for match in self._control_pattern.finditer(own):
            token = self.tokenizer.spec.control_tokens[match[0]]
            begin, end = match.span()
            if token.single_word and (_is_word(text[begin - 1 : begin]) or _is_word(text[end : end + 1])):
                continue
            if token.lstrip:
                begin = past + len(text[past:begin].rstrip())
            if token.rstrip:
                end = len(text) - len(text[end:].lstrip())
            yield begin, end, token.id
            past = end

    @functools.cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.tokenizer.control_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @functools.cached_property
    def _inside(self) -> Tokenizer:
        """The tokenizer of what stands behind a control token.

        Another one only where a space is put before the beginning of a text, and not before each stretch of it.
        """
        if not _first_only(self.tokenizer.spec.document):
            return self.tokenizer
        document = json.loads(self.tokenizer.to_json())
        for step in _first_only(document):
            step["prepend_scheme"] = "never"
        return Tokenizer.from_bytes(json.dumps(document).encode())


def _first_only(document: Mapping[str, Any]) -> list[Any]:
    """The steps of a tokenizer.json that put a space before the beginning of a text alone."""
    steps = document.get("pre_tokenizer") or {}
    return [step for step in (steps, *steps.get("pretokenizers", ())) if step.get("prepend_scheme") == "first"]


def _open_turn(text: Written, mark: str) -> Written:
    """The text up to the mark at the end of the last message, without the message's white space before it if the
    template trims contents: behind the mark it then left no space."""
    end = text.rindex(mark)
    is_trimmed = text[end + 1 : end + 2] != " "
    text = text[:end]
    while is_trimmed and text[-1:].isspace() and not text.by_template[-1]:
        text = text[:-1]
    return text


def _plain(messages: Sequence[Message]) -> str:
    turns = [(_PLAIN_NAMES[message["role"]], message["content"]) for message in messages]
    if messages[-1]["role"] != "assistant":
        turns.append(("Assistant", ""))
    # In GPT-2's BPE the space before a word is part of its token: a prompt that ends in one leaves the model a
    # beginning that it has hardly seen.
    return "\n\n".join(f"{name}: {content}" if content else f"{name}:" for name, content in turns)


def _is_word(character: str) -> bool:
    return re.fullmatch(r"\w", character) is not None


# ---- messages ---------------------------------------------------------------------------------------------------


def _checked(messages: Any, names: frozenset[str]) -> list[dict[str, Any]]:
    """The messages as a template takes them: role and content as strings, and such other fields as are in `names`."""
    if not isinstance(messages, (list, tuple)):
        raise ChatError(f"messages must be a list of messages, not {messages!r:.60}")
    if not messages:
        raise ChatError("messages is empty; at least one message is needed")
    return [_checked_message(f"messages[{index}]", message, names) for index, message in enumerate(messages)]


def _checked_message(at: str, message: Any, names: frozenset[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatError(f"{at} must be an object with role and content, not {message!r:.60}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ChatError(f"{at}.role must be one of {', '.join(ROLES)}, not {role!r:.60}")
    if role == "tool" and role not in names:
        raise ChatError(f"{at}.role is 'tool', for which this model's chat template has no place")
    checked = {
        "role": "system" if role == "developer" else role,
        "content": _checked_content(f"{at}.content", message.get("content"), role),
    }
    for name, value in message.items():
        if name in checked or value is None:
            continue
        if name not in names:
            raise ChatError(f"{at}.{name} is a field for which this model's chat template has no place")
        try:
            checked[name] = _plain_data(f"{at}.{name}", value)
        except RecursionError:
            raise ChatError(f"{at}.{name} is nested too deep") from None
    return checked


def _checked_content(at: str, content: Any, role: str) -> str:
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        return "".join([content])  # exactly a string, whatever it derives from
    if not isinstance(content, (list, tuple)):
        found = "null" if content is None else f"{content!r:.60}"
        raise ChatError(f"{at} must be text or a list of text parts, not {found}")
    return "".join([_part_text(f"{at}[{index}]", part) for index, part in enumerate(content)])


def _part_text(at: str, part: Any) -> str:
    if not isinstance(part, Mapping):
        raise ChatError(f"{at} must be an object with type and text, not {part!r:.60}")
    if part.get("type") != "text":
        raise ChatError(f"{at}.type must be 'text', not {part.get('type')!r:.60}")
    if not isinstance(text := part.get("text"), str):
        raise ChatError(f"{at}.text must be a string, not {text!r:.60}")
    return text


def _plain_data(at: str, value: Any) -> Any:
    """A copy in the types of JSON, so that a template never gets hold of an object with methods of its own."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain_data(f"{at}.{key}", item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_data(f"{at}[{index}]", item) for index, item in enumerate(value)]
    raise ChatError(f"{at} must be of a type that JSON has, not {type(value).__name__}")
