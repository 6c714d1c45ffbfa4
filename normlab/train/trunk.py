"""The steps that a longer run shares with a finished shorter one: found, and taken over instead of trained again.

Under a constant or a warm-up-stable-decay schedule the learning rate of a step does not depend on how many
steps there are in all, up to where the decay begins: the shorter run's checkpoint there is the longer run's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normlab.config import RunConfig
from normlab.errors import StoreError
from normlab.parsing import from_json
from normlab.store.files import write_atomic
from normlab.store.query import find_runs
from normlab.store.runs import RunFolder
from normlab.store.schema import decode
from normlab.train import checkpoint
from normlab.train.checkpoint import Checkpoint
from normlab.train.optim import decay_start
from normlab.train.resume import say


@dataclass(frozen=True, slots=True)
class Trunk:
    """A finished run and its last checkpoint that the longer run shares."""

    folder: RunFolder
    checkpoint: Checkpoint
    ended_between: bool
    """Whether the shorter run evaluated at that step only because it ended there."""

    def graft(self, onto: RunFolder) -> None:
        """Put the record and the checkpoint into a new run's folder, as if it had trained those steps itself."""
        saved = self.checkpoint
        record = self.folder.metrics_path.read_bytes()[: saved.meta["record_bytes"]]
        meta = saved.meta
        if self.ended_between:
            record, meta = _without_last_evaluation(record, saved)
        write_atomic(onto.metrics_path, record)
        self.folder.statistics.copy(onto.path, before=saved.step)
        meta = {**meta, "record_bytes": len(record), "run_id": onto.run_id}
        checkpoint.save(onto.path / checkpoint.FOLDER, saved.step, saved.tensors, meta)


def longest_trunk(runs: Path, run: Mapping[str, Any], config: RunConfig) -> Trunk | None:
    """Among the runs of a folder, the one that shares the most steps with a run that is to be made."""
    if run["trunk"] is None:
        return None
    best: Trunk | None = None
    for entry in find_runs(runs):
        other = entry.run
        if other.get("trunk") != run["trunk"] or entry.state != "finished":
            continue
        steps, every = other["config"]["train"]["steps"], other["config"]["eval"]["every"]
        if steps >= config.train.steps:
            continue
        limit = min(decay_start(config.optim, steps), decay_start(config.optim, config.train.steps))
        with contextlib.suppress(StoreError):
            saved, _ = checkpoint.newest(entry.folder.path / checkpoint.FOLDER, at_most=limit)
            if saved is None or (best is not None and saved.step <= best.checkpoint.step):
                continue
            if problem := entry.folder.metrics_problem():
                say(f"{problem}; this run does not continue from it")
            elif _has_every_row(entry.folder, saved):
                best = Trunk(entry.folder, saved, saved.step == steps and (every == 0 or steps % every != 0))
    return best


def _has_every_row(folder: RunFolder, saved: Checkpoint) -> bool:
    """Whether a record holds what it held at a checkpoint; one that was damaged since is not taken over."""
    record = folder.rows()
    trained = [row.get("step") for row in record.rows if row.get("kind") == "train"]
    whole = not record.damaged and all("kind" in row and "step" in row for row in record.rows)
    return whole and folder.size() >= saved.meta["record_bytes"] and trained[: saved.step] == list(range(saved.step))


def _without_last_evaluation(record: bytes, saved: Checkpoint) -> tuple[bytes, dict[str, Any]]:
    lines = record.splitlines(keepends=True)
    rows = [decode(from_json(line)) for line in lines]
    kept = [index for index, row in enumerate(rows) if not (row["kind"] == "eval" and row["step"] == saved.step)]
    evaluations = [rows[index] for index in kept if rows[index]["kind"] == "eval"]
    # The first of the smallest, and never a NaN: as the loop keeps count.
    finite = [row for row in evaluations if row["loss"] < math.inf]
    best = min(finite, key=lambda row: row["loss"], default={})
    last = evaluations[-1]  # there is one before the first step
    progress = saved.meta["progress"] | {
        "val_loss": last["loss"],
        "val_loss_batch_statistics": last.get("loss_batch_statistics"),
        "best_val_loss": best.get("loss"),
        "best_val_step": best.get("step"),
    }
    return b"".join(lines[index] for index in kept), {**saved.meta, "progress": progress}
