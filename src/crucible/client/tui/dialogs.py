"""What lies over the conversation for a moment: help, settings, earlier conversations, where to save."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar, Final

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Label, OptionList, Static
from textual.widgets.option_list import Option

from crucible.client.store import Conversation, Settings
from crucible.client.tui.markdown import printable

KEYS: Final = (
    ("Enter", "send"),
    ("Alt+Enter, Ctrl+J", "new line"),
    ("Esc", "stop the reply; leave a dialog; give up editing"),
    ("Up, Down", "earlier messages, on the first and last line"),
    ("Ctrl+U", "empty the input"),
    ("Ctrl+E", "edit an earlier message and send it again, as a new conversation"),
    ("PgUp, PgDn", "scroll"),
    ("End, Ctrl+End", "back to the newest text"),
    ("Ctrl+Home", "to the beginning"),
    ("Ctrl+Y", "copy the last reply"),
    ("Ctrl+S", "save the conversation as Markdown"),
    ("Ctrl+N", "new conversation"),
    ("F1", "this help"),
    ("F2", "figures: this request, and the service"),
    ("F3", "settings: how replies are generated"),
    ("F4", "earlier conversations"),
    ("Ctrl+R", "look for the server now"),
    ("Ctrl+C", "copy what the mouse selected; else quit"),
)


class Dialog(ModalScreen[None]):
    """A box in the middle, which Esc closes."""

    DEFAULT_CSS = """
    Dialog { align: center middle; background: $background 60%; }
    Dialog > .box { width: 74; max-width: 100%; height: auto; max-height: 100%; border: round $primary;
                    padding: 0 1; background: $surface; }
    Dialog .hint { color: $foreground 70%; margin-top: 1; }
    Dialog Input { border: none; height: 1; padding: 0 1; background: $panel; }
    Dialog Input:focus { border: none; background: $primary 40%; text-style: bold; }
    Dialog .error { color: $error; height: auto; }
    Dialog OptionList, Dialog OptionList:focus { height: auto; max-height: 14; border: none; padding: 0;
                                                 background: $surface; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", show=False)]

    def action_leave(self) -> None:
        self.dismiss()


class Help(Dialog):
    """All keys."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("f1", "leave", show=False)]

    def compose(self) -> ComposeResult:
        table = Table.grid(padding=(0, 2))
        for key, what in KEYS:
            table.add_row(Text(key, "bold"), what)
        with VerticalScroll(classes="box") as box:
            box.border_title = "keys"
            yield Static(table)


_FIELDS: Final[tuple[tuple[str, str, Callable[[str], float | int], str], ...]] = (
    ("temperature", "Temperature", float, "above 0"),
    ("top_k", "Top-k", int, "0 for all tokens"),
    ("top_p", "Top-p", float, "above 0, to 1"),
    ("seed", "Seed", int, "empty for the server's"),
    ("max_tokens", "Max tokens", int, "empty for what the context leaves"),
)
_OPTIONAL: Final = frozenset({"seed", "max_tokens"})


class Mode(Static, can_focus=True):
    """Greedy or sampled."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("space,left,right", "change", show=False)]

    def __init__(self, is_sampled: bool) -> None:
        super().__init__()
        self.is_sampled = is_sampled

    def render(self) -> str:
        """As `Widget.render`."""
        return "‹ sampled ›" if self.is_sampled else "‹ greedy ›"

    def action_change(self) -> None:
        self.is_sampled = not self.is_sampled
        self.refresh()


class SettingsDialog(Dialog):
    """Changes settings; `on_change` is called with the new ones when Enter is pressed and all are possible."""

    DEFAULT_CSS = """
    SettingsDialog .row { height: 1; layout: horizontal; }
    SettingsDialog .row Label { width: 16; }
    SettingsDialog .row .about { width: 34; color: $foreground 70%; padding-left: 1; }
    SettingsDialog .row Input { width: 20; }
    SettingsDialog Mode { height: 1; width: 20; padding: 0 1; background: $panel; }
    SettingsDialog Mode:focus { background: $primary 40%; text-style: bold; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f3", "leave", show=False),
        Binding("enter", "accept", show=False, priority=True),
        Binding("down", "app.focus_next", show=False),
        Binding("up", "app.focus_previous", show=False),
    ]

    def __init__(self, settings: Settings, on_change: Callable[[Settings], None]) -> None:
        super().__init__()
        self._settings = settings
        self._on_change = on_change

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = "settings"
            with Vertical(classes="row"):
                yield Label("Decoding")
                yield Mode(self._settings.sampled)
                yield Label("Space changes it", classes="about")
            for name, label, _, about in _FIELDS:
                value = getattr(self._settings, name)
                with Vertical(classes="row"):
                    yield Label(label)
                    yield Input("" if value is None else f"{value:g}" if name[0] == "t" else str(value), id=name)
                    yield Label(about, classes="about")
            yield Label("System prompt")
            yield Input(self._settings.system, id="system", placeholder="the chat template's own")
            yield Label("", classes="error")
            yield Label("Enter takes them · Esc leaves them as they were · Tab and arrows go on", classes="hint")

    def action_accept(self) -> None:
        """Take what stands there, or say what is wrong with it."""
        found: dict[str, float | int | None] = {}
        for name, label, read, _ in _FIELDS:
            text = self.query_one(f"#{name}", Input).value.strip()
            try:
                found[name] = None if name in _OPTIONAL and not text else read(text)
            except ValueError:
                self._complain(f"{label} must be {'a number' if read is float else 'an integer'}", name)
                return
        settings = Settings(
            sampled=self.query_one(Mode).is_sampled,
            system=self.query_one("#system", Input).value,
            **found,  # type: ignore[arg-type]
        )
        for name, label, holds, allowed in (
            ("temperature", "Temperature", 0 < settings.temperature < float("inf"), "above 0"),
            ("top_k", "Top-k", settings.top_k >= 0, "0 or more"),
            ("top_p", "Top-p", 0 < settings.top_p <= 1, "above 0 and at most 1"),
            ("max_tokens", "Max tokens", settings.max_tokens is None or settings.max_tokens > 0, "1 or more"),
        ):
            if not holds:
                self._complain(f"{label} must be {allowed}", name)
                return
        self._on_change(settings)
        self.dismiss()

    def _complain(self, text: str, name: str) -> None:
        self.query_one(".error", Label).update(text)
        self.query_one(f"#{name}", Input).focus()


class Conversations(Dialog):
    """Opens or deletes an earlier conversation."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f4", "leave", show=False),
        Binding("delete,d", "delete", show=False),
    ]

    def __init__(
        self,
        conversations: list[Conversation],
        on_open: Callable[[Conversation], None],
        on_delete: Callable[[Conversation], None],
    ) -> None:
        super().__init__()
        self._conversations = conversations
        self._on_open, self._on_delete = on_open, on_delete

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = "conversations"
            yield OptionList(*map(_option, self._conversations))
            yield Label("Enter opens · Delete or d removes it from disk · Esc leaves", classes="hint")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss()
        self._on_open(self._conversations[event.option_index])

    def action_delete(self) -> None:
        """Delete the one under the cursor."""
        options = self.query_one(OptionList)
        if (index := options.highlighted) is not None:
            self._on_delete(self._conversations.pop(index))
            options.remove_option_at_index(index)


def _option(conversation: Conversation) -> Option:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(conversation.changed))
    title = Text(f"{when}  ", "dim") + Text(printable(conversation.title), "not dim")
    title.no_wrap, title.overflow = True, "ellipsis"
    return Option(title)


class SaveDialog(Dialog):
    """Asks for a file's name."""

    def __init__(self, path: str, on_path: Callable[[str], None]) -> None:
        super().__init__()
        self._path = path
        self._on_path = on_path

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = "save as Markdown"
            yield Input(self._path)
            yield Label("Enter saves · Esc leaves", classes="hint")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss()
        if event.value.strip():
            self._on_path(event.value.strip())
