"""Branches a new run from the checkpoint of a shorter finished run, so that shared steps are not trained again.

With a constant or warmup-stable-decay schedule the learning rate of a step does not depend on the total number of
steps until the decay starts: the shorter run's checkpoint at that step is also the longer run's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normlab.config.schema import RunConfig
from normlab.errors import StoreError, warn
from normlab.parsing import from_json
from normlab.store.files import write_atomic
from normlab.store.format import decode
from normlab.store.query import find_runs
from normlab.store.runs import RunFolder
from normlab.training import checkpoint
from normlab.training.checkpoint import Checkpoint
from normlab.training.optim import decay_start


@dataclass(frozen=True, slots=True)
class ParentRun:
    """A finished run and its last checkpoint that a longer run shares."""

    folder: RunFolder
    checkpoint: Checkpoint
    has_extra_evaluation: bool
    """Whether the parent evaluated at the checkpoint's step only because it finished there."""

    def branch(self, folder: RunFolder) -> None:
        """Copy the record and the checkpoint into a new run's folder, as if it had trained those steps itself."""
        saved = self.checkpoint
        record = self.folder.metrics_path.read_bytes()[: saved.meta["metrics_bytes"]]
        meta = saved.meta
        if self.has_extra_evaluation:
            record, meta = _without_last_evaluation(record, saved)
        write_atomic(folder.metrics_path, record)
        self.folder.statistics.copy(folder.path, before=saved.step)
        meta = {**meta, "metrics_bytes": len(record), "run_id": folder.run_id}
        checkpoint.save(folder.path / checkpoint.FOLDER, saved.step, saved.tensors, meta)


def find_parent_run(runs: Path, run: Mapping[str, Any], config: RunConfig) -> ParentRun | None:
    """Return the finished run in the folder `runs` that shares the most steps with a new run, if there is one."""
    if run["prefix_hash"] is None:
        return None
    best: ParentRun | None = None
    for entry in find_runs(runs):
        if entry.prefix_hash != run["prefix_hash"] or entry.state != "finished":
            continue
        steps, every = int(entry.config.train.steps or 0), int(entry.config.eval.every or 0)
        if not 0 < steps < config.train.steps:
            continue
        limit = min(decay_start(config.optim, steps), decay_start(config.optim, config.train.steps))
        with contextlib.suppress(StoreError):
            saved, _ = checkpoint.read_newest(entry.folder.path / checkpoint.FOLDER, at_most=limit)
            if saved is None or (best is not None and saved.step <= best.checkpoint.step):
                continue
            if problem := entry.folder.metrics_problem():
                warn(f"{problem}; this run does not branch from it")
            elif _has_every_row(entry.folder, saved):
                best = ParentRun(entry.folder, saved, saved.step == steps and (every == 0 or steps % every != 0))
    return best


def _has_every_row(folder: RunFolder, saved: Checkpoint) -> bool:
    """Return whether a record still holds every row up to a checkpoint."""
    record = folder.rows()
    trained = [row.get("step") for row in record.rows if row.get("kind") == "train"]
    intact = not record.damaged and all("kind" in row and "step" in row for row in record.rows)
    return intact and folder.size() >= saved.meta["metrics_bytes"] and trained[: saved.step] == list(range(saved.step))


def _without_last_evaluation(record: bytes, saved: Checkpoint) -> tuple[bytes, dict[str, Any]]:
    """Return a record without the evaluation at the checkpoint's step, and the checkpoint's meta to match."""
    rows = [(line, decode(from_json(line))) for line in record.splitlines(keepends=True)]
    kept = [(line, row) for line, row in rows if not (row["kind"] == "eval" and row["step"] == saved.step)]
    evaluations = [row for _, row in kept if row["kind"] == "eval"]
    # The first of the smallest losses, and never NaN, as in `TrainingRun.record_evaluation`.
    best = min((row for row in evaluations if row["loss"] < math.inf), key=lambda row: row["loss"], default={})
    last = evaluations[-1]  # there is always the one before the first step
    progress = saved.meta["progress"] | {
        "val_loss": last["loss"],
        "val_loss_batch_statistics": last.get("loss_batch_statistics"),
        "best_val_loss": best.get("loss"),
        "best_val_step": best.get("step"),
    }
    return b"".join(line for line, _ in kept), {**saved.meta, "progress": progress}
