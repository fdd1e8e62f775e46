"""`crucible chat` in a real terminal against the real server, and what it costs."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_native import FakeServer
from serve_process import Server, children, stop, wait_until_gone
from terminal import Terminal, terminal

from crucible import cli
from crucible.client.store import Conversation, Store


def kept(folder: Path) -> Conversation:
    """The conversation that was last changed."""
    return Store(folder / "crucible" / "conversations").all()[0]


def test_a_conversation_through_everything(
    make_server: Callable[..., Server], long_model: Path, tmp_path: Path
) -> None:
    server = make_server(model=long_model)
    with terminal("chat", "--server", server.url, XDG_DATA_HOME=str(tmp_path)) as chat:
        chat.until_shown("● connected   long")
        # Typed as fast as a paste: nothing overtakes anything.
        chat.press("one", "alt+enter", "two")
        chat.until_shown("│ two")
        chat.press("enter")
        chat.until_shown("▌ two")
        chat.press("f2")
        chat.until(lambda: server.metrics()["active"] == 1)
        chat.until(lambda: re.search(r"tokens a second +\d", chat.text))
        chat.resize(100, 30)
        chat.until(lambda: re.search(r"╭─+[^╮]+╮\n.+\n╰─{98}╯\n", chat.text) and "Ctrl+C" in chat.text.splitlines()[29])
        chat.press("escape")
        chat.until_shown("─ stopped after")
        assert server.wait_until_idle()["cancelled"] == 1
        question, reply = kept(tmp_path).turns
        assert question.text == "one\ntwo"
        tokens = int(re.findall(r"\d+", reply.note)[0])
        body = {"messages": [{"role": "user", "content": "one\ntwo"}], "max_tokens": tokens}
        whole = server.post("/v1/generate", json=body).json()["text"]
        # The last token's bytes may have been the beginning of a character.
        assert whole.rstrip("\N{REPLACEMENT CHARACTER}") == reply.text.rstrip("\N{REPLACEMENT CHARACTER}")

        chat.press("again", "enter")
        chat.until(lambda: server.metrics()["active"] == 1)
        stop(server, signal.SIGKILL)
        chat.until_shown("─ the connection was lost after")
        chat.until_shown("○ reconnecting")
        chat.press("ctrl+c")
        assert chat.wait() == 0
    assert kept(tmp_path).turns[-1].note.startswith("the connection was lost")


def test_a_server_that_is_started_again(make_server: Callable[..., Server], tmp_path: Path) -> None:
    server = make_server(backend="null")
    with terminal("chat", "--server", server.url, XDG_DATA_HOME=str(tmp_path), NO_COLOR="1") as chat:
        chat.until_shown("● connected   toy")
        family = [server.pid, *children(server.pid)]
        stop(server, signal.SIGKILL)
        server.process.wait()
        wait_until_gone(family)
        chat.until_shown("○ reconnecting")
        make_server("--port", str(server.port), backend="null")
        chat.until_shown("● connected   toy")
        chat.press("hello", "enter")
        chat.until_shown("the limit")
        os.kill(chat.pid, signal.SIGHUP)
        assert chat.wait() == 0
        styles = set(b";".join(re.findall(rb"\x1b\[([\d;]*)m", chat.raw)).split(b";"))
        assert styles <= {b"", b"0", b"1", b"2", b"3", b"4", b"7", b"39", b"49"}, "colours were used"
        assert b"\x1b[?1049l" in chat.raw, "the terminal was left as it was found"


@pytest.mark.parametrize("end", ["key", "kill"])
def test_a_model_of_its_own(toy_model: Path, tmp_path: Path, end: str) -> None:
    with terminal("chat", str(toy_model), "--backend", "null", XDG_DATA_HOME=str(tmp_path)) as chat:
        chat.until_shown("● connected   toy", 60)
        family = [pid for child in children(chat.pid) for pid in (child, *children(child))]
        assert len(family) == 2
        if end == "key":
            chat.press("hello", "enter")
            chat.until_shown("the limit")
            chat.press("ctrl+c")
        else:
            os.kill(chat.pid, signal.SIGKILL)
        assert chat.wait() == (0 if end == "key" else -signal.SIGKILL)
    wait_until_gone(family)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("MODEL", "--server", "http://x"), "give MODEL, which is then served here, or --server"),
        (("--server", "http://x"), "chat needs a terminal"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["crucible", "chat", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert message in said.splitlines()[-1]
    assert "Traceback" not in said


# ---- what it costs ------------------------------------------------------------------------------------------------


@contextmanager
def paced(fake: FakeServer) -> Iterator[FakeServer]:
    """A scripted server on a thread of its own."""
    loop, started = asyncio.new_event_loop(), threading.Event()

    async def serve() -> None:
        async with fake.running():
            started.set()
            await asyncio.Event().wait()

    task = loop.create_task(serve())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([task])))  # not its exception
    thread.start()
    started.wait()
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


def share(chat: Terminal, seconds: float) -> float:
    """Of a core, over a while."""
    before = chat.cpu_seconds
    chat.run(seconds)
    return (chat.cpu_seconds - before) / seconds


def test_little_is_used_when_idle_and_at_900_tokens_a_second(tmp_path: Path) -> None:
    words = ["Some", "*words*", "of", "a", "reply,", "in", "`Markdown`,", "and", "in", "paragraphs.", ""]
    texts = [f"{word} " if i % 80 else "\n\n" for i, word in enumerate(words * 400)]
    with (
        paced(FakeServer(texts=texts, pause=1 / 900)) as fake,
        terminal("chat", "--server", fake.url, XDG_DATA_HOME=str(tmp_path)) as chat,
    ):
        chat.until_shown("● connected")
        chat.run(0.5)
        idle = share(chat, 1.0)
        chat.press("go", "enter")
        chat.until_shown("of a reply")
        busy = share(chat, 1.5)
        chat.press("escape")
        chat.until_shown("stopped after")
    print(f"idle {idle:.1%}, at 900 tokens a second {busy:.1%}")
    # Twice what is meant, for slow machines.
    assert idle < 0.04
    assert busy < 0.20
