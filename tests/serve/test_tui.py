"""The terminal client, driven key by key on a screen of 80x24, against a scripted server and against the real one."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from fake_native import FakeServer
from rich.console import Console
from rich.style import Style
from serve_process import Server
from textual.pilot import Pilot
from textual.widgets import Input, OptionList

from crucible.client import Client
from crucible.client.store import Conversation, Settings, Store, Turn
from crucible.client.tui.app import ChatApp
from crucible.client.tui.dialogs import KEYS, Dialog, SettingsDialog
from crucible.client.tui.markdown import Block
from crucible.client.tui.prompt import Prompt
from crucible.client.tui.transcript import Transcript

MARKDOWN = """\
# Title

Some **bold**
and a second line.

1. one
2. two

   - inner

```python
def f():

    return "x"
```

| a | b |
| - | - |
| 1 | 2 |

> quoted
lazily

***

End with <b>HTML</b> and `code`.
"""


class Session:
    """A running application, and what one sees of it."""

    def __init__(self, app: ChatApp, pilot: Pilot[None]) -> None:
        self.app, self.pilot = app, pilot

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def send(self, text: str) -> None:
        self.app.query_one(Prompt).write(text)
        await self.press("enter")

    async def ask(self, text: str) -> Turn:
        """Send, and wait for the end of the reply."""
        await self.send(text)
        await self.until(lambda: not self.app.is_replying)
        return self.app.conversation.turns[-1]

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(15):
            while not condition():
                await self.pilot.pause(0.01)

    @property
    def screen(self) -> list[str]:
        """The lines of the screen."""
        strips = self.app.screen._compositor.render_strips()
        return ["".join(segment.text for segment in strip) for strip in strips]

    def shows(self, text: str) -> bool:
        return text in "\n".join(self.screen)


@contextlib.asynccontextmanager
async def chatting(url: str, folder: Path, size: tuple[int, int] = (80, 24)) -> AsyncIterator[Session]:
    app = ChatApp(Client(url), Store(folder))
    async with app.run_test(size=size) as pilot:
        session = Session(app, pilot)
        yield session


@contextlib.asynccontextmanager
async def faking(folder: Path, **script: Any) -> AsyncIterator[tuple[FakeServer, Session]]:
    async with FakeServer(**script).running() as fake, chatting(fake.url, folder) as session:
        await session.until(lambda: session.app.link.state == "connected")
        yield fake, session


# ---- text ---------------------------------------------------------------------------------------------------------


def block(width: int = 40) -> Block:
    return Block(Console(width=width, force_terminal=True), Style(), width, is_markdown=True)


def text_of(made: Block, text: str) -> list[str]:
    return [strip.text.rstrip() for strip in made.lines(text)[0]]


@pytest.mark.parametrize("step", [1, 2, 3, 7, 50])
def test_markdown_that_grows_is_what_it_is_as_a_whole(step: int) -> None:
    grown, before = block(), []
    for end in range(step, len(MARKDOWN) + step, step):
        lines, kept = grown.lines(MARKDOWN[:end])
        assert [strip.text for strip in lines[:kept]] == before[:kept]
        before = [strip.text for strip in lines]
    assert [line.rstrip() for line in before] == text_of(block(), MARKDOWN)


def test_markdown_keeps_lines_and_shows_html() -> None:
    lines = text_of(block(), "one\ntwo <think>three</think>\n\n<div>\nfour")
    assert lines == ["one", "two <think>three</think>", "", "<div>", "four"]


def test_nothing_of_a_reply_commands_the_terminal() -> None:
    lines = text_of(block(), "a\x1b[2Jb\x07\x9b1mc\n\n`\x1b]0;x`\n\n[text](http://host/\x1b)")
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", "".join(lines))
    assert lines[0].startswith("a�[2Jb")


# ---- a conversation -----------------------------------------------------------------------------------------------


def test_a_question_and_its_reply(tmp_path: Path) -> None:
    async def run() -> None:
        async with faking(tmp_path, texts=["Hello", " **wor", "ld**", ".\n"]) as (fake, session):
            assert session.shows("● connected   toy   greedy   serving 3 of 64")
            turn = await session.ask("Who?")
            assert turn == Turn("assistant", "Hello **world**.\n", turn.note)
            assert turn.note.startswith("4 tokens")
            assert fake.requests == [{"messages": [{"role": "user", "content": "Who?"}]}]
            await session.until(lambda: session.shows("Hello world."))
            assert session.shows("▌ Who?")
            assert session.app.query_one(Prompt).text == ""
            await session.ask("And?")
            assert [message["content"] for message in fake.requests[1]["messages"]] == ["Who?", turn.text, "And?"]
            (kept,) = Store(tmp_path).all()
            assert kept == session.app.conversation

    asyncio.run(run())


def test_all_text_of_a_fast_reply_arrives(null_server: Server, tmp_path: Path) -> None:
    async def run() -> None:
        async with chatting(null_server.url, tmp_path) as session:
            await session.until(lambda: session.app.link.state == "connected")
            turn = await session.ask("Hello")
            request = {"messages": [{"role": "user", "content": "Hello"}]}
            assert turn.text == null_server.post("/v1/generate", json=request).json()["text"]
            assert len(turn.text) > 100

    asyncio.run(run())


def test_escape_keeps_what_has_come(tmp_path: Path) -> None:
    async def run() -> None:
        async with faking(tmp_path, texts=["word "] * 1000, pause=0.005) as (fake, session):
            await session.send("Go")
            await session.until(lambda: session.shows("word word"))
            assert session.shows("replying – Esc stops it")
            await session.send("more")
            assert session.app.query_one(Prompt).text == "more"
            await session.press("escape")
            await session.until(lambda: not session.app.is_replying)
            turn = session.app.conversation.turns[-1]
            tokens = turn.text.count("word ")
            assert turn.text == "word " * tokens
            assert turn.note == f"stopped after {tokens} tokens"
            await session.until(lambda: fake.left and session.shows(turn.note))
            assert Store(tmp_path).all()[0].turns[-1] == turn

    asyncio.run(run())


def test_keys_of_the_input(tmp_path: Path) -> None:
    async def run() -> None:
        Store(tmp_path).save(Conversation(turns=[Turn("user", "earlier"), Turn("assistant", "x", "1 token")]))
        async with faking(tmp_path) as (_, session):
            prompt = session.app.query_one(Prompt)
            await session.press(*"one", "alt+enter", *"two", "ctrl+j", *"three")
            assert prompt.text == "one\ntwo\nthree"
            await session.press("up", "up", "up")
            assert prompt.text == "earlier"
            await session.press("up", "down")
            assert prompt.text == "one\ntwo\nthree"
            await session.press("enter")
            await session.until(lambda: session.app.conversation.turns and not session.app.is_replying)
            await session.press("up")
            assert prompt.text == "one\ntwo\nthree"
            await session.press("ctrl+u")
            assert prompt.text == ""
            await session.press("enter", "space", "enter")
            assert len(session.app.conversation.turns) == 2

    asyncio.run(run())


def test_an_earlier_message_is_edited_into_a_new_conversation(tmp_path: Path) -> None:
    async def run() -> None:
        async with faking(tmp_path) as (fake, session):
            await session.ask("first")
            await session.ask("second")
            prompt, old = session.app.query_one(Prompt), session.app.conversation
            await session.press("ctrl+e", "ctrl+e")
            assert prompt.text == "first"
            await session.press("escape")
            assert prompt.text == ""
            await session.press("ctrl+e")
            assert prompt.text == "second"
            assert session.shows("editing an earlier message")
            await session.ask("other")
            asked = [turn.text for turn in session.app.conversation.turns if turn.role == "user"]
            assert asked == ["first", "other"]
            assert [message["content"] for message in fake.requests[-1]["messages"][::2]] == asked
            new, kept = Store(tmp_path).all()
            assert (new.turns, kept.turns) == (session.app.conversation.turns, old.turns)

    asyncio.run(run())


def test_scrolling(tmp_path: Path) -> None:
    async def run() -> None:
        async with faking(tmp_path, texts=[f"line {i}\n" for i in range(60)], pause=0.01) as (_, session):
            transcript = session.app.query_one(Transcript)
            await session.send("Go")
            await session.until(lambda: transcript.top > 10)
            await session.press("pageup", "ctrl+home")
            assert transcript.top == 0
            assert session.shows("lines below – End")
            await session.until(lambda: not session.app.is_replying)
            assert transcript.top == 0
            await session.press("pagedown")
            assert 0 < transcript.top < 20
            await session.press("end")
            await session.until(lambda: session.shows("line 59"))
            assert not session.shows("lines below")
            await session.press("f2")
            await session.until(lambda: session.shows("first token"))
            assert session.shows("line 59")

    asyncio.run(run())


def test_a_refusal_and_a_lost_connection_are_said(tmp_path: Path) -> None:
    async def run() -> None:
        async with faking(tmp_path) as (fake, session):
            fake.refusal = (400, {"error": {"message": "the prompt is too long", "type": "too_long"}})
            assert await session.ask("long") == Turn("assistant", "", "the prompt is too long")
            fake.refusal, fake.breaks_after = None, 2
            turn = await session.ask("again")
            assert turn.text == "Hello **world**"
            assert turn.note.startswith("the connection was lost after 2 tokens")
            assert len(fake.requests[-1]["messages"]) == 1
            await session.until(lambda: session.shows("the connection was lost"))

    asyncio.run(run())


def test_without_a_server_it_waits_for_one(tmp_path: Path) -> None:
    async def run() -> None:
        fake = FakeServer()
        async with fake.running():
            pass
        async with chatting(fake.url, tmp_path) as session:
            await session.until(lambda: session.shows("○ reconnecting"))
            assert session.shows("cannot be reached")
            async with fake.running():
                await session.press("ctrl+r")
                await session.until(lambda: session.shows("● connected   toy"))
                assert (await session.ask("there?")).text == "Hello **world**."

    asyncio.run(run())


# ---- dialogs ------------------------------------------------------------------------------------------------------


def test_settings_change_what_is_asked(tmp_path: Path) -> None:
    async def run() -> None:
        async with faking(tmp_path) as (fake, session):
            await session.press("f3", "space")
            dialog = session.app.screen
            assert isinstance(dialog, SettingsDialog)
            values = {"temperature": "0.5", "top_k": "x", "top_p": "1", "seed": "9", "max_tokens": "30", "system": "Be"}
            for name, value in values.items():
                dialog.query_one(f"#{name}", Input).value = value
            await session.press("enter")
            assert session.shows("Top-k must be an integer")
            dialog.query_one("#top_k", Input).value = "-1"
            await session.press("enter")
            assert session.shows("Top-k must be 0 or more")
            dialog.query_one("#top_k", Input).value = "0"
            await session.press("enter")
            await session.until(lambda: session.shows("t 0.5 k 0 p 1"))
            await session.ask("Hi")
            assert fake.requests[0] == {
                "messages": [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi"}],
                "max_tokens": 30,
                "temperature": 0.5,
                "top_k": 0,
                "top_p": 1.0,
                "seed": 9,
            }
            assert Store(tmp_path).all()[0].settings == session.app.conversation.settings
            await session.press("f3", "space", "escape")
            assert session.app.conversation.settings.sampled
            await session.press("ctrl+n")
            assert session.app.conversation.settings.seed == 9

    asyncio.run(run())


def test_conversations_are_opened_and_deleted(tmp_path: Path) -> None:
    async def run() -> None:
        store = Store(tmp_path)
        for name in ("older", "newer"):
            store.save(Conversation(turns=[Turn("user", name), Turn("assistant", f"reply to {name}", "3 tokens")]))
        async with faking(tmp_path) as (_, session):
            await session.press("f4")
            assert session.shows("newer")
            assert session.shows("older")
            await session.press("down", "enter")
            await session.until(lambda: session.shows("reply to older"))
            await session.ask("more")
            assert [len(one.turns) for one in store.all()] == [4, 2]
            await session.press("f4", "down", "delete", "escape")
            assert [one.title for one in store.all()] == ["older"]
            await session.press("f4", "delete", "escape", "f4")
            assert store.all() == []
            assert session.app.screen.query_one(OptionList).option_count == 0

    asyncio.run(run())


def test_copy_and_save(tmp_path: Path) -> None:
    async def run() -> None:
        async with faking(tmp_path / "kept") as (_, session):
            await session.ask("Who are you?")
            await session.press("ctrl+y")
            assert session.app.clipboard == "Hello **world**."
            await session.press("ctrl+s")
            field = session.app.screen.query_one(Input)
            assert field.value == "who-are-you.md"
            field.value = str(tmp_path / "saved.md")
            await session.press("enter")
            await session.until((tmp_path / "saved.md").exists)
            saved = (tmp_path / "saved.md").read_text()
            assert saved.startswith(
                "# Who are you?\n\n## You\n\nWho are you?\n\n## toy\n\nHello **world**.\n\n*3 tokens"
            )

    asyncio.run(run())


def test_what_the_mouse_selects_is_copied(tmp_path: Path) -> None:
    async def run() -> None:
        async with faking(tmp_path, texts=["first line\nsecond line\n\nthird"]) as (_, session):
            await session.ask("A question")
            await session.until(lambda: session.shows("third"))
            await session.pilot.mouse_down(Transcript, offset=(9, 4))
            await session.pilot.hover(Transcript, offset=(7, 7))
            await session.pilot.mouse_up(Transcript, offset=(7, 7))
            await session.press("ctrl+c")
            assert session.app.clipboard.startswith("line\nsecond line\n\nthir")
            assert session.app.is_running

    asyncio.run(run())


def test_help_names_every_key() -> None:
    def keys(text: str) -> set[str]:
        text = text.lower().replace("esc", "escape").replace("pgup", "pageup").replace("pgdn", "pagedown")
        return set(text.split(", "))

    named = set().union(*(keys(key) for key, _ in KEYS))
    bound = {binding.key for binding in ChatApp.BINDINGS if hasattr(binding, "key")}
    assert bound <= named
    assert {"enter", "alt+enter", "up", "down", "ctrl+u"} <= named


@pytest.mark.parametrize("no_color", [False, True])
def test_it_fits_80_by_24(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_color: bool) -> None:
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")

    async def run() -> None:
        async with faking(tmp_path) as (_, session):
            await session.press("f2")
            await session.until(lambda: session.shows("3 · 2") and session.shows("178 of 1,024"))
            assert session.shows("9,812 · 3 min 31 s")
            assert session.screen[-1].strip().endswith("Ctrl+C quit")
            for key in ("f1", "f3", "f4"):
                await session.press(key)
                box = session.app.screen.query_one(".box")
                assert isinstance(session.app.screen, Dialog)
                assert box.region.height <= 24
                assert box.virtual_size.height <= box.scrollable_content_region.height
                await session.press(key)
                assert not isinstance(session.app.screen, Dialog)

    asyncio.run(run())


def test_settings_in_few_words() -> None:
    assert Settings().summary() == "greedy"
    assert Settings(sampled=True, temperature=1.0).summary() == "t 1 k 40 p 0.95"
