"""Write the page of `normlab compare`, and its figures as images."""

from __future__ import annotations

import shlex
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from normlab.errors import ConfigError, unknown, warn
from normlab.report.compare.data import page_data
from normlab.report.pages.shell import check_page, page, write_page
from normlab.report.tables import Row
from normlab.store.files import write_atomic
from normlab.store.query import NOT_STARTED, select_runs

HTML, PNG = "html", "png"
FORMATS = (HTML, PNG)
PAGE = "compare.html"
"""The default file name of the page."""
ASSETS = Path(__file__).parent / "assets"
ASSET_NAMES = (
    "compare.css", "state.js", "picture.js", "losses.js", "tables.js", "series.js", "curves.js",
    "rates.js", "matrix.js", "units.js", "profiles.js", "heatmaps.js", "start.js",
)  # fmt: skip
"""Styles and scripts in loading order."""


def write_compare(
    names: Sequence[str], *, by: str | None = None, where: Sequence[str] = (), output: Path | None = None,
    format: str = HTML, open: bool = False, results_dir: str = "results", version: str = "",
) -> tuple[list[str], list[Path]]:  # fmt: skip
    """Write the comparison page of some runs, and print its warnings on stderr.

    Returns the summary sentences of the page, and the written files, the page last.

    Args:
        names: Runs, sweeps or folders, as for `query.select_runs`.
        by: The options that define cells, separated by commas; by default the options in which runs differ.
        where: Conditions that the runs must meet.
        output: The file of the page; by default in the sweep's folder.
        format: `html`, or `png` to also write each figure as an image beside the page.
        open: Open the page in a browser.
        results_dir: The folder in which names are looked up.
        version: The version of normlab that writes the page.

    Raises:
        ConfigError: A name, a condition, the format or the page's file name is invalid.
        StoreError: There is no run, or the page could not be written.
    """
    if format not in FORMATS:
        raise ConfigError(f"--format {format}: " + unknown("format", format, FORMATS))
    if output is not None:
        check_page(output, "-o")
    selection = select_runs(names, results_dir)
    path = output or selection.home / PAGE
    data = page_data(selection, None if by is None else [option.strip() for option in by.split(",")], where)
    flags = ["--by", by] if by is not None else []
    flags += [part for condition in where for part in ("--where", condition)]
    flags += ["-o", str(output)] if output is not None else []
    flags += ["--format", format] if format != HTML else []
    flags += ["--results-dir", results_dir] if results_dir != "results" else []
    command = shlex.join(["normlab", "compare", *names, *flags])
    data |= {"version": version, "written": time.time(), "command": command}
    for line in _warnings(data):
        warn(line)
    body = (ASSETS / "body.html").read_text(encoding="utf-8")
    write_page(path, page(data["title"], body, data, [ASSETS / name for name in ASSET_NAMES]))
    images: list[Path] = []
    if format == PNG:
        from normlab.report.pages.browser import export_images

        for name, content in export_images(path).items():
            images.append(path.with_name(f"{path.stem}-{name}.png"))
            write_atomic(images[-1], content)
    if open:
        webbrowser.open(path.resolve().as_uri())
    return data["summary"], [*images, path]


def _warnings(data: Row) -> list[str]:
    """Return the warnings of `normlab summarize --by`, and a line per unreadable run."""
    warnings, lines = data["warnings"], []
    for run in data["runs"]:
        problems = [problem for problem in run["problems"] if not any(problem in warning for warning in warnings)]
        if problems and run["state"] != NOT_STARTED:
            text = "; ".join(problems).replace(f" of run {run['id']}", "")
            lines.append(f"run {run['id']}: {text}")
    return [*warnings, *lines]
