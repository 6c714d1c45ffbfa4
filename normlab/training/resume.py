"""Prepares the folders of runs and resumes them, from the newest checkpoint that all runs of a pack have.

A run resumes in its own folder only: the record and the checkpoint must be those of the run that the config describes.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from torch import Tensor

from normlab.base.errors import StoreError, notify, warn
from normlab.base.options import flatten_options
from normlab.config.train import TrackingConfig
from normlab.data.corpus import Corpus
from normlab.store.files import make_folder, write_atomic
from normlab.store.format import COMPLETED_STATES, DIVERGED, FINISHED, RUN_FILE, STATUS_FILE, TOKENIZER_FILE, to_json
from normlab.store.reading import damaged
from normlab.store.record import RunRecord, Setting, as_setting, flatten
from normlab.store.run_json import Run
from normlab.store.runs import RunFolder
from normlab.store.status import Status
from normlab.training import checkpoint
from normlab.training.changed_plugins import change_warnings
from normlab.training.checkpoint import Checkpoint
from normlab.training.start_from import copy_start
from normlab.training.state import TrainingState
from normlab.training.training_run import FRESH, PLUGINS, Progress, TrainingRun

KEPT_OPTIONS = {"run.name": None} | {
    f"tracking.{name}": default for name, default in flatten_options(TrackingConfig()).items() if name != "wandb"
}
"""Options that a run keeps from its first start: its name, and its project at W&B. The values are their defaults."""


def status_if_completed(run: TrainingRun) -> Status | None:
    """Return the status of a run that has completed before; print which options have no effect then.

    Raises:
        StoreError: The record in the folder is damaged, or that of another run.
    """
    folder = run.folder
    if not folder.exists():
        return None
    recorded = RunRecord.load(folder, allow_lost_status=True)
    if recorded.run.identity.sha256 != run.identity.sha256:
        raise damaged(folder.path / RUN_FILE, f"it is not the record of run {folder.run_id}")
    if recorded.state not in COMPLETED_STATES:
        return None
    problem = folder.metrics_problem()
    if problem:
        warn(problem)
    _warn_of_kept_options(recorded.options, flatten(run.config.recorded()), is_completed=True)
    return recorded.status


def _warn_of_kept_options(
    recorded: Mapping[str, Setting], new: Mapping[str, Setting], *, is_completed: bool = False
) -> None:
    """Warn of options without effect: names of a run that has started, statistics and kept weights of an ended one."""
    ignored: list[str] = []
    for option, value in new.items():
        # A command that does not name an option has its default.
        is_kept = option in KEPT_OPTIONS and value != as_setting(KEPT_OPTIONS[option])
        is_statistic = option.startswith("stats.") and option != "stats.preset"
        comes_too_late = is_completed and (is_statistic or option == "train.keep")
        if value != recorded.get(option) and (is_kept or comes_too_late):
            ignored.append(f"{option}={value}")
    if ignored:
        warn(f"{', '.join(ignored)}: no effect, because the run keeps these options of its first start; {FRESH}")


def check_pack(run: TrainingRun) -> None:
    """Raise StoreError if a run started in the pack of another sweep, whose runs resume together."""
    if not run.folder.exists():
        return
    old = run.folder.run(Run).pack
    if len(old.runs) > 1 and old.sweep != run.pack.sweep:
        raise StoreError(
            f"run {run.folder.run_id} is one of a pack of {len(old.runs)} that trains together in sweep {old.sweep}; "
            f"start that sweep again to resume it, or {FRESH}"
        )


# The folder of a run.


def has_started(folder: RunFolder) -> bool:
    """Return whether a run has a status or rows."""
    return (folder.path / STATUS_FILE).exists() or folder.metrics_path.exists()


def prepare_folder(run: TrainingRun, corpus: Corpus, state: Mapping[str, Tensor]) -> None:
    """Create the folder of a new run, with the checkpoint that it starts from, and read its run.json.

    The folder is locked. The state is that of a run that starts from the weights in a folder.
    """
    folder = run.folder
    if not folder.exists():
        _create(run)
    run.on_record = folder.run(Run)
    write_atomic(folder.path / TOKENIZER_FILE, to_json(corpus.tokenizer.state()))
    if run.config.train.start_from is None or has_started(folder):
        return
    if run.weights:
        run.save(0, run.meta(), lambda: {name: tensor.cpu() for name, tensor in state.items()})
        run.weights = {}
    else:
        copy_start(run.config, folder)


def _create(run: TrainingRun) -> None:
    """Fill a new folder; run.json comes last, so that a kill in between leaves a folder that is no run yet."""
    folder = run.folder
    if checkpoint.steps(folder.path / checkpoint.FOLDER) or folder.size() or (folder.path / STATUS_FILE).exists():
        raise StoreError(
            f"{folder.path / RUN_FILE}: is missing, but the folder has other files of a run; restore a copy, or {FRESH}"
        )
    shutil.rmtree(folder.path / PLUGINS, ignore_errors=True)
    for number, path in enumerate(run.config.plugins):
        make_folder(folder.path / PLUGINS)
        copy = folder.path / PLUGINS / f"{number:02d}_{Path(path).name}"
        write_atomic(copy, Path(path).expanduser().read_bytes())
    if not run.pack.runs:  # the command of a sweep has warned
        for line in change_warnings([(run.config, run.identity)], folder.path.parent):
            warn(line)
    RunFolder.create(folder.path, asdict(run.described))


# Resume.


def resume(state: TrainingState) -> None:
    """Put the state and the records at the newest step of which every run has an intact checkpoint, or at step 0."""
    checkpoints = _checkpoints_of_one_step(state.runs)
    _check_not_rewound(state.runs, checkpoints)
    if checkpoints is None:
        for run in state.runs:
            if run.folder.size():
                notify("the run has no checkpoint yet: it starts again from step 0")
            run.progress = Progress()
            run.folder.truncate(0)
            run.folder.statistics.truncate(0)
        return
    state.restore(checkpoints)
    for run, saved in zip(state.runs, checkpoints, strict=True):
        folder = run.folder
        folder.truncate(saved.meta["metrics_bytes"])
        # At the last step, statistics with the step's own number were measured after the last update and stay.
        folder.statistics.truncate(saved.step + (saved.step == run.config.train.steps))
        count = folder.rows().damaged
        if count:
            warn(f"{folder.metrics_path}: damaged rows: {count}; the run resumes from an intact checkpoint")


def _check_not_rewound(runs: Sequence[TrainingRun], checkpoints: Sequence[Checkpoint] | None) -> None:
    """Raise StoreError if a pack would take back a run that has made all its steps to an earlier one."""
    if len(runs) == 1:
        return
    step = _common_step(checkpoints or ()) or 0
    for run in runs:
        status, steps = run.folder.read_status(), run.config.train.steps
        # A run that is diverged because of its final loss has made all its steps too.
        if step < steps and (status.state == FINISHED or (status.state == DIVERGED and status.step == steps)):
            raise StoreError(
                f"run {run.folder.run_id}: is finished, but its pack would resume from step {step}, since another run "
                "has no later checkpoint; restore it, or move the folder of this run away to train all again"
            )


def _checkpoints_of_one_step(runs: Sequence[TrainingRun]) -> list[Checkpoint] | None:
    """Return each run's newest checkpoint of a common step; a run that diverged earlier has its last one."""
    newest = [_newest_checkpoint(run) for run in runs]
    while True:
        checkpoints = [saved for saved in newest if saved is not None]
        if len(checkpoints) < len(runs):
            return None
        step = _common_step(checkpoints)
        if step is None or all(saved.step <= step for saved in checkpoints):
            return checkpoints
        # An older checkpoint may be damaged, so that its run has only one that is older still: compare again.
        newest = []
        for run, saved in zip(runs, checkpoints, strict=True):
            newest.append(saved if saved.step <= step else _newest_checkpoint(run, at_most=step))


