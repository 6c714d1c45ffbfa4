"""Trains runs from their configs: finds the folder, resumes or starts, feeds the sinks, and writes the final status."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from normlab.config.schema import RunConfig, canonical_hash, config_from_record
from normlab.data.corpus import Corpus, open_corpus
from normlab.errors import ConfigError, NormlabError, OutOfMemoryError, StoreError, notify
from normlab.model.fingerprint import fingerprint
from normlab.stats.spikes import count_spikes
from normlab.stats.statistic import CORE, EXTENDED
from normlab.store.arrays import STATISTICS_FOLDER
from normlab.store.files import io_error, write_atomic
from normlab.store.reading import HOW_TO_FIX
from normlab.store.record import final_status
from normlab.store.runs import RunFolder, pack_run_ids
from normlab.store.schema import (
    COMPLETED_STATES,
    DIVERGED,
    METRICS_FILE,
    RUN_FILE,
    RUNNING,
    RUNS_FOLDER,
    STATUS_FILE,
    to_json,
)
from normlab.store.series import evaluations, series
from normlab.tracking.background import Background, abandon, wait_for_finish, wait_for_start
from normlab.tracking.base import Sink
from normlab.tracking.console import Console
from normlab.tracking.wandb import WandbSink
from normlab.train import checkpoint
from normlab.train.identity import describe, runs_before_versions
from normlab.train.loop import Loop
from normlab.train.machine import apply, resolve
from normlab.train.parent_run import find_parent_run
from normlab.train.resume import report_changes, resume_from_checkpoint
from normlab.train.signals import StopRequest
from normlab.train.training_run import FRESH, TrainingRun

PLUGINS = "plugins"
TOKENIZER_FILE = "tokenizer.json"
UNFINISHED = "unfinished"
"""Marks a folder while its files are created, to tell an unfinished start from the remains of a run."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call of `train`."""

    folder: RunFolder
    state: str
    """finished, diverged or interrupted."""
    status: dict[str, Any]
    signal: int | None = None
    """The signal that interrupted the run."""
    already_ended: bool = False
    """Whether the run had ended before the call."""


def train(config: RunConfig, sinks: Sequence[Sink] | None = None, *, ends_process: bool = False) -> Outcome:
    """Train the run of a validated config, or resume it, or return the outcome that it has already.

    Args:
        config: The run's config.
        sinks: Receivers of the record besides the run's folder; by default the console and W&B, as configured.
        ends_process: Whether the second SIGINT or SIGTERM may end the whole process in the middle of a step.

    Raises:
        ConfigError, DataError, StoreError: The message says what to do.
    """
    return train_pack([config], None if sinks is None else [sinks], ends_process=ends_process)[0]


