"""Starts runs: each is new, or resumes from its checkpoint, or has completed before.

`train_pack` does so for `normlab train`, for the workers of a sweep and for tasks of Slurm alike. It holds the locks of
the folders and feeds the trackers until the loop ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from normlab.config.schema import RunConfig, TrackingConfig, canonical_hash
from normlab.data.corpus import Corpus, open_corpus
from normlab.errors import ConfigError, NormlabError, StoreError, notify, warn
from normlab.model.fingerprint import fingerprint
from normlab.options import flatten_options
from normlab.ranks import Ranks, local_statistics
from normlab.stats.spikes import count_spikes
from normlab.store.files import make_folder, write_atomic
from normlab.store.format import (
    COMPLETED_STATES,
    DIVERGED,
    FAILED,
    FINISHED,
    INTERRUPTED,
    RUN_FILE,
    RUNNING,
    RUNS_FOLDER,
    STATUS_FILE,
    to_json,
)
from normlab.store.reading import damaged
from normlab.store.record import Corpus as RecordedCorpus
from normlab.store.record import Run, RunRecord, Setting, as_setting, flatten
from normlab.store.runs import RunFolder
from normlab.store.series import evaluations, series
from normlab.store.status import RecordedPack, SpikeCount, Status
from normlab.tracking.background import follow_training
from normlab.tracking.console import Console
from normlab.training import checkpoint
from normlab.training.checkpoint import Checkpoint
from normlab.training.launch import train_on_devices
from normlab.training.loop import Loop
from normlab.training.machine import RuntimeSettings, apply, convert_torch_errors, resolve
from normlab.training.optim import decayed_kinds
from normlab.training.signals import StopRequest
from normlab.training.start_from import check_start, copy_start, read_start, resolve_start
from normlab.training.training_run import FRESH, PLUGINS, TOKENIZER_FILE, Progress, TrainingRun, describe

KEPT_OPTIONS = {"run.name": None} | {
    f"tracking.{name}": default for name, default in flatten_options(TrackingConfig()).items() if name != "wandb"
}
"""Options that a run keeps from its first start: its name, and its project at W&B. The values are their defaults."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call of `train`."""

    folder: RunFolder
    status: Status
    signal: int | None = None
    """The signal that interrupted the run."""
    already_ended: bool = False
    """Whether the run had ended before the call."""

    @property
    def state(self) -> str:
        """Return finished, diverged or interrupted."""
        return self.status.state


def train(config: RunConfig, trackers: Sequence[Console] | None = None, *, ends_process: bool = False) -> Outcome:
    """Train the run of a validated config, or resume it, or return the outcome that it has already.

    Args:
        config: The run's config.
        trackers: Receivers of the record besides the run's folder; by default the console, and W&B as configured.
        ends_process: Whether the second SIGINT or SIGTERM may end the whole process in the middle of a step.

    Raises:
        ConfigError, DataError, StoreError: The message says what to do.
    """
    return train_pack([config], None if trackers is None else [trackers], ends_process=ends_process)[0]


