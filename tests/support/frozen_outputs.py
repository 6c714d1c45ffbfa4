"""Outputs of commands as golden files store them: reports of five synthetic sweeps, lists, figures and verdicts.

A golden is text, or JSON. Numbers are rounded to 10 significant digits; a long list of numbers x_i, or of points, is
stored as its sums of i x_i; the time and the version of a page are replaced, and its list of statistics is left out.
"""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from synthetic_runs import Record, write_sweep

from normlab.analysis.comparability import intact_runs
from normlab.analysis.table import summarize_by
from normlab.cli import main
from normlab.report.figure_data import make_figure
from normlab.report.figure_points import Point
from normlab.store.format import DIVERGED, FAILED, INTERRUPTED, RUNNING, encode
from normlab.store.outcome import STUCK
from normlab.store.query import select_runs
from normlab.studies.base import AtLeast, AtMost, Claim, Study, Within
from normlab.studies.estimators import Contrast, Share, Slope, difference, interaction
from normlab.studies.judge import judge
from normlab.studies.measures import Statistic, StepsTo, TokenTime
from normlab.studies.over_grid import OverGrid
from normlab.studies.report_format import as_row

FOLDER = Path(__file__).parents[1] / "golden" / "outputs"
ENVIRONMENT = {"COLUMNS": "160", "TZ": "UTC"}
"""Variables on which texts depend."""
DIGITS = 10
REPLACED = {"written": "(time)", "version": "(version)", "statistics": "(as in list-stats)"}
"""Replaced values of a page, by key."""
WHOLE_NUMBERS, WHOLE_POINTS = 12, 2
"""Longest list of numbers that is stored whole, and longest list of points, which are lists of numbers."""

# The sweeps

SMALL = {"depth": 2, "width": 32, "context": 32, "steps": 60, "batch_size": 4, "warmup_steps": 10, "stats_every": None}


def _factors() -> list[Record]:
    """Three factors and seeds; every run finishes."""
    choices = itertools.product(("layernorm", "rmsnorm"), ("pre", "post"), (2, 4), range(3))
    return [Record(**SMALL | {"norm": n, "placement": p, "depth": d, "seed": s}) for n, p, d, s in choices]


def _diverged() -> list[Record]:
    """Runs with each outcome, one cell of diverged runs only, and a missing cell."""
    outcomes: dict[tuple[str, str, int], dict[str, Any]] = {
        **{("dyt", "post", seed): {"outcome": DIVERGED, "at": 30 + seed} for seed in range(4)},
        ("rmsnorm", "post", 1): {"outcome": DIVERGED, "at": 50},
        ("rmsnorm", "post", 2): {"outcome": STUCK},
        ("layernorm", "pre", 0): {"outcome": STUCK},
        ("layernorm", "pre", 1): {"outcome": FAILED, "at": 20},
        ("dyt", "pre", 0): {"outcome": INTERRUPTED},
        ("dyt", "pre", 3): {"outcome": RUNNING, "at": 15},
    }
    choices = itertools.product(("dyt", "layernorm", "rmsnorm"), ("pre", "post"), range(4))
    return [
        Record(**SMALL | {"steps": 80, "norm": n, "placement": p, "seed": s} | outcomes.get((n, p, s), {}))
        for n, p, s in choices
        if (n, p) != ("layernorm", "post")
    ]


def _rates() -> list[Record]:
    """Five learning rates; the highest diverges in post-norm, the second highest in some of its seeds."""
    records = []
    for placement, lr, seed in itertools.product(("pre", "post"), (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), range(4)):
        is_bad = placement == "post" and (lr == 3e-2 or (lr == 1e-2 and seed in (1, 2)))
        more: dict[str, Any] = {"outcome": DIVERGED, "at": 40} if is_bad else {}
        more |= {"outcome": STUCK} if (placement, lr, seed) == ("pre", 3e-2, 0) else {}
        records.append(Record(**SMALL | {"steps": 200, "placement": placement, "lr": lr, "seed": seed} | more))
    return records


def _seeds() -> list[Record]:
    """Two norms over many seeds, some of which are missing in one norm; a loss spike."""
    return [
        Record(**SMALL | {"steps": 300, "norm": norm, "seed": seed, "spike_at": 250 if seed == 3 else None})
        for norm, seeds in (("rmsnorm", range(6)), ("scalenorm", range(1, 7)))
        for seed in seeds
    ]


def _layers() -> list[Record]:
    """Statistics of placements at three depths, at more steps than a sparkline has characters."""
    choices = itertools.product(("pre", "post"), (2, 3, 6), range(3))
    return [
        Record(**SMALL | {"steps": 50, "placement": placement, "depth": depth, "seed": seed, "stats_every": 4})
        for placement, depth, seed in choices
    ]


SWEEPS = {"factors": _factors, "diverged": _diverged, "rates": _rates, "seeds": _seeds, "layers": _layers}

