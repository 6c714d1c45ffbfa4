"""Resumes runs: selects checkpoints, cuts the record back to them, and reports what changed since the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from normlab.errors import StoreError, notify, warn
from normlab.store.format import COMPLETED_STATES, DIVERGED, FINISHED, RUNNING, STATUS_FILE
from normlab.store.parts import Setting, part_to_json
from normlab.store.record import RunRecord
from normlab.training import checkpoint
from normlab.training.loop import Loop
from normlab.training.prepare import warn_of_kept_options
from normlab.training.training_run import FRESH, Progress, TrainingRun


def resume_from_checkpoint(loop: Loop) -> None:
    """Put the loop and the records at the newest step of which every run has an intact checkpoint, or at step 0."""
    checkpoints = _checkpoints_of_one_step(loop.runs)
    _refuse_rewinding_finished_runs(loop.runs, checkpoints)
    if checkpoints is None:
        for run in loop.runs:
            if run.folder.size():
                notify("the run has no checkpoint yet: it starts again from step 0")
            run.progress = Progress()
            run.folder.truncate(0)
            run.folder.statistics.truncate(0)
        return
    loop.restore(checkpoints)
    for run, saved in zip(loop.runs, checkpoints, strict=True):
        folder = run.folder
        folder.truncate(saved.meta["metrics_bytes"])
        # At the last step, statistics with the step's own number were measured after the last update and stay.
        folder.statistics.truncate(saved.step + (saved.step == run.config.train.steps))
        for problem in folder.statistics.missing_warnings(saved.step):
            warn(problem)
        if damaged := folder.rows().damaged:
            warn(f"{folder.metrics_path}: damaged rows: {damaged}; the run resumes from an intact checkpoint")


def _refuse_rewinding_finished_runs(
    runs: Sequence[TrainingRun], checkpoints: Sequence[checkpoint.Checkpoint] | None
) -> None:
    """Raise StoreError if a pack would take back a run that has finished to an earlier step."""
    # A run that is diverged because of its final loss has made all its steps too.
    finished = [
        run
        for run, status in ((run, run.recorded_status()) for run in runs)
        if status.state == FINISHED or (status.state == DIVERGED and status.step == run.config.train.steps)
    ]
    step = min((saved.step for saved in checkpoints or () if saved.meta.get("diverged") is None), default=0)
    if finished and len(runs) > 1 and step < finished[0].config.train.steps:
        others = [run.folder.run_id for run in runs if run.recorded_status().state not in COMPLETED_STATES]
        raise StoreError(
            f"run {finished[0].folder.run_id}: is finished, but its pack would resume from step {step}, since "
            f"{', '.join(others)} has no later checkpoint; restore one, or move the folder of {', '.join(others)} away "
            "and run the same command again"
        )


def _checkpoints_of_one_step(runs: Sequence[TrainingRun]) -> list[checkpoint.Checkpoint] | None:
    """Return each run's newest checkpoint of a common step; a run that diverged earlier has its last one."""
    candidates = [_newest_checkpoint(run) for run in runs]
    while all(saved is not None for saved in candidates):
        checkpoints = [saved for saved in candidates if saved is not None]
        step = min((saved.step for saved in checkpoints if saved.meta.get("diverged") is None), default=None)
        if step is None or all(
            saved.step == step or (saved.step < step and saved.meta.get("diverged") is not None)
            for saved in checkpoints
        ):
            return checkpoints
        candidates = [
            saved if saved.step <= step else _newest_checkpoint(run, at_most=step)
            for run, saved in zip(runs, checkpoints, strict=True)
        ]
    return None


def _newest_checkpoint(run: TrainingRun, at_most: int | None = None) -> checkpoint.Checkpoint | None:
    """Return the run's newest intact checkpoint (of at most a step), if it has one; print the problems of others.

    Raises:
        StoreError: The run has saved a checkpoint, and there is none.
    """
    folder = run.folder
    status = run.recorded_status()
    saved, problems = checkpoint.read_newest(folder.path / checkpoint.FOLDER, at_most)
    if at_most is None:
        for problem in problems:
            warn(f"{problem}; resuming from the previous checkpoint")
        last = status.checkpoint
        if last is not None and not problems and (saved is None or saved.step < last):
            missing = f"{folder.path / checkpoint.FOLDER}: the checkpoint of step {last} is missing"
            if saved is None:
                raise StoreError(f"{missing} and there is no other; put it back, or {FRESH}")
            warn(f"{missing}; resuming from that of step {saved.step}")
        if saved is None and not (folder.path / STATUS_FILE).exists() and folder.rows("train").rows:
            raise StoreError(
                f"{folder.path}: the run took steps, and has neither {STATUS_FILE} nor a checkpoint; put them back, or "
                f"{FRESH}"
            )
    if saved is not None and status.state == DIVERGED and saved.step == status.step:
        # The checkpoint may have been written before the step that diverged.
        return replace(saved, meta={**saved.meta, "diverged": part_to_json(status.diverged)})
    return saved


def report_changes(run: TrainingRun) -> None:
    """Warn of what differs from the run's start, and record what changes its bits."""
    recorded, today = (
        RunRecord.parse(run.folder, content, {}, RUNNING) for content in (run.run_json, run.new_run_json)
    )
    warn_of_kept_options(recorded, today)
    old, new = _environment(recorded), _environment(today)
    differences = [f"{name} changed from {old[name]} to {new[name]}" for name in old if old[name] != new[name]]
    if differences:
        text = "; ".join(differences)
        run.progress.changes_at_resume.append(f"from step {run.progress.step}: {text}")
        warn(f"since this run started, {text}; results will not be bit-identical")


def _environment(run: RunRecord) -> dict[str, Setting]:
    """Return what a run's bits depend on besides its identity."""
    return {
        "devices": run.machine.devices,
        "threads": run.machine.threads,
        "instructions": run.machine.instructions,
        "device_name": run.machine.device_name,
        "deterministic": run.machine.deterministic,
        "the size of its pack": len(run.pack.runs) or 1,
        "the block's fingerprint": run.fingerprint,
        "torch": run.versions.get("torch"),
        "normlab": run.versions.get("normlab"),
        "normlab's commit": run.git.label,
    }
