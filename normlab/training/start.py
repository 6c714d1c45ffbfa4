"""Starts runs: each is new, or resumes from its checkpoint, or has completed before.

`train_pack` does so for `normlab train`, for the workers of a sweep and for tasks of Slurm alike. It holds the locks of
the folders and feeds the trackers until the loop ends.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from normlab.analysis.spikes import count_spikes
from normlab.base.errors import ConfigError, NormlabError, StoreError, warn
from normlab.config.schema import RunConfig
from normlab.data.corpus import Corpus, open_corpus
from normlab.model.fingerprint import fingerprint
from normlab.model.init import notify_of_depth
from normlab.store.format import (
    COMPLETED_STATES,
    DIVERGED,
    FAILED,
    INTERRUPTED,
    RUNNING,
    RUNS_FOLDER,
)
from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder
from normlab.store.series import evaluations, series
from normlab.store.status import RecordedPack, SpikeCount, Status
from normlab.system.ranks import Ranks, local_statistics
from normlab.tracking.background import follow_training
from normlab.tracking.console import Console, Tracker
from normlab.training.build import build_parts
from normlab.training.changed_plugins import reason_of_other_id
from normlab.training.identity import describe, identity, run_id_of
from normlab.training.launch import train_on_devices
from normlab.training.loop import Loop
from normlab.training.machine import RuntimeSettings, apply, convert_torch_errors, resolve
from normlab.training.optim import decayed_groups
from normlab.training.resume import (
    check_pack,
    has_started,
    prepare_folder,
    report_changes,
    resume,
    status_if_completed,
)
from normlab.training.signals import StopRequest
from normlab.training.start_from import check_start, read_start, read_weights, resolve_start
from normlab.training.training_run import TrainingRun


@dataclass(frozen=True, slots=True)
class TrainingResult:
    folder: RunFolder
    status: Status
    signal: int | None = None
    """The signal that interrupted the run."""
    already_ended: bool = False
    """Whether the run had ended before the call."""

    @property
    def state(self) -> str:
        return self.status.state


def train(
    config: RunConfig,
    trackers: Sequence[Tracker] | None = None,
    *,
    settings: RuntimeSettings | None = None,
    ends_process: bool = False,
) -> TrainingResult:
    """Train the run of a validated config, or resume it, or return the result that it has already.

    Args:
        trackers: Receivers of the record besides the run's folder; by default the console, and W&B as configured.
        settings: This machine's settings for the run, as `check_run` returns them; None resolves them here.
        ends_process: Whether the second stop signal may end the whole process in the middle of a step.

    Raises:
        ConfigError, DataError, StoreError: The message says what to do.
    """
    trackers_by_run = None if trackers is None else [trackers]
    return train_pack([config], trackers_by_run, settings=settings, ends_process=ends_process)[0]


def train_pack(
    configs: Sequence[RunConfig],
    trackers: Sequence[Sequence[Tracker]] | None = None,
    *,
    settings: RuntimeSettings | None = None,
    pack: Mapping[str, Any] | None = None,
    ends_process: bool = False,
    only_first_signal: bool = False,
    keep_compiled: bool = False,
) -> list[TrainingResult]:
    """Train runs as one stacked computation, or resume them, or return the results that all have already.

    Each run has its own folder, status and trackers. They resume together, from the newest step of which each has an
    intact checkpoint; a run that has diverged stays frozen in the stack.

    Args:
        configs: Validated configs that differ in numbers only: seeds, learning rates and the like (`sweep.packs`).
        settings: As for `train`; those of the first config.
        pack: The pack's `sweep`, `number` and, if they are planned, the ids of its `runs`.
        ends_process: As for `train`.
        only_first_signal: Whether the process ignores the stop signals after the first one.
        keep_compiled: Whether the runs use the code that the last call in this process compiled, for equal blocks.

    Raises:
        ConfigError, DataError, StoreError: The message says what to do.
    """
    configs = [resolve_start(config) for config in configs]
    settings = settings or resolve(configs[0])
    corpus = open_corpus(configs[0].data)
    # After the corpus: it may import a compiler, and a missing text is reported sooner.
    apply(settings, keep_compiled=keep_compiled)
    settings = settings.with_attention(configs[0], len(configs))
    stop = StopRequest(ends_process=ends_process, only_first=only_first_signal)
    with contextlib.ExitStack() as contexts:
        if only_first_signal:
            contexts.enter_context(stop)
        runs = open_runs(configs, settings, corpus, pack)
        completed = _completed(runs)
        if completed is not None:
            return completed
        if configs[0].devices > 1 and Ranks.current().count == 1:
            return [_train_on_devices(runs[0], pack, stop)]
        loop = _build(runs, settings, corpus)
        # Only now: until here, nothing is written but the files of a corpus, atomically, and a signal ends it at once.
        if not only_first_signal:
            contexts.enter_context(stop)
        for run in runs:
            contexts.enter_context(run.folder.lock())
        _prepare_and_resume(loop, corpus)
        _set_trackers(loop, trackers)
        _print_warnings(loop)  # after all errors, which stay a single line
        return _run(loop, stop)


def train_replica(config: RunConfig, settings: RuntimeSettings) -> int | None:
    """Train the run of a config on a rank other than 0, from the state that rank 0 has; return the received signal.

    Raises:
        ConfigError, DataError: The message says what to do.
    """
    corpus = open_corpus(config.data)
    apply(settings)
    with StopRequest(only_first=True) as stop, convert_torch_errors():
        if Ranks.current().broadcast(False):  # the run is completed, as rank 0 sees (`_completed`)
            return None
        runs = [TrainingRun(config, RunFolder(os.devnull))]  # only rank 0 writes
        loop = Loop(runs, settings, build_parts(runs, settings, corpus))
        loop.state.share()
        loop.run(stop)
        return stop.received


def open_runs(
    configs: Sequence[RunConfig], settings: RuntimeSettings, corpus: Corpus, pack: Mapping[str, Any] | None = None
) -> list[TrainingRun]:
    """Return the runs of these configs, each with its identity and its folder. Writes nothing.

    Args:
        settings: This machine's settings; only the init rule may differ between the runs of a pack.
        pack: The pack's `sweep`, `number` and, if they are planned, the ids of its `runs`.

    Raises:
        ConfigError: A run's id is not the planned one, or a new run cannot start from the run or folder that it names.
        StoreError: The checkpoint or the weights from which a new run starts are missing or damaged.
    """
    runs = [_open(config, settings, corpus) for config in configs]
    if pack is not None or len(runs) > 1:
        ids = [run.folder.run_id for run in runs]
        for run, planned in zip(runs, (pack or {}).get("runs", ids), strict=True):
            if run.folder.run_id != planned:
                reason = reason_of_other_id(run.config, run.folder.path.with_name(planned))
                raise ConfigError(
                    f"run {planned} would be {run.folder.run_id} now: {reason} since the plan was made; undo the "
                    "change, or start the same overrides with another sweep.name=..."
                )
        for run in runs:
            run.pack = msgspec.convert({**(pack or {}), "runs": ids}, RecordedPack)
    for run in runs:
        if run.config.train.start_from is None or has_started(run.folder):
            continue
        run.warnings += check_start(run.config, run.identity, corpus.tokenizer)
        run.weights = read_weights(run.config, corpus.tokenizer)
        if not run.weights:
            read_start(run.config)  # a damaged checkpoint is an error before the folder exists
    return runs


def _open(config: RunConfig, settings: RuntimeSettings, corpus: Corpus) -> TrainingRun:
    """Return the run of a config; run.fresh=true numbers a new folder."""
    runs = Path(config.results_dir) / RUNS_FOLDER
    run_identity = identity(config, settings, corpus)
    run_id, number = run_id_of(config, run_identity), 1
    folder = RunFolder(runs / run_id)
    # A stopped run of run.fresh=true was started by the same command: resume it.
    while config.run.fresh and folder.path.exists() and not _is_stopped_fresh_run(folder):
        number += 1
        folder = RunFolder(runs / f"{run_id}.{number}")
    run = TrainingRun(config, folder, warnings=[*config.warnings(), *corpus.warnings()])
    run.identity = run_identity
    return run


def _is_stopped_fresh_run(folder: RunFolder) -> bool:
    """Return whether a run was started with run.fresh=true and is neither ended nor running."""
    try:
        record = RunRecord.load(folder, allow_lost_status=True)
    except StoreError:  # a damaged record
        return False
    return record.config.run.fresh and record.state not in (*COMPLETED_STATES, RUNNING)


# The steps of a start.


def _completed(runs: Sequence[TrainingRun]) -> list[TrainingResult] | None:
    """Return the results of runs that have all completed before; None if one has not."""
    statuses = [status_if_completed(run) for run in runs]
    # The other ranks wait for this value: another command may have completed the run since they were started.
    if not Ranks.current().broadcast(all(statuses)):
        return None
    results: list[TrainingResult] = []
    for run, status in zip(runs, statuses, strict=True):
        if status is not None:
            results.append(TrainingResult(run.folder, status, already_ended=True))
    return results


def _train_on_devices(run: TrainingRun, pack: Mapping[str, Any] | None, stop: StopRequest) -> TrainingResult:
    """Train a run by one process for each device; they handle signals themselves."""
    stop.end()
    if stop.received is not None:
        raise KeyboardInterrupt
    received = train_on_devices(run.config, pack)
    return TrainingResult(run.folder, run.folder.read_status(), received)


def _build(runs: Sequence[TrainingRun], settings: RuntimeSettings, corpus: Corpus) -> Loop:
    """Return the loop of the runs, and describe them; a config that cannot be trained leaves no file."""
    notify_of_depth(runs[0].config.model.depth)
    with local_statistics():  # rank 0 computes it alone
        block = fingerprint(runs[0].config)
    for run in runs:
        check_pack(run)
    with convert_torch_errors():
        parts = build_parts(runs, settings, corpus)
    for run in runs:
        decayed = decayed_groups(run.config.optim, parts.groups)
        run.described = describe(run, settings, corpus, fingerprint=block, decayed=decayed)
    return Loop(runs, settings, parts)


def _prepare_and_resume(loop: Loop, corpus: Corpus) -> None:
    """Create the folders of new runs, and put all runs, on all ranks, at the step from which they continue."""
    with convert_torch_errors():  # reading a checkpoint can exhaust the memory
        for index, run in enumerate(loop.runs):
            prepare_folder(run, corpus, loop.state.of_run(index))
        resume(loop.state)
        loop.state.share()
    for run in loop.runs:
        report_changes(run)
        run.recorded = replace(run.progress), run.diverged


def _set_trackers(loop: Loop, trackers: Sequence[Sequence[Tracker]] | None) -> None:
    """Give each run its trackers: those given, or the console for a single run and W&B as configured."""
    if trackers is not None:
        for run, of_run in zip(loop.runs, trackers, strict=True):
            run.trackers = of_run
        return
    if loop.is_single:  # the runs of a pack have no console
        loop.runs[0].trackers = [Console()]
    follow_training([run.folder.path for run in loop.runs], loop.config.tracking.wandb)


def _print_warnings(loop: Loop) -> None:
    """Print each warning of the runs and of this machine once."""
    warnings: list[str] = []
    for run in loop.runs:
        warnings += run.warnings
    resumed = any(run.progress.step for run in loop.runs)
    warnings += loop.settings.warnings(loop.config, resumed=resumed)
    for warning in dict.fromkeys(warnings):
        warn(warning)


# The training and its end.


def _run(loop: Loop, stop: StopRequest) -> list[TrainingResult]:
    """Train until the loop ends or an error does; write the last status of each run."""
    try:
        for run in loop.runs:
            for tracker in run.trackers:
                # The header and the MFU are of this machine, not of that of the first start.
                tracker.start(replace(run.on_record, resolved=run.described.resolved), run.progress.step)
        with convert_torch_errors():
            state = loop.run(stop)
            loop.parts.writer.wait()
    except BaseException as error:
        # Write the rows that the loop has recorded. The second Ctrl-C ends the process if that takes too long.
        loop.parts.writer.end()
        state = FAILED
        if isinstance(error, KeyboardInterrupt):  # the second Ctrl-C: stop without a checkpoint
            stop.end()
            state = INTERRUPTED
        _finish(loop, stop, state, error)
        raise
    loop.parts.writer.end()
    statuses = _finish(loop, stop, state)
    results: list[TrainingResult] = []
    for run, status in zip(loop.runs, statuses, strict=True):
        # The runs of a stopped pack may have diverged before.
        number = stop.received if status.state == INTERRUPTED else None
        results.append(TrainingResult(run.folder, status, number))
    return results


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
    is_diverged = run.diverged is not None
    if error is not None:
        # After an error, only a run whose status.json says diverged keeps that state.
        run.use_recorded()
        is_diverged = run.divergence_written
    status = loop.status(run, DIVERGED if is_diverged else state)
    if status.state == FAILED:
        reason = str(error)
        if not isinstance(error, NormlabError):
            reason = f"{type(error).__name__}: {error}"
        status = replace(status, error=reason)
    if status.state in COMPLETED_STATES:
        initial_loss = next((row.loss for row in evaluations(run.folder) if row.step == 0), None)
        status = status.completed(run.on_record.corpus.references(initial_loss), run.last_finite)
    with contextlib.suppress(StoreError):  # the outcome stands without them
        spikes: dict[str, SpikeCount] = {}
        for counted in count_spikes(series(run.folder)):
            spikes[counted.rule] = SpikeCount(len(counted.spikes), counted.scored)
        status = replace(status, spikes=spikes)
    # By these digests, readers notice a changed record.
    if status.state not in COMPLETED_STATES:
        return status
    metrics, statistics = run.folder.digests()
    return replace(status, metrics=metrics, statistics=statistics)
