"""The table of runs, a row each: settings, state, losses and speed."""

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from normlab.analysis.columns import Column
from normlab.analysis.comparability import differences, intact_runs, names_of, obstacles
from normlab.analysis.conditions import select_where
from normlab.analysis.factors import distinguishing_options, unexplained_options
from normlab.analysis.settings import RESOLVED, format_setting, setting
from normlab.report.tables import TableRow, render
from normlab.store.format import DAMAGED, DIVERGED, FAILED, INTERRUPTED, KILLED
from normlab.store.outcome import OUTCOMES, final_losses, format_loss
from normlab.store.query import Folder, Selection, select_runs
from normlab.store.record import RunEntry, RunRecord, Setting
from normlab.store.throughput import format_mfu, format_tflops

_OPTIONS_IN_COLUMNS = ("norm", "placement", "model.depth", "model.width", "device", "precision", "pack size")
"""Settings that a row has under other names."""

# Values of a run that are more than a field of its record


def _val_loss(run: RunRecord) -> float | None:
    loss, _ = final_losses(run.outcome, run.status.val_loss)
    return loss


def _val_loss_ema(run: RunRecord) -> float | None:
    loss, _ = final_losses(run.outcome, run.status.val_loss_ema)
    return loss


def _vs_bigram(run: RunRecord) -> float | None:
    loss = _val_loss(run)
    if loss is None:
        return None
    return loss - run.corpus.baselines.bigram


def _pack(run: RunRecord) -> int | None:
    if run.status.pack_size == 1:
        return None
    return run.status.pack_size


def _note(run: RunRecord) -> str:
    notes = [_state_note(run)]
    for change in run.status.changes_at_resume:
        notes.append(f"resumed {change}")
    if run.status.graph_problem:
        notes.append(f"without CUDA graphs: {run.status.graph_problem}")
    return "; ".join(filter(None, notes))


def _state_note(run: RunRecord) -> str:
    divergence = run.status.diverged
    if divergence is not None and run.outcome == DIVERGED:
        return f"diverged at step {divergence.step}: {divergence}"
    at_step = f" at step {run.status.step} of {run.config.train.steps}"
    if run.state == FAILED:
        lines = (run.status.error or "").strip().splitlines()
        if not lines:
            return f"failed{at_step}"
        return f"failed{at_step}: {lines[0]}"
    if run.state in (KILLED, INTERRUPTED):
        return f"{run.state}{at_step}; the same command resumes it from its newest checkpoint"
    return ""


COLUMNS: Sequence[Column[RunRecord]] = (
    Column("run", lambda run: run.name, "run", is_kept=True),
    Column("id", lambda run: run.run_id, "id", is_hidden=True),
    Column("state", lambda run: run.outcome or run.state, "state", is_kept=True, is_shared=True),
    Column("norm", lambda run: setting(run, "norm"), "norm", is_shared=True),
    Column("placement", lambda run: run.config.placement.name, "placement", is_shared=True),
    Column("depth", lambda run: run.config.model.depth, "depth", format_setting, is_number=True, is_shared=True),
    Column("width", lambda run: run.config.model.width, "width", format_setting, is_number=True, is_shared=True),
    Column("seed", lambda run: run.config.seed, "seed", format_setting, is_number=True, is_shared=True),
    Column("lr", lambda run: run.config.optim.lr, "lr", format_setting, is_number=True, is_shared=True),
    Column("step", lambda run: run.status.step, "step", "{:.0f}".format, is_number=True),
    Column("steps", lambda run: run.config.train.steps, "steps", "{:.0f}".format, is_number=True),
    Column("val_loss", _val_loss, "val loss", format_loss, is_kept=True, is_number=True),
    Column("val_loss_ema", _val_loss_ema, "val ema", format_loss, is_number=True),
    Column(
        "best_val_loss",
        lambda run: run.status.best_val_loss,
        "best val",
        format_loss,
        "best val: the lowest validation loss of the run",
        is_number=True,
    ),
    Column(
        "train_loss",
        lambda run: run.status.train_loss,
        "train loss",
        format_loss,
        "train loss: of the batch of the last step, so that it differs from val loss by chance too",
        is_number=True,
    ),
    Column(
        "vs_bigram",
        _vs_bigram,
        "vs bigram",
        partial(format_loss, sign="+"),
        "vs bigram: val loss minus the bigram entropy, the loss of a model that knows only pairs of tokens",
        is_number=True,
    ),
    Column("corpus", lambda run: run.corpus.name, "corpus", is_shared=True),
    Column("corpus_sha256", lambda run: run.corpus.sha256, "corpus sha256", is_hidden=True),
    Column("device", lambda run: run.machine.device, "device", is_shared=True),
    Column("precision", lambda run: run.machine.precision, "precision", is_shared=True),
    Column("tokens_per_s", lambda run: run.status.tokens_per_s, "tok/s", "{:,.0f}".format, is_number=True),
    Column(
        "flops_per_token",
        lambda run: run.compute.flops_per_token,
        "FLOPs/token",
        "{:.4g}".format,
        is_number=True,
        is_hidden=True,
    ),
    Column("flops_per_s", lambda run: run.flops_per_s, "TFLOP/s", format_tflops, is_hidden=True, is_number=True),
    Column("mfu", lambda run: run.mfu, "MFU", format_mfu, is_number=True),
    Column(
        "seconds",
        lambda run: run.status.seconds,
        "seconds",
        "{:,.1f}".format,
        "seconds: of training; runs that train together, as a pack, have the same ones",
        is_number=True,
    ),
    Column("pack", _pack, "pack", is_shared=True),
    Column("note", _note, "note", is_hidden=True),
    Column("folder", lambda run: os.path.relpath(run.folder.path), "folder", is_hidden=True),
)
"""The columns of a run, in their order.

Losses are in nats/token; a value that the record lacks is None.

`state`: the outcome of a completed run (`store/outcome.py`), else running, interrupted, killed, failed or damaged.
`val_loss`: the final validation loss, or the latest of an unfinished run; None for a diverged run.
`val_loss_ema`: the same with the average of the weights (`eval.ema`).
`vs_bigram`: `val_loss` minus the bigram entropy.
`flops_per_token`: model FLOPs of a training step per token; `flops_per_s`: of this run alone; `mfu`: from 0 to 1,
of the device with all runs of a pack, None if its peak is not known (`store/throughput.py`).
`pack`: the number of runs that trained together, which share `seconds`; None for a run that trained alone.
`folder`: from the working folder.
"""


