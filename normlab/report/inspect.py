"""Tables of the statistics that a run recorded: `normlab inspect RUN [STATISTIC]`."""

import math
from collections.abc import Sequence
from typing import TypeVar

from normlab.analysis.spikes import count_spikes
from normlab.base.errors import ConfigError, StatisticsError, warn
from normlab.catalogue.statistics.profiles import Array
from normlab.catalogue.statistics.registry import STATISTICS
from normlab.catalogue.statistics.statistic import CORE, OF
from normlab.report.histories import SPIKES as SPIKES
from normlab.report.histories import History, histories, history, read_statistics
from normlab.report.tables import TableRow
from normlab.store.runs import RunFolder
from normlab.store.series import series

T = TypeVar("T")
MAX_STEPS = 5
"""Most steps in a table; --json has all."""
MAX_LAYERS = 24
"""Most layers of each site in a table."""
MAX_SPIKES = 5
"""Most spikes of which a table has the step."""
SPIKES_READING = """\
spikes: steps at which the loss or the gradient norm leaves the range of other steps
to read: a row is a rule, which is a definition of a spike; of steps: the number of steps that the rule applies to"""


def inspect(folder: RunFolder, name: str | None = None, at: int | None = None) -> list[TableRow]:
    """Return the rows of one statistic, or of every statistic that was measured, at all steps or at one.

    A row is one site and one layer: `statistic`, `site`, `layer`, `steps`, `values`, `formula`, `unit`. A
    statistic that is averaged also has `n`, the number of measured steps per value; a statistic with warnings has
    `notes`. Damage is reported on stderr.

    Raises:
        ConfigError: The statistic is unknown, or none was measured at the step.
        StatisticsError: The statistic was not measured.
        StoreError: The record cannot be read.
    """
    problems: list[str] = []
    try:
        profiles = read_statistics(folder, problems)
        rows: list[TableRow] = []
        if name is not None:
            for part in history(profiles, name):
                rows += _rows(name, part)
        else:
            for statistic, part in histories(profiles):
                rows += _rows(statistic, part)
        if at is None:
            return rows
        return _at(rows, at)
    except StatisticsError as error:
        # A core statistic is measured without stats=full, too.
        if name not in STATISTICS or STATISTICS[name].tier == CORE:
            raise
        raise StatisticsError(f"{error}; train with stats=full run.fresh=true to measure it") from error
    finally:
        for problem in problems:
            warn(problem)


def _at(rows: Sequence[TableRow], step: int) -> list[TableRow]:
    """Return the rows at a step, with one value each, of the statistics that were measured there."""
    rows_at: list[TableRow] = []
    for row in rows:
        if step in row["steps"]:
            index = list(row["steps"]).index(step)
            row_at = dict(row)
            for key in ("steps", "values", "n"):
                if key in row:
                    row_at[key] = row[key][index : index + 1]
            rows_at.append(row_at)
    if not rows_at:
        steps: set[int] = set()
        for row in rows:
            steps.update(row["steps"])
        nearest = sorted(steps, key=lambda measured: abs(measured - step))[:2]
        choice = " or ".join(map(str, sorted(nearest)))
        raise ConfigError(f"--at {step}: not measured at this step (stats.every says at which); choose {choice}")
    return rows_at


def _rows(name: str, part: History) -> list[TableRow]:
    statistic = STATISTICS[name]
    about: TableRow = {"formula": statistic.formula, "unit": statistic.unit}
    if part.counts is not None:
        about["n"] = part.counts
    if part.notes:
        about["notes"] = list(part.notes)
    columns: dict[str, Array] = {}
    if part.values.ndim == 1:
        columns[""] = part.values
    elif part.is_per_step:  # the last layer is the head, or holds the number of the whole model
        columns[""] = part.values[:, -1]
    else:
        for layer in part.layers:
            columns[_layer_name(layer, part.values.shape[1])] = part.values[:, layer]
    rows: list[TableRow] = []
    for layer, column in columns.items():
        row: TableRow = {"statistic": name, "site": part.site, "layer": layer, "steps": part.steps}
        rows.append(row | {"values": column.tolist(), **about})
    return rows


def _layer_name(layer: int, layers: int) -> str:
    """Return the name of a layer: the first is the embeddings, the last the head."""
    if layer == 0:
        return "embed"
    if layer == layers - 1:
        return "head"
    return f"layer {layer}"


def table_rows(rows: Sequence[TableRow]) -> list[TableRow]:
    """Return a table of one statistic: a few steps, some layers, and a sparkline over training."""
    sites = _by_site(rows)
    has_layers = any(row["layer"] for row in rows)
    table: list[TableRow] = []
    for site, site_rows in sites.items():
        for row in evenly_spaced(site_rows, MAX_LAYERS):
            texts: TableRow = {}
            if len(sites) > 1:
                texts["site"] = site
            if has_layers:
                texts["layer"] = row["layer"]
            for index in evenly_spaced(range(len(row["steps"])), MAX_STEPS):
                texts[f"step {row['steps'][index]}"] = f"{row['values'][index]:.4g}"
            texts["over training"] = sparkline(row["values"])
            table.append(texts)
    return table