def train_pack(
    configs: Sequence[RunConfig],
    sinks: Sequence[Sequence[Sink]] | None = None,
    *,
    pack: Mapping[str, Any] | None = None,
    ends_process: bool = False,
) -> list[Outcome]:
    """Train runs as one stacked computation, or resume them, or return the outcomes that all have already.

    Each run has its own folder, status and sinks. They resume together, from the newest step of which each has an
    intact checkpoint; a run that has diverged stays frozen in the stack.

    Args:
        configs: Validated configs that differ in numbers only: seeds, learning rates and the like (`sweep.packs`).
        sinks: The sinks of each run.
        pack: The pack's `sweep` and `number`, for the records.
        ends_process: As for `train`.

    Raises:
        ConfigError, DataError, StoreError: The message says what to do.
    """
    settings = resolve(configs[0])
    # Before the stop request: a signal ends the preparation of a corpus at once, and its files appear atomically.
    corpus = open_corpus(configs[0].data)
    apply(settings)  # after the corpus: it may import a compiler, and a missing text is reported sooner
    with StopRequest(ends_process=ends_process) as stop:
        # Of the settings only the init rule may differ between the runs of a pack.
        records = [describe(config, replace(settings, init=config.init_rule), corpus) for config in configs]
        runs = [
            TrainingRun(config, RunFolder(_choose_folder(config, record)))
            for config, record in zip(configs, records, strict=True)
        ]
        if pack is not None or len(runs) > 1:
            ids = [run.folder.run_id for run in runs]
            for run, record in zip(runs, records, strict=True):
                record["pack"] = run.pack = {**(pack or {}), "runs": ids}
        outcomes = [_existing_outcome(run, record) for run, record in zip(runs, records, strict=True)]
        ended = [outcome for outcome in outcomes if outcome is not None]
        if len(ended) == len(runs):
            return ended
        for run, record in zip(runs, records, strict=True):
            if run.folder.exists():
                _refuse_other_pack(run.folder.run(), record, pack)
        block_fingerprint = fingerprint(configs[0])
        for record in records:
            record["fingerprint"] = block_fingerprint
        # The loop comes before the folders: a config that cannot be trained leaves nothing behind.
        with _convert_torch_errors():
            loop = Loop(runs, settings, corpus)
        with contextlib.ExitStack() as locks:
            for run in runs:
                locks.enter_context(run.folder.lock())
            with _convert_torch_errors():  # reading a checkpoint can exhaust the memory
                old_records = [_prepare_folder(run, record, corpus) for run, record in zip(runs, records, strict=True)]
                resume_from_checkpoint(loop)
            for number, (run, old, record) in enumerate(zip(runs, old_records, records, strict=True)):
                report_changes(run, old, record)
                stats = run.config.stats
                run.folder.statistics.set_cadence(
                    run.progress.step, {CORE: stats.every, EXTENDED: stats.extended_every}
                )
                run.sinks = (
                    make_sinks(run.config, run.folder, console=loop.is_single) if sinks is None else sinks[number]
                )
            # After all errors, which stay a single line.
            for warning in dict.fromkeys(warning for config in configs for warning in config.warnings()):
                print(f"warning: {warning}", file=sys.stderr)
            return _run(loop, old_records, stop)


# The folder.


def _choose_folder(config: RunConfig, record: dict[str, Any]) -> Path:
    """Return the run's folder, and set the record's id and name; run.fresh=true numbers a new folder."""
    runs = Path(config.results_dir) / RUNS_FOLDER
    run_id, number = record["run_id"], 1
    while config.run.fresh and (runs / record["run_id"]).exists():
        if _is_stopped_fresh_run(RunFolder(runs / record["run_id"])):
            break  # the same command started it: resume it
        number += 1
        record["run_id"] = f"{run_id}.{number}"
    if config.run.name is None:
        record["name"] = record["run_id"]
    return runs / record["run_id"]


def _is_stopped_fresh_run(folder: RunFolder) -> bool:
    """Return whether a run was started with run.fresh=true and is neither ended nor running."""
    try:
        return bool(folder.run()["config"]["run"]["fresh"]) and folder.state() not in (*COMPLETED_STATES, RUNNING)
    except (StoreError, KeyError, TypeError):  # a damaged record
        return False


def _existing_outcome(run: TrainingRun, record: Mapping[str, Any]) -> Outcome | None:
    """Return the outcome of a run that has ended; print which options have no effect then."""
    config, folder = run.config, run.folder
    if not folder.exists():
        return None
    old, status = folder.run(), folder.status()
    if not _is_record_of_run(old, record):
        raise StoreError(
            f"{folder.path / RUN_FILE}: is damaged (it is not the record of run {folder.run_id}); "
            f"{HOW_TO_FIX[RUN_FILE]}"
        )
    if status["state"] not in COMPLETED_STATES:
        return None
    if problem := folder.metrics_problem():
        notify(problem)
    if config.run.name not in (None, old["name"]):
        notify(f"run.name={config.run.name}: has no effect, the run has ended with the name {old['name']}")
    old_stats, stats = (each["config"].get("stats", {}) for each in (old, record))
    changed = [
        f"stats.{option}"
        for option, value in stats.items()
        if option != "preset" and old_stats.get(option, value) != value
    ]
    if changed:
        notify(
            f"{', '.join(changed)}: no effect, the run has ended; `normlab inspect RUN --probe` measures its "
            "checkpoints, and run.fresh=true trains another run with these statistics"
        )
    return Outcome(folder, status["state"], status, already_ended=True)


