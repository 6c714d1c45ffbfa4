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

from normlab.config.schema import RunConfig, canonical_hash
from normlab.data.corpus import Corpus, open_corpus
from normlab.errors import ConfigError, StoreError, notify, warn
from normlab.model.fingerprint import fingerprint
from normlab.ranks import Ranks, local_statistics
from normlab.stats.spikes import count_spikes
from normlab.store.files import make_folder, write_atomic
from normlab.store.format import (
    COMPLETED_STATES,
    INTERRUPTED,
    METRICS_FILE,
    RUN_FILE,
    RUNNING,
    RUNS_FOLDER,
    STATUS_FILE,
    to_json,
)
from normlab.store.reading import damaged
from normlab.store.record import RunRecord, flatten
from normlab.store.runs import RunFolder
from normlab.store.series import series
from normlab.store.status import RecordedPack, SpikeCount, Status
from normlab.tracking.background import follow_training
from normlab.tracking.console import Console
from normlab.tracking.tracker import Tracker
from normlab.training import checkpoint
from normlab.training.identity import describe
from normlab.training.launch import train_on_devices
from normlab.training.loop import Loop
from normlab.training.machine import RuntimeSettings, apply, resolve
from normlab.training.optim import decayed_kinds
from normlab.training.resume import (
    check_start,
    copy_start,
    read_start,
    report_changes,
    resolve_start,
    resume_from_checkpoint,
    warn_of_kept_options,
)
from normlab.training.signals import StopRequest
from normlab.training.torch_errors import convert_torch_errors
from normlab.training.training_run import FRESH, PLUGINS, TOKENIZER_FILE, TrainingRun

MANY_BLOCKS = 500
"""Number of blocks that takes seconds to build."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call of `train`."""

    folder: RunFolder
    state: str
    """finished, diverged or interrupted."""
    status: Status
    signal: int | None = None
    """The signal that interrupted the run."""
    already_ended: bool = False
    """Whether the run had ended before the call."""


def train(config: RunConfig, trackers: Sequence[Tracker] | None = None, *, ends_process: bool = False) -> Outcome:
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
    trackers: Sequence[Sequence[Tracker]] | None = None,
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
    with contextlib.ExitStack() as handlers:
        if only_first_signal:
            handlers.enter_context(stop)
        runs = open_runs(configs, settings, corpus, pack)
        completed = [_status_if_completed(run) for run in runs]
        # The other ranks wait for this value: another command may have completed the run since they were started.
        if Ranks.current().broadcast(all(completed)):
            # A W&B agent expects the numbers of a completed run under the agent's own run id.
            if trackers is None and Ranks.current().rank == 0 and os.environ.get("WANDB_SWEEP_ID"):
                follow_training([run.folder.path for run in runs], configs[0].tracking)
            return [
                Outcome(run.folder, status.state, status, already_ended=True)
                for run, status in zip(runs, completed, strict=True)
                if status
            ]
        if configs[0].devices > 1 and Ranks.current().count == 1:
            stop.end()  # the ranks handle signals
            if stop.received is not None:
                raise KeyboardInterrupt
            received = train_on_devices(configs[0], pack)
            status = runs[0].recorded_status()
            return [Outcome(runs[0].folder, status.state, status, received)]
        if (blocks := configs[0].model.depth * len(configs)) >= MANY_BLOCKS:
            notify(f"building {blocks:,} blocks takes a while; nothing is written yet, and Ctrl-C ends it at once")
        with local_statistics():  # rank 0 computes it alone
            block = fingerprint(configs[0])
        for run in runs:
            _check_pack(run)
            run.new_run_json["fingerprint"] = block
        # The loop comes before the folders: a config that cannot be trained leaves nothing behind.
        with convert_torch_errors():
            loop = Loop(runs, settings, corpus)
        for run in runs:
            run.new_run_json["resolved"]["decayed"] = decayed_kinds(run.config.optim, loop.runner.model)
        # Only now: until here, nothing is written but the files of a corpus, atomically, and a signal ends it at once.
        if not only_first_signal:
            handlers.enter_context(stop)
        with contextlib.ExitStack() as locks:
            for run in runs:
                locks.enter_context(run.folder.lock())
            with convert_torch_errors():  # reading a checkpoint can exhaust the memory
                for run in runs:
                    _prepare_folder(run, corpus)
                resume_from_checkpoint(loop)
                loop.share_state()
            for index, run in enumerate(runs):
                report_changes(run)
                run.recorded = replace(run.progress), run.diverged
                if trackers is not None:
                    run.trackers = trackers[index]
                elif loop.is_single:  # the runs of a pack have no console
                    run.trackers = [Console()]
            if trackers is None:
                follow_training([run.folder.path for run in runs], configs[0].tracking)
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
    new = flatten(record["config"])
    warn_of_kept_options(recorded.options, new)
    changed = [
        option
        for option, value in new.items()
        if option.startswith("stats.") and option != "stats.preset" and recorded.options.get(option) != value
    ]
    if changed:
        warn(
            f"{', '.join(changed)}: no effect, the run has ended; `normlab inspect RUN --probe` measures its "
            "checkpoints, and run.fresh=true trains another run with these statistics"
        )
    return recorded.status


