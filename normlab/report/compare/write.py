"""Write the page of `normlab compare`."""

from __future__ import annotations

import shlex
import time
import webbrowser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normlab.errors import warn
from normlab.report.compare.data import page_data
from normlab.report.pages.shell import CHART, check_page, page, write_page
from normlab.store.query import select_runs

PAGE = "compare.html"
"""The default file name of the page."""
ASSETS = Path(__file__).parent / "assets"


def write_compare(
    names: Sequence[str], *, by: Sequence[str] | None = None, where: Sequence[str] = (),
    channels: Mapping[str, Any] | None = None, output: Path | None = None, open: bool = False,
    results_dir: str = "results", version: str = "",
) -> tuple[list[str], Path]:  # fmt: skip
    """Write the comparison page of some runs, and print its warnings on stderr.

    Returns the summary sentences of the page, and the page's file.

    Args:
        names: Runs, sweeps or folders, as for `query.select_runs`.
        by: The factors; by default the options in which the runs differ.
        where: Conditions that the runs must meet.
        channels: The options on `x`, `color` and `style`, and the list of options with a `panel` each.
        output: The file of the page; by default in the sweep's folder.
        open: Open the page in a browser.
        results_dir: The folder in which names are looked up.
        version: The version of normlab that writes the page.

    Raises:
        ConfigError: A name, a condition, a channel or the page's file name is invalid.
        StoreError: There is no run, or the page could not be written.
    """
    if output is not None:
        check_page(output, "-o")
    selection = select_runs(names, results_dir)
    path = output or selection.home / PAGE
    channels = {channel: option for channel, option in (channels or {}).items() if option is not None}
    data = page_data(selection, by, where, channels)
    flags = ["--by", ",".join(by)] if by is not None else []
    flags += [part for condition in where for part in ("--where", condition)]
    flags += ["--results-dir", results_dir] if results_dir != "results" else []
    figure_flags = list(flags)
    for channel, option in channels.items():
        flags += [f"--{channel}", option if isinstance(option, str) else ",".join(option)]
    flags += ["-o", str(output)] if output is not None else []
    command = shlex.join(["normlab", "compare", *names, *flags])
    data |= {"version": version, "written": time.time(), "command": command, "figure": ""}
    if len(names) < 2:  # `normlab figure` takes one sweep or folder
        data["figure"] = shlex.join([*(names or [results_dir]), *figure_flags])
    for line in [*data["warnings"], *data["problems"]]:
        warn(line)
    body = (ASSETS / "body.html").read_text(encoding="utf-8")
    write_page(path, page(data["title"], body, data, [*CHART, ASSETS / "compare.css", ASSETS / "compare.js"]))
    if open:
        webbrowser.open(path.resolve().as_uri())
    return data["summary"], path
