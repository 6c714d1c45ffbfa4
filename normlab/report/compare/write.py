"""The page of `normlab compare`: its data, its HTML and its file."""

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normlab.base.errors import warn
from normlab.base.version import __version__
from normlab.report.compare.data import page_data
from normlab.report.pages.shell import CHART, check_page, page, write_output
from normlab.report.tables import TableRow
from normlab.store.files import check_links
from normlab.store.query import Selection, select_runs

PAGE = "compare.html"
ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True, kw_only=True)
class ComparePage:
    """The comparison page of some runs.

    Raises:
        ConfigError: The page's file name is invalid.
    """

    names: Sequence[str] = ()
    """Runs, sweeps or folders, as for `query.select_runs`."""
    by: Sequence[str] | None = None
    """The factors; None for the options in which the runs differ."""
    where: Sequence[str] = ()
    channels: Mapping[str, Any] = field(default_factory=dict)
    """The options on `x`, `color` and `style`, and the list of options with a `panel` each."""
    output: Path | None = None
    """The file of the page; None for a file in the sweep's folder."""
    results_dir: str = "results"

    def __post_init__(self) -> None:
        if self.output is not None:
            check_page(self.output)

    def data(self, selection: Selection) -> TableRow:
        """Return the data of the page.

        Raises:
            ConfigError: A condition or a channel is invalid.
        """
        data = page_data(selection, self.by, self.where, self._channels)
        return data | {"version": __version__, "written": time.time(), "command": self._command}

    def html(self, data: TableRow) -> str:
        body = (ASSETS / "body.html").read_text(encoding="utf-8")
        assets = [*CHART, ASSETS / "compare.css", ASSETS / "compare.js"]
        return page(data["title"], body, data, assets)

    def write(self) -> tuple[list[str], Path]:
        """Write the page to its file, and print its warnings on stderr.

        Returns the summary sentences of the page, and the file.

        Raises:
            ConfigError: A name, a condition or a channel is invalid.
            StoreError: No run has started, the page could not be written, or a link leads out of the sweep's folder.
        """
        selection = select_runs(self.names, self.results_dir)
        path = self.output or selection.home / PAGE
        if self.output is None and selection.name and len(self.names) == 1:
            check_links(selection.home)
        data = self.data(selection)
        for line in [*data["warnings"], *data["problems"]]:
            warn(line)
        write_output(path, self.html(data).encode())
        return data["summary"], path

    @property
    def _channels(self) -> dict[str, Any]:
        chosen: dict[str, Any] = {}
        for channel, option in self.channels.items():
            if option is not None:
                chosen[channel] = option
        return chosen

    @property
    def _command(self) -> str:
        """The command that writes this page, which the page shows."""
        flags: list[str] = []
        if self.by is not None:
            flags += ["--by", ",".join(self.by)]
        for condition in self.where:
            flags += ["--where", condition]
        if self.results_dir != "results":
            flags += ["--results-dir", self.results_dir]
        for channel, option in self._channels.items():
            text = option if isinstance(option, str) else ",".join(option)
            flags += [f"--{channel}", text]
        if self.output is not None:
            flags += ["-o", str(self.output)]
        return shlex.join(["normlab", "compare", *self.names, *flags])
