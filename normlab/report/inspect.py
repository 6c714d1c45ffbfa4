"""Tables of the statistics that a run recorded: `normlab inspect RUN [STATISTIC]`."""

from __future__ import annotations

from collections.abc import Sequence

from normlab.errors import ConfigError, StatisticsError, warn
from normlab.report.histories import SPIKES as SPIKES
from normlab.report.histories import History, histories, history, read_statistics
from normlab.report.tables import Row, evenly_spaced, format_value, sparkline
from normlab.stats.profiles import Profiles
from normlab.stats.registry import STATISTICS
from normlab.stats.spikes import count_spikes
from normlab.stats.statistic import EXTENDED, OF, PROBE
from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder
from normlab.store.series import series

MAX_STEPS = 5
"""Most steps in a table; --json has all."""
MAX_LAYERS = 24
"""Most layers of each site in a table."""
OVERVIEW = (
    "resid_rms", "attn_ratio", "mlp_ratio", "adj_cos", "dresid_rms", "resid_kurt", "resid_crest", "resid_uniform",
    "norm_in_rms", "norm_gain", "gain_rms", "grad_share", "logz", "attn_entropy", "attn_sink", "token_cos",
    "part_ratio", "sharpness", "sharpness_pre", "layer_drop", "erank", "jac_gain",
)  # fmt: skip
"""The statistics of the overview."""
_LAYERS = {"embed": "the embeddings", "head": "after the last layer"}
_STREAM_LAYERS = {"layer 1": "the output of the embeddings", "head": "the output of the last layer"}
"""What the first and the last layer of a table are; a statistic of the residual stream is of a layer's input."""
_SITES = {
    "norm": "a norm", "gain": "a norm", "parameter": "a parameter, or several together",
    "block": "the number n of layers",
}  # fmt: skip
"""What a site is, by the tensors of the statistic."""
_NORM_SITES = {
    "in": "before attention or the MLP", "out": "after it", "res": "after the addition to the residual stream",
    "close": "before the LM head",
}  # fmt: skip
"""Where a norm is, by the last part of its site."""
SPIKES_READING = """\
spikes: steps at which the loss or the gradient norm leaves the range of other steps
to read: a row is a rule, which is a definition of a spike; of steps: the number of steps that the rule applies to"""
"""The definition of the spikes, and how to read their table."""


def check_statistic(name: str | None, *, probe: bool) -> None:
    """Reject a statistic that the probe does not measure.

    Raises:
        ConfigError: `probe` is set and the statistic is of another tier.
    """
    probed = [each for each, statistic in STATISTICS.items() if statistic.tier == PROBE]
    if probe and name is not None and name not in probed:
        raise ConfigError(f"--probe: does not measure {name}; choose one of {', '.join(probed)}, or omit --probe")


def inspect(folder: RunFolder, name: str | None = None) -> list[Row]:
    """Return the rows of one statistic, or of every statistic that was measured.

    A row is one site and one layer: `statistic`, `site`, `layer`, `steps`, `values`, `formula`, `unit`. A
    statistic that is averaged also has `n`, the number of measured steps per value; a statistic with warnings has
    `notes`. Damage is reported on stderr.

    Raises:
        ConfigError: The statistic is unknown.
        StatisticsError: The statistic was not measured.
        StoreError: The record cannot be read.
    """
    problems: list[str] = []
    try:
        return rows_of(read_statistics(folder, problems), name)
    except StatisticsError as error:
        remedies = {
            PROBE: f"`normlab inspect RUN {name} --probe` measures it now",
            EXTENDED: "train with stats=full to measure it",
        }
        remedy = remedies.get(STATISTICS[name].tier) if name in STATISTICS else None
        if remedy is None:
            raise
        raise StatisticsError(f"{error}; {remedy}") from error
    finally:
        for problem in problems:
            warn(problem)


def rows_of(profiles: Sequence[Profiles], name: str | None = None) -> list[Row]:
    """Return the rows of recorded or probed statistics; rows and errors as in `inspect`."""
    if name is not None:
        return [row for part in history(profiles, name) for row in _rows(name, part)]
    return [row for statistic, part in histories(profiles) for row in _rows(statistic, part)]


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


def left_out(rows: Sequence[Row]) -> str:
    """Return the number of layers and steps that `table_rows` shows, or an empty text if all."""
    layers = sum(min(len(site_rows), MAX_LAYERS) for site_rows in _by_site(rows).values())
    steps = len(rows[0]["steps"])
    counts = {"layers": (layers, len(rows)), "measured steps": (min(steps, MAX_STEPS), steps)}
    parts = [f"{shown} of {total} {what}" for what, (shown, total) in counts.items() if shown < total]
    return f"{', '.join(parts)}; --json has all" if parts else ""


