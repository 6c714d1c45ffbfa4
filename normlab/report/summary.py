"""Summarize runs, one row each: settings, state, losses and speed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

from normlab.errors import StoreError
from normlab.report.compare.find import find_started
from normlab.report.settings import get_nested
from normlab.report.where import match_runs, parse_conditions
from normlab.store.evaluations import evaluations_of
from normlab.store.outcome import (
    OUTCOMES,
    describe_divergence,
    divergence_at_end,
    final_losses,
    outcome_of,
    references_of,
)
from normlab.store.query import Entry
from normlab.store.reading import HOW_TO_FIX, Rows
from normlab.store.schema import (
    DAMAGED,
    DIVERGED,
    FAILED,
    FINISHED,
    INTERRUPTED,
    KILLED,
    KNOWN_FIELDS,
    STATUS_FILE,
    number,
)

COLUMNS = (
    "run", "id", "state", "norm", "placement", "depth", "width", "seed", "lr", "step", "steps", "val_loss",
    "best_val_loss", "last_val_loss", "train_loss", "vs_bigram", "baselines", "corpus", "corpus_sha256", "device",
    "precision", "tokens_per_s", "seconds", "note",
)  # fmt: skip
"""Keys of a row, in order. Losses are in nats/token; None where the record has no value.

`state`: the outcome of a run that has one (`store/outcome.py`), else running, interrupted, killed, failed or damaged.
`val_loss`: the final validation loss, or the latest of an unfinished run; None for a diverged run. `last_val_loss`: the
last finite validation loss of a diverged run, which has no rank; None for others. `vs_bigram`: `val_loss` less the
bigram entropy. `baselines`: `whole text` for an older record, whose bigram entropy is of the whole validation text;
None where it is of the evaluated windows.
"""

_FINISHED_COLUMNS = ("step", "val_loss", "best_val_loss", "train_loss", "tokens_per_s", "seconds")
"""What the status of every finished run has."""

Row = dict[str, Any]


def summarize(
    path: str | os.PathLike[str], where: Sequence[str] = (), results_dir: str | os.PathLike[str] = "results"
) -> list[Row]:
    """Return a row of `COLUMNS` for each run in a results folder, a `runs` folder, a sweep or a run's folder.

    Rows are sorted by corpus, then by final loss, lowest first; runs without one follow. A run that diverged, failed,
    was killed or cannot be read has a row too, with a note.

    Args:
        path: A folder, or the name of a sweep or a run, as for `compare.find.find`.
        where: Conditions that the runs must meet, such as `model.depth>=8`.
        results_dir: Where names are looked up.

    Raises:
        ConfigError: A condition is invalid, or no run meets it.
        StoreError: There is no run.
    """
    return [{key: row[key] for key in COLUMNS} for row in sorted(read_rows(path, where, results_dir), key=_sort_key)]


def read_rows(
    path: str | os.PathLike[str], where: Sequence[str] = (), results_dir: str | os.PathLike[str] = "results"
) -> list[Row]:
    """Return a row of `COLUMNS` and `created` for each run, sorted by id; arguments and errors as `summarize`."""
    entries, _ = find_started(path, results_dir)
    if where:
        kept = match_runs([entry.run for entry in entries], parse_conditions(where, "--where"))
        entries = [entry for entry, keep in zip(entries, kept, strict=True) if keep]
    return [row_of(entry) for entry in entries]


def row_of(entry: Entry, rows: Callable[[], Rows] | None = None) -> Row:
    """Return a run's row: `COLUMNS` and `created`.

    Args:
        entry: The run.
        rows: Returns the run's metrics, for a caller that has read them already; may raise StoreError.
    """
    run, status, unreadable = entry.run, entry.status, ""
    if _finite(status, "step") is None:
        progress, unreadable = _progress(rows or entry.folder.rows)
        status = progress | status
    steps = _finite(status, "steps")
    outcome = outcome_of(run, entry.state, status)
    val_loss, last_val_loss = final_losses(outcome, status)
    if outcome == DIVERGED and last_val_loss is None:
        last_val_loss = _last_finite_loss(rows or entry.folder.rows)
    bigram = _number(run, "corpus.baselines.bigram")
    row = {
        "run": entry.name,
        "id": entry.folder.run_id,
        "state": outcome or entry.state,
        "norm": _text(run, "config.norm.preset") or _text(run, "config.norm.name"),
        "placement": _text(run, "config.placement.name"),
        "depth": _finite(run, "config.model.depth"),
        "width": _finite(run, "config.model.width"),
        "seed": _finite(run, "config.seed"),
        "lr": _finite(run, "config.optim.lr"),
        "step": _finite(status, "step"),
        "steps": _finite(run, "config.train.steps") if steps is None else steps,
        "val_loss": val_loss,
        "best_val_loss": _number(status, "best_val_loss"),
        "last_val_loss": last_val_loss,
        "train_loss": _number(status, "train_loss"),
        "vs_bigram": None if val_loss is None or bigram is None else val_loss - bigram,
        "baselines": "whole text" if references_of(run, status).whole_text else None,
        "corpus": _text(run, "corpus.name"),
        "corpus_sha256": _text(run, "corpus.sha256"),
        "device": _text(run, "resolved.device"),
        "precision": _text(run, "resolved.precision"),
        "tokens_per_s": _finite(status, "tokens_per_s"),
        "seconds": _finite(status, "seconds"),
        "created": run.get("created"),
    }
    resumed = status.get("elsewhere")
    unknown = sorted({*entry.run, *entry.status} - KNOWN_FIELDS)
    notes = [
        _state_note(entry, row),
        unreadable,
        *(f"resumed {text}" for text in (resumed if isinstance(resumed, list) else ())),
        f"fields that this normlab does not know: {', '.join(unknown)}" if unknown else "",
    ]
    return row | {"note": "; ".join(filter(None, notes))}


def _progress(rows: Callable[[], Rows]) -> tuple[Row, str]:
    """The fields of a status as far as the metrics hold them, and what could not be read."""
    try:
        metrics = rows()
    except StoreError as error:
        return {}, str(error)
    train = [row for row in metrics.rows if row.get("kind") == "train"]
    losses = [row.get("loss") for row in metrics.rows if row.get("kind") == "eval"]
    finite = [loss for loss in map(number, losses) if loss is not None and math.isfinite(loss)]
    progress: Row = {}
    if train:
        # A row counts steps from 0, and a status counts the steps that are done.
        step = number(train[-1].get("step"))
        progress |= {"step": None if step is None else step + 1, "train_loss": train[-1].get("loss")}
    if losses:
        progress |= {"val_loss": losses[-1]}
    if finite:
        progress |= {"best_val_loss": min(finite)}
    return progress, unreadable_lines_note(metrics)


def _last_finite_loss(rows: Callable[[], Rows]) -> float | None:
    try:
        evaluations = evaluations_of(rows().rows)
    except StoreError:
        return None
    return next((evaluation.loss for evaluation in reversed(evaluations) if math.isfinite(evaluation.loss)), None)


def unreadable_lines_note(metrics: Rows) -> str:
    """Return how many lines of the metrics cannot be read; empty if all can."""
    lines = "line" if metrics.damaged == 1 else "lines"
    return f"{metrics.damaged} {lines} of the metrics cannot be read" if metrics.damaged else ""


def _state_note(entry: Entry, row: Row) -> str:
    """Why a run has no final loss; empty for a finished run with a complete status."""
    at_step = f" at step {_or_unknown(row['step'])} of {_or_unknown(row['steps'])}"
    if entry.state == DAMAGED:
        return entry.problem
    if row["state"] == DIVERGED:
        # An older record may be called finished although its final loss is a divergence.
        known = entry.status.get("diverged") if entry.state == DIVERGED else divergence_at_end(entry.run, entry.status)
        return f"diverged at step {_or_unknown(number(get_nested(known, 'step')))}: {describe_divergence(known)}"
    if entry.state == FAILED:
        lines = str(entry.status.get("error") or "").strip().splitlines()
        return f"failed{at_step}: {lines[0]}" if lines else f"failed{at_step}"
    if entry.state in (KILLED, INTERRUPTED):
        saved = number(entry.status.get("checkpoint"))
        if saved is None:  # the status is older than the first checkpoint, or is lost
            checkpoint = "its last checkpoint, or from the start"
        else:
            checkpoint = "there" if saved == row["step"] else f"its checkpoint of step {saved}, or a later one"
        return f"{entry.state}{at_step}; the same command resumes from {checkpoint}"
    missing = [key for key in _FINISHED_COLUMNS if row[key] is None]
    if entry.state == FINISHED and missing:
        return f"its {STATUS_FILE} has no {', '.join(missing)}: {HOW_TO_FIX[STATUS_FILE]}"
    return ""


def _or_unknown(value: float | None) -> str:
    return "?" if value is None else f"{value}"


def _number(tree: Any, path: str) -> float | None:
    """A number of the record, which may be NaN or infinite; None for other types and for what no float can hold."""
    value = number(get_nested(tree, path))
    try:
        float(value or 0)
    except OverflowError:
        return None
    return value


def _finite(tree: Any, path: str) -> float | None:
    value = _number(tree, path)
    return value if value is not None and math.isfinite(value) else None


def _text(tree: Any, path: str) -> str | None:
    value = get_nested(tree, path)
    return value if isinstance(value, str) else None


def _sort_key(row: Row) -> tuple[Any, ...]:
    loss = row["val_loss"]
    has_loss = loss is not None and not math.isnan(loss)
    return (
        row["corpus_sha256"] is None,
        str(row["corpus"]),
        str(row["corpus_sha256"]),
        row["state"] not in OUTCOMES,
        not has_loss,
        loss if has_loss else 0.0,
        row["id"],
    )
