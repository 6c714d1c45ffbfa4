"""A real browser for pages: Debian's Chromium, without a screen and without a network, driven by Playwright.

Where `NORMLAB_BROWSER=required` is set, as in CI, its absence is a failure; elsewhere what needs it is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from normlab.report.pages.browser import FLAGS, NAMES, find_browser

WIDE, PHONE = (1280, 900), (375, 812)


def executable() -> str:
    """The browser's program; skips, or fails where it is required."""
    found = find_browser()
    if found is None:
        give_up = pytest.fail if os.environ.get("NORMLAB_BROWSER") == "required" else pytest.skip
        give_up(f"there is no {NAMES[0]} here: apt-get install chromium")
    return found


@contextmanager
def started() -> Iterator[Browser]:
    """A browser, until the block ends."""
    program = executable()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, path: Path, size: tuple[int, int] = WIDE, theme: str = "light") -> Iterator[Page]:
    """A page from the disk, in a browser that has no network.

    At the end of the block it must have asked nothing of any network, and have had nothing to say on its console.
    """
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=theme, offline=True, accept_downloads=True
    )
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.absolute().as_uri())
    try:
        yield page
        page.wait_for_timeout(50)
    finally:
        context.close()
    own = (path.absolute().as_uri(), "data:", "blob:")
    assert [url for url in asked if not url.startswith(own)] == []
    assert said == []