# The commands

COMMANDS: dict[str, str] = {
    **{f"{sweep}-summary": f"summarize {sweep}" for sweep in SWEEPS},
    **{f"{sweep}-cells": f"summarize {sweep} --format json" for sweep in SWEEPS},
    **{f"{sweep}-page": f"compare {sweep}" for sweep in SWEEPS},
    "layers-page": "compare layers --where depth=6 --color placement",
    "factors-csv": "summarize factors --by norm --format csv",
    "factors-markdown": "summarize factors --format markdown",
    "factors-latex": "summarize factors --format latex",
    "factors-against": "summarize factors --by norm,placement --against norm=layernorm",
    "factors-interaction": "summarize factors --test interaction",
    "factors-interaction-rows": "summarize factors --test interaction --format json",
    "factors-runs": "summarize factors --runs",
    "diverged-runs": "summarize diverged --runs",
    "diverged-runs-rows": "summarize diverged --runs --where norm=rmsnorm,placement=post --format json",
    "diverged-counts": "summarize diverged --test counts --format json",
    "diverged-against": "summarize diverged --against norm=rmsnorm",
    "rates-against": "summarize rates --against placement=pre --format json",
    "rates-selection": "summarize rates --where lr<0.02",
    "seeds-target": "summarize seeds --target 2.6 --format json",
    "seeds-run-spikes": "inspect seeds norm=rmsnorm,seed=3 spikes",
    "layers-trend": "summarize layers --test trend",
    "layers-trend-rows": "summarize layers --test trend --format json",
    "layers-overview": "inspect layers placement=post,depth=6,seed=1",
    "layers-statistic": "inspect layers placement=pre,depth=6,seed=0 resid_rms",
    "layers-statistic-rows": "inspect layers placement=post,depth=3,seed=1 norm_in_rms --json",
    **{f"list-{kind}": f"list {kind} --json" for kind in ("norms", "placements", "models", "data", "optim", "init")},
    "list-stats": "list stats --json",
    "list-auto": "list auto --json",
    "list-formulas": "list formulas",
    "list-models-table": "list models",
    "list-norm": "list norms rmsnorm",
    "list-placement": "list placements pre",
}
"""The arguments of a command by the name of its golden."""

FIGURES: dict[str, tuple[str, dict[str, Any]]] = {
    "figure-factor": ("factor factors", {}),
    "figure-lr": ("lr rates", {}),
    "figure-loss": ("loss seeds", {}),
    "figure-grad-norm": ("loss diverged", {"statistic": "grad_norm"}),
    "figure-layers": ("layers layers", {}),
    "figure-layers-first": ("layers layers", {"statistic": "norm_in_rms attn.in", "moment": "first", "x": None}),
}
"""The kind and the sweep of a figure, and its options, by the name of its golden."""

POST, PRE = "placement=post", "placement=pre"
CLAIMS: dict[str, list[Claim]] = {
    "rates": [
        Claim("difference", "", difference(POST, PRE), AtLeast(0.01), effect=0.05),
        Claim("equivalence", "", difference(POST, PRE), Within(-0.1, 0.1), effect=0.0),
        Claim("mean", "", Contrast({PRE: 1.0}), AtMost(2.2), effect=2.0),
        Claim("steps", "", Contrast({POST: 1.0, PRE: -1.0}, StepsTo(2.9), is_ratio=True), AtLeast(1.0)),
        Claim("time", "", Contrast({POST: 1.0, PRE: -1.0}, TokenTime(), is_ratio=True), AtMost(1.5)),
        Claim("slope", "", Slope(PRE, "optim.lr"), AtMost(0.0)),
        Claim("share", "", Share(POST, lr="every"), AtMost(0.5)),
        Claim("share_of_diverged", "", Share(POST, PRE, states=(DIVERGED,)), AtMost(0.5)),
        Claim("sensitivity", "", OverGrid("sensitivity", POST, PRE), AtLeast(0.0)),
        Claim("highest_rate", "", OverGrid("highest_rate", POST, PRE), AtMost(1.0)),
    ],
    "layers": [
        Claim("trend", "", Slope(POST, "model.depth", minus=PRE), Within(-0.05, 0.05), effect=0.0),
        Claim(
            "interaction",
            "",
            interaction(f"{POST},depth=6", f"{POST},depth=2", f"{PRE},depth=6", f"{PRE},depth=2"),
            AtLeast(0.0),
        ),
        *(
            Claim(f"{reduced}_{at}", "", difference(f"{POST},depth=6", f"{PRE},depth=6", measure), AtLeast(0.0))
            for reduced, at in (("growth", "last"), ("median", "first"), ("max", "last"), ("last/first", "last"))
            for measure in [Statistic("dresid_rms", over=reduced, at=at, log=True)]
        ),
    ],
}
"""Claims on a sweep, with each estimator and criterion of the studies, by the sweep's name."""

