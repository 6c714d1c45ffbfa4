"""What W&B receives of a run, read from its record: numbers by step, config, labels and summary.

A key of a statistic is `<of>/<statistic>`, with `/<site>` or `/L<layer>` where it has several values. `of` is the
tensor that the statistic is computed from, so that W&B shows one section for each.

Shapes: S measured steps, L blocks; layer 0 is the embeddings, L + 1 the head.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from normlab.base.errors import StatisticsError, printable
from normlab.catalogue.statistics.profiles import Profiles
from normlab.catalogue.statistics.registry import STATISTICS, layers_of, values_of
from normlab.catalogue.statistics.statistic import LARGEST, ONE
from normlab.store.added import AddedRecord
from normlab.store.format import COMPLETED_STATES
from normlab.store.outcome import final_losses
from normlab.store.plans import Plan
from normlab.store.record import RunRecord
from normlab.store.run_json import Run
from normlab.store.runs import RunFolder
from normlab.store.throughput import Compute

MOST_LAYERS = 32
"""Maximum number of layers that are sent of a statistic; a deeper model sends evenly spaced layers."""
LONGEST_TAG, LONGEST_NAME = 64, 128
"""W&B's limits on tags and job types, and on names and groups."""

ROW_KEYS = {
    "train": {"loss": "train/loss", "grad_norm": "train/grad_norm", "clip": "train/clip_factor", "lr": "train/lr"},
    "eval": {"loss": "eval/loss", "loss_batch_statistics": "eval/loss_batch_statistics", "loss_ema": "eval/loss_ema"},
    "pace": {"tokens_per_s": "perf/tokens_per_s", "seconds": "perf/seconds"},
}
"""The key of each number of a row, by the row's kind."""

Payload = dict[str, float]


class StepReader:
    """Reads the numbers of a run's steps, and returns each step once, after the run has written its last number for it.

    An interval ends with a row of kind `pace`, whose step P is the number of updates so far, so all steps before P are
    complete. P may have an evaluation already, and the next interval adds the rest, so P waits for it, unless the run
    is completed. W&B accepts no second row of a step; a run that stopped gets its last evaluation there when it is
    resumed.

    Raises:
        StoreError: run.json cannot be read.
    """

    def __init__(self, folder: RunFolder, first: int) -> None:
        run = folder.run(Run)
        self._record = AddedRecord(folder)
        self._compute = run.compute
        self._tokens = run.config["train"]["batch_size"] * run.config["model"]["context"]
        self._first = first
        self._complete = 0
        """The first step that is not complete while the run trains."""
        self._by_step: dict[int, Payload] = {}
        """The numbers of the steps that were read and not returned."""

    def read(self, state: str) -> list[tuple[int, Payload]]:
        """Return the numbers of the steps that are complete and were not returned before, oldest first.

        The caller reads the state of the run before this call.

        Raises:
            StoreError: The record cannot be read.
        """
        rows, parts = self._record.read()
        for row in rows:
            if row["kind"] == "pace":
                self._complete = row["step"]
            if row["step"] >= self._first:
                self._by_step.setdefault(row["step"], {}).update(_numbers(row, self._compute))
        for profiles in parts:
            columns = _columns(profiles)
            for index, step in enumerate(profiles.steps.tolist()):
                if step >= self._first:
                    numbers = {key: float(values[index]) for key, values in columns.items()}
                    self._by_step.setdefault(step, {}).update(numbers)
        # A completed run adds nothing, so that its last step is complete too.
        end = math.inf if state in COMPLETED_STATES else self._complete
        steps: list[tuple[int, Payload]] = []
        for step in sorted(self._by_step):
            if step < end:
                steps.append((step, {"train/tokens": step * self._tokens, **self._by_step.pop(step)}))
        if steps:
            self._first = steps[-1][0] + 1
        return steps


def _numbers(row: Mapping[str, Any], compute: Compute) -> Payload:
    """Return the numbers of a row by key: model FLOP/s in 10^12, MFU from 0 to 1."""
    numbers: Payload = {}
    for key, name in ROW_KEYS[row["kind"]].items():
        if key in row:
            numbers[name] = row[key]
    tokens_per_s = numbers.get("perf/tokens_per_s")
    if tokens_per_s is not None:
        numbers["perf/tflops_per_s"] = compute.flops_per_token * tokens_per_s / 1e12
        mfu = compute.mfu(tokens_per_s)
        if mfu is not None:  # the peak of the device is known
            numbers["perf/mfu"] = mfu
    return numbers


