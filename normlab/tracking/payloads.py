"""What a tracking service receives of a run, read from its record: numbers by step, config, labels and summary.

A key of a statistic is `<of>/<statistic>`, with `/<site>` or `/L<layer>` where it has several values. `of` is the
tensor that the statistic is computed from, so that services show one section for each.

Shapes: S measured steps, L blocks; layer 0 is the embeddings, L + 1 the head.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from normlab.errors import StatisticsError, printable
from normlab.stats.profiles import Profiles
from normlab.stats.registry import STATISTICS, layers_of, values_of
from normlab.stats.statistic import TIERS
from normlab.store.added import AddedRecord
from normlab.store.format import CHECKS_FILE, COMPLETED_STATES, encode
from normlab.store.outcome import final_losses
from normlab.store.plans import Plan
from normlab.store.reading import read_record
from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder
from normlab.store.throughput import Compute

LAYERED = (
    "resid_rms", "attn_rms", "mlp_rms", "attn_ratio", "mlp_ratio", "resid_uniform", "resid_kurt", "resid_crest",
    "adj_cos", "dresid_rms",
    "attn_logit_max", "attn_entropy", "token_cos", "part_ratio", "layer_drop", "erank",
)  # fmt: skip
"""Statistics that are sent for each layer."""
SINGLE = (
    "resid_growth", "dresid_growth", "logz", "logz2", "logit_mean", "logit_absmax", "grad_share", "sharpness",
    "sharpness_pre",
)  # fmt: skip
"""Statistics with one number per step, or per step and site."""
LARGEST = {"update_ratio": ".weight", "gain_absmax": "", "resid_nonfinite": ""}
"""Statistics that are sent as the maximum over layers and over the sites whose names have this ending."""
MOST_LAYERS = 32
"""Maximum number of layers that are sent of a statistic; a deeper model sends evenly spaced layers."""
LONGEST_TAG, LONGEST_NAME = 64, 128
"""W&B's limits on tags and job types, and on names and groups."""

ROW_KEYS = {
    "train": {"loss": "train/loss", "grad_norm": "train/grad_norm", "clip": "train/clip_factor", "lr": "train/lr"},
    "eval": {"loss": "eval/loss", "loss_batch_statistics": "eval/loss_batch_statistics"},
    "pace": {"tokens_per_s": "perf/tokens_per_s", "seconds": "perf/seconds"},
}
"""The key of each number of a row, by the row's kind."""

Payload = dict[str, float]


class Labels(NamedTuple):
    """How a service lists a run."""

    name: str
    group: str | None
    """The sweep."""
    job_type: str
    """The configuration: what the runs that differ only in seeds have in common."""
    tags: tuple[str, ...]


class StepReader:
    """Reads the numbers of a run's steps, and returns each step once, after the run has written its last number for it.

    An interval ends with a row of kind `pace`, whose step P is the number of updates so far, so all steps before P are
    complete. P may have an evaluation already, and the next interval adds the rest, so P waits for it, unless the run
    is completed. W&B accepts no second row of a step; a run that stopped gets its last evaluation there when it is
    resumed.

    Args:
        folder: The run's folder.
        first: The first step.

    Raises:
        StoreError: run.json cannot be read.
    """

    def __init__(self, folder: RunFolder, first: int) -> None:
        run = folder.run()
        self._record = AddedRecord(folder)
        self._compute = Compute.parse(run)
        self._tokens = run["config"]["train"]["batch_size"] * run["config"]["model"]["context"]
        self._first = first
        self._complete = 0
        """The first step that is not complete while the run trains."""
        self._by_step: dict[int, Payload] = {}
        """The numbers of the steps that were read and not given."""

    @property
    def problem(self) -> str:
        """What is damaged in the record, so that its numbers are missing."""
        rows = f"{self._record.damaged} damaged rows of the record" if self._record.damaged else ""
        return "; ".join(filter(None, [rows, self._record.problem]))

    def read(self) -> None:
        """Read what was added to the record since the last call.

        Raises:
            StoreError: The record cannot be read.
        """
        rows, parts = self._record.read()
        for row in rows:
            if row["kind"] == "pace":
                self._complete = row["step"]
            if row["step"] >= self._first and row["kind"] in ROW_KEYS:
                self._by_step.setdefault(row["step"], {}).update(_numbers(row, self._compute))
        for profiles in parts:
            due = profiles.steps >= self._first
            _add_statistics(self._by_step, Profiles(profiles.layout, profiles.steps[due], profiles.values[due]))

    def take(self, state: str) -> list[tuple[int, Payload]]:
        """Return the numbers of each step that was read and is complete, oldest first, and forget them.

        Args:
            state: The state of the run, which the caller read before it called `read`.
        """
        before = math.inf if state in COMPLETED_STATES else self._complete
        steps = [(step, self._by_step.pop(step)) for step in sorted(self._by_step) if step < before]
        if steps:
            self._first = steps[-1][0] + 1
        return [(step, {"train/tokens": step * self._tokens, **numbers}) for step, numbers in steps]


def keys_of(folder: RunFolder, run: Mapping[str, Any]) -> set[str]:
    """Return the keys of all numbers that `StepReader` returns for a run.

    Raises:
        StoreError: The record cannot be read.
    """
    compute = Compute.parse(run)
    keys = {key for row in folder.rows().rows for key in _numbers(row, compute)}
    parts = [profiles for tier in TIERS for profiles in folder.statistics.read(tier)[0]]
    return keys.union(*map(_columns, parts))