def train_pack(
    configs: Sequence[RunConfig],
    trackers: Sequence[Sequence[Console]] | None = None,
    *,
    pack: Mapping[str, Any] | None = None,
    ends_process: bool = False,
    only_first_signal: bool = False,
    keep_compiled: bool = False,
) -> list[Outcome]:
    """Train runs as one stacked computation, or resume them, or return the outcomes that all have already.

    Each run has its own folder, status and trackers. They resume together, from the newest step of which each has an
    intact checkpoint; a run that has diverged stays frozen in the stack.

    Args:
        configs: Validated configs that differ in numbers only: seeds, learning rates and the like (`sweep.packs`).
        trackers: The trackers of each run.
        pack: The pack's `sweep`, `number` and, if they are planned, the ids of its `runs`.
        ends_process: As for `train`.
        only_first_signal: Whether the process ignores SIGINT and SIGTERM after the first one.
        keep_compiled: Whether the runs use the code that the last call in this process compiled, for equal blocks.

    Raises:
        ConfigError, DataError, StoreError: The message says what to do.
    """
    configs = [resolve_start(config) for config in configs]
    settings = resolve(configs[0])
    corpus = open_corpus(configs[0].data)
    # After the corpus: it may import a compiler, and a missing text is reported sooner.
    apply(settings, keep_compiled=keep_compiled)
    stop = StopRequest(ends_process=ends_process, only_first=only_first_signal)
    with contextlib.ExitStack() as contexts:
        if only_first_signal:
            contexts.enter_context(stop)
        runs = open_runs(configs, settings, corpus, pack)
        completed = [_status_if_completed(run) for run in runs]
        # The other ranks wait for this value: another command may have completed the run since they were started.
        if Ranks.current().broadcast(all(completed)):
            return [
                Outcome(run.folder, status, already_ended=True)
                for run, status in zip(runs, completed, strict=True)
                if status
            ]
        if configs[0].devices > 1 and Ranks.current().count == 1:
            stop.end()  # the ranks handle signals
            if stop.received is not None:
                raise KeyboardInterrupt
            received = train_on_devices(configs[0], pack)
            return [Outcome(runs[0].folder, runs[0].recorded_status(), received)]
        loop = _build(runs, settings, corpus)
        # Only now: until here, nothing is written but the files of a corpus, atomically, and a signal ends it at once.
        if not only_first_signal:
            contexts.enter_context(stop)
        for run in runs:
            contexts.enter_context(run.folder.lock())
        with convert_torch_errors():  # reading a checkpoint can exhaust the memory
            for run in runs:
                _prepare_folder(run, corpus)
            _resume(loop)
            loop.share_state()
        for index, run in enumerate(runs):
            _report_changes(run)
            run.recorded = replace(run.progress), run.diverged
            if trackers is not None:
                run.trackers = trackers[index]
            elif loop.is_single:  # the runs of a pack have no console
                run.trackers = [Console()]
        if trackers is None:
            follow_training([run.folder.path for run in runs], configs[0].tracking.wandb)
        # After all errors, which stay a single line.
        for warning in dict.fromkeys(warning for config in configs for warning in config.warnings()):
            warn(warning)
        return _run(loop, stop)


def train_replica(config: RunConfig) -> int | None:
    """Train the run of a config on a rank other than 0, from the state that rank 0 has; return the received signal.

    Raises:
        ConfigError, DataError: The message says what to do.
    """
    settings = resolve(config)
    corpus = open_corpus(config.data)
    apply(settings)
    with StopRequest(only_first=True) as stop, convert_torch_errors():
        if Ranks.current().broadcast(False):
            return None
        loop = Loop([TrainingRun(config, RunFolder(os.devnull))], settings, corpus)  # only rank 0 writes
        loop.share_state()
        loop.run(stop)
        return stop.received


def open_runs(
    configs: Sequence[RunConfig], settings: RuntimeSettings, corpus: Corpus, pack: Mapping[str, Any] | None = None
) -> list[TrainingRun]:
    """Return the runs of these configs, each with its folder and its run.json. Writes nothing.

    Args:
        configs: The configs of one run, or of the runs of a pack.
        settings: This machine's settings; only the init rule may differ between the runs of a pack.
        corpus: The corpus of all runs.
        pack: The pack's `sweep`, `number` and, if they are planned, the ids of its `runs`.

    Raises:
        ConfigError: A run's id is not the planned one, or a new run cannot start from the run that it names.
        StoreError: The checkpoint from which a new run starts is missing or damaged.
    """
    runs = [_open(config, settings, corpus) for config in configs]
    if pack is not None or len(runs) > 1:
        ids = [run.folder.run_id for run in runs]
        for run_id, planned in zip(ids, (pack or {}).get("runs", ids), strict=True):
            if run_id != planned:
                raise ConfigError(
                    f"run {planned} would be {run_id} now: a plugin, the corpus, the device or normlab has changed "
                    "since the plan was made; restore it, or start the same overrides with another sweep.name=..."
                )
        for run in runs:
            run.new_run_json["pack"] = {**(pack or {}), "runs": ids}
    for run in runs:
        if run.config.train.start_from is not None and not run.folder.exists():
            check_start(run.config, run.new_run_json["identity"])
            read_start(run.config)
    return runs


def _open(config: RunConfig, settings: RuntimeSettings, corpus: Corpus) -> TrainingRun:
    """Return the run of a config; run.fresh=true numbers a new folder."""
    record = describe(config, replace(settings, init=config.init_rule), corpus)
    runs, run_id, number = Path(config.results_dir) / RUNS_FOLDER, record["run_id"], 1
    folder = RunFolder(runs / run_id)
    # A stopped run of run.fresh=true was started by the same command: resume it.
    while config.run.fresh and folder.path.exists() and not _is_stopped_fresh_run(folder):
        number += 1
        folder = RunFolder(runs / f"{run_id}.{number}")
    record |= {"run_id": folder.run_id, "name": config.run.name or folder.run_id}
    return TrainingRun(config, folder, record)


