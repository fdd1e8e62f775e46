"""The web page in a real browser, against a real server on a toy model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from browser import chromium
from serve_process import Server, serving

# How many tokens a reply has unless a test says otherwise.
SHORT = 12


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def chat_server(long_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of a model whose reply takes many seconds unless its length is limited."""
    with serving(long_model, tmp_path_factory.mktemp("log") / "page.txt", "--backend", "reference") as server:
        yield server


class Opened:
    """A page, and what it did that it should not."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1100, "height": 720}, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(15_000)
        self.trouble: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        self.page.on("dialog", lambda dialog: dialog.accept())
        self.host = urlsplit(url).netloc
        self.page.goto(url)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.trouble.append(message.text)

    def close(self) -> None:
        self.context.close()
        assert self.trouble == []
        assert self.hosts <= {self.host}

    # ---- what a person does

    def set(self, **values: Any) -> None:
        """Fill in settings; `decoding` chooses one."""
        self.page.click("#open-settings")
        for name, value in values.items():
            if name == "decoding":
                self.page.check(f"#settings input[value={value}]")
            else:
                self.page.fill(f"#set-{name}", str(value))
        self.page.keyboard.press("Escape")
        assert self.page.locator("#settings").is_hidden()

    def ask(self, text: str) -> None:
        """Send a message and wait until its reply is complete."""
        replies = self.page.locator(".reply footer").count()
        self.page.fill("#message", text)
        self.page.press("#message", "Enter")
        self.page.locator(".reply footer").nth(replies).wait_for()

    def until(self, expression: str, seconds: float = 15.0) -> None:
        """Wait until JavaScript is true; the page's policy lets Playwright's own way of waiting not run."""
        deadline = time.monotonic() + seconds
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, f"not within {seconds} s: {expression}"
            self.page.wait_for_timeout(20)

    def kept(self) -> list[Any]:
        """The conversations in this browser, newest first."""
        found = self.page.evaluate(
            "Object.entries(localStorage).filter(([k]) => k.startsWith('crucible.conversation.')).map(([, v]) => v)"
        )
        return sorted(map(json.loads, found), key=lambda one: -one["updated"])

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Opened]]:
    opened: list[Opened] = []

    def open_it(server: Server, **options: Any) -> Opened:
        opened.append(Opened(browser, server.url, **options))
        return opened[-1]

    yield open_it
    for one in opened:
        one.close()


@pytest.fixture
def at(open_page: Callable[..., Opened], chat_server: Server) -> Opened:
    """The page of the shared server, with short replies."""
    at = open_page(chat_server)
    at.set(max_tokens=SHORT)
    return at


# ---- conversations ------------------------------------------------------------------------------------------------


def test_a_message_is_answered_as_the_api_answers_it(at: Opened, chat_server: Server) -> None:
    at.set(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=7, system="Be brief.")
    at.ask("Hello there")
    at.ask("And again")
    (kept,) = at.kept()
    assert [message["role"] for message in kept["messages"]] == ["user", "assistant"] * 2
    first, second = (message["variants"][0] for message in kept["messages"][1::2])
    body = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 7, "max_tokens": SHORT}
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]
    alone = chat_server.post("/v1/generate", json={**body, "messages": said}).json()
    assert (first["text"], first["token_ids"]) == (alone["text"], alone["token_ids"])
    said += [{"role": "assistant", "content": first["text"]}, {"role": "user", "content": "And again"}]
    alone = chat_server.post("/v1/generate", json={**body, "messages": said}).json()
    assert (second["text"], second["token_ids"]) == (alone["text"], alone["token_ids"])
    facts = at.texts(".reply .facts")[0]
    assert f"{len(first['token_ids'])} tokens" in facts
    assert "to the first" in facts
    assert "tokens/s" in facts
    assert "seed 7" in facts


def test_a_reply_streams_and_escape_keeps_what_has_come(open_page: Callable[..., Opened], chat_server: Server) -> None:
    at = open_page(chat_server)
    at.page.fill("#message", "Go on for long")
    at.page.press("#message", "Enter")
    text = at.page.locator(".reply.running .text")
    at.until("document.querySelector('.reply.running .text')?.textContent.length > 20")
    assert at.page.get_attribute(".reply", "aria-busy") == "true"
    assert at.page.get_attribute("#send", "aria-label") == "Stop"
    before = text.inner_text()
    at.until(f"document.querySelector('.reply .text').innerText.length > {len(before)}")
    at.page.keyboard.press("Escape")
    at.page.locator(".reply.stopped").wait_for()
    assert "Stopped." in at.texts(".reply footer .label")
    (kept,) = at.kept()
    reply = kept["messages"][1]["variants"][0]
    assert reply["status"] == "stopped"
    assert len(reply["text"]) > 20
    assert chat_server.wait_until_idle()["cancelled"] > 0
    # What came of it can be had again as well.
    at.page.click(".reproduce")
    at.page.click(".reproduce-dialog button[type=submit]")
    at.page.locator(".reproduce-dialog .verdict.good").wait_for()


def test_leaving_in_the_middle_keeps_what_has_come(open_page: Callable[..., Opened], chat_server: Server) -> None:
    at = open_page(chat_server)
    at.page.fill("#message", "Go on for long")
    at.page.click("#send")
    at.until("document.querySelector('.reply.running .text')?.textContent.length > 20")
    at.page.reload()
    at.page.locator(".reply.stopped").wait_for()
    assert len(at.page.locator(".reply .text").inner_text()) > 20
    chat_server.wait_until_idle()


def test_a_reload_keeps_conversations_and_settings(at: Opened) -> None:
    at.set(decoding="greedy")
    at.ask("The first\nof two")
    at.page.click("#new-chat")
    at.ask("The second")
    shown = at.texts(".said, .reply .text")
    at.page.reload()
    at.page.locator(".reply footer").wait_for()
    assert at.texts(".said, .reply .text") == shown
    assert at.texts("#conversations .title") == ["The second", "The first of two"]
    assert at.page.inner_text("#summary") == f"Greedy, at most {SHORT} tokens"
    at.page.click("#conversations .title >> nth=1")
    assert at.texts(".said") == ["The first\nof two"]
    at.page.hover("#conversations li >> nth=1")
    at.page.click("#conversations li >> nth=1 >> .quiet")
    assert at.texts("#conversations .title") == at.texts(".said") == ["The second"]
    assert len(at.kept()) == 1


def test_an_earlier_message_is_edited_and_sent_again(at: Opened) -> None:
    for text in ("One", "Two", "Three"):
        at.ask(text)
    at.page.hover(".user >> nth=1")
    at.page.click(".user >> nth=1 >> [aria-label='Edit and send again']")
    at.page.fill(".edit textarea", "Another")
    at.page.press(".edit textarea", "Escape")
    assert at.texts(".said") == ["One", "Two", "Three"]
    at.page.hover(".user >> nth=1")
    at.page.click(".user >> nth=1 >> [aria-label='Edit and send again']")
    assert "What follows is replaced." in at.texts(".edit .fine")
    at.page.fill(".edit textarea", "Another")
    at.page.press(".edit textarea", "Enter")
    at.until("document.querySelectorAll('.reply footer').length === 2")
    assert at.texts(".said") == ["One", "Another"]
    assert [one.get("content") for one in at.kept()[0]["messages"][::2]] == ["One", "Another"]


def test_another_seed_gives_another_reply_and_both_stay(at: Opened) -> None:
    at.set(temperature=2)
    at.ask("Surprise me")
    at.page.click(".regenerate")
    at.page.locator(".variants").wait_for()
    assert at.page.evaluate("document.activeElement.id") == "message"
    first, second = at.kept()[0]["messages"][1]["variants"]
    assert first["seed"] != second["seed"]
    assert first["token_ids"] != second["token_ids"]
    assert "2 of 2" in at.page.inner_text(".variants")
    at.page.click("[aria-label='Previous reply']")
    assert f"seed {first['seed']}" in at.page.inner_text(".facts")
    at.page.reload()
    assert "1 of 2" in at.page.inner_text(".variants")


def test_the_same_text_comes_again_and_another_is_noticed(at: Opened) -> None:
    at.ask("Say something")
    at.page.click(".reproduce")
    line = json.loads(at.page.input_value("#line"))
    assert set(line) == {"model", "fingerprint", "request", "token_ids"}
    at.page.click(".reproduce-dialog button[type=submit]")
    at.page.locator(".reproduce-dialog .verdict.good").wait_for()
    assert f"all {SHORT} tokens are identical" in at.page.inner_text(".reproduce-dialog .verdict")
    assert at.page.inner_text(".again") == at.kept()[0]["messages"][1]["variants"][0]["text"]
    line["token_ids"][4] += 1
    at.page.fill("#line", json.dumps(line))
    at.page.click(".reproduce-dialog button[type=submit]")
    at.page.locator(".reproduce-dialog .verdict.bad").wait_for()
    assert "from token 5 on" in at.page.inner_text(".reproduce-dialog .verdict")
    at.page.fill("#line", "no line")
    at.page.click(".reproduce-dialog button[type=submit]")
    assert "no line of reproduction" in at.page.inner_text(".reproduce-dialog .verdict")


def test_a_refusal_is_told_in_the_servers_words(open_page: Callable[..., Opened], null_server: Server) -> None:
    at = open_page(null_server)
    at.set(max_tokens=4000)
    at.ask("Too much")
    assert "do not fit the context of 256" in at.page.inner_text(".reply .label")
    assert len(at.trouble) == 1  # the browser's own line about a status of 400
    assert "400" in at.trouble.pop()
    # What was not answered is no part of what is said next, and another try takes its place.
    at.set(max_tokens=4)
    with at.page.expect_request("**/stream") as sent:
        at.ask("Less")
    assert [message["content"] for message in sent.value.post_data_json["messages"]] == ["Less"]
    at.page.reload()
    assert at.texts(".said") == ["Too much", "Less"]


def test_a_key_is_asked_for_until_it_is_right(
    open_page: Callable[..., Opened], make_server: Callable[..., Server]
) -> None:
    at = open_page(make_server("--api-key", "secret"))
    at.set(max_tokens=4)
    at.page.click("nav a[href='#/service']")
    at.page.click(".key-dialog .outlined")
    at.page.wait_for_timeout(1200)
    assert not at.page.locator(".key-dialog").count()
    assert at.texts("#view-service .verdict") == ["The server asks for a key."]
    at.page.click("nav a[href='#/chat']")
    at.page.fill("#message", "Let me in")
    at.page.press("#message", "Enter")
    at.page.fill("#key", "wrong")
    at.page.press("#key", "Enter")
    at.page.get_by_text("That key was not accepted").wait_for()
    at.page.fill("#key", "secret")
    at.page.press("#key", "Enter")
    at.page.locator(".reply.done").wait_for()
    assert all("401" in line for line in at.trouble)
    at.trouble.clear()
    at.page.reload()
    at.ask("It is kept")
    assert "secret" not in at.page.evaluate("JSON.stringify(localStorage)")


# ---- the other views ----------------------------------------------------------------------------------------------


def test_the_service_is_seen_to_move(open_page: Callable[..., Opened], chat_server: Server) -> None:
    at = open_page(chat_server)
    at.page.click("nav a[href='#/service']")
    at.page.locator("#uptime").wait_for()
    tiles = at.texts(".tile dd")
    chat_server.post("/v1/generate", json={"prompt": "the cat", "max_tokens": 60, "ignore_eos": True})
    at.until(
        "Number(document.querySelectorAll('.tile dd')[5].textContent.replace(',', '')) > "
        + tiles[5].replace("–", "0").replace(",", "")
    )
    at.until("/median \\d/.test(document.querySelectorAll('.plot svg')[4].getAttribute('aria-label'))")
    assert at.page.locator(".plot svg").count() == 6
    at.until("[...document.querySelectorAll('.plot .line.main')].some((path) => path.getAttribute('d').includes('L'))")
    # Nobody looks: nobody asks.
    at.page.click("nav a[href='#/chat']")
    at.page.wait_for_timeout(100)
    asked: list[str] = []
    at.page.on("request", lambda request: asked.append(request.url))
    at.page.wait_for_timeout(1300)
    assert not [url for url in asked if url.endswith("/metrics")]


def test_tokens_show_what_else_could_have_stood_there(at: Opened) -> None:
    at.set(decoding="greedy")
    at.page.click("nav a[href='#/tokens']")
    at.page.fill("#token-prompt", "the cat")
    at.page.fill("#token-limit", "10")
    at.page.press("#token-prompt", "Enter")
    at.page.locator("[data-token='9']").wait_for()
    at.page.locator("[aria-selected=true]").wait_for()
    at.page.click("[data-token='3']")
    assert "Token 4 of 10" in at.page.inner_text(".token-side")
    shares = [float(share.strip("<> %")) for share in at.texts(".bars li .share")]
    assert len(shares) == 6
    assert shares[:5] == sorted(shares[:5], reverse=True)
    assert sum(shares) == pytest.approx(100, abs=1.5)
    assert at.page.locator(".bars .drawn").count() == 1
    at.page.keyboard.press("ArrowRight")
    assert "Token 5 of 10" in at.page.inner_text(".token-side")
    kept = at.texts(".token[data-token]")[:4]
    at.page.click(".bars li >> nth=1 >> button")
    at.page.locator(".token.forced").wait_for()
    at.page.locator("[data-token='9']").wait_for()
    assert at.texts(".token[data-token]")[:4] == kept
    assert at.page.get_attribute(".token.forced", "data-token") == "4"


def test_tokens_of_a_reply_are_those_of_the_reply(at: Opened) -> None:
    at.set(seed=3)
    at.ask("Hello")
    text = at.kept()[0]["messages"][1]["variants"][0]["token_ids"]
    at.page.click("[aria-label='What the model considered']")
    at.page.locator(f"[data-token='{SHORT - 1}']").wait_for()
    at.page.locator("[aria-selected=true]").wait_for()
    ids = []
    for position in range(SHORT):
        at.page.click(f"[data-token='{position}']")
        ids.append(int(at.page.inner_text(".bars .drawn .name small")))
    assert ids == text


# ---- for everyone -------------------------------------------------------------------------------------------------


def test_it_is_used_by_keys_alone(at: Opened) -> None:
    at.page.reload()
    at.page.keyboard.type("one")
    at.page.keyboard.press("Shift+Enter")
    at.page.keyboard.type("two")
    at.page.keyboard.press("Enter")
    at.page.locator(".reply footer").wait_for()
    assert at.texts(".said") == ["one\ntwo"]
    assert at.page.evaluate("document.activeElement.id") == "message"
    at.until("document.querySelector('#announcer').textContent.includes('limit of tokens')")
    for _ in range(20):
        at.page.keyboard.press("Shift+Tab")
        if at.page.locator(".skip:focus-visible").count():
            break
    assert at.page.locator(".skip").bounding_box()["y"] >= 0
    at.page.keyboard.press("Enter")
    assert at.page.evaluate("document.activeElement.id") == "main"


def test_every_control_has_a_name(at: Opened) -> None:
    at.ask("Hello")
    at.page.click("#open-settings")
    nameless = """() => [...document.querySelectorAll('button, a, input, textarea')]
        .filter((one) => !(one.getAttribute('aria-label') || one.textContent.trim() || one.labels?.length))
        .map((one) => one.outerHTML)"""
    for view in ("chat", "tokens", "service"):
        at.page.click(f"nav a[href='#/{view}']")
        assert at.page.evaluate(nameless) == []


def test_light_and_dark_follow_the_system_or_the_switch(open_page: Callable[..., Opened], null_server: Server) -> None:
    def ground() -> str:
        return str(at.page.evaluate("getComputedStyle(document.body).backgroundColor"))

    at = open_page(null_server, color_scheme="dark")
    dark = ground()
    at.page.click("#theme")
    light = ground()
    assert light != dark
    at.page.reload()
    assert ground() == light
    at.page.click("#theme")
    assert ground() == dark


def test_nothing_is_wider_than_a_phone(open_page: Callable[..., Opened], chat_server: Server) -> None:
    at = open_page(chat_server, has_touch=True)
    at.page.set_viewport_size({"width": 360, "height": 640})
    at.set(max_tokens=SHORT)
    at.ask("A long word: " + "x" * 200)
    for view in ("chat", "tokens", "service"):
        at.page.click(f"nav a[href='#/{view}']")
        wide = f"[document.scrollingElement, document.querySelector('#view-{view}')].map((e) => e.scrollWidth)"
        assert max(at.page.evaluate(wide)) <= 360
    at.page.click("nav a[href='#/chat']")
    at.page.click("#open-list")
    at.page.locator("#conversations .title").wait_for()
    at.page.click("#new-chat")
    assert at.page.locator("#sidebar").is_hidden()
