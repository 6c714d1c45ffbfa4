"""Take screenshots of pages, light and dark, at desktop and phone width.

    python scripts/bench/screenshots.py compare=PAGE.html explain=PAGE.html --to results/pages

Each shows the full page in a headless Chromium without a network: NAME-light-wide.png (1280 pixels),
NAME-light-phone.png (375 pixels) and both dark; NAME.png is the first screen. Exits with 1 if a page writes to its
console or is wider than its window. Needs Playwright (`pip install '.[test]'`) and Chromium.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from pathlib import Path

from browser import FLAGS, find_browser
from playwright.sync_api import Browser, sync_playwright

SIZES = {"wide": (1280, 900), "phone": (375, 812)}
THEMES = ("light", "dark")


def screenshot(
    browser: Browser, path: Path, theme: str, size: tuple[int, int], *, full_page: bool = True
) -> tuple[bytes, list[str]]:
    """Return a page as a PNG, and its problems."""
    width, height = size
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme, offline=True)
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(path.absolute().as_uri())
    at = 0
    while at < page.evaluate("document.body.scrollHeight"):  # figures are drawn when they come into view
        page.evaluate("at => window.scrollTo(0, at)", at)
        page.wait_for_timeout(300)
        at += height // 2
    page.evaluate("window.scrollTo(0, 0)")
    page.wait_for_timeout(300)
    if (page_width := page.evaluate("document.documentElement.scrollWidth")) > width:
        problems.append(f"the page is {page_width} pixels wide")
    png = page.screenshot(full_page=full_page)
    context.close()
    return png, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", metavar="NAME=PAGE.html")
    parser.add_argument("--to", type=Path, default=Path("results/pages"), help="folder (default: results/pages)")
    args = parser.parse_args()
    program = find_browser()
    if program is None:
        parser.error("no browser found; install one: apt-get install chromium")
    args.to.mkdir(parents=True, exist_ok=True)
    code = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=list(FLAGS), chromium_sandbox=os.geteuid() != 0
        )
        for page in args.pages:
            name, _, path = page.partition("=")
            pictures = {
                f"{name}-{theme}-{size}": screenshot(browser, Path(path), theme, pixels)
                for (size, pixels), theme in itertools.product(SIZES.items(), THEMES)
            }
            pictures[name] = screenshot(browser, Path(path), "light", SIZES["wide"], full_page=False)
            for target, (png, problems) in pictures.items():
                file = args.to / f"{target}.png"
                file.write_bytes(png)
                print(file, f"{file.stat().st_size / 1e3:.0f} kB", *problems, sep="  ")
                code |= bool(problems)
        browser.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