def _is_stopped_fresh_run(folder: RunFolder) -> bool:
    """Return whether a run was started with run.fresh=true and is neither ended nor running."""
    try:
        record = RunRecord.load(folder)
    except StoreError:  # a damaged record
        return False
    return record.config.run.fresh and record.state not in (*COMPLETED_STATES, RUNNING)


def _status_if_completed(run: TrainingRun) -> Status | None:
    """Return the status of a run that has completed before; print which options have no effect then.

    Raises:
        StoreError: The record in the folder is damaged, or that of another run.
    """
    folder, record = run.folder, run.new_run_json
    if not folder.exists():
        return None
    recorded = RunRecord.load(folder)
    # The tree, because an identity is of the class of a norm or of a placement.
    if canonical_hash(folder.run()["identity"]) != canonical_hash(record["identity"]):
        raise damaged(folder.path / RUN_FILE, f"it is not the record of run {record['run_id']}")
    if recorded.state not in COMPLETED_STATES:
        return None
    if problem := folder.metrics_problem():
        warn(problem)
    _warn_of_kept_options(recorded.options, flatten(record["config"]), is_completed=True)
    return recorded.status


def _warn_of_kept_options(
    recorded: Mapping[str, Setting], new: Mapping[str, Setting], *, is_completed: bool = False
) -> None:
    """Warn of options that have no effect: names and labels of a run that has started, statistics of one that ended."""
    ignored = {
        option: value
        for option, value in new.items()
        if value != recorded.get(option)
        and (
            (option in KEPT_OPTIONS and value != as_setting(KEPT_OPTIONS[option]))
            or (is_completed and option.startswith("stats.") and option != "stats.preset")
        )
    }
    if ignored:
        settings = ", ".join(f"{option}={value}" for option, value in ignored.items())
        warn(f"{settings}: no effect, because the run keeps these options of its first start; {FRESH}")


def _build(runs: Sequence[TrainingRun], settings: RuntimeSettings, corpus: Corpus) -> Loop:
    """Return the loop of the runs, and complete their run.json; a config that cannot be trained leaves no file."""
    with local_statistics():  # rank 0 computes it alone
        block = fingerprint(runs[0].config)
    for run in runs:
        _check_pack(run)
        run.new_run_json["fingerprint"] = block
    with convert_torch_errors():
        loop = Loop(runs, settings, corpus)
    for run in runs:
        run.new_run_json["resolved"]["decayed"] = decayed_kinds(run.config.optim, loop.runner.model)
    return loop


def _check_pack(run: TrainingRun) -> None:
    """Raise StoreError if a run started in the pack of another sweep, whose runs resume together."""
    if not run.folder.exists():
        return
    old, new = (msgspec.convert(each.get("pack", {}), RecordedPack) for each in (run.folder.run(), run.new_run_json))
    if len(old.runs) > 1 and old.sweep != new.sweep:
        raise StoreError(
            f"run {run.folder.run_id} is one of a pack of {len(old.runs)} that trains together in sweep {old.sweep}; "
            f"start that sweep again to resume it, or {FRESH}"
        )


# The folder of a run.


def _prepare_folder(run: TrainingRun, corpus: Corpus) -> None:
    """Create the folder of a new run, and read its run.json. The folder is locked."""
    folder = run.folder
    if not folder.exists():
        _create(run)
    run.run_json = folder.run()
    write_atomic(folder.path / TOKENIZER_FILE, to_json(corpus.tokenizer.state()))
    has_started = (folder.path / STATUS_FILE).exists() or folder.metrics_path.exists()
    if run.config.train.start_from is not None and not has_started:
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
    RunFolder.create(folder.path, run.new_run_json)


# Resume.


def _resume(loop: Loop) -> None:
    """Put the loop and the records at the newest step of which every run has an intact checkpoint, or at step 0."""
    checkpoints = _checkpoints_of_one_step(loop.runs)
    _check_not_rewound(loop.runs, checkpoints)
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
        if count := folder.rows().damaged:
            warn(f"{folder.metrics_path}: damaged rows: {count}; the run resumes from an intact checkpoint")


def _check_not_rewound(runs: Sequence[TrainingRun], checkpoints: Sequence[Checkpoint] | None) -> None:
    """Raise StoreError if a pack would take back a run that has made all its steps to an earlier one."""
    step = min((saved.step for saved in checkpoints or () if saved.meta.get("diverged") is None), default=0)
    for run in runs if len(runs) > 1 else ():
        status, steps = run.recorded_status(), run.config.train.steps
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
        step = min((saved.step for saved in checkpoints if saved.meta.get("diverged") is None), default=None)
        if step is None or all(saved.step <= step for saved in checkpoints):
            return checkpoints
        newest = [
            saved if saved.step <= step else _newest_checkpoint(run, at_most=step)
            for run, saved in zip(runs, checkpoints, strict=True)
        ]


