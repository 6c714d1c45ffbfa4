"""Tables of the statistics that a run recorded: `normlab inspect RUN [STATISTIC]`."""

import math
from collections.abc import Sequence
from typing import TypeVar

from normlab.analysis.spikes import count_spikes
from normlab.base.errors import ConfigError, StatisticsError, warn
from normlab.catalogue.statistics.registry import STATISTICS
from normlab.catalogue.statistics.statistic import CORE, OF
from normlab.report.histories import SPIKES as SPIKES
from normlab.report.histories import History, histories, history, read_statistics
from normlab.report.tables import Row
from normlab.store.runs import RunFolder
from normlab.store.series import series

T = TypeVar("T")
MAX_STEPS = 5
"""Most steps in a table; --json has all."""
MAX_LAYERS = 24
"""Most layers of each site in a table."""
SPIKES_READING = """\
spikes: steps at which the loss or the gradient norm leaves the range of other steps
to read: a row is a rule, which is a definition of a spike; of steps: the number of steps that the rule applies to"""


def inspect(folder: RunFolder, name: str | None = None, at: int | None = None) -> list[Row]:
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
        if name is not None:
            rows = [row for part in history(profiles, name) for row in _rows(name, part)]
        else:
            rows = [row for statistic, part in histories(profiles) for row in _rows(statistic, part)]
        return rows if at is None else _at(rows, at)
    except StatisticsError as error:
        if name not in STATISTICS or STATISTICS[name].tier == CORE:
            raise
        raise StatisticsError(f"{error}; train with stats=full to measure it") from error
    finally:
        for problem in problems:
            warn(problem)


def _at(rows: Sequence[Row], step: int) -> list[Row]:
    """Return the rows at a step, with one value each, of the statistics that were measured there."""
    found = [(row, list(row["steps"]).index(step)) for row in rows if step in row["steps"]]
    if not found:
        steps = sorted({each for row in rows for each in row["steps"]}, key=lambda each: abs(each - step))[:2]
        nearest = " or ".join(map(str, sorted(steps)))
        raise ConfigError(f"--at {step}: not measured at this step (stats.every says at which); choose {nearest}")
    series = ("steps", "values", "n")
    return [{key: value[i : i + 1] if key in series else value for key, value in row.items()} for row, i in found]


def _rows(name: str, part: History) -> list[Row]:
    statistic = STATISTICS[name]
    about: Row = {"formula": statistic.formula, "unit": statistic.unit}
    if part.counts is not None:
        about["n"] = part.counts
    if part.notes:
        about["notes"] = list(part.notes)
    if part.is_per_step:
        columns = {"": part.values if part.values.ndim == 1 else part.values[:, -1]}
    else:
        head = part.values.shape[1] - 1
        columns = {
            "embed" if layer == 0 else "head" if layer == head else f"layer {layer}": part.values[:, layer]
            for layer in part.layers
        }
    return [
        {"statistic": name, "site": part.site, "layer": layer, "steps": part.steps, "values": column.tolist(), **about}
        for layer, column in columns.items()
    ]


def table_rows(rows: Sequence[Row]) -> list[Row]:
    """Return a table of one statistic: a few steps, some layers, and a sparkline over training."""
    sites = _by_site(rows)
    has_layers = any(row["layer"] for row in rows)
    return [
        {
            **({"site": site} if len(sites) > 1 else {}),
            **({"layer": row["layer"]} if has_layers else {}),
            **{
                f"step {row['steps'][index]}": f"{row['values'][index]:.4g}"
                for index in evenly_spaced(range(len(row["steps"])), MAX_STEPS)
            },
            "over training": sparkline(row["values"]),
        }
        for site, site_rows in sites.items()
        for row in evenly_spaced(site_rows, MAX_LAYERS)
    ]


def notes(rows: Sequence[Row]) -> list[str]:
    """Return the notes on one statistic: its warnings, and that the table has few of the steps and layers."""
    lines = list(dict.fromkeys(note for row in rows for note in row.get("notes", ())))
    few = len(rows[0]["steps"]) > MAX_STEPS or any(len(site) > MAX_LAYERS for site in _by_site(rows).values())
    return [*lines, *(["the table has some of the steps and layers; --json has all"] if few else [])]


def overview_reading(rows: Sequence[Row]) -> str:
    if not any(STATISTICS[row["statistic"]].shown for row in rows):
        return ""
    return (
        "to read: a row is a statistic at a site; a / b: its values in the first and the last layer (at); first, last: "
        "at its first and its last measured step; by layer: at the last step; over training: the last layer"
    )


def overview_rows(rows: Sequence[Row]) -> list[Row]:
    """Return a row per statistic and site: first and last layer at the first and last step."""
    overview: list[Row] = []
    for name in (statistic.name for statistic in STATISTICS.values() if statistic.shown):
        for site, layers in _by_site([row for row in rows if row["statistic"] == name]).items():
            ends = layers[:1] if len(layers) == 1 else [layers[0], layers[-1]]
            overview.append(
                {
                    "statistic": name,
                    "site": site,
                    "at": " / ".join(row["layer"] for row in ends),
                    "first": " / ".join(f"{row['values'][0]:.3g}" for row in ends),
                    "last": " / ".join(f"{row['values'][-1]:.3g}" for row in ends),
                    "by layer": sparkline([row["values"][-1] for row in layers]) if len(layers) > 1 else "",
                    "over training": sparkline(layers[-1]["values"]),
                }
            )
    return overview


def spike_rows(folder: RunFolder) -> list[Row]:
    """Return the spikes of a run's loss and gradient norm, a row for each rule.

    A row has `rule`, `spikes`, `of steps`, `share`, `formula`, `source` and `at`, the steps of the spikes. A warning on
    stderr reports damaged rows.

    Raises:
        StoreError: The run has no steps yet, or its record cannot be read, or its metrics changed after it finished.
    """
    metrics = series(folder)
    if problem := folder.rows().problem(folder.metrics_path):
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


def spike_table(rows: Sequence[Row]) -> list[Row]:
    return [
        {
            **{key: row[key] for key in ("rule", "spikes", "of steps")},
            "share": "" if row["share"] is None else f"{row['share']:.2%}",
            "first at": ", ".join(map(str, row["at"][:5])) + (", ..." if len(row["at"]) > 5 else ""),
            "a spike is": row["formula"],
        }
        for row in rows
    ]


def definition(name: str) -> str:
    statistic = STATISTICS[name]
    return (
        f"{name}: {statistic.formula}; unit {statistic.unit}; measured on {OF[statistic.of]}\n"
        f"question: {statistic.question}\nsource: {statistic.source}"
    )


def _by_site(rows: Sequence[Row]) -> dict[str, list[Row]]:
    sites: dict[str, list[Row]] = {}
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
    heights = evenly_spaced(values, width)
    finite = [value for value in heights if math.isfinite(value)]
    flat = _FLAT * max(map(abs, finite), default=0.0)
    if finite and min(finite) > 0:
        heights, flat = [math.log(value) if math.isfinite(value) else value for value in heights], _FLAT
    finite = [height for height in heights if math.isfinite(height)]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)

    def bar(height: float) -> str:
        if not math.isfinite(height):
            return "?"
        return BARS[3] if span <= flat else BARS[round((height - low) / span * (len(BARS) - 1))]

    return "".join(map(bar, heights))
