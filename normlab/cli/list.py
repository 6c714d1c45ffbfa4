"""`normlab list`."""

import shutil
from typing import Annotated, Literal

from typer import Argument

from normlab.cli.app import Json, app, echo
from normlab.errors import ConfigError
from normlab.plugins import load_plugins

Kind = Literal["norms", "placements", "models", "recipes", "data", "optim", "init", "options", "stats", "names", "auto"]


@app.command("list")
def list_(
    what: Annotated[Kind, Argument(metavar="KIND", help=f"{', '.join(Kind.__args__)}.")],
    arguments: Annotated[
        list[str] | None,
        Argument(metavar="NAME|plugins=[FILE]", help="An entry to describe."),
    ] = None,
    json: Json = False,
) -> None:
    """List norms, placements, models and more.

    With plugins=[my_norm.py] the list includes the norms and placements of your own files.
    """
    from normlab.config import rules
    from normlab.report.entries import ENTRIES, entry_text, one_entry, table_rows
    from normlab.report.tables import render

    plugins = [argument for argument in arguments or [] if argument.startswith("plugins=")]
    names = [argument for argument in arguments or [] if argument not in plugins]
    if len(names) > (what not in ("auto", "names")):
        raise ConfigError(f"list {what} {' '.join(names)}: too many names; leave out {names[-1]}")
    name = names[0] if names else None
    load_plugins([])
    if plugins:
        from normlab.config.compose import register_plugins

        register_plugins(plugins)
    format = "json" if json else "table"
    if what == "names":
        from normlab.verify.names import LEGEND, name_entries

        return echo(render([*name_entries()], format) + ("" if json else f"\n\n{LEGEND}"), keep="\n")
    if what == "auto":
        return echo(render(rules.rows(), format) + ("" if json else f"\n{rules.LEGEND}"), keep="\n")
    if name is not None:
        width = shutil.get_terminal_size((100, 24)).columns
        return echo(render([one_entry(what, name)], "json") if json else entry_text(what, name, width), keep="\n")
    rows = ENTRIES[what]()
    echo(render(rows if json else table_rows(what, rows), format), keep="\n")