def _columns(profiles: Profiles) -> dict[str, np.ndarray[Any, Any]]:
    """Return the values of each statistic that was measured by key, shape (S,)."""
    columns: dict[str, np.ndarray[Any, Any]] = {}
    for name, statistic in STATISTICS.items():
        if not statistic.sent:
            continue
        try:
            by_site = values_of(profiles, name)
        except StatisticsError:  # it was not measured
            continue
        key = f"{statistic.of}/{name}"
        if statistic.sent == LARGEST:
            # One number for a step: the largest over the sites, and over the layers if there are any.
            largest = [values for site, values in by_site.items() if site.endswith(statistic.sent_sites)]
            if largest:
                stacked = np.stack(largest)
                columns[key] = np.nanmax(stacked, axis=0 if stacked.ndim == 2 else (0, 2))
            continue
        for site, values in by_site.items():
            key_of_site = f"{key}/{printable(site)}" if site else key
            if statistic.sent == ONE and values.ndim == 1:
                columns[key_of_site] = values
            elif statistic.sent == ONE:
                columns[key_of_site] = values[:, -1]
            else:
                # Evenly spaced layers, the first and the last among them.
                layers = np.flatnonzero(layers_of(profiles, name)[site])
                positions = np.linspace(0, len(layers) - 1, min(len(layers), MOST_LAYERS)).round().astype(int)
                for layer in layers[positions]:
                    columns[f"{key_of_site}/L{layer:02d}"] = values[:, layer]
    return columns


def config_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run by their names, as trees, and the rest of run.json under `record`.

    The options have their resolved values, so that W&B shows what differs between runs with `auto`.
    """
    config = run["config"]
    resolved = {option: value for option, value in run["resolved"].items() if option in config}
    return {**config, **resolved, "record": {key: value for key, value in run.items() if key != "config"}}


def labels_of(run: Mapping[str, Any], plan: Plan | None) -> dict[str, Any]:
    """Return a run's name, group, job type and tags: in a sweep, the overrides that vary; else norm, placement, depth.

    The group is the sweep, and the job type is what the runs that differ only in seeds have in common. `run` is the
    content of run.json.
    """
    config = run["config"]
    overrides: list[str] = []
    if plan is not None:
        overrides = next((list(planned.overrides) for planned in plan.runs if planned.run_id == run["run_id"]), [])
    norm = config["norm"]["preset"] or config["norm"]["name"]
    depth = f"model.depth={config['model']['depth']}"
    configuration = [f"norm={norm}", f"placement={config['placement']['name']}", depth]
    job_type = [override for override in overrides if override.partition("=")[0] not in ("seed", "data.seed")]
    job_type = job_type or configuration
    # A run without a name of its own has its id there.
    given_name = "" if run["name"] == run["run_id"] else run["name"]
    return {
        "name": printable(given_name or " ".join(overrides) or run["run_id"])[:LONGEST_NAME],
        "group": None if plan is None else _shortened(plan.name, LONGEST_NAME),
        "job_type": _shortened(" ".join(job_type), LONGEST_TAG),
        "tags": list(dict.fromkeys(_shortened(tag, LONGEST_TAG) for tag in overrides or configuration)),
    }


def _shortened(text: str, length: int) -> str:
    """Return a text of at most `length` characters; a longer one ends with its hash.

    W&B averages runs of one group and job type, so that long labels of different cells must not become equal.
    """
    label = printable(text)
    if len(label) <= length:
        return label
    end = f"...{hashlib.sha256(label.encode()).hexdigest()[:8]}"
    return label[: length - len(end)] + end


def summary_of(record: RunRecord) -> dict[str, Any]:
    """Return the results of a run that W&B shows in its table of runs, without those that it lacks."""
    status = record.status
    summary: dict[str, Any] = {"state": record.state, "outcome": record.outcome, "best_val_loss": status.best_val_loss}
    if record.state in COMPLETED_STATES:
        summary["val_loss"], summary["last_val_loss"] = final_losses(record.state, status.val_loss)
    summary |= {f"spike/{rule}": spikes.spikes for rule, spikes in (status.spikes or {}).items()}
    return {key: value for key, value in summary.items() if value is not None}
