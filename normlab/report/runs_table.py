"""Summarize runs, one row each: settings, state, losses and speed."""

import math
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from normlab.analysis.comparability import differences, intact_runs, obstacles
from normlab.analysis.factors import distinguishing_options, unexplained_options
from normlab.analysis.settings import RESOLVED, select_where, setting
from normlab.report.tables import Row
from normlab.store.format import DAMAGED, DIVERGED, FAILED, INTERRUPTED, KILLED
from normlab.store.outcome import OUTCOMES, final_losses
from normlab.store.query import Folder, Selection, select_runs
from normlab.store.record import RunEntry, RunRecord

_OPTIONS_IN_COLUMNS = ("norm", "placement", "model.depth", "model.width", "device", "precision", "pack size")
"""Settings that a row has under other names."""
_VALUES = (
    "norm", "placement", "depth", "width", "seed", "lr", "step", "steps", "val_loss", "val_loss_ema",
    "best_val_loss", "train_loss", "vs_bigram", "corpus", "corpus_sha256", "device", "precision", "tokens_per_s",
    "flops_per_token", "flops_per_s", "mfu", "seconds", "pack",
)  # fmt: skip
"""Keys of a row between `state` and `note`."""


def summarize(
    path: Folder | Sequence[Folder] | Selection,
    where: Sequence[str] = (),
    results_dir: Folder = "results",
) -> list[Row]:
    """Return a row (`row_of`) for each run of a results folder, `runs` folder, sweep or run.

    A row also has the run's folder, from the working folder, each other option, by its full name, and each other
    resolved setting in which the runs differ, but those that follow from the arm.

    Rows are sorted by corpus, then by final loss, lowest first, then runs without a final loss. A run that diverged,
    failed, was killed or cannot be read also has a row, with a note.

    `path` is a folder or a name, or several, as for `query.select_runs`, or the selected runs; `where` are conditions
    that the runs must meet, such as `model.depth>=8`.

    Raises:
        ConfigError: A condition is invalid, or no run meets it.
        StoreError: There is no run.
    """
    selection = path if isinstance(path, Selection) else select_runs(path, results_dir)
    runs = select_where(selection.started, where)
    records = [run for run in runs if isinstance(run, RunRecord)]
    resolved = {name: read for name, read in RESOLVED.items() if len({*map(read, records)} - {None}) > 1}
    factors = distinguishing_options(records)
    unexplained = unexplained_options(records, factors)
    options = {option: partial(setting, option=option) for option in (*factors, *unexplained)}
    others = {name: read for name, read in (options | resolved).items() if name not in _OPTIONS_IN_COLUMNS}
    rows = []
    for run in runs:
        values = list(row_of(run).items())
        at = [key for key, _ in values].index("seed")
        more = [(name, read(run) if isinstance(run, RunRecord) else None) for name, read in others.items()]
        folder = ("folder", os.path.relpath(run.folder.path))
        rows.append(dict([*values[:at], *more, *values[at:], folder]))
    return sorted(rows, key=_sort_key)


def comparability_warnings(selection: Selection, where: Sequence[str] = ()) -> list[str]:
    """Return lines that name the options in which runs differ beside those that distinguish them, or no line."""
    runs, _ = intact_runs(select_where(selection.started, where))
    factors = distinguishing_options(runs)
    unexplained = unexplained_options(runs, factors)
    if not unexplained:
        return []
    different = [str(each) for each in differences(runs, factors) if each.name in unexplained]
    warnings = [f"the runs differ in more than {', '.join(factors)}: {'; '.join(different)}"]
    if apart := [each.name for each in obstacles([[run] for run in runs], factors) if each.name in unexplained]:
        warnings.append(f"losses of runs that differ in {' or '.join(apart)} are not comparable")
    return warnings


def row_of(run: RunEntry) -> Row:
    """Return a run's row. Losses are in nats/token; a value that the record lacks is None.

    `state`: the outcome of a completed run (`store/outcome.py`), else running, interrupted, killed, failed or damaged.
    `val_loss`: the final validation loss, or the latest of an unfinished run; None for a diverged run.
    `val_loss_ema`: the same with the average of the weights (`eval.ema`).
    `vs_bigram`: `val_loss` minus the bigram entropy.
    `flops_per_token`: model FLOPs of a training step per token; `flops_per_s`: of this run alone; `mfu`: from 0 to 1,
    of the device with all runs of a pack, None if its peak is not known (`store/throughput.py`).
    `pack`: the number of runs that trained together, which share `seconds`; None for a run that trained alone.
    A run without an intact record has only `run`, `id`, `state` and `note`.
    """
    row: Row = {"run": run.name, "id": run.run_id, "state": run.state}
    if not isinstance(run, RunRecord):
        note = run.problem if run.state == DAMAGED else ""
        return row | dict.fromkeys(_VALUES) | {"note": note}
    status, config = run.status, run.config
    val_loss, _ = final_losses(run.outcome, status.val_loss)
    averaged, _ = final_losses(run.outcome, status.val_loss_ema)
    values = (
        setting(run, "norm"), config.placement.name, config.model.depth, config.model.width, config.seed,
        config.optim.lr, status.step, config.train.steps, val_loss, averaged,
        status.best_val_loss, status.train_loss, None if val_loss is None else val_loss - run.corpus.baselines.bigram,
        run.corpus.name, run.corpus.sha256, run.machine.device, run.machine.precision, status.tokens_per_s,
        run.compute.flops_per_token, run.flops_per_s, run.mfu, status.seconds,
        status.pack_size if status.pack_size > 1 else None,
    )  # fmt: skip
    row |= {"state": run.outcome or run.state, **dict(zip(_VALUES, values, strict=True))}
    notes = [_state_note(run), *(f"resumed {text}" for text in status.changes_at_resume)]
    if status.graph_problem:
        notes.append(f"without CUDA graphs: {status.graph_problem}")
    return row | {"note": "; ".join(filter(None, notes))}


def _state_note(run: RunRecord) -> str:
    at_step = f" at step {run.status.step} of {run.config.train.steps}"
    if (divergence := run.status.diverged) is not None and run.outcome == DIVERGED:
        return f"diverged at step {divergence.step}: {divergence}"
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
