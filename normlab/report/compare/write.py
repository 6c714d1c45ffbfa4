"""`normlab compare`: the page of a comparison, and its pictures."""

from __future__ import annotations

import shlex
import sys
import time
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from normlab.errors import ConfigError, one_line, unknown
from normlab.report.compare.data import Row, data
from normlab.report.compare.find import NOT_STARTED, find
from normlab.report.pages.shell import check_page, page, write_page
from normlab.store.files import write_atomic

HTML, PNG = "html", "png"
FORMATS = (HTML, PNG)
PAGE = "compare.html"
"""What the page is called unless a name is given."""
ASSETS = Path(__file__).parent / "assets"
NAMES = (
    "compare.css", "state.js", "picture.js", "answer.js", "table.js", "tables.js", "series.js", "curves.js", "rates.js",
    "panels.js", "matrix.js", "units.js", "profiles.js", "heatmaps.js", "signatures.js", "start.js",
)  # fmt: skip
"""Its styles and its scripts, in the order in which they are read: what is shown, a picture, each picture, the page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What is asked for beside the words."""

    by: str | None = None
    """The words that cells are made of, with commas between them."""
    where: Sequence[str] = ()
    """Conditions that the runs must meet."""
    output: Path | None = None
    """The page's name."""
    format: str = HTML
    """png: also its pictures, beside the page."""
    open: bool = False
    """Whether a browser is to show it."""
    results_dir: str = "results"
    """Where names are looked up."""
    version: str = ""
    """The normlab that writes the page."""


@dataclass(frozen=True, slots=True)
class Written:
    """What was found, and where it is."""

    answer: Sequence[str]
    """The sentences that the page begins with."""
    paths: Sequence[Path]
    """The files, the page last."""


def write_compare(words: Sequence[str], options: Options | None = None) -> Written:
    """Write the page of some runs; its warnings, and what is wrong with any of the runs, are said on stderr.

    Raises:
        ConfigError: A word, a condition, the format or the page's name is none.
        StoreError: There is no run, or the page could not be written.
    """
    options = options or Options()
    if options.format not in FORMATS:
        raise ConfigError(f"--format {options.format}: " + unknown("format", options.format, FORMATS))
    if options.output is not None:
        check_page(options.output, "-o")
    found = find(words, options.results_dir)
    path = options.output or found.home / PAGE
    by = None if options.by is None else [word.strip() for word in options.by.split(",")]
    shown = data(found, by, options.where)
    shown |= {"version": options.version, "written": time.time(), "command": _typed(words, options)}
    for line in _problems(shown):
        print(f"normlab: {one_line(line)}", file=sys.stderr)
    body = (ASSETS / "body.html").read_text(encoding="utf-8")
    write_page(path, page(shown["title"], body, shown, [ASSETS / name for name in NAMES]))
    pictures = _pictures(path) if options.format == PNG else []
    if options.open:
        webbrowser.open(path.resolve().as_uri())
    return Written(shown["answer"], [*pictures, path])


def _problems(shown: Row) -> list[str]:
    """The warnings, as `normlab summarize --by` has them, and a line for each run of which something cannot be read."""
    warnings, lines = shown["warnings"], []
    for run in shown["runs"]:
        problems = [problem for problem in run["problems"] if not any(problem in warning for warning in warnings)]
        if problems and run["state"] != NOT_STARTED:
            lines.append(f"run {run['id']}: {'; '.join(problems)}")
    return [*warnings, *lines]


def _pictures(page_path: Path) -> list[Path]:
    """Every figure of a page as an image beside it."""
    from normlab.report.pages.browser import export_images

    paths: list[Path] = []
    for name, content in export_images(page_path).items():
        paths.append(page_path.with_name(f"{page_path.stem}-{name}.png"))
        write_atomic(paths[-1], content)
    return paths


def _typed(words: Sequence[str], options: Options) -> str:
    """The command, as a shell takes it."""
    asked = [] if options.by is None else ["--by", options.by]
    asked += [part for condition in options.where for part in ("--where", condition)]
    asked += [] if options.output is None else ["-o", str(options.output)]
    asked += [] if options.format == HTML else ["--format", options.format]
    asked += [] if options.results_dir == "results" else ["--results-dir", options.results_dir]
    return shlex.join(["normlab", "compare", *words, *asked])