def notes(rows: Sequence[Row]) -> list[str]:
    """Return the notes on one statistic: the number of averaged steps, and warnings."""
    lines = list(dict.fromkeys(note for row in rows for note in row.get("notes", ())))
    if "n" in rows[0]:
        counts = evenly_spaced(list(zip(rows[0]["steps"], rows[0]["n"], strict=True)), MAX_STEPS)
        lines.insert(0, f"n = measured steps averaged: {', '.join(f'{n} at step {step}' for step, n in counts)}")
    return lines


def speed_line(record: RunRecord) -> str:
    """Return a run's model FLOPs per token, its speed and its MFU, if they are known."""
    speed = record.status.tokens_per_s
    parts = [
        f"{format_value('flops_per_token', record.compute.flops_per_token)} FLOPs/token",
        "" if speed is None else f"{format_value('tokens_per_s', speed)} tok/s",
        "" if record.flops_per_s is None else f"{format_value('flops_per_s', record.flops_per_s)} TFLOP/s",
        "" if record.mfu is None else f"MFU {format_value('mfu', record.mfu)}",
    ]
    return ", ".join(filter(None, parts))


def overview_reading(rows: Sequence[Row]) -> str:
    """Return how to read the overview, with the steps of its columns and of statistics with other steps."""
    names_by_steps: dict[tuple[int, int], list[str]] = {}
    for name in OVERVIEW:
        if steps := next((row["steps"] for row in rows if row["statistic"] == name), None):
            names_by_steps.setdefault((steps[0], steps[-1]), []).append(name)
    if not names_by_steps:
        return ""
    (first, last), *others = sorted(names_by_steps, key=lambda steps: -len(names_by_steps[steps]))
    exceptions = [f"; {', '.join(names_by_steps[steps])}: steps {steps[0]} and {steps[1]}" for steps in others]
    return (
        "to read: a row is a statistic at a site; a / b: its values in the first and the last layer (at); first: step "
        f"{first}; last: step {last}{''.join(exceptions)}; by layer: at the last step; over training: the last layer"
    )


def overview_rows(rows: Sequence[Row]) -> list[Row]:
    """Return a row per statistic and site: first and last layer at the first and last step."""
    overview: list[Row] = []
    for name in OVERVIEW:
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
    stderr reports metrics that changed after the run finished.

    Raises:
        StoreError: The run has no steps yet, or its record cannot be read.
    """
    if problem := folder.metrics_problem():
        warn(problem)
    metrics = series(folder)
    return [
        {
            "rule": counts.rule.name,
            "spikes": len(counts.spikes),
            "of steps": counts.scored,
            "share": counts.share,
            "formula": counts.rule.formula,
            "source": counts.rule.source,
            "at": metrics["step"][counts.spikes].astype(int).tolist(),
        }
        for counts in count_spikes(metrics)
    ]


def spike_table(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of `spike_rows` for a table."""
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
    """Return the formula, the unit, the tensors, the question and the source of a statistic."""
    statistic = STATISTICS[name]
    return (
        f"{name}: {statistic.formula}; unit {statistic.unit}; measured on {OF[statistic.of]}\n"
        f"question: {statistic.question}\nsource: {statistic.source}"
    )


def reading(rows: Sequence[Row]) -> str:
    """Return how to read the table of a statistic: its rows, its first and last layer, its sites and its columns."""
    of = STATISTICS[rows[0]["statistic"]].of
    sites, layers = _by_site(rows), dict.fromkeys(row["layer"] for row in rows if row["layer"])
    terms = _STREAM_LAYERS if of == "resid" else _LAYERS
    described = [f"{layer}: {terms[layer]}" for layer in layers if layer in terms]
    if len(sites) > 1:
        described += [f"site: {_SITES[of]}"] * (of in _SITES)
        parts = dict.fromkeys(site.rpartition(".")[2] for site in sites) if of in ("norm", "gain") else ()
        described += [f"{part}: {_NORM_SITES[part]}" for part in parts if part in _NORM_SITES]
    kinds = ["a site"] * (len(sites) > 1) + ["a layer"] * bool(layers)
    # `render` writes a single row as a column.
    axes = (
        f"a row is {' and '.join(kinds)}; a column is a measured step" if len(rows) > 1 else "a row is a measured step"
    )
    return "; ".join([f"to read: {axes}", *described, "over training: all measured steps"])


def _by_site(rows: Sequence[Row]) -> dict[str, list[Row]]:
    sites: dict[str, list[Row]] = {}
    for row in rows:
        sites.setdefault(row["site"], []).append(row)
    return sites
