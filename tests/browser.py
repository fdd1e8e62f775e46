"""A headless Chromium for tests: the system's own, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser. Skips the test where there is none, but never in CI.

    While it is open no other event loop runs in this thread.
    """
    is_ci = os.environ.get("CI") == "true"
    if not is_ci:
        pytest.importorskip("playwright", reason="Playwright is not installed")
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        if is_ci:
            pytest.fail("CI has no Chromium: .ci/run installs it")
        pytest.skip("no Chromium found; CHROMIUM may name one")
    with sync_playwright() as playwright:
        # Root has no sandbox, and a container's /dev/shm is small.
        arguments = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            browser.close()
