"""One row a run: what it was, how it ended, and how good it was."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

from normlab.errors import StoreError
from normlab.report.compare.find import find_started
from normlab.report.render import FORMATS as FORMATS
from normlab.report.render import render as render
from normlab.report.settings import dig
from normlab.report.where import chosen, parse
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
)  # fmt: skip

COLUMNS = (
    "run",
    "id",
    "state",
    "norm",
    "placement",
    "depth",
    "width",
    "seed",
    "lr",
    "step",
    "steps",
    "val_loss",
    "best_val_loss",
    "last_val_loss",
    "train_loss",
    "vs_bigram",
    "baselines",
    "corpus",
    "corpus_sha256",
    "device",
    "precision",
    "tokens_per_s",
    "seconds",
    "note",
)
"""Keys of a summary's rows, in order. Losses are in nats/token; None is what a run's record does not hold.

`state`: the outcome of a run that has ended (`store/outcome.py`), else running, interrupted, killed, failed or damaged.
`val_loss`: the final validation loss, so far for a run that has not ended; None for a diverged run, which has no final
loss. `last_val_loss`: the last finite validation loss of a diverged run, for which nothing is ranked; None for others.
`vs_bigram`: `val_loss` less the bigram's. `baselines`: `whole text` in an older record, whose bigram is of the whole
validation text; None where it is of the evaluated windows.
"""


_OF_ALL_FINISHED = ("step", "val_loss", "best_val_loss", "train_loss", "tokens_per_s", "seconds")
"""What the status of every finished run says."""


def summarize(
    path: str | os.PathLike[str], where: Sequence[str] = (), results_dir: str | os.PathLike[str] = "results"
) -> list[dict[str, Any]]:
    """A row for every run in a results folder, its runs, of a sweep, or of one run: `COLUMNS`.

    Runs on one corpus stand together, those with a final loss first, lowest first. A run that diverged, failed, was
    killed or cannot be read has a row like any other, and a note of what happened.

    Args:
        path: A folder, or the name of a sweep or a run: as `compare.find.find`.
        where: Conditions that the runs must meet, as `model.depth>=8`.
        results_dir: Where names are looked up.

    Raises:
        ConfigError: A condition is none, or no run meets it.
        StoreError: There is no run there.
    """
    return [{key: row[key] for key in COLUMNS} for row in sorted(read_rows(path, where, results_dir), key=_rank)]


def read_rows(
    path: str | os.PathLike[str], where: Sequence[str] = (), results_dir: str | os.PathLike[str] = "results"
) -> list[dict[str, Any]]:
    """A row for every run, by id: `COLUMNS` and `created`; as `summarize`."""
    entries, _ = find_started(path, results_dir)
    if where:
        kept = chosen([entry.run for entry in entries], parse(where, "--where"))
        entries = [entry for entry, keep in zip(entries, kept, strict=True) if keep]
    return [row_of(entry) for entry in entries]


def row_of(entry: Entry, rows: Callable[[], Rows] | None = None) -> dict[str, Any]:
    """A run's row: `COLUMNS` and `created`.

    Args:
        entry: The run as it was found.
        rows: Gives its metrics, for who has read them already; may raise StoreError.
    """
    run, status, lost = entry.run, entry.status, ""
    if _finite(status, "step") is None:
        progress, lost = _progress(rows or entry.folder.rows)
        status = progress | status
    steps = _finite(status, "steps")
    outcome = outcome_of(run, entry.state, status)
    val_loss, last_val_loss = final_losses(outcome, status)
    if outcome == DIVERGED and last_val_loss is None:
        last_val_loss = _last_finite(rows or entry.folder.rows)
    references = references_of(run, status)
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
        "baselines": "whole text" if references.whole_text else None,
        "corpus": _text(run, "corpus.name"),
        "corpus_sha256": _text(run, "corpus.sha256"),
        "device": _text(run, "resolved.device"),
        "precision": _text(run, "resolved.precision"),
        "tokens_per_s": _finite(status, "tokens_per_s"),
        "seconds": _finite(status, "seconds"),
        "created": run.get("created"),
    }
    notes = (_note(entry, row), lost, _elsewhere(status), _unknown(entry))
    return row | {"note": "; ".join(filter(None, notes))}


def _elsewhere(status: dict[str, Any]) -> str:
    """Where the run was gone on with by other code or on another machine."""
    seen = status.get("elsewhere")
    return "; ".join(f"gone on with {text}" for text in seen) if isinstance(seen, list) else ""


def _unknown(entry: Entry) -> str:
    fields = sorted({*entry.run, *entry.status} - KNOWN_FIELDS)
    return f"{len(fields)} unknown to this normlab: {', '.join(fields)}" if fields else ""


def _progress(rows: Callable[[], Rows]) -> tuple[dict[str, Any], str]:
    """What a status would say, from the metrics, and how much of them could not be read."""
    try:
        record = rows()
    except StoreError as error:
        return {}, str(error)
    train = [row for row in record.rows if row.get("kind") == "train"]
    losses = [row.get("loss") for row in record.rows if row.get("kind") == "eval"]
    finite = [loss for loss in map(number, losses) if loss is not None and math.isfinite(loss)]
    progress: dict[str, Any] = {}
    if train:
        # Its step's number counts from 0, and a progress is what has been done.
        done = number(train[-1].get("step"))
        progress |= {"step": None if done is None else done + 1, "train_loss": train[-1].get("loss")}
    if losses:
        progress |= {"val_loss": losses[-1]}
    if finite:
        progress |= {"best_val_loss": min(finite)}
    return progress, damaged_lines(record)


def _last_finite(rows: Callable[[], Rows]) -> float | None:
    """The last finite validation loss in the metrics; read only where the status has none."""
    try:
        found = evaluations_of(rows().rows)
    except StoreError:
        return None
    return next((seen.loss for seen in reversed(found) if math.isfinite(seen.loss)), None)


def damaged_lines(record: Rows) -> str:
    """How much of the metrics could not be read, in words; empty where nothing was damaged."""
    lines = "line" if record.damaged == 1 else "lines"
    return f"{record.damaged} {lines} of the metrics cannot be read" if record.damaged else ""


def _note(entry: Entry, row: dict[str, Any]) -> str:
    reached = f" at step {_or_unknown(row['step'])} of {_or_unknown(row['steps'])}"
    if entry.state == DAMAGED:
        return entry.problem
    if row["state"] == DIVERGED:
        # An older record may be called finished where its final loss is a divergence.
        known = entry.status.get("diverged") if entry.state == DIVERGED else divergence_at_end(entry.run, entry.status)
        return f"diverged at step {_or_unknown(number(dig(known, 'step')))}: {describe_divergence(known)}"
    if entry.state == FAILED:
        lines = str(entry.status.get("error") or "").strip().splitlines()
        return f"failed{reached}: {lines[0]}" if lines else f"failed{reached}"
    if entry.state == KILLED:
        return f"killed{reached}; the same command goes on {_from_where(entry, row)}"
    if entry.state == INTERRUPTED:
        return f"interrupted{reached}; the same command goes on {_from_where(entry, row)}"
    lost = [key for key in _OF_ALL_FINISHED if row[key] is None]
    if entry.state == FINISHED and lost:
        return f"its {STATUS_FILE} does not say {', '.join(lost)}: {HOW_TO_FIX[STATUS_FILE]}"
    return ""


def _from_where(entry: Entry, row: dict[str, Any]) -> str:
    saved = number(entry.status.get("checkpoint"))
    if saved is None:  # a status that was written before the first checkpoint, or is gone
        return "from its last checkpoint, or from the start"
    return "from there" if saved == row["step"] else f"from its checkpoint of step {saved}, or a later one"


def _or_unknown(value: float | None, form: str = "") -> str:
    return "?" if value is None else format(value, form)


def _number(tree: Any, words: str) -> float | None:
    """A leaf that is a number, NaN and infinity included; None for any other, and for what no float holds."""
    value = number(dig(tree, words))
    try:
        float(value or 0)
    except OverflowError:
        return None
    return value


def _finite(tree: Any, words: str) -> float | None:
    """A leaf that is a finite number."""
    value = _number(tree, words)
    return value if value is not None and math.isfinite(value) else None


def _text(tree: Any, words: str) -> str | None:
    """A leaf that is text."""
    value = dig(tree, words)
    return value if isinstance(value, str) else None


def _rank(row: dict[str, Any]) -> tuple[Any, ...]:
    loss = row["val_loss"]
    bad = loss is None or math.isnan(loss)
    return (
        row["corpus_sha256"] is None,
        str(row["corpus"]),
        str(row["corpus_sha256"]),
        row["state"] not in OUTCOMES,
        bad,
        0.0 if bad else loss,
        row["id"],
    )
