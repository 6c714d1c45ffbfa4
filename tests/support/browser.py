"""A browser for tests of pages: headless Chromium without a network, driven by Playwright.

Without a browser the tests are skipped, or fail if `NORMLAB_BROWSER=required` is set, as in CI.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from browser import FLAGS, NAMES, find_browser
from playwright.sync_api import Browser, Page, sync_playwright

WIDE, PHONE = (1280, 900), (375, 812)


def executable() -> str:
    """Return the path of the browser; skip or fail the test without one."""
    path = find_browser()
    if path is None:
        give_up = pytest.fail if os.environ.get("NORMLAB_BROWSER") == "required" else pytest.skip
        give_up(f"{NAMES[0]} is not installed: apt-get install chromium")
    return path


Theme = Literal["light", "dark"]


@contextmanager
def start_browser() -> Iterator[Browser]:
    """Start a browser until the end of the block."""
    program = executable()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, path: Path, size: tuple[int, int] = WIDE, theme: Theme = "light") -> Iterator[Page]:
    """Open a local page without a network; it must make no request and write nothing to its console."""
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=theme, offline=True, accept_downloads=True
    )
    page = context.new_page()
    messages: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: messages.append(f"error: {error}"))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.absolute().as_uri())
    try:
        yield page
        page.wait_for_timeout(50)
    finally:
        context.close()
    local = (path.absolute().as_uri(), "data:", "blob:")
    assert [url for url in requests if not url.startswith(local)] == []
    assert messages == []