def _numbers(row: Mapping[str, Any], compute: Compute) -> Payload:
    """Return the numbers of a row by key, without what is no number."""
    names = ROW_KEYS.get(row["kind"], {})
    numbers = {name: row[key] for key, name in names.items() if key in row}
    tokens_per_s = numbers.get(ROW_KEYS["pace"]["tokens_per_s"])
    return numbers if tokens_per_s is None else numbers | _speeds(compute, tokens_per_s)


def _speeds(compute: Compute, tokens_per_s: float) -> Payload:
    """Return the model FLOP/s in units of 10^12, and the MFU from 0 to 1, if they are known."""
    mfu = compute.mfu(tokens_per_s)
    speeds = {"perf/tflops_per_s": compute.flops_per_token * tokens_per_s / 1e12}
    return speeds if mfu is None else speeds | {"perf/mfu": mfu}


def _add_statistics(by_step: dict[int, Payload], profiles: Profiles) -> None:
    """Add the statistics that were measured to the payload of each of the S steps."""
    columns = _columns(profiles)
    for index, step in enumerate(profiles.steps.tolist()):
        by_step.setdefault(step, {}).update({key: float(values[index]) for key, values in columns.items()})


def _columns(profiles: Profiles) -> dict[str, np.ndarray[Any, Any]]:
    """Return the values of each statistic that was measured by key, shape (S,)."""
    columns: dict[str, np.ndarray[Any, Any]] = {}
    for name in LAYERED:
        for site, values in _values(profiles, name):
            layers = np.flatnonzero(layers_of(profiles, name)[site])
            chosen = np.linspace(0, len(layers) - 1, min(len(layers), MOST_LAYERS)).round().astype(int)
            columns |= {f"{_key(name, site)}/L{layer:02d}": values[:, layer] for layer in layers[chosen]}
    for name in SINGLE:
        for site, values in _values(profiles, name):
            columns[_key(name, site)] = values if values.ndim == 1 else values[:, -1]
    for name, ending in LARGEST.items():
        if candidates := [values for site, values in _values(profiles, name) if site.endswith(ending)]:
            stacked = np.stack(candidates)
            columns[_key(name)] = np.nanmax(stacked, axis=0 if stacked.ndim == 2 else (0, 2))
    return columns


def _key(name: str, site: str = "") -> str:
    return f"{STATISTICS[name].of}/{name}" + (f"/{printable(site)}" if site else "")


def _values(profiles: Profiles, name: str) -> Iterable[tuple[str, np.ndarray[Any, Any]]]:
    """Return a statistic by site; empty if the statistic was not measured."""
    try:
        return values_of(profiles, name).items()
    except StatisticsError:
        return ()


def config_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run by their names, as trees, and the rest of run.json under `record`.

    The options have their resolved values, so that W&B shows what differs between runs with `auto`. Their values in
    run.json are under `record.unresolved`.
    """
    config = run["config"]
    resolved = {option: value for option, value in run["resolved"].items() if option in config}
    record = {**run, "unresolved": {option: config[option] for option in resolved}}
    return {**config, **resolved, "record": {key: value for key, value in record.items() if key != "config"}}


def labels_of(run: Mapping[str, Any], plan: Plan | None) -> Labels:
    """Return a run's labels: in a sweep, the overrides that vary; otherwise its norm, placement and depth.

    Args:
        run: The content of run.json.
        plan: The plan of the run's sweep, if it has one.
    """
    config = run["config"]
    tracking, model = config["tracking"], config["model"]
    overrides = next((list(each.overrides) for each in plan.runs if each.run_id == run["run_id"]), []) if plan else []
    norm = config["norm"]["preset"] or config["norm"]["name"]
    configuration = [f"norm={norm}", f"placement={config['placement']['name']}", f"model.depth={model['depth']}"]
    tags = overrides or configuration
    job_type = [each for each in overrides if each.partition("=")[0] not in ("seed", "data.seed")] or configuration
    given_name = None if run["name"] == run["run_id"] else run["name"]
    group = tracking["group"] or (plan.name if plan else None)
    return Labels(
        name=_shorten(given_name or " ".join(overrides) or run["run_id"], LONGEST_NAME),
        group=group and _shorten(group, LONGEST_NAME),
        job_type=_shorten(tracking["job_type"] or " ".join(job_type), LONGEST_TAG),
        tags=tuple(dict.fromkeys(_shorten(tag, LONGEST_TAG) for tag in [*tracking["tags"], *tags])),
    )


def _shorten(text: str, longest: int) -> str:
    """Return a printable text of at most `longest` characters; a cut one ends in its hash."""
    text = printable(text)
    return text if len(text) <= longest else f"{text[: longest - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def summary_of(record: RunRecord) -> dict[str, Any]:
    """Return the summary of a run: state, outcome, losses, spikes, and complete status."""
    status = record.status
    summary: dict[str, Any] = {"state": record.state, "outcome": record.outcome, "best_val_loss": status.best_val_loss}
    if record.state in COMPLETED_STATES:
        summary["val_loss"], summary["last_val_loss"] = final_losses(record.state, status.val_loss)
    summary |= {f"spike/{rule}": spikes.spikes for rule, spikes in (status.spikes or {}).items()}
    numbers = {key: value for key, value in summary.items() if value is not None}
    return numbers | {"status": encode(asdict(status))}  # W&B has no NaN in nested values


def checks_of(folder: RunFolder) -> dict[str, int]:
    """Return the result of `normlab verify` for the summary of a run; empty if there is none.

    Raises:
        StoreError: The result cannot be read.
    """
    path = folder.path / CHECKS_FILE
    result = read_record(path) if path.exists() else {}
    return {"verify/checks": result["checks"], "verify/failed": len(result["failed"])} if result else {}
