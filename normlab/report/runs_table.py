"""Summarize runs, one row each: settings, state, losses and speed."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from normlab.analysis.factors import distinguishing_options
from normlab.analysis.phrases import counted
from normlab.analysis.results import read_results
from normlab.analysis.settings import RESOLVED, select_where, setting
from normlab.errors import StoreError
from normlab.report.tables import Row
from normlab.store.format import (
    DAMAGED,
    DIVERGED,
    FAILED,
    INTERRUPTED,
    KILLED,
    number,
)
from normlab.store.outcome import OUTCOMES, final_losses
from normlab.store.parts import finite
from normlab.store.query import Selection, select_runs
from normlab.store.record import RunRecord
from normlab.store.status import Status, or_unknown

_OPTIONS_IN_COLUMNS = ("norm", "placement", "model.depth", "model.width", "device", "precision", "pack size")
"""Settings that a row has under other names."""
RUN_COLUMNS = ("run", "id", "state", "norm", "placement", "depth", "steps", "val_loss", "created")
"""Keys of a row of `normlab list runs`, in order."""


def summarize(
    path: str | os.PathLike[str] | Selection,
    where: Sequence[str] = (),
    results_dir: str | os.PathLike[str] = "results",
    *,
    with_options: bool = False,
) -> list[Row]:
    """Return a row (`row_of`) for each run of a results folder, `runs` folder, sweep or run.

    A row also has each other option, by its full name, and each other resolved setting in which the runs differ.

    Rows are sorted by corpus, then by final loss, lowest first, then runs without a final loss. A run that diverged,
    failed, was killed or cannot be read also has a row, with a note.

    Args:
        path: A folder, or the name of a sweep or a run, as for `query.select_runs`; or the selected runs.
        where: Conditions that the runs must meet, such as `model.depth>=8`.
        results_dir: The folder in which names are looked up.
        with_options: Add the key `options`, all options of the run.

    Raises:
        ConfigError: A condition is invalid, or no run meets it.
        StoreError: There is no run.
    """
    selection = path if isinstance(path, Selection) else select_runs([os.fspath(path)], results_dir)
    runs = select_where(selection.started, where)
    resolved = {name: read for name, read in RESOLVED.items() if len({*map(read, runs)} - {None}) > 1}
    options = {option: partial(setting, option=option) for option in distinguishing_options(read_results(runs)[0])}
    others = {name: read for name, read in (options | resolved).items() if name not in _OPTIONS_IN_COLUMNS}
    rows = []
    for run in runs:
        row = row_of(run)
        row.pop("created")
        rest = {key: row.pop(key) for key in list(row)[list(row).index("seed") :]}
        row |= {name: read(run) for name, read in others.items()} | rest
        rows.append(row | {"options": dict(run.options)} if with_options else row)
    return sorted(rows, key=_sort_key)


def list_runs(path: str | os.PathLike[str], results_dir: str = "results") -> list[Row]:
    """Return a row of `RUN_COLUMNS` for each run of a folder, sweep or run, newest first.

    Raises:
        StoreError: There is no run.
    """
    runs = select_runs([os.fspath(path)], results_dir).started
    newest_first = sorted(runs, key=lambda run: run.created or 0, reverse=True)
    return [{key: row[key] for key in RUN_COLUMNS} for row in map(row_of, newest_first)]


def row_of(run: RunRecord) -> Row:
    """Return a run's row. Losses are in nats/token; a value that the record lacks is None.

    `state`: the outcome of a completed run (`store/outcome.py`), else running, interrupted, killed, failed or damaged.
    `val_loss`: the final validation loss, or the latest of an unfinished run; None for a diverged run.
    `last_val_loss`: the latest validation loss of a diverged run, if it is finite; None for other runs.
    `vs_bigram`: `val_loss` minus the bigram entropy.
    `flops_per_token`: model FLOPs of a training step per token; `flops_per_s`: of this run alone; `mfu`: from 0 to 1,
    of the device with all runs of a pack, None if its peak is not known (`store/throughput.py`).
    `pack`: the number of runs that trained together, which share `seconds`; None for a run that trained alone.
    """
    unreadable = ""
    if run.status.step is None:
        run, unreadable = _with_progress(run)
    status = run.status
    val_loss, last_val_loss = final_losses(run.outcome, status.val_loss)
    bigram = run.corpus.baselines.bigram
    row = {
        "run": run.name,
        "id": run.run_id,
        "state": run.outcome or run.state,
        "norm": setting(run, "norm"),
        "placement": run.config.placement.name,
        "depth": run.config.model.depth,
        "width": run.config.model.width,
        "seed": run.config.seed,
        "lr": run.config.optim.lr,
        "step": status.step,
        "steps": run.config.train.steps if status.steps is None else status.steps,
        "val_loss": val_loss,
        "best_val_loss": status.best_val_loss,
        "last_val_loss": last_val_loss,
        "train_loss": status.train_loss,
        "vs_bigram": None if val_loss is None or bigram is None else val_loss - bigram,
        "corpus": run.corpus.name,
        "corpus_sha256": run.corpus.sha256,
        "device": run.machine.device,
        "precision": run.machine.precision,
        "tokens_per_s": status.tokens_per_s,
        "flops_per_token": run.compute.flops_per_token,
        "flops_per_s": run.flops_per_s,
        "mfu": run.mfu,
        "seconds": status.seconds,
        "pack": status.pack_size if status.pack_size > 1 else None,
        "created": run.created,
    }
    notes = [
        _state_note(run, row),
        unreadable,
        *(f"resumed {text}" for text in status.changes_at_resume),
    ]
    return row | {"note": "; ".join(filter(None, notes))}


def _with_progress(run: RunRecord) -> tuple[RunRecord, str]:
    """Return a run with its status completed from the metrics, and a note on unreadable metrics."""
    try:
        metrics = run.folder.rows()
    except StoreError as error:
        return run, str(error)
    train = next((row for row in reversed(metrics.rows) if row.get("kind") == "train"), {})
    losses = [number(row.get("loss")) for row in metrics.rows if row.get("kind") == "eval"]
    step = finite(train.get("step"))
    progress = Status(
        step=None if step is None else step + 1,  # rows count steps from 0; a status counts completed steps
        train_loss=number(train.get("loss")),
        val_loss=losses[-1] if losses else None,
        best_val_loss=min((loss for loss in losses if loss is not None and math.isfinite(loss)), default=None),
    )
    known = {key: value for key in progress.__slots__ if (value := getattr(run.status, key)) is not None}
    status = dataclasses.replace(progress, **known)
    return dataclasses.replace(run, status=status), unreadable_lines_note(metrics.damaged)


def unreadable_lines_note(damaged: int) -> str:
    """Return a note on the number of unreadable lines of the metrics, or an empty text."""
    return f"{counted(damaged, 'line')} of the metrics cannot be read" if damaged else ""


def _state_note(run: RunRecord, row: Row) -> str:
    """Return why a run has no final loss or an incomplete status, or an empty text."""
    divergence = run.status.diverged
    at_step = f" at step {or_unknown(row['step'])} of {or_unknown(row['steps'])}"
    if run.state == DAMAGED:
        return run.problem
    if run.outcome == DIVERGED:
        return f"diverged at step {or_unknown(divergence.step)}: {divergence}"
    if run.state == FAILED:
        lines = (run.status.error or "").strip().splitlines()
        return f"failed{at_step}: {lines[0]}" if lines else f"failed{at_step}"
    if run.state in (KILLED, INTERRUPTED):
        return f"{run.state}{at_step}; the same command resumes it from its newest checkpoint"
    return ""


def _sort_key(row: Row) -> tuple[Any, ...]:
    loss = math.inf if row["val_loss"] is None or math.isnan(row["val_loss"]) else row["val_loss"]
    corpus = row["corpus_sha256"] is None, str(row["corpus"]), str(row["corpus_sha256"])
    return *corpus, row["state"] not in OUTCOMES, loss, row["id"]
