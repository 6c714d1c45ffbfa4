"""What happened inside a run, from its record: `normlab inspect RUN [STAT]`.

Shapes: S measured steps, L blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from normlab.errors import ConfigError, StatisticsError
from normlab.report.bars import bars
from normlab.report.histories import SPIKES as SPIKES
from normlab.report.histories import History, history, read_statistics
from normlab.stats import options  # noqa: F401  (with it every statistic is known)
from normlab.stats.profiles import Array, Profiles
from normlab.stats.spikes import count_spikes
from normlab.stats.statistic import OF, PROBE, STATISTICS, sorted_statistics
from normlab.store.runs import RunFolder
from normlab.store.series import series

Row = dict[str, Any]

MOST_STEPS = 5
"""Steps that a table shows; --json has all."""
MOST_PLACES = 24
"""Places that a table shows of each site."""
OVERVIEW = (
    "resid_rms", "attn_ratio", "mlp_ratio", "adj_cos", "dresid_rms", "resid_kurt", "resid_crest", "resid_uniform",
    "norm_in_rms", "norm_gain", "gain_rms", "grad_share", "logz", "attn_entropy", "attn_sink", "token_cos",
    "part_ratio", "sharpness", "sharpness_pre", "layer_drop", "erank", "jac_gain",
)  # fmt: skip
"""What is shown of a run when no statistic is named."""


def check(name: str | None, *, probe: bool) -> None:
    """Refuse a statistic that no probe makes, before one is made.

    Raises:
        ConfigError: It is of another tier.
    """
    made = [each for each, one in STATISTICS.items() if one.tier == PROBE]
    if probe and name is not None and name not in made:
        raise ConfigError(f"--probe: makes no {name}; choose one of {', '.join(made)}, or leave --probe out")


def inspect(folder: RunFolder, name: str | None = None) -> list[Row]:
    """Rows with everything: a statistic's, or, with no name, those of every statistic that was measured.

    A row is one site and one place: `statistic`, `site`, `place`, `steps`, `values`, `formula`, `unit`; where a value
    averages over measured steps also `n`, how many, and where there is something to know of the values `notes`.

    Raises:
        ConfigError: There is no statistic of that name.
        StatisticsError: It was not measured.
        StoreError: The record cannot be read.
    """
    try:
        return rows_of(_read(folder), name)
    except StatisticsError as error:
        if name in STATISTICS and STATISTICS[name].tier == PROBE:
            raise StatisticsError(f"{error}; `normlab inspect RUN {name} --probe` measures it now") from error
        raise


def rows_of(profiles: Sequence[Profiles], name: str | None = None) -> list[Row]:
    """The rows of what was measured; as `inspect`.

    Raises:
        ConfigError: There is no statistic of that name.
        StatisticsError: It was not measured.
    """
    if name is not None:
        return list(_rows(name, history(profiles, name)))
    rows: list[Row] = []
    for each in sorted_statistics():
        try:
            rows += _rows(each.name, history(profiles, each.name))
        except StatisticsError:
            continue
    return rows


def table_rows(rows: Sequence[Row]) -> list[Row]:
    """One statistic's rows as a person reads them: a few steps, some places, and its way through training."""
    several = len({row["site"] for row in rows}) > 1
    placed = any(row["place"] for row in rows)
    shown: list[Row] = []
    for site in dict.fromkeys(row["site"] for row in rows):
        own = [row for row in rows if row["site"] == site]
        for row in _spread(own, MOST_PLACES):
            picked = _spread(range(len(row["steps"])), MOST_STEPS)
            shown.append(
                {
                    **({"site": site} if several else {}),
                    **({"place": row["place"]} if placed else {}),
                    **{f"step {row['steps'][index]}": f"{row['values'][index]:.4g}" for index in picked},
                    "over training": bars(row["values"]),
                }
            )
    return shown


def left_out(rows: Sequence[Row]) -> str:
    """What the table of one statistic's rows leaves out, in a line; empty where it is nothing."""
    sites = [[row for row in rows if row["site"] == site] for site in dict.fromkeys(row["site"] for row in rows)]
    counts = {
        "places": (sum(min(len(own), MOST_PLACES) for own in sites), len(rows)),
        "measured steps": (min(len(rows[0]["steps"]), MOST_STEPS), len(rows[0]["steps"])),
    }
    told = [f"{shown} of {there} {what}" for what, (shown, there) in counts.items() if shown < there]
    return f"{', '.join(told)}; --json has all" if told else ""


def notes(rows: Sequence[Row]) -> list[str]:
    """What to know of one statistic's values, a line each: how many steps they average, and what is wrong with them."""
    lines = list(dict.fromkeys(note for row in rows for note in row.get("notes", ())))
    if "n" in rows[0]:
        steps = [
            f"{n} at step {step}"
            for step, n in _spread(list(zip(rows[0]["steps"], rows[0]["n"], strict=True)), MOST_STEPS)
        ]
        lines.insert(0, f"n = measured steps averaged: {', '.join(steps)}")
    return lines