def row_of(run: RunEntry) -> TableRow:
    """Return a run's values of `COLUMNS`; one without an intact record has `run`, `id`, `state`, `note`, `folder`."""
    if isinstance(run, RunRecord):
        return {column.key: column.value(run) for column in COLUMNS}
    row: TableRow = dict.fromkeys(column.key for column in COLUMNS)
    row |= {"run": run.name, "id": run.run_id, "state": run.state, "note": ""}
    if run.state == DAMAGED:
        row["note"] = run.problem
    return row | {"folder": os.path.relpath(run.folder.path)}


def summarize(
    path: Folder | Sequence[Folder] | Selection,
    where: Sequence[str] = (),
    results_dir: Folder = "results",
) -> list[TableRow]:
    """Return a row (`row_of`) for each run of a results folder, `runs` folder, sweep or run.

    A row also has each other option, by its full name, and each other resolved setting in which the runs differ, but
    those that follow from the arm.

    Rows are sorted by corpus, then by final loss, lowest first, then runs without a final loss. A run that diverged,
    failed, was killed or cannot be read also has a row, with a note.

    `path` is a folder or a name, or several, as for `query.select_runs`, or the selected runs; `where` are conditions
    that the runs must meet, such as `model.depth>=8`.

    Raises:
        ConfigError: A condition is invalid, or no run meets it.
        StoreError: There is no run.
    """
    selection = path
    if not isinstance(selection, Selection):
        selection = select_runs(selection, results_dir)
    runs = select_where(selection.started, where)
    records = [run for run in runs if isinstance(run, RunRecord)]
    factors = distinguishing_options(records)
    readers: dict[str, Callable[[RunRecord], Setting]] = {}
    for option in [*factors, *unexplained_options(records, factors)]:
        readers[option] = partial(setting, option=option)
    for name, read in RESOLVED.items():
        # A run whose record lacks the setting does not differ in it.
        values = set(map(read, records)) - {None}
        if len(values) > 1:
            readers[name] = read
    for name in _OPTIONS_IN_COLUMNS:
        readers.pop(name, None)
    rows: list[TableRow] = []
    for run in runs:
        row: TableRow = {}
        for key, value in row_of(run).items():
            # The other options stand beside those that every table has.
            if key == "seed":
                for name, read in readers.items():
                    row[name] = read(run) if isinstance(run, RunRecord) else None
            row[key] = value
        rows.append(row)
    return sorted(rows, key=_sort_key)


def render_runs(
    rows: Sequence[TableRow], format: str = "table", width: int | None = None, *, has_definitions: bool = True
) -> str:
    """Render rows of `summarize` in one of `tables.FORMATS`."""
    return render(rows, format, width, columns=COLUMNS, has_definitions=has_definitions)


def comparability_warnings(selection: Selection, where: Sequence[str] = ()) -> list[str]:
    """Return lines that name the options in which runs differ beside those that distinguish them, or no line."""
    runs, _ = intact_runs(select_where(selection.started, where))
    factors = distinguishing_options(runs)
    unexplained = unexplained_options(runs, factors)
    if not unexplained:
        return []
    different: list[str] = []
    for difference in differences(runs, factors):
        if difference.name in unexplained:
            different.append(str(difference))
    warnings = [f"the runs differ in more than {', '.join(factors)}: {'; '.join(different)}"]
    # Each run is a group of its own, because the table has a row for each.
    names = names_of(obstacles([[run] for run in runs], factors))
    apart = [name for name in names if name in unexplained]
    if apart:
        warnings.append(f"losses of runs that differ in {' or '.join(apart)} are not comparable")
    return warnings


def _sort_key(row: TableRow) -> tuple[Any, ...]:
    # A run without a loss comes last, and NaN has no place in an order.
    loss = row["val_loss"]
    if loss is None or math.isnan(loss):
        loss = math.inf
    # Losses are comparable within a corpus only.
    corpus = row["corpus_sha256"] is None, str(row["corpus"]), str(row["corpus_sha256"])
    return *corpus, row["state"] not in OUTCOMES, loss, row["id"]