def _is_record_of_run(old: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Return whether a run.json describes the run of its folder's name, with every part of the right type."""
    try:
        config, identity = config_from_record(old["config"]).identity(), old["identity"]
        same = canonical_hash([config, identity]) == canonical_hash([record["identity"]["config"], record["identity"]])
        git, pack = old["git"] or {"commit": "", "diff": ""}, old.get("pack")
        return (
            same
            and all(isinstance(old[part], type(record[part])) for part in ("run_id", "name", "resolved", "corpus"))
            and all(isinstance(git[part], str) for part in ("commit", "diff"))
            and isinstance(old["versions"], dict)
            and isinstance(old["config"]["run"]["fresh"], bool)
            and (pack is None or isinstance(pack["runs"], list))
        )
    except (ConfigError, KeyError, TypeError, ValueError, AttributeError):
        return False


def _refuse_other_pack(old: Mapping[str, Any], record: Mapping[str, Any], pack: Mapping[str, Any] | None) -> None:
    """Check that a run resumes in the kind of pack that it started in, because its checkpoints are shared.

    Raises:
        StoreError: The run started in another sweep's pack, or on its own.
    """
    size = len(pack_run_ids(old))
    if size > 1 and old["pack"].get("sweep") != (pack or {}).get("sweep"):
        raise StoreError(
            f"run {old['run_id']} is one of a pack of {size} that trains together in sweep "
            f"{old['pack'].get('sweep')}; start that sweep again to resume it, or run.fresh=true starts another "
            "beside it"
        )
    if size < 2 <= len(pack_run_ids(record)):
        raise StoreError(
            f"run {old['run_id']} was started as a single run and cannot join a pack; resume it with `normlab train`, "
            "or plan the sweep with sweep.pack=off"
        )


def _prepare_folder(run: TrainingRun, record: dict[str, Any], corpus: Corpus) -> dict[str, Any]:
    """Create the folder of a new run; return the run.json that the folder holds."""
    folder = run.folder
    if not folder.exists():
        _create(folder, record, run.config)
    old = folder.run()
    (folder.path / UNFINISHED).unlink(missing_ok=True)
    write_atomic(folder.path / TOKENIZER_FILE, to_json(corpus.tokenizer.state()))
    return old


def _create(folder: RunFolder, record: dict[str, Any], config: RunConfig) -> None:
    """Fill a new folder; run.json comes last, so that a kill in between leaves a folder that is no run yet."""
    marker = folder.path / UNFINISHED
    if not marker.exists() and (remains := _remains(folder)):
        raise StoreError(
            f"{folder.path / RUN_FILE}: is missing, but the folder has {' and '.join(remains)} of a run; put back a "
            f"copy, or {FRESH}"
        )
    write_atomic(marker, b"")
    try:
        for name in (checkpoint.FOLDER, PLUGINS, STATISTICS_FOLDER, METRICS_FILE, STATUS_FILE):
            path = folder.path / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if config.plugins:
            (folder.path / PLUGINS).mkdir()
    except OSError as error:
        raise io_error(Path(error.filename or folder.path), "written", error) from error
    for number, path in enumerate(config.plugins):
        copy = folder.path / PLUGINS / f"{number:02d}_{Path(path).name}"
        write_atomic(copy, Path(path).expanduser().read_bytes())
    # The runs of a pack start together, at step 0.
    parent = None
    if not config.run.fresh and len(pack_run_ids(record)) < 2:
        parent = find_parent_run(folder.path.parent, record, config)
    if parent is not None:
        parent.branch(folder)
        record["continued_from"] = {"run_id": parent.folder.run_id, "step": parent.checkpoint.step}
    for other in runs_before_versions(folder.path.parent, record["run_id"], record["identity"]):
        notify(
            f"run {other} has these settings, but was recorded before norms and placements had versions: it cannot be "
            f"resumed, and {record['run_id']} starts from step 0"
        )
    RunFolder.create(folder.path, record)


def _remains(folder: RunFolder) -> list[str]:
    """Return the names of a run's files in a folder without run.json."""
    files = {
        checkpoint.FOLDER: checkpoint.steps(folder.path / checkpoint.FOLDER),
        METRICS_FILE: folder.size(),
        STATUS_FILE: (folder.path / STATUS_FILE).exists(),
    }
    return [name for name, exists in files.items() if exists]


# The run.


def make_sinks(config: RunConfig, folder: RunFolder, *, console: bool = True) -> list[Sink]:
    """Return the configured sinks of a run; the runs of a pack have no console."""
    sinks: list[Sink] = [Console()] if console else []
    if config.tracking.wandb != "off":
        sinks.append(Background(WandbSink(config.tracking, folder.path)))
    return sinks


def _run(loop: Loop, records: Sequence[dict[str, Any]], stop: StopRequest) -> list[Outcome]:
    try:
        for run, record in zip(loop.runs, records, strict=True):
            first = run.progress.step
            for sink in run.sinks:
                sink.start(record, first)
                if record.get("continued_from", {}).get("step") == first and first > 0:
                    sink.log(run.folder.rows().rows)  # those of the parent run
        wait_for_start(_mirrors(loop))
        with _convert_torch_errors():
            state = loop.run(stop)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):  # the second Ctrl-C: stop without a checkpoint
            stop.end()
            _finish(loop, [loop.status(run, "interrupted") for run in loop.runs], stop, at_once=True)
        else:
            reason = str(error) if isinstance(error, NormlabError) else f"{type(error).__name__}: {error}"
            statuses = [loop.status(run, "failed") for run in loop.runs]
            # A run of the pack that diverged before the error keeps its outcome.
            final = [each if each["state"] == DIVERGED else {**each, "error": reason} for each in statuses]
            _finish(loop, final, stop)
        raise
    statuses: list[dict[str, Any]] = []
    for run, record in zip(loop.runs, records, strict=True):
        status = loop.status(run, DIVERGED if run.diverged else state)
        initial_loss = next((evaluation.loss for evaluation in evaluations(run.folder) if evaluation.step == 0), None)
        statuses.append(final_status(record, status, initial_loss, run.last_finite))
    return [
        Outcome(run.folder, status["state"], status, stop.received if status["state"] == "interrupted" else None)
        for run, status in zip(loop.runs, _finish(loop, statuses, stop), strict=True)
    ]


