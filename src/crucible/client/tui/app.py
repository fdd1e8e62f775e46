"""The application: keys and what comes from the server change the conversation, a timer draws what has changed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.theme import Theme
from textual.widgets import Static

from crucible.client.api import Client, Done, Token
from crucible.client.http import UnreachableError
from crucible.client.link import Link
from crucible.client.measure import Speed
from crucible.client.store import Conversation, Settings, Store, Turn, replace
from crucible.client.tui.dialogs import Conversations, Help, SaveDialog, SettingsDialog
from crucible.client.tui.markdown import THEME
from crucible.client.tui.prompt import Prompt
from crucible.client.tui.telemetry import Header, RequestFigures, ServiceFigures
from crucible.client.tui.transcript import Transcript
from crucible.serve.protocol import ApiError

SHORTEST_FRAME: Final = 1 / 30
_LONGEST_FRAME: Final = 1 / 2
_SHARE: Final = 0.07
"""Of a core, what frames may be drawn with while a reply comes: where one costs more, there are fewer."""
_REMEMBERED: Final = 200
"""Messages of earlier conversations that Up goes back to."""
_HINTS: Final = ("Enter send", "Esc stop", "F1 help", "F2 figures", "F3 settings", "F4 chats", "Ctrl+C quit")
_THEME: Final = Theme(
    name="crucible",
    primary="#6fc3df",
    accent="#e6a35c",
    foreground="#dde3ea",
    background="#12151a",
    surface="#1a1f26",
    panel="#232a33",
    success="#8fce7a",
    warning="#e6c35c",
    error="#e6706f",
)


class ChatApp(App[None]):
    """A conversation with the model of a server.

    Args:
        client: of the server.
        store: of conversations.
    """

    CSS = """
    #hints { height: 1; padding: 0 1; color: $foreground 80%; }
    #figures { height: 6; display: none; }
    #figures.shown { display: block; }
    """
    TITLE = "Crucible"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop"),
        Binding("f1", "help"),
        Binding("f2", "figures"),
        Binding("f3", "settings"),
        Binding("f4", "conversations"),
        Binding("pageup", "scroll(-1)", priority=True),
        Binding("pagedown", "scroll(1)", priority=True),
        Binding("end", "end", priority=True),
        Binding("ctrl+end", "end", priority=True),
        Binding("ctrl+home", "home", priority=True),
        Binding("ctrl+e", "edit", priority=True),
        Binding("ctrl+y", "copy", priority=True),
        Binding("ctrl+s", "save", priority=True),
        Binding("ctrl+n", "new", priority=True),
        Binding("ctrl+r", "reconnect", priority=True),
        Binding("ctrl+c", "quit_or_copy", priority=True),
    ]

    def __init__(self, client: Client, store: Store) -> None:
        # Without colour: none at all, rather than the greys that Textual makes of its own.
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self.animation_level = "none"
        self.conversation = Conversation()
        self.link = Link(client, self._link_changed)
        self._client, self._store = client, store
        self._reply: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._editing: int | None = None
        """The turn that is edited."""

    def compose(self) -> ComposeResult:
        yield Header(self.link)
        yield Transcript()
        yield Prompt()
        with Horizontal(id="figures"):
            yield RequestFigures()
            yield ServiceFigures(self.link)
        hints = [Text.assemble((key, "bold"), f" {what}") for key, _, what in (hint.partition(" ") for hint in _HINTS)]
        yield Static(Text("  ", no_wrap=True, overflow="ellipsis").join(hints), id="hints")

    def on_mount(self) -> None:
        self.console.push_theme(THEME)
        if not self.no_color:
            self.register_theme(_THEME)
            self.theme = _THEME.name
        earlier = [turn.text for one in reversed(self._store.all()) for turn in one.turns if turn.role == "user"]
        self.query_one(Prompt).earlier = earlier[-_REMEMBERED:]
        self._show()
        self._watch = asyncio.create_task(self.link.run())
        for number in (signal.SIGTERM, signal.SIGHUP):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                asyncio.get_running_loop().add_signal_handler(number, self.exit)

    async def on_unmount(self) -> None:
        for task in (self._watch, self._reply):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    # ---- the reply ------------------------------------------------------------------------------------------------

    @property
    def is_replying(self) -> bool:
        return self._reply is not None and not self._reply.done()

    def on_prompt_sent(self, message: Prompt.Sent) -> None:
        """Send it, unless a reply is under way: then it stays in the input."""
        if not message.text.strip():
            return
        if self.is_replying:
            self.notify("A reply is under way; Esc stops it.", severity="warning")
            return
        if self._editing is not None:
            self.conversation = self.conversation.branch(self._editing)
            self._editing = None
        prompt = self.query_one(Prompt)
        prompt.action_clear_sent()
        prompt.earlier.append(message.text)
        self.conversation.turns += [Turn("user", message.text), Turn("assistant", "")]
        self._save()
        self.query_one(RequestFigures).speed = Speed()
        self._reply = asyncio.create_task(self._generate(self.conversation))
        self._show()
        self.query_one(Transcript).to_end()

    async def _generate(self, conversation: Conversation) -> None:
        """The reply to the last turn but one, into the last. Whatever happens, what has come of it stays."""
        turn, speed = conversation.turns[-1], self.query_one(RequestFigures).speed
        used = time.process_time()
        try:
            async with contextlib.aclosing(self._client.arrivals(conversation.request())) as arrivals:
                async for events in arrivals:
                    tokens = [(when, event) for when, event in events if isinstance(event, Token)]
                    speed.add([when for when, _ in tokens])
                    turn.text += "".join([event.text for _, event in tokens])
                    if isinstance(done := events[-1][1], Done):
                        turn.note = _ended(done, speed, conversation.settings)
                        break
                    self.query_one(Transcript).grow()
                    self.query_one(RequestFigures).refresh()
                    before, used = used, time.process_time()
                    await asyncio.sleep(max(SHORTEST_FRAME, min(_LONGEST_FRAME, (used - before) / _SHARE)))
        except asyncio.CancelledError:
            how = "the server was gone" if self.link.state == "disconnected" else "stopped"
            turn.note = f"{how} after {_tokens(speed.tokens)}"
        except UnreachableError as error:
            turn.note = f"the connection was lost after {_tokens(speed.tokens)}: {error.message}"
            self.link.hurry()
        except ApiError as error:
            turn.note = f"failed after {_tokens(speed.tokens)}: {error.message}" if speed.tokens else error.message
        finally:
            self._reply = None
            self._save(conversation)
            if self.is_running:
                self._show()

    # ---- what is shown --------------------------------------------------------------------------------------------

    def _show(self) -> None:
        """The conversation anew, with all that says what state it is in."""
        conversation = self.conversation
        self.query_one(Header).conversation = conversation
        self.query_one(Transcript).show(conversation.turns, conversation.model)
        prompt = self.query_one(Prompt)
        if self.is_replying:
            prompt.border_title = "replying – Esc stops it"
        elif self._editing is not None:
            prompt.border_title = "editing an earlier message – Enter sends it, Esc gives up"
        else:
            prompt.border_title = ""
        self.query_one(Header).refresh()
        self.query_one(RequestFigures).refresh()

    def _link_changed(self) -> None:
        if not self.query(Header):  # while the application closes its widgets go before the task that watches
            return
        health = self.link.health
        if health is not None and health.model and self.conversation.model != health.model:
            self.conversation.model = health.model
            self._show()
        if self.link.state == "disconnected" and self._reply is not None:
            self._reply.cancel()
        self.query_one(Header).refresh()
        self.query_one(ServiceFigures).refresh()

    def _save(self, conversation: Conversation | None = None) -> None:
        try:
            self._store.save(conversation or self.conversation)
        except OSError as error:
            self.notify(f"The conversation could not be kept: {error}", severity="error")

    def _open(self, conversation: Conversation) -> None:
        self.conversation, self._editing = conversation, None
        if self.link.health is not None and self.link.health.model:
            conversation.model = self.link.health.model
        self._show()
        self.query_one(Transcript).to_end()

    # ---- keys -----------------------------------------------------------------------------------------------------

    def on_transcript_scrolled(self, message: Transcript.Scrolled) -> None:
        """Say that there is more, and how to get there."""
        below = f"{message.lines_below} lines below – End" if message.lines_below else ""
        self.query_one(Prompt).border_subtitle = below

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Under a dialog only quitting works: its keys are its own."""
        return action in ("quit_or_copy", "focus_next", "focus_previous") or len(self.screen_stack) == 1

    def action_stop(self) -> None:
        """Stop the reply, or give up editing."""
        if self._reply is not None:
            self._reply.cancel()
        elif self._editing is not None:
            self._editing = None
            self.query_one(Prompt).action_clear_sent()
            self._show()

    def action_help(self) -> None:
        self.push_screen(Help())

    def action_figures(self) -> None:
        self.query_one("#figures").toggle_class("shown")

    def action_settings(self) -> None:
        self.push_screen(SettingsDialog(self.conversation.settings, self._set))

    def _set(self, settings: Settings) -> None:
        self.conversation.settings = settings
        if self.conversation.turns:
            self._save()
        self.query_one(Header).refresh()

    def action_conversations(self) -> None:
        if not self._refuse_while_replying():
            self.push_screen(Conversations(self._store.all(), self._open, self._store.delete))

    def action_new(self) -> None:
        if not self._refuse_while_replying():
            self._open(Conversation(settings=self.conversation.settings))

    def action_scroll(self, pages: int) -> None:
        transcript = self.query_one(Transcript)
        transcript.scroll_lines(pages * max(1, transcript.size.height - 2))

    def action_end(self) -> None:
        """The newest text; where that is in view already, the end of the line."""
        transcript, prompt = self.query_one(Transcript), self.query_one(Prompt)
        if transcript.is_at_end:
            prompt.action_cursor_line_end()
        else:
            transcript.to_end()

    def action_home(self) -> None:
        transcript = self.query_one(Transcript)
        transcript.scroll_lines(-transcript.top)

    def action_edit(self) -> None:
        """Put the last message into the input; pressed again, the one before."""
        if self._refuse_while_replying() or not self.conversation.turns:
            return
        before = len(self.conversation.turns) if self._editing is None else self._editing
        self._editing = before - 2 if before else len(self.conversation.turns) - 2
        self.query_one(Prompt).write(self.conversation.turns[self._editing].text)
        self._show()

    def action_copy(self) -> None:
        """The last reply, by the terminal's clipboard (OSC 52), which works over ssh."""
        replies = [turn.text for turn in self.conversation.turns if turn.role == "assistant" and turn.text]
        if replies:
            self.copy_to_clipboard(replies[-1])
            self.notify(f"Copied {len(replies[-1]):,} characters.", timeout=2)

    def action_save(self) -> None:
        if self.conversation.turns:
            words = re.findall(r"\w+", self.conversation.title.lower())
            self.push_screen(SaveDialog(f"{'-'.join(words[:6]) or 'conversation'}.md", self._save_as))

    def _save_as(self, name: str) -> None:
        path = Path(name).expanduser().absolute()
        try:
            replace(path, self.conversation.markdown().encode())
        except OSError as error:
            self.notify(f"Not saved: {error.strerror or error}", severity="error")
        else:
            self.notify(f"Saved as {path}", timeout=4)

    def action_reconnect(self) -> None:
        self.link.hurry()

    def action_quit_or_copy(self) -> None:
        """Quit, or copy the selection if there is one."""
        prompt = self.query_one(Prompt) if len(self.screen_stack) == 1 else None
        selected = self.screen.get_selected_text() or (prompt.selected_text if prompt else "")
        if selected:
            self.copy_to_clipboard(selected)
            self.screen.clear_selection()
            self.notify(f"Copied {len(selected):,} characters.", timeout=2)
        else:
            self.exit()

    def _refuse_while_replying(self) -> bool:
        if self.is_replying:
            self.notify("A reply is under way; Esc stops it.", severity="warning")
        return self.is_replying


def _ended(done: Done, speed: Speed, settings: Settings) -> str:
    parts = [_tokens(done.usage.completion_tokens)]
    if done.finish_reason == "length":
        parts[0] += ", the limit"
    if done.finish_reason == "error":
        parts.append("the model gave no usable numbers")
    if speed.rate:
        parts.append(f"{speed.rate:,.0f} a second")
    if settings.sampled:
        parts.append(f"seed {done.seed}")
    return " · ".join(parts)


def _tokens(number: int) -> str:
    return "1 token" if number == 1 else f"{number:,} tokens"
