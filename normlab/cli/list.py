"""`normlab list`."""

import shutil
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from typer import Argument

from normlab.base.errors import ConfigError, StoreError, counted, unknown
from normlab.base.plugins import load_plugins
from normlab.cli.app import Json, ResultsDir, app, echo, warn_of_replaced

Kind = Literal[
    "norms", "placements", "models", "recipes", "data", "optim", "init", "options", "stats", "estimators", "names",
    "formulas", "sites", "auto", "sweeps",
]  # fmt: skip


@app.command("list")
def list_(
    what: Annotated[Kind, Argument(metavar="KIND", help=f"{', '.join(Kind.__args__)}.")],
    arguments: Annotated[
        list[str] | None,
        Argument(
            metavar="NAME|OVERRIDE",
            help="An entry to describe; plugins=[FILE]; norm and model for which the norms of a placement are listed, "
            "such as model.qk_norm=head.",
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
    from normlab.report.tables import render

    plugins, names, overrides = _sort_arguments(arguments or [])
    _check_arguments(what, names, overrides)
    name = names[0] if names else None
    if what == "sweeps":
        if plugins:
            raise ConfigError(f"{plugins[0]}: has no effect on the list of sweeps; leave it out")
        return _list_sweeps(results_dir, json=json)
    if results_dir != "results":
        raise ConfigError(f"--results-dir={results_dir}: has no effect without sweeps; leave it out")
    warn_of_replaced([*plugins, *overrides])
    # A plugin of an earlier command of this process is not in the list.
    load_plugins([])
    if plugins:
        from normlab.config.compose import register_plugins

        register_plugins(plugins)
    format = "json" if json else "table"
    if what in ("names", "estimators", "formulas", "sites", "auto"):
        return echo(_table(what, name, json=json), keep="\n")
    if name is None:
        rows = ENTRIES[what]()
        return echo(render(rows if json else table_rows(what, rows), format), keep="\n")
    entry = one_entry(what, name)
    if what == "placements":
        entry |= _norms_of(name, plugins, overrides, as_text=not json)
    if json:
        return echo(render([entry], "json"), keep="\n")
    echo(entry_text(entry, shutil.get_terminal_size((100, 24)).columns), keep="\n")


def _table(what: str, name: str | None, *, json: bool) -> str:
    """Return the rows of what is no entry of the catalogue, as a table with its legend or as JSON."""
    from normlab.report.tables import render

    legend = ""
    if what == "names":
        from normlab.verify.names import LEGEND

        rows, legend = _names(name), f"\n\n{LEGEND}"
    elif what == "estimators":
        from normlab.studies.base import estimator_rows

        rows = estimator_rows()
    elif what == "formulas":
        from normlab.catalogue.placements import formula

        rows = [*formula.rows()]
    elif what == "sites":
        from normlab.catalogue.sites import rows as rows_of_sites

        rows = rows_of_sites()
    else:
        from normlab.config import rules

        rows, legend = rules.rows(), f"\n{rules.LEGEND}"
    return render(rows, "json") if json else render(rows, "table") + legend


def _sort_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the overrides of plugins, the names of entries, and the other overrides."""
    plugins: list[str] = []
    names: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        if argument.startswith("plugins="):
            plugins.append(argument)
        elif "=" in argument:
            overrides.append(argument)
        else:
            names.append(argument)
    return plugins, names, overrides


def _check_arguments(what: str, names: Sequence[str], overrides: Sequence[str]) -> None:
    """Reject names and overrides that have no effect on a list."""
    most = 0 if what in ("auto", "estimators", "formulas", "sites", "sweeps") else 1
    if len(names) > most:
        raise ConfigError(f"list {what} {' '.join(names)}: too many names; leave out {names[-1]}")
    for override in overrides:
        # They choose the model whose norms are listed.
        if what != "placements" or not names or not override.startswith(("norm", "model")):
            raise ConfigError(
                f"{override}: has no effect; leave it out: only norm and model, after the name of a placement, have one"
            )


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
    # The studies are many modules, which a folder without a study does not need.
    if any(row["study"] for row in rows):
        load_studies()
    for row in rows:
        study = STUDIES.get(row["study"])  # None also for the study of a plugin, which is unknown here
        row["question"] = "" if study is None else study.question
    if json:
        return echo(render(rows, "json"), keep="\n")
    echo(render([_text_row(row) for row in rows]), keep="\n")


def _text_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row about a sweep as in the table: what does not vary is a note, below the table."""
    from normlab.config.memory import format_size

    notes: list[str] = []
    if row["fixed"]:
        notes.append(f"fixed: {row['fixed']}")
    for arm, overrides in row["arms"].items():
        notes.append(f"arm {arm}: {overrides}")
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


def _norms_of(placement: str, plugins: list[str], overrides: list[str], *, as_text: bool) -> dict[str, Any]:
    """Return the norms of a placement by site, and which of them are redundant, in a model with these overrides.

    Raises:
        ConfigError: The overrides give no model.
    """
    from normlab.catalogue.placements.base import load_all
    from normlab.config.compose import compose_run
    from normlab.model.redundancy import redundancy_text, without_redundant_norms
    from normlab.verify.norms_by_site import norms_by_site

    # A placement without norms allows no other norm than none.
    chosen = {"norm": "none", "model": "gpt2_nano"}
    if load_all()[placement].has_norms(1):
        chosen["norm"] = "rmsnorm"
    for override in overrides:
        option, value = override.split("=", 1)
        chosen[option] = value
    model = [f"{option}={value}" for option, value in chosen.items()]
    config = compose_run([f"placement={placement}", *plugins, *model])
    redundant, _ = without_redundant_norms(config)
    sites = norms_by_site(config)
    if not as_text:
        return {"norms": sites, "redundant_norms": redundant}
    texts: list[str] = []
    for row in sites:
        numbers = counted(row["parameters"], "parameter")
        texts.append(f"{row['site']} ({row['blocks'] or 'outside the blocks'}): {row['norm']}, {numbers}")
    return {"norms": texts, "redundant_norms": f"{redundancy_text(redundant)} ({' '.join(model)})"}