@contextlib.contextmanager
def _convert_torch_errors() -> Iterator[None]:
    """Convert torch's out-of-memory and compiler errors to NormlabError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch has a class of error for the memory of a GPU only.
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise OutOfMemoryError(
                "the memory ran out; lower train.batch_size or model.context, or raise train.accumulation, which "
                "splits a batch into micro-batches"
            ) from error
        if type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
            reason = " ".join(str(error).partition("\n\n")[0].split())
            raise ConfigError(
                f"compile=on: torch's compiler failed ({reason:.200}); check it with `normlab doctor`, or train with "
                "compile=off"
            ) from error
        raise


def _with_spikes(folder: RunFolder, status: dict[str, Any]) -> dict[str, Any]:
    """Return the status with the number of spikes by each rule, and write it if the run has ended."""
    with contextlib.suppress(StoreError):  # the outcome stands without them: a report can count them again
        spikes = {
            each.rule.name: {"spikes": len(each.spikes), "of_steps": each.scored}
            for each in count_spikes(series(folder))
        }
        status = {**status, "spikes": spikes}
        if status["state"] in COMPLETED_STATES:
            folder.write_status(status)
    return status


def _finish(
    loop: Loop, statuses: Sequence[dict[str, Any]], stop: StopRequest, *, at_once: bool = False
) -> list[dict[str, Any]]:
    """Write the final statuses and finish the sinks; return the statuses that the sinks received."""
    final = list(statuses)
    mirrors = _mirrors(loop)
    try:
        for index, (run, status) in enumerate(zip(loop.runs, statuses, strict=True)):
            final[index] = status | (
                {"metrics": run.folder.metrics_digest()} if status["state"] in COMPLETED_STATES else {}
            )
            run.folder.write_status(final[index])
    finally:
        stop.end()  # no step is left to stop at: from here Ctrl-C ends the wait for the sinks
        try:
            if at_once:
                abandon(mirrors)
            for index, run in enumerate(loop.runs):
                if not at_once:
                    final[index] = _with_spikes(run.folder, final[index])
                for sink in run.sinks:
                    sink.finish(final[index])
            wait_for_finish(mirrors)
        except KeyboardInterrupt:
            abandon(mirrors)
            raise
    return final


def _mirrors(loop: Loop) -> list[Background]:
    """Return the sinks of all runs that may need time to finish."""
    return [sink for run in loop.runs for sink in run.sinks if isinstance(sink, Background)]
