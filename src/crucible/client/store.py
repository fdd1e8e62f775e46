"""Conversations on disk: a JSON file for each, replaced as a whole."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from crucible.serve.protocol import Generate

_TITLE_LENGTH: Final = 60


class Settings(msgspec.Struct, kw_only=True):
    """How replies are generated. The numbers of sampling hold where `sampled` is true.

    Attributes:
        seed: None for the server's.
        max_tokens: of a reply; None for what the context leaves.
        system: the system message; "" for the chat template's own.
    """

    sampled: bool = False
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    seed: int | None = None
    max_tokens: int | None = None
    system: str = ""

    def summary(self) -> str:
        """In a few words."""
        if not self.sampled:
            return "greedy"
        return f"t {self.temperature:g} k {self.top_k} p {self.top_p:g}"


class Turn(msgspec.Struct):
    """What one side said; `note` is how a reply ended, in words."""

    role: Literal["user", "assistant"]
    text: str
    note: str = ""


class Conversation(msgspec.Struct, kw_only=True):
    """Turns of the user and of the model, in turn; a reply may be empty."""

    id: str = msgspec.field(default_factory=lambda: f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}")
    changed: float = 0.0
    model: str = ""
    settings: Settings = msgspec.field(default_factory=Settings)
    turns: list[Turn] = msgspec.field(default_factory=list)

    @property
    def title(self) -> str:
        """The beginning of what was first asked."""
        words = " ".join(self.turns[0].text.split()) if self.turns else "new conversation"
        return words if len(words) <= _TITLE_LENGTH else words[: _TITLE_LENGTH - 1] + "…"

    def request(self) -> Generate:
        """For the reply that comes next. A question that got no reply at all is left out, but for the last one."""
        settings, messages = self.settings, [("system", self.settings.system)] if self.settings.system else []
        *pairs, (question, _) = zip(self.turns[::2], self.turns[1::2], strict=True)
        for asked, replied in pairs:
            if replied.text:
                messages += [("user", asked.text), ("assistant", replied.text)]
        messages.append(("user", question.text))
        sampling: dict[str, Any] = {}
        if settings.sampled:
            sampling = {"temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p}
        return Generate(
            messages=[{"role": role, "content": text} for role, text in messages],
            seed=settings.seed,
            max_tokens=settings.max_tokens,
            **sampling,
        )

    def markdown(self) -> str:
        """As a document."""
        parts = [f"# {self.title}"]
        for turn in self.turns:
            name = "You" if turn.role == "user" else self.model or "Model"
            parts += [f"## {name}", turn.text] + ([f"*{turn.note}*"] if turn.note else [])
        return "\n\n".join(parts) + "\n"

    def branch(self, position: int) -> Conversation:
        """A new one with the turns before a position."""
        return Conversation(model=self.model, settings=self.settings, turns=self.turns[:position])


class Store:
    """A folder of conversations."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def all(self) -> list[Conversation]:
        """Those that can be read, last changed first."""
        found = []
        for path in self._folder.glob("*.json"):
            with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
                conversation = msgspec.json.decode(path.read_bytes(), type=Conversation)
                conversation.id = path.stem
                found.append(conversation)
        return sorted(found, key=lambda conversation: conversation.changed, reverse=True)

    def save(self, conversation: Conversation) -> None:
        """Raises OSError."""
        conversation.changed = time.time()
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace(self._path(conversation), msgspec.json.format(msgspec.json.encode(conversation)))

    def delete(self, conversation: Conversation) -> None:
        """Raises OSError."""
        self._path(conversation).unlink(missing_ok=True)

    def _path(self, conversation: Conversation) -> Path:
        return self._folder / f"{conversation.id}.json"


def replace(path: Path, content: bytes) -> None:
    """Replaces a file by one rename, its bytes on disk before that. Raises OSError: the old one is left."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
