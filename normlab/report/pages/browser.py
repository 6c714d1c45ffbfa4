"""A page's pictures as PNG: an installed Chromium or Chrome opens the page, and the page draws them itself.

The browser has no window and no network. It is driven by Playwright, an extra: `pip install 'normlab[images]'`.
"""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from normlab.errors import NormlabError, one_line

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""What a browser's program is called."""
FLAGS = ("--disable-gpu", "--disable-background-networking", "--disable-component-update")
"""It has no screen, and asks nothing of anyone."""
PATIENCE_S = 60.0
"""How long it may take, from its start to the last picture."""
_PNG = "data:image/png;base64,"


def find_browser() -> str | None:
    """The program of a browser that is installed, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def export_images(page: Path) -> dict[str, bytes]:
    """A page's pictures, PNG by name, as its own function `exportPictures` draws them.

    Raises:
        NormlabError: There is no Playwright or no browser, it died or took too long, or the page draws no pictures.
    """
    try:
        import playwright  # noqa: F401
    except ImportError as error:
        raise NormlabError(
            "PNG needs Playwright, which is not installed: pip install 'normlab[images]', or write the page as HTML"
        ) from error
    program = find_browser()
    if program is None:
        raise NormlabError(
            f"PNG needs a browser, and none of {', '.join(NAMES)} is on the PATH: install Chromium or Chrome "
            "(Debian: apt-get install chromium), or write the page as HTML"
        )
    # In a thread of its own: a notebook has an event loop in the one that calls.
    with ThreadPoolExecutor(1) as thread:
        pictures = thread.submit(asyncio.run, _drawn(page, program)).result()
    return {picture["name"]: base64.b64decode(picture["png"].removeprefix(_PNG)) for picture in pictures}


async def _drawn(page: Path, program: str) -> list[dict[str, Any]]:
    """What the page's function gives."""
    from playwright.async_api import Error, async_playwright

    try:
        async with asyncio.timeout(PATIENCE_S), async_playwright() as playwright:
            # Playwright would go without the sandbox; Chromium itself refuses it to root alone.
            browser = await playwright.chromium.launch(
                executable_path=program, args=list(FLAGS), chromium_sandbox=os.geteuid() != 0, timeout=0
            )
            try:
                context = await browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
                tab = await context.new_page()
                await tab.goto(page.absolute().as_uri(), timeout=0)
                if await tab.evaluate("typeof exportPictures") != "function":
                    raise NormlabError(f"{page}: draws no pictures that could be exported; write the page again")
                return await tab.evaluate("exportPictures()")
            finally:
                await browser.close()
    except TimeoutError as error:
        raise NormlabError(
            f"{page}: {program} has not drawn its pictures in {PATIENCE_S:g} s; try again where less is running, or "
            "write the page as HTML"
        ) from error
    except Error as error:
        raise NormlabError(
            f"{page}: {program} could not draw its pictures ({_reason(error.message)}); see whether it opens the page, "
            "or write the page as HTML"
        ) from error


def _reason(message: str) -> str:
    """Why, of what Playwright says: the browser's own last words where they are told, else the first line."""
    lines = message.splitlines()
    own = [line.rpartition("[err]")[2] for line in lines if "[err]" in line]
    fatal = [line for line in own if "FATAL" in line]  # a trace of addresses follows it
    return one_line((fatal or own or lines[:1] or ["no reason was given"])[-1])
