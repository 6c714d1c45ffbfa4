"""Selects the checkpoint from which a run goes on: its own newest one, or one of another run.

With `train.start_from=RUN@STEP`, a new folder gets RUN's rows, statistics and checkpoint of that step, as if the run
had made those steps itself: its steps, tokens, seconds and FLOPs count from step 0 of RUN, and it needs RUN no longer.
All options that changed the numbers of those steps must be equal, except `train.steps` and those of the optimiser,
which may change from that step on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from normlab.config.schema import RunConfig, TrackingConfig
from normlab.errors import ConfigError, StoreError, notify, warn
from normlab.options import flatten_options
from normlab.store.files import write_atomic
from normlab.store.format import (
    COMPLETED_STATES,
    DIVERGED,
    FINISHED,
    RUNS_FOLDER,
    STATISTICS_FOLDER,
    STATUS_FILE,
)
from normlab.store.query import is_run, resolve_run
from normlab.store.record import Run, Setting, as_setting, flatten
from normlab.store.runs import RunFolder
from normlab.training import checkpoint
from normlab.training.checkpoint import Checkpoint
from normlab.training.loop import Loop
from normlab.training.training_run import FRESH, Progress, TrainingRun

KEPT_OPTIONS = {"run.name": None} | {
    f"tracking.{name}": default
    for name, default in flatten_options(TrackingConfig()).items()
    if name not in ("wandb", "also")
}
"""Options that a run keeps from its first start: its name and its labels at W&B. The values are their defaults."""


# Of another run.


def resolve_start(config: RunConfig) -> RunConfig:
    """Return the config with `train.start_from` as RUN_ID@STEP; a run without a step is given its newest checkpoint.

    Raises:
        StoreError: There is no such run in the results folder, or it has no checkpoint.
    """
    text = config.train.start_from
    if text is None:
        return config
    name, _, step = text.rpartition("@")
    if not step.isdecimal():
        name, step = text, ""
    runs = Path(config.results_dir) / RUNS_FOLDER
    try:  # the id first: a search by name reads every run
        folder = resolve_run(os.fspath(runs / name) if is_run(runs / name) else name, config.results_dir)
    except StoreError as error:
        raise StoreError(f"train.start_from={text}: {error}") from error
    if folder.path.resolve().parent != runs.resolve():
        raise StoreError(f"train.start_from={text}: is in another results folder; copy it to {runs}")
    if not step:
        steps = checkpoint.steps(folder.path / checkpoint.FOLDER)
        if not steps:
            raise StoreError(f"train.start_from={text}: has no checkpoint yet; wait for one, or choose another run")
        step = steps[-1]
    return replace(config, train=replace(config.train, start_from=f"{folder.run_id}@{int(step)}"))


def check_start(config: RunConfig, identity: Mapping[str, Any]) -> None:
    """Check that a new run can start from the checkpoint that its resolved `train.start_from` names.

    Args:
        config: The run's config.
        identity: The run's identity.

    Raises:
        ConfigError: The other run differs in an option that must be equal, or has made all the steps of this one.
        StoreError: The other run has no checkpoint of that step, or its record cannot be read.
    """
    if config.train.start_from is None:
        return
    other, step = _start(config)
    option = f"train.start_from={config.train.start_from}"
    steps = checkpoint.steps(other.path / checkpoint.FOLDER)
    if step not in steps:
        raise StoreError(
            f"{option}: the run has no checkpoint of step {step}; choose one of {', '.join(map(str, steps)) or 'none'} "
            "(a run keeps its two newest, and with optim.schedule=wsd the one at the start of its decay)"
        )
    if step >= config.train.steps:
        raise ConfigError(f"train.steps={config.train.steps}: must be greater than the step of {option}")
    ours, theirs = (_fixed_settings(each) for each in (identity, other.run()["identity"]))
    different = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if different:
        values = ", ".join(f"{name}={ours.get(name)} (there {theirs.get(name)})" for name in different[:3])
        raise ConfigError(f"{option}: differs in {values}; only train.steps and options of one optimiser may differ")


def read_start(config: RunConfig) -> Checkpoint:
    """Return the checkpoint that a resolved `train.start_from` names.

    Raises:
        StoreError: The checkpoint is damaged or that of a diverged run, or rows before it are missing.
    """
    other, step = _start(config)
    saved = checkpoint.read(other.path / checkpoint.FOLDER, step)
    problem = other.metrics_problem()
    if saved.meta["diverged"] is not None:
        problem = f"run {other.run_id} diverged at step {step}; choose an earlier checkpoint"
    elif other.size() < saved.meta["metrics_bytes"]:
        problem = f"{other.metrics_path}: rows before step {step} are missing; restore a copy"
    if problem:
        raise StoreError(f"train.start_from={config.train.start_from}: {problem}")
    return saved


def copy_start(config: RunConfig, folder: RunFolder) -> None:
    """Copy the record and the checkpoint that a resolved `train.start_from` names into a new run's folder.

    Raises:
        StoreError: As `read_start`, or a file cannot be written.
    """
    other, step = _start(config)
    saved = read_start(config)
    shutil.rmtree(folder.path / STATISTICS_FOLDER, ignore_errors=True)  # a killed process may have copied a part
    other.statistics.copy(folder.path, before=step)
    meta = {**saved.meta, "run_id": folder.run_id}
    checkpoint.save(folder.path / checkpoint.FOLDER, step, saved.tensors, meta)
    # Last: a folder without rows has not started.
    write_atomic(folder.metrics_path, other.metrics_path.read_bytes()[: saved.meta["metrics_bytes"]])


def _start(config: RunConfig) -> tuple[RunFolder, int]:
    """Return the folder and the step of a resolved `train.start_from`."""
    run_id, _, step = str(config.train.start_from).rpartition("@")
    return RunFolder(Path(config.results_dir) / RUNS_FOLDER / run_id), int(step)


def _fixed_settings(identity: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the parts of an identity that both runs must share, by option."""
    free = ("config.optim.", "config.train.steps", "config.train.start_from")
    return {
        name.removeprefix("config."): value
        for name, value in flatten(identity).items()
        if name == "config.optim.name" or not name.startswith(free)
    }