def _common_step(checkpoints: Sequence[Checkpoint]) -> int | None:
    """Return the newest step that all runs have reached, except those that diverged; None if all have."""
    steps = [saved.step for saved in checkpoints if saved.meta.get("diverged") is None]
    return min(steps, default=None)


def _newest_checkpoint(run: TrainingRun, at_most: int | None = None) -> Checkpoint | None:
    """Return the run's newest intact checkpoint (of at most a step), if it has one; print the problems of others.

    Raises:
        StoreError: The run has saved a checkpoint, and there is none.
    """
    folder, status = run.folder, run.folder.read_status()
    saved, problems = checkpoint.read_newest(folder.path / checkpoint.FOLDER, at_most)
    if at_most is None:
        for problem in problems:
            warn(f"{problem}; resuming from the previous checkpoint")
        has_lost_status = not (folder.path / STATUS_FILE).exists() and folder.rows("train").rows
        if saved is None and (status.checkpoint is not None or has_lost_status):
            raise StoreError(
                f"{folder.path}: the run took steps, and its {checkpoint.FOLDER} are missing (`normlab rm "
                f"--checkpoints` deletes them, `normlab share` leaves them out); put them back, or {FRESH}"
            )
    if saved is not None and status.diverged is not None and saved.step == status.step:
        # The checkpoint may have been written before the step that diverged.
        return replace(saved, meta={**saved.meta, "diverged": asdict(status.diverged)})
    return saved


def report_changes(run: TrainingRun) -> None:
    """Warn of what differs from the run's start, and record what changes its bits."""
    _warn_of_kept_options(flatten(run.on_record.config), flatten(run.described.config))
    old, new = _environment(run.on_record), _environment(run.described)
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
        "attention": run.resolved.attention,
        "device_name": run.resolved.device_name,
        "deterministic": run.resolved.deterministic,
        "the size of its pack": len(run.pack.runs) or 1,
        "the block's fingerprint": run.fingerprint,
        "torch": run.versions["torch"],
        "normlab": run.versions["normlab"],
        "normlab's commit": run.git.label if run.git else "unknown",
    }