NAMES = [*COMMANDS, *FIGURES, *(f"verdicts-{sweep}" for sweep in CLAIMS)]
"""The names of all goldens."""


class Outputs:
    """Writes the sweeps into a folder when they are first needed, and returns the outputs of commands on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of(self, name: str) -> Any:
        """Return the content of a golden: text, or JSON values."""
        if name in FIGURES:
            options, more = FIGURES[name]
            kind, sweep = options.split()
            with self._results_of(sweep):
                return stored(_values(make_figure(kind, summarize_by(sweep), **more)))
        if name.startswith("verdicts-"):
            return self._verdicts(name.removeprefix("verdicts-"))
        arguments = COMMANDS[name].split()
        with self._results_of(next((each for each in arguments if each in SWEEPS), None)):
            return self._printed(arguments)

    def _printed(self, arguments: list[str]) -> Any:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(arguments)
            except SystemExit as stop:
                if stop.code:
                    raise AssertionError(err.getvalue()) from stop
        printed = out.getvalue() + err.getvalue()
        if arguments[0] == "compare":
            page = Path(out.getvalue().splitlines()[-1]).read_text()
            data = re.findall('<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
            return stored({"printed": printed.splitlines(), "page": json.loads(data[0]) | REPLACED})
        if "json" in arguments or "--json" in arguments:
            return stored(json.loads(out.getvalue()))
        return re.sub(r"\d+\.\d{8,}(e[+-]?\d+)?", lambda number: f"{float(number[0]):.{DIGITS}g}", printed)

    def _verdicts(self, sweep: str) -> Any:
        with self._results_of(sweep):
            results, _ = intact_runs(select_runs([sweep], "results").records)
            verdicts = judge(Study("made", "", [], CLAIMS[sweep]), results, unverified={})
        return stored(encode({"claims": [as_row(each) for each in verdicts.claims], "notes": list(verdicts.notes)}))

    @contextlib.contextmanager
    def _results_of(self, sweep: str | None) -> Iterator[None]:
        """Make the working folder one whose `results` has only this sweep."""
        home = self.folder / (sweep or "none")
        if not home.exists():
            home.mkdir(parents=True)
            if sweep is not None:
                write_sweep(home / "results", sweep, SWEEPS[sweep]())
        with contextlib.chdir(home):
            yield


# The form of the files


def _values(figure: Any) -> Any:
    """Return the values of a figure; those of a point are a list."""
    if isinstance(figure, Point):
        seeds = figure.seeds or (None,)
        return [figure.x, figure.y, figure.low, figure.high, figure.diverged, figure.n, figure.stuck, *seeds]
    if dataclasses.is_dataclass(figure):
        return {field.name: _values(getattr(figure, field.name)) for field in dataclasses.fields(figure)}
    if isinstance(figure, Mapping):
        return {str(key): _values(each) for key, each in figure.items()}
    return [_values(each) for each in figure] if isinstance(figure, list | tuple) else figure


def stored(value: Any) -> Any:
    """Return JSON values as a golden stores them: rounded, and a long list of numbers by its ends and a sum."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): stored(each) for key, each in value.items()}
    if not isinstance(value, list | tuple):
        return value
    points = [each if isinstance(each, list | tuple) else [each] for each in value]
    most = WHOLE_POINTS if points and points[0] is value[0] else WHOLE_NUMBERS
    if len(value) <= most or not all(_is_number(number) for point in points for number in point):
        return [stored(each) for each in value]
    sums = [
        sum(index * (number or 0.0) for index, number in enumerate(column, 1))
        for column in itertools.zip_longest(*points)
    ]
    return {"n": len(value), "sums": [stored(each) for each in sums]}


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and math.isfinite(value))


def as_text(content: Any) -> str:
    """Return the text of a golden file."""
    return content if isinstance(content, str) else "\n".join(_lines(content, 3)) + "\n"


def _lines(value: Any, levels: int) -> Iterator[str]:
    """Yield the lines of JSON in which each item of the outer levels that has other items starts a line."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if not items or not levels or len(compact) < 120:
        yield compact
        return
    is_object = isinstance(value, dict)
    yield "{" if is_object else "["
    for index, (key, each) in enumerate(items):
        first, *others = _lines(each, levels - 1)
        lines = [f"{json.dumps(key)}:{first}" if is_object else first, *others]
        lines[-1] += "," if index < len(items) - 1 else ""
        yield from lines
    yield "}" if is_object else "]"


def read(name: str) -> Any:
    """Return the content of a golden."""
    (path,) = FOLDER.glob(f"{name}.*")
    text = path.read_text()
    return json.loads(text) if path.suffix == ".json" else text


def write(name: str, content: Any) -> Path:
    """Write a golden, and return its path."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.{'txt' if isinstance(content, str) else 'json'}"
    path.write_text(as_text(content))
    return path