def _check_pack(run: TrainingRun) -> None:
    """Check that a run resumes in the kind of pack that it started in, because its checkpoints are shared.

    Raises:
        StoreError: The run started in another sweep's pack, or on its own.
    """
    if not run.folder.exists():
        return
    old, new = (msgspec.convert(each.get("pack", {}), RecordedPack) for each in (run.folder.run(), run.new_run_json))
    if len(old.runs) > 1 and old.sweep != new.sweep:
        raise StoreError(
            f"run {run.folder.run_id} is one of a pack of {len(old.runs)} that trains together in sweep {old.sweep}; "
            "start that sweep again to resume it, or run.fresh=true starts another beside it"
        )
    if len(old.runs) < 2 <= len(new.runs):
        raise StoreError(
            f"run {run.folder.run_id} was started as a single run and cannot join a pack; resume it with "
            "`normlab train`, or plan the sweep with sweep.pack=off"
        )


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
    files = {
        checkpoint.FOLDER: checkpoint.steps(folder.path / checkpoint.FOLDER),
        METRICS_FILE: folder.size(),
        STATUS_FILE: (folder.path / STATUS_FILE).exists(),
    }
    if remains := [name for name, exists in files.items() if exists]:
        raise StoreError(
            f"{folder.path / RUN_FILE}: is missing, but the folder has {' and '.join(remains)} of a run; restore a "
            f"copy, or {FRESH}"
        )
    shutil.rmtree(folder.path / PLUGINS, ignore_errors=True)
    for number, path in enumerate(run.config.plugins):
        make_folder(folder.path / PLUGINS)
        copy = folder.path / PLUGINS / f"{number:02d}_{Path(path).name}"
        write_atomic(copy, Path(path).expanduser().read_bytes())
    RunFolder.create(folder.path, run.new_run_json)


def _run(loop: Loop, stop: StopRequest) -> list[Outcome]:
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
        _finish(loop, stop, [loop.status_after_error(run, error) for run in loop.runs])
        raise
    loop.writer.end()
    statuses = _finish(loop, stop, [loop.final_status(run, state) for run in loop.runs])
    return [
        Outcome(run.folder, status.state, status, stop.received if status.state == INTERRUPTED else None)
        for run, status in zip(loop.runs, statuses, strict=True)
    ]


def _finish(loop: Loop, stop: StopRequest, statuses: Sequence[Status]) -> list[Status]:
    """Write the last statuses and finish the trackers; return the statuses that the trackers received."""
    final = list(statuses)
    errors: list[StoreError] = []
    try:
        for run, status in zip(loop.runs, statuses, strict=True):
            try:
                run.write_status(status)
            except StoreError as error:  # the other runs of a pack have their own folders
                errors.append(error)
        if errors:
            raise errors[0]
    finally:
        stop.end()  # no step is left to stop at
        for index, run in enumerate(loop.runs):
            final[index] = _with_spikes(run.folder, final[index])
            for tracker in run.trackers:
                tracker.finish(final[index])
    return final


def _with_spikes(folder: RunFolder, status: Status) -> Status:
    """Return the status with the number of spikes by each rule, and write it if the run has ended."""
    with contextlib.suppress(StoreError):  # the outcome stands without them
        spikes = {each.rule.name: SpikeCount(len(each.spikes), each.scored) for each in count_spikes(series(folder))}
        status = replace(status, spikes=spikes)
        if status.state in COMPLETED_STATES:
            folder.write_status(asdict(status))
    return status
