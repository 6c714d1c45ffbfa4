"""Write the page of `normlab compare`, and its figures as images."""

from __future__ import annotations

import shlex
import sys
import time
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from normlab.errors import ConfigError, one_line, unknown
from normlab.report.compare.data import Row, page_data
from normlab.report.pages.shell import check_page, page, write_page
from normlab.store.files import write_atomic
from normlab.store.query import NOT_STARTED, select_runs

HTML, PNG = "html", "png"
FORMATS = (HTML, PNG)
PAGE = "compare.html"
"""The default name of the page."""
ASSETS = Path(__file__).parent / "assets"
ASSET_NAMES = (
    "compare.css", "state.js", "picture.js", "answer.js", "tables.js", "series.js", "curves.js",
    "rates.js", "matrix.js", "units.js", "profiles.js", "heatmaps.js", "start.js",
)  # fmt: skip
"""Styles and scripts in loading order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of the command."""

    by: str | None = None
    """The options that define cells, separated by commas."""
    where: Sequence[str] = ()
    """Conditions that the runs must meet."""
    output: Path | None = None
    """The file of the page."""
    format: str = HTML
    """png: also write each figure as an image beside the page."""
    open: bool = False
    """Open the page in a browser."""
    results_dir: str = "results"
    version: str = ""
    """The version of normlab that writes the page."""


@dataclass(frozen=True, slots=True)
class Written:
    """The result of the command."""

    summary: Sequence[str]
    """The sentences that open the page."""
    paths: Sequence[Path]
    """The written files, the page last."""


def write_compare(names: Sequence[str], options: Options | None = None) -> Written:
    """Write the comparison page of some runs; print its warnings and unreadable records on stderr.

    Raises:
        ConfigError: A name, a condition, the format or the page's file name is invalid.
        StoreError: There is no run, or the page could not be written.
    """
    options = options or Options()
    if options.format not in FORMATS:
        raise ConfigError(f"--format {options.format}: " + unknown("format", options.format, FORMATS))
    if options.output is not None:
        check_page(options.output, "-o")
    selection = select_runs(names, options.results_dir)
    path = options.output or selection.home / PAGE
    by = None if options.by is None else [option.strip() for option in options.by.split(",")]
    data = page_data(selection, by, options.where)
    data |= {"version": options.version, "written": time.time(), "command": _command_line(names, options)}
    for line in _warnings(data):
        print(f"normlab: {one_line(line)}", file=sys.stderr)
    body = (ASSETS / "body.html").read_text(encoding="utf-8")
    write_page(path, page(data["title"], body, data, [ASSETS / name for name in ASSET_NAMES]))
    images = _write_images(path) if options.format == PNG else []
    if options.open:
        webbrowser.open(path.resolve().as_uri())
    return Written(data["summary"], [*images, path])


def _warnings(data: Row) -> list[str]:
    """Return the warnings of `normlab summarize --by`, and a line for each run with an unreadable record."""
    warnings, lines = data["warnings"], []
    for run in data["runs"]:
        problems = [problem for problem in run["problems"] if not any(problem in warning for warning in warnings)]
        if problems and run["state"] != NOT_STARTED:
            lines.append(f"run {run['id']}: {'; '.join(problems)}")
    return [*warnings, *lines]


def _write_images(page_path: Path) -> list[Path]:
    """Write every figure of a page as an image beside it."""
    from normlab.report.pages.browser import export_images

    paths: list[Path] = []
    for name, content in export_images(page_path).items():
        paths.append(page_path.with_name(f"{page_path.stem}-{name}.png"))
        write_atomic(paths[-1], content)
    return paths


def _command_line(names: Sequence[str], options: Options) -> str:
    """Return the command, quoted for a shell."""
    flags = [] if options.by is None else ["--by", options.by]
    flags += [part for condition in options.where for part in ("--where", condition)]
    flags += [] if options.output is None else ["-o", str(options.output)]
    flags += [] if options.format == HTML else ["--format", options.format]
    flags += [] if options.results_dir == "results" else ["--results-dir", options.results_dir]
    return shlex.join(["normlab", "compare", *names, *flags])