# Of the run itself.


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
        if damaged := folder.rows().damaged:
            warn(f"{folder.metrics_path}: damaged rows: {damaged}; the run resumes from an intact checkpoint")


def _refuse_rewinding_finished_runs(runs: Sequence[TrainingRun], checkpoints: Sequence[Checkpoint] | None) -> None:
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


def _checkpoints_of_one_step(runs: Sequence[TrainingRun]) -> list[Checkpoint] | None:
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


def _newest_checkpoint(run: TrainingRun, at_most: int | None = None) -> Checkpoint | None:
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
    if saved is not None and status.state == DIVERGED and status.diverged and saved.step == status.step:
        # The checkpoint may have been written before the step that diverged.
        return replace(saved, meta={**saved.meta, "diverged": asdict(status.diverged)})
    return saved


def warn_of_kept_options(recorded: Mapping[str, Setting], new: Mapping[str, Setting]) -> None:
    """Warn of a name or a label that differs from the one that a run keeps from its first start."""
    for option, default in KEPT_OPTIONS.items():
        old, value = recorded.get(option), new.get(option)
        if value not in (old, as_setting(default)):
            kept = f"{option}={'null' if old is None else old}"
            warn(f"{option}={value}: has no effect, because the run keeps {kept} of its first start; {FRESH}")


def report_changes(run: TrainingRun) -> None:
    """Warn of what differs from the run's start, and record what changes its bits."""
    warn_of_kept_options(flatten(run.run_json["config"]), flatten(run.new_run_json["config"]))
    old, new = (_environment(msgspec.convert(each, Run)) for each in (run.run_json, run.new_run_json))
    differences = [f"{name} changed from {old[name]} to {new[name]}" for name in old if old[name] != new[name]]
    if differences:
        text = "; ".join(differences)
        run.progress.changes_at_resume.append(f"from step {run.progress.step}: {text}")
        warn(f"since this run started, {text}; results will not be bit-identical")


def _environment(run: Run) -> dict[str, Setting]:
    """Return what a run's bits depend on besides its identity."""
    return {
        "devices": run.resolved.devices,
        "threads": run.resolved.threads,
        "instructions": run.resolved.instructions,
        "device_name": run.resolved.device_name,
        "deterministic": run.resolved.deterministic,
        "the size of its pack": len(run.pack.runs) or 1,
        "the block's fingerprint": run.fingerprint,
        "torch": run.versions["torch"],
        "normlab": run.versions["normlab"],
        "normlab's commit": run.git.label if run.git else "unknown",
    }