def overview_steps(rows: Sequence[Row]) -> str:
    """Of which steps the overview's columns are, in a line; what was measured at others than most is named."""
    ends: dict[tuple[int, int], list[str]] = {}
    for name in OVERVIEW:
        for own in [row["steps"] for row in rows if row["statistic"] == name][:1]:
            ends.setdefault((own[0], own[-1]), []).append(name)
    if not ends:
        return ""
    most = max(ends, key=lambda each: len(ends[each]))
    others = [f"; of {', '.join(ends[each])}: steps {each[0]} and {each[1]}" for each in ends if each != most]
    return f"begins: step {most[0]}; ends: step {most[1]}{''.join(others)}; over training: at the last place"


def overview_rows(rows: Sequence[Row]) -> list[Row]:
    """A line for each statistic and site: both ends of its profile at the first and at the last step, and its shape."""
    shown: list[Row] = []
    for name in OVERVIEW:
        for site in dict.fromkeys(row["site"] for row in rows if row["statistic"] == name):
            own = [row for row in rows if (row["statistic"], row["site"]) == (name, site)]
            ends = f"{own[0]['place']} / {own[-1]['place']}" if len(own) > 1 else own[0]["place"]
            shown.append(
                {
                    "statistic": name,
                    "site": site,
                    "at": ends,
                    "begins": _ends(own, 0),
                    "ends": _ends(own, -1),
                    "by place": bars([row["values"][-1] for row in own]) if len(own) > 1 else "",
                    "over training": bars(own[-1]["values"]),
                }
            )
    return shown


def spike_rows(folder: RunFolder) -> list[Row]:
    """What each definition of a spike finds in a run's every step: `rule`, `spikes`, `of steps`, `share`, `at`.

    A warning on stderr says where the steps are not those with which the run ended.

    Raises:
        StoreError: The run has taken no step yet, or its record cannot be read.
    """
    if problem := folder.metrics_problem():
        print(f"normlab: {problem}", file=sys.stderr)
    seen = series(folder)
    return [
        {
            "rule": found.rule.name,
            "spikes": len(found.spikes),
            "of steps": found.scored,
            "share": found.share,
            "formula": found.rule.formula,
            "source": found.rule.source,
            "at": seen["step"][found.spikes].astype(int).tolist(),
        }
        for found in count_spikes(seen)
    ]


def spike_table(rows: Sequence[Row]) -> list[Row]:
    """The rows as a person reads them."""
    return [
        {
            **{key: row[key] for key in ("rule", "spikes", "of steps")},
            "share": "" if row["share"] is None else f"{row['share']:.2%}",
            "first at": ", ".join(map(str, row["at"][:5])) + (", ..." if len(row["at"]) > 5 else ""),
            "a spike is": row["formula"],
        }
        for row in rows
    ]


def heading(name: str) -> str:
    """What a statistic is, in a line."""
    one = STATISTICS[name]
    return f"{name} = {one.formula} [{one.unit}]; of {OF[one.of]}. {one.question}"


def _ends(own: Sequence[Row], step: int) -> str:
    places = own if len(own) == 1 else [own[0], own[-1]]
    return " / ".join(f"{row['values'][step]:.3g}" for row in places)


def _read(folder: RunFolder) -> list[Profiles]:
    """What was measured; what is damaged or missing is said."""
    problems: list[str] = []
    try:
        return read_statistics(folder, problems)
    finally:
        for problem in problems:
            print(f"normlab: {problem}", file=sys.stderr)


def _rows(name: str, histories: Sequence[History]) -> Iterator[Row]:
    one = STATISTICS.get(name)
    told: Mapping[str, Any] = {"formula": one.formula, "unit": one.unit} if one else {}
    for site, steps, values, places, counts, notes in histories:
        about = told | ({"n": counts} if counts is not None else {}) | ({"notes": list(notes)} if notes else {})
        whole = one is not None and one.of == "model"
        columns = {"": values} if values.ndim == 1 else {"": values[:, -1]} if whole else dict(_places(values, places))
        for place, column in columns.items():
            yield {
                "statistic": name, "site": site, "place": place, "steps": steps, "values": column.tolist(), **about,
            }  # fmt: skip


def _places(values: Array, places: Sequence[int]) -> Iterator[tuple[str, Array]]:
    """Each place where it is, by what that is called."""
    depth = values.shape[1] - 2
    for place in places:
        yield "embed" if place == 0 else "head" if place > depth else f"block {place}", values[:, place]


def _spread(items: Any, most: int) -> list[Any]:
    """At most so many of them, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