def _newest_checkpoint(run: TrainingRun, at_most: int | None = None) -> Checkpoint | None:
    """Return the run's newest intact checkpoint (of at most a step), if it has one; print the problems of others.

    Raises:
        StoreError: The run has saved a checkpoint, and there is none.
    """
    folder, status = run.folder, run.recorded_status()
    saved, problems = checkpoint.read_newest(folder.path / checkpoint.FOLDER, at_most)
    if at_most is None:
        for problem in problems:
            warn(f"{problem}; resuming from the previous checkpoint")
        has_lost_status = not (folder.path / STATUS_FILE).exists() and folder.rows("train").rows
        if saved is None and (status.checkpoint is not None or has_lost_status):
            raise StoreError(
                f"{folder.path}: the run took steps, and its {checkpoint.FOLDER} are missing; put them back, or {FRESH}"
            )
    if saved is not None and status.diverged is not None and saved.step == status.step:
        # The checkpoint may have been written before the step that diverged.
        return replace(saved, meta={**saved.meta, "diverged": asdict(status.diverged)})
    return saved


def _report_changes(run: TrainingRun) -> None:
    """Warn of what differs from the run's start, and record what changes its bits."""
    _warn_of_kept_options(flatten(run.run_json["config"]), flatten(run.new_run_json["config"]))
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


# The training and its end.


def _run(loop: Loop, stop: StopRequest) -> list[Outcome]:
    """Train until the loop ends or an error does; write the last status of each run."""
    try:
        for run in loop.runs:
            for tracker in run.trackers:
                # The header and the MFU are of this machine, not of that of the first start.
                tracker.start(run.run_json | {"resolved": run.new_run_json["resolved"]}, run.progress.step)
        with convert_torch_errors():
            state = loop.run(stop)
            loop.writer.wait()
    except BaseException as error:
        # Write the rows that the loop has recorded. The second Ctrl-C ends the process if that takes too long.
        loop.writer.end()
        if isinstance(error, KeyboardInterrupt):  # the second Ctrl-C: stop without a checkpoint
            stop.end()
        _finish(loop, stop, INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED, error)
        raise
    loop.writer.end()
    statuses = _finish(loop, stop, state)
    return [
        Outcome(run.folder, status, stop.received if status.state == INTERRUPTED else None)
        for run, status in zip(loop.runs, statuses, strict=True)
    ]


def _finish(loop: Loop, stop: StopRequest, state: str, error: BaseException | None = None) -> list[Status]:
    """Write the last statuses, finish the trackers, and return these statuses."""
    statuses: list[Status] = []
    errors: list[StoreError] = []
    for run in loop.runs:
        statuses.append(_last_status(loop, run, state, error))
        try:
            run.write_status(statuses[-1])
        except StoreError as problem:  # the other runs of a pack have their own folders
            errors.append(problem)
    stop.end()  # no step is left to stop at
    for run, status in zip(loop.runs, statuses, strict=True):
        for tracker in run.trackers:
            tracker.finish(status)
    if errors:
        raise errors[0]
    return statuses


def _last_status(loop: Loop, run: TrainingRun, state: str, error: BaseException | None) -> Status:
    """Return the status of a run after its last step: completed, with its outcome, or with the error that ended it."""
    if error is not None:
        run.use_recorded()
    # After an error, only a run whose status.json says diverged keeps that state.
    is_diverged = run.diverged is not None if error is None else run.divergence_written
    status = loop.status(run, DIVERGED if is_diverged else state)
    if status.state == FAILED:
        reason = str(error) if isinstance(error, NormlabError) else f"{type(error).__name__}: {error}"
        status = replace(status, error=reason)
    if status.state in COMPLETED_STATES:
        initial_loss = next((each.loss for each in evaluations(run.folder) if each.step == 0), None)
        references = msgspec.convert(run.run_json["corpus"], RecordedCorpus).references(initial_loss)
        status = status.completed(references, run.last_finite)
    with contextlib.suppress(StoreError):  # the outcome stands without them
        spikes = {
            each.rule.name: SpikeCount(len(each.spikes), each.scored) for each in count_spikes(series(run.folder))
        }
        status = replace(status, spikes=spikes)
    # By the digest of its rows, readers notice a changed record.
    return replace(status, metrics=run.folder.metrics_digest()) if status.state in COMPLETED_STATES else status