def notes(rows: Sequence[TableRow]) -> list[str]:
    """Return the notes on one statistic: its warnings, and that the table has few of the steps and layers."""
    # Each layer of a site has the notes of the site.
    lines: dict[str, None] = {}
    for row in rows:
        lines |= dict.fromkeys(row.get("notes", ()))
    most_layers = max(map(len, _by_site(rows).values()))
    if most_layers > MAX_LAYERS or len(rows[0]["steps"]) > MAX_STEPS:
        lines["the table has some of the steps and layers; --json has all"] = None
    return list(lines)


def overview_reading(rows: Sequence[TableRow]) -> str:
    if not any(STATISTICS[row["statistic"]].shown for row in rows):
        return ""
    return (
        "to read: a row is a statistic at a site; a / b: its values in the first and the last layer (at); first, last: "
        "at its first and its last measured step; by layer: at the last step; over training: the last layer"
    )


def overview_rows(rows: Sequence[TableRow]) -> list[TableRow]:
    """Return a row per statistic and site: first and last layer at the first and last step."""
    overview: list[TableRow] = []
    for statistic in STATISTICS.values():
        if not statistic.shown:
            continue
        rows_of_statistic = [row for row in rows if row["statistic"] == statistic.name]
        for site, layers in _by_site(rows_of_statistic).items():
            ends, by_layer = layers, ""
            if len(layers) > 1:
                ends = [layers[0], layers[-1]]
                by_layer = sparkline([row["values"][-1] for row in layers])
            names: list[str] = []
            first: list[str] = []
            last: list[str] = []
            for row in ends:
                names.append(row["layer"])
                first.append(f"{row['values'][0]:.3g}")
                last.append(f"{row['values'][-1]:.3g}")
            overview.append(
                {
                    "statistic": statistic.name,
                    "site": site,
                    "at": " / ".join(names),
                    "first": " / ".join(first),
                    "last": " / ".join(last),
                    "by layer": by_layer,
                    "over training": sparkline(layers[-1]["values"]),
                }
            )
    return overview


def spike_rows(folder: RunFolder) -> list[TableRow]:
    """Return the spikes of a run's loss and gradient norm, a row for each rule.

    A row has `rule`, `spikes`, `of steps`, `share`, `formula`, `source` and `at`, the steps of the spikes. A warning on
    stderr reports damaged rows.

    Raises:
        StoreError: The run has no steps yet, or its record cannot be read, or its metrics changed after it finished.
    """
    metrics = series(folder)
    problem = folder.rows().problem(folder.metrics_path)
    if problem:
        warn(problem)
    return [
        {
            "rule": counts.rule,
            "spikes": len(counts.spikes),
            "of steps": counts.scored,
            "share": counts.share,
            "formula": counts.formula,
            "source": counts.source,
            "at": metrics["step"][counts.spikes].astype(int).tolist(),
        }
        for counts in count_spikes(metrics)
    ]


def spike_table(rows: Sequence[TableRow]) -> list[TableRow]:
    table: list[TableRow] = []
    for row in rows:
        share = ""
        if row["share"] is not None:
            share = f"{row['share']:.2%}"
        steps = list(map(str, row["at"][:MAX_SPIKES]))
        if len(row["at"]) > MAX_SPIKES:
            steps.append("...")
        table.append(
            {
                "rule": row["rule"],
                "spikes": row["spikes"],
                "of steps": row["of steps"],
                "share": share,
                "first at": ", ".join(steps),
                "a spike is": row["formula"],
            }
        )
    return table


def definition(name: str) -> str:
    statistic = STATISTICS[name]
    return (
        f"{name}: {statistic.formula}; unit {statistic.unit}; measured on {OF[statistic.of]}\n"
        f"question: {statistic.question}\nsource: {statistic.source}"
    )


def _by_site(rows: Sequence[TableRow]) -> dict[str, list[TableRow]]:
    sites: dict[str, list[TableRow]] = {}
    for row in rows:
        sites.setdefault(row["site"], []).append(row)
    return sites


# Sparklines

BARS = "▁▂▃▄▅▆▇█"
_FLAT = 0.01
"""Relative difference up to which numbers are drawn at the same height."""


def evenly_spaced(items: Sequence[T], most: int) -> Sequence[T]:
    """Return at most `most` (2 or more) items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def sparkline(values: Sequence[float], width: int = 12) -> str:
    """Draw at most `width` of the numbers, evenly spaced, as bars; `?` for NaN and infinity.

    The scale is logarithmic if all finite numbers are positive, else linear. Numbers within 1 % of each other are all
    drawn at half height.
    """
    drawn = evenly_spaced(values, width)
    heights = [value for value in drawn if math.isfinite(value)]
    if not heights:
        return "?" * len(drawn)
    flat = _FLAT * max(map(abs, heights))
    is_log = min(heights) > 0
    if is_log:
        heights = list(map(math.log, heights))
        # A difference of logarithms is a relative difference.
        flat = _FLAT
    low, span = min(heights), max(heights) - min(heights)
    bars = ""
    for value in drawn:
        if not math.isfinite(value):
            bars += "?"
        elif span <= flat:
            bars += BARS[3]
        else:
            height = math.log(value) if is_log else value
            bars += BARS[round((height - low) / span * (len(BARS) - 1))]
    return bars
