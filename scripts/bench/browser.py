"""The browser of the page's tests and benchmark: an installed Chromium or Chrome, driven by Playwright."""

import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""The programs to look up on the PATH, in this order."""
FLAGS = ("--disable-gpu", "--disable-background-networking", "--disable-component-update")
"""Command-line flags: no GPU, and no background requests."""


def find_browser() -> str | None:
    """Return the path of an installed browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)
