"""`normlab list`."""

import shutil
from typing import Annotated, Any, Literal

from typer import Argument

from normlab.base.errors import ConfigError, StoreError, unknown
from normlab.base.plugins import load_plugins
from normlab.cli.app import Json, ResultsDir, app, echo, warn_of_replaced

Kind = Literal[
    "norms", "placements", "models", "recipes", "data", "optim", "init", "options", "stats", "estimators", "names",
    "formulas", "auto", "sweeps",
]  # fmt: skip


@app.command("list")
def list_(
    what: Annotated[Kind, Argument(metavar="KIND", help=f"{', '.join(Kind.__args__)}.")],
    arguments: Annotated[
        list[str] | None,
        Argument(
            metavar="NAME|OVERRIDE",
            help="An entry to describe; plugins=[FILE]; norm and model in which the redundant norms of a placement are "
            "searched for, such as model.qk_norm=head.",
        ),
    ] = None,
    json: Json = False,
    results_dir: ResultsDir = "results",
) -> None:
    """List norms, placements, models, the sweeps of a results folder, and more.

    With plugins=[my_norm.py] the list includes the norms and placements of your own files.
    """
    from normlab.catalogue.entries import ENTRIES, one_entry
    from normlab.cli.entry_text import entry_text, table_rows
    from normlab.config import rules
    from normlab.report.tables import render

    plugins = [argument for argument in arguments or [] if argument.startswith("plugins=")]
    names = [argument for argument in arguments or [] if "=" not in argument]
    name = names[0] if names else None
    overrides = [argument for argument in arguments or [] if "=" in argument and argument not in plugins]
    if len(names) > (0 if what in ("auto", "estimators", "formulas", "sweeps") else 1):
        raise ConfigError(f"list {what} {' '.join(names)}: too many names; leave out {names[-1]}")
    for override in overrides:
        if what != "placements" or name is None or not override.startswith(("norm", "model")):
            raise ConfigError(
                f"{override}: has no effect; leave it out: only norm and model, after the name of a placement, have one"
            )
    if what == "sweeps":
        if plugins:
            raise ConfigError(f"{plugins[0]}: has no effect on the list of sweeps; leave it out")
        return _list_sweeps(results_dir, json=json)
    if results_dir != "results":
        raise ConfigError(f"--results-dir={results_dir}: has no effect without sweeps; leave it out")
    warn_of_replaced([*plugins, *overrides])
    load_plugins([])
    if plugins:
        from normlab.config.compose import register_plugins

        register_plugins(plugins)
    format = "json" if json else "table"
    if what == "names":
        from normlab.verify.names import LEGEND

        return echo(render(_names(name), format) + ("" if json else f"\n\n{LEGEND}"), keep="\n")
    if what == "estimators":
        from normlab.studies.base import estimator_rows

        return echo(render(estimator_rows(), format), keep="\n")
    if what == "formulas":
        from normlab.catalogue.placements.formula import rows

        return echo(render([*rows()], format), keep="\n")
    if what == "auto":
        return echo(render(rules.rows(), format) + ("" if json else f"\n{rules.LEGEND}"), keep="\n")
    if name is not None:
        entry, width = one_entry(what, name), shutil.get_terminal_size((100, 24)).columns
        if what == "placements":
            entry["redundant_norms"] = _redundant_norms(name, plugins, overrides, as_text=not json)
        return echo(render([entry], "json") if json else entry_text(entry, width), keep="\n")
    rows = ENTRIES[what]()
    echo(render(rows if json else table_rows(what, rows), format), keep="\n")


def _list_sweeps(results_dir: str, *, json: bool) -> None:
    """Print the sweeps of a results folder, with the question of the study to which a sweep belongs.

    Raises:
        StoreError: There is none.
    """
    from normlab.report.tables import render
    from normlab.studies.base import STUDIES, load_studies
    from normlab.sweeps.overview import sweep_rows

    rows = sweep_rows(results_dir)
    if not rows:
        raise StoreError(f"no sweeps in {results_dir}: train one with `normlab sweep`, or name another --results-dir")
    if any(row["study"] for row in rows):
        load_studies()
    for row in rows:
        # The study of a plugin is unknown here.
        row["question"] = STUDIES[row["study"]].question if row["study"] in STUDIES else ""
    if json:
        return echo(render(rows, "json"), keep="\n")
    echo(render([_text_row(row) for row in rows]), keep="\n")


def _text_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row about a sweep as in the table: what does not vary is a note, below the table."""
    from normlab.config.memory import format_size

    notes = [f"fixed: {row['fixed']}"] if row["fixed"] else []
    notes += [f"arm {arm}: {overrides}" for arm, overrides in row["arms"].items()]
    if row["study"]:
        notes.append(f"study {row['study']}: {row['question']}".removesuffix(": "))
    columns = {key: row[key] for key in ("sweep", "varies", "runs", "states", "date")}
    return {**columns, "size": format_size(row["bytes"]), "note": "; ".join(notes)}


def _names(name: str | None) -> list[dict[str, Any]]:
    """Return what public code calls the placements, or the rows of one of these names.

    Raises:
        ConfigError: Nothing has the name.
    """
    from normlab.catalogue.other_names import NAMES, OTHER_NAMES
    from normlab.verify.names import name_entries

    known = dict.fromkeys(use[0] for use in NAMES)
    if name is not None and name not in known:
        raise ConfigError("list names: " + unknown("name", name, known, OTHER_NAMES))
    return [*name_entries(name)]


def _redundant_norms(placement: str, plugins: list[str], overrides: list[str], *, as_text: bool) -> list[str] | str:
    """Return the sites of the redundant norms of a placement in a model with these overrides.

    Raises:
        ConfigError: The overrides give no model.
    """
    from normlab.catalogue.placements.base import load_all
    from normlab.config.compose import compose_run
    from normlab.model.redundancy import redundancy_text, without_redundant_norms

    norm = "rmsnorm" if load_all()[placement].has_norms(1) else "none"
    chosen = {"norm": norm, "model": "gpt2_nano"} | dict(each.split("=", 1) for each in overrides)
    words = [f"{option}={value}" for option, value in chosen.items()]
    sites, _ = without_redundant_norms(compose_run([f"placement={placement}", *plugins, *words]))
    return f"{redundancy_text(sites)} ({' '.join(words)})" if as_text else sites
