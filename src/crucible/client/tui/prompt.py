"""Where a message is written: Enter sends, Alt+Enter breaks the line, Up and Down go through earlier ones."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar, Final

from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual.binding import Binding, BindingType
from textual.events import Key
from textual.message import Message
from textual.widgets import TextArea


class _Keys(StrEnum):
    ALT_ENTER = "alt+enter"


# Terminals that send Alt as Escape before the key: Textual would take these two for Enter alone.
_SEQUENCES: dict[str, Any] = ANSI_SEQUENCES_KEYS  # type: ignore[assignment]
_SEQUENCES |= dict.fromkeys(("\x1b\r", "\x1b\n"), (_Keys.ALT_ENTER,))


class Prompt(TextArea):
    """The input. Its height is that of its text, up to a few lines."""

    DEFAULT_CSS = """
    Prompt { height: auto; max-height: 8; border: round $foreground 40%; padding: 0 1; background: $background; }
    Prompt:focus { border: round $primary; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+u", "clear_sent", "Clear", show=False),
    ]
    NEWLINES: Final = ("alt+enter", "shift+enter", "ctrl+j")

    class Sent(Message):
        """Enter was pressed."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self) -> None:
        super().__init__(highlight_cursor_line=False, show_line_numbers=False, placeholder="Ask something")
        self.cursor_blink = False
        self.earlier: list[str] = []
        """What was sent before, oldest first."""
        self._position = 0
        """In `earlier`; 0 is what is being written, -1 the newest."""
        self._draft = ""

    def write(self, text: str) -> None:
        """Replace what stands there; the cursor is at its end."""
        self.load_text(text)
        self.move_cursor(self.document.end)

    def action_clear_sent(self) -> None:
        """Empty it for the next message."""
        self._position, self._draft = 0, ""
        self.load_text("")

    async def _on_key(self, event: Key) -> None:
        # Not as bindings: those can overtake what was typed before.
        if event.key == "enter" or event.key in self.NEWLINES:
            event.stop()
            event.prevent_default()
            if event.key == "enter":
                self.post_message(self.Sent(self.text))
            else:
                self.insert("\n")
        else:
            await super()._on_key(event)

    def action_cursor_up(self, select: bool = False) -> None:
        """On the first line: the message before."""
        if select or not self.cursor_at_first_line:
            super().action_cursor_up(select)
        else:
            self._go(-1)

    def action_cursor_down(self, select: bool = False) -> None:
        """On the last line: the message after."""
        if select or not self.cursor_at_last_line:
            super().action_cursor_down(select)
        else:
            self._go(1)

    def _go(self, step: int) -> None:
        position = self._position + step
        if not -len(self.earlier) <= position <= 0:
            return
        if self._position == 0:
            self._draft = self.text
        self._position = position
        self.write(self.earlier[position] if position else self._draft)
