"""`normlab list`."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from normlab.cli.app import ResultsDir, app, echo
from normlab.errors import ConfigError, unknown
from normlab.plugins import load_plugins


def _kinds() -> list[str]:
    from normlab.report.entries import ENTRIES

    return [*ENTRIES, "auto", "runs"]


@app.command("list")
def list_(
    what: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            autocompletion=_kinds,
            help="norms, placements, models, data, optim, init, options, stats, auto or runs.",
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME|plugins=[FILE]", help="An entry to describe; for runs, a sweep, run or folder."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with every option.")] = False,
    results_dir: ResultsDir = "results",
) -> None:
    """List norms, placements, models, runs and more.

    With plugins=[my_norm.py] the list includes the norms and placements of your own files.
    """
    from normlab.config import rules
    from normlab.report.entries import ENTRIES, entry_text, one_entry, table_rows
    from normlab.report.runs_table import list_runs
    from normlab.report.tables import render

    plugins = [argument for argument in arguments or [] if argument.startswith("plugins=")]
    names = [argument for argument in arguments or [] if argument not in plugins]
    if len(names) > 1:
        raise ConfigError(f"list {what} {' '.join(names)}: too many names; choose one")
    name = names[0] if names else None
    load_plugins([])
    if plugins:
        from normlab.config.compose import register_plugins

        register_plugins(plugins)
    kinds = {"runs": lambda: list_runs(name or results_dir, results_dir), "auto": rules.rows, **ENTRIES}
    if what not in kinds:
        raise ConfigError(unknown("kind", what, kinds))
    if what == "auto" and name is not None:
        raise ConfigError(f"list auto {name}: is a table without entries to describe; leave out {name}")
    if what != "runs" and name is not None:
        width = shutil.get_terminal_size((100, 24)).columns
        return echo(render([one_entry(what, name)], "json") if json else entry_text(what, name, width), keep="\n")
    rows = kinds[what]()
    echo(
        render(rows if json or what in ("runs", "auto") else table_rows(what, rows), "json" if json else "table"),
        keep="\n",
    )
    if what == "auto" and not json:
        echo(rules.LEGEND)
