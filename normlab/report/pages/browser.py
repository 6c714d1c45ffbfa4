"""Export the figures of a page as PNG, drawn by a headless Chromium or Chrome without network.

Needs Playwright: `pip install 'normlab[images]'`.
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
"""The browser programs to look up on the PATH, in this order."""
FLAGS = ("--disable-gpu", "--disable-background-networking", "--disable-component-update")
"""Command-line flags of the browser: no GPU, and no background requests."""
TIMEOUT_S = 60.0
"""Time limit from the start of the browser to the last figure."""
_PNG = "data:image/png;base64,"


def find_browser() -> str | None:
    """Return the path of an installed browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def export_images(page: Path) -> dict[str, bytes]:
    """Return a page's figures as PNG, by name; the page's function `exportFigures` draws them.

    Raises:
        NormlabError: Playwright or a browser is missing, the browser failed or timed out, or the page has no figures.
    """
    try:
        import playwright  # noqa: F401
    except ImportError as error:
        raise NormlabError(
            "PNG export needs Playwright, which is not installed: pip install 'normlab[images]', or write HTML only"
        ) from error
    program = find_browser()
    if program is None:
        raise NormlabError(
            f"PNG export needs a browser, and none of {', '.join(NAMES)} is on the PATH: install Chromium or Chrome "
            "(Debian: apt-get install chromium), or write HTML only"
        )
    # The caller's thread can already have an event loop, as in a notebook.
    with ThreadPoolExecutor(1) as thread:
        figures = thread.submit(asyncio.run, _draw(page, program)).result()
    return {figure["name"]: base64.b64decode(figure["png"].removeprefix(_PNG)) for figure in figures}


async def _draw(page: Path, program: str) -> list[dict[str, Any]]:
    from playwright.async_api import Error, async_playwright

    try:
        async with asyncio.timeout(TIMEOUT_S), async_playwright() as playwright:
            # Playwright disables the sandbox by default, but Chromium needs that only for root.
            browser = await playwright.chromium.launch(
                executable_path=program, args=list(FLAGS), chromium_sandbox=os.geteuid() != 0, timeout=0
            )
            try:
                context = await browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
                tab = await context.new_page()
                await tab.goto(page.absolute().as_uri(), timeout=0)
                if await tab.evaluate("typeof exportFigures") != "function":
                    raise NormlabError(f"{page}: has no figures to export; write the page again")
                return await tab.evaluate("exportFigures()")
            finally:
                await browser.close()
    except TimeoutError as error:
        raise NormlabError(
            f"{page}: {program} did not draw the figures within {TIMEOUT_S:g} s; try again on an idle machine, or "
            "write HTML only"
        ) from error
    except Error as error:
        raise NormlabError(
            f"{page}: {program} could not draw the figures ({_reason(error.message)}); check that it opens the page, "
            "or write HTML only"
        ) from error


def _reason(message: str) -> str:
    """Return the last error line of the browser in a Playwright message, else the first line."""
    lines = message.splitlines()
    errors = [line.rpartition("[err]")[2] for line in lines if "[err]" in line]
    fatal = [line for line in errors if "FATAL" in line]  # a stack trace follows it
    return one_line((fatal or errors or lines[:1] or ["unknown reason"])[-1])
