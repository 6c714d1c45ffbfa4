"""Prepares runs: their records, their folders, and whether they have completed before.

`train_pack` calls these functions for `normlab train`, for the workers of a sweep and for tasks on Slurm alike.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from normlab.config.schema import RunConfig, TrackingConfig, canonical_hash, config_from_record
from normlab.data.corpus import Corpus
from normlab.errors import ConfigError, StoreError, warn
from normlab.options import flatten_options
from normlab.store.files import io_error, write_atomic
from normlab.store.format import (
    COMPLETED_STATES,
    METRICS_FILE,
    RUN_FILE,
    RUNNING,
    RUNS_FOLDER,
    STATISTICS_FOLDER,
    STATUS_FILE,
    to_json,
)
from normlab.store.parts import as_setting, parse_part
from normlab.store.reading import HOW_TO_FIX
from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder
from normlab.store.status import RecordedPack, Status
from normlab.training import checkpoint
from normlab.training.identity import describe
from normlab.training.machine import RuntimeSettings
from normlab.training.parent_run import find_parent_run
from normlab.training.training_run import FRESH, TrainingRun

PLUGINS = "plugins"
TOKENIZER_FILE = "tokenizer.json"
KEPT_OPTIONS = {"run.name": None} | {
    f"tracking.{name}": default
    for name, default in flatten_options(TrackingConfig()).items()
    if name not in ("wandb", "also")
}
"""Options that a run keeps from its first start: its name and its labels at W&B. The values are their defaults."""
UNFINISHED = "unfinished"
"""Marks a folder while its files are created, to tell an unfinished start from the remains of a run."""


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
        ConfigError: A run's id is not the planned one.
    """
    records = [describe(config, replace(settings, init=config.init_rule), corpus) for config in configs]
    folders = [_choose_folder(config, record) for config, record in zip(configs, records, strict=True)]
    if pack is not None or len(configs) > 1:
        ids = [record["run_id"] for record in records]
        for run_id, planned in zip(ids, (pack or {}).get("runs", ids), strict=True):
            if run_id != planned:
                raise ConfigError(
                    f"run {planned} would be {run_id} now: a plugin, the corpus, the device or normlab has changed "
                    "since the plan was made; restore it, or start the same overrides with another sweep.name=..."
                )
        for record in records:
            record["pack"] = {**(pack or {}), "runs": ids}
    return [
        TrainingRun(config, RunFolder(folder), record)
        for config, folder, record in zip(configs, folders, records, strict=True)
    ]


def status_if_completed(run: TrainingRun) -> Status | None:
    """Return the status of a run that has completed before; print which options have no effect then.

    Raises:
        StoreError: The record in the folder is damaged, or that of another run.
    """
    folder, record = run.folder, run.new_run_json
    if not folder.exists():
        return None
    old, status = folder.run(), folder.status()
    try:
        is_record_of_run = _is_record_of_run(old, record)
    except ConfigError as error:
        raise StoreError(f"{folder.path / RUN_FILE}: is damaged ({error}); {HOW_TO_FIX[RUN_FILE]}") from error
    if not is_record_of_run:
        raise StoreError(
            f"{folder.path / RUN_FILE}: is damaged (it is not the record of run {folder.run_id}); "
            f"{HOW_TO_FIX[RUN_FILE]}"
        )
    if status["state"] not in COMPLETED_STATES:
        return None
    if problem := folder.metrics_problem():
        warn(problem)
    recorded, new = (RunRecord.parse(folder, each, status, status["state"]) for each in (old, record))
    warn_of_kept_options(recorded, new)
    changed = [
        option
        for option, value in new.options.items()
        if option.startswith("stats.") and option != "stats.preset" and recorded.options.get(option) != value
    ]
    if changed:
        warn(
            f"{', '.join(changed)}: no effect, the run has ended; `normlab inspect RUN --probe` measures its "
            "checkpoints, and run.fresh=true trains another run with these statistics"
        )
    return recorded.status


def warn_of_kept_options(recorded: RunRecord, new: RunRecord) -> None:
    """Warn of a name or a label that differs from the one that a run keeps from its first start."""
    for option, default in KEPT_OPTIONS.items():
        old, value = recorded.options.get(option), new.options.get(option)
        if value not in (old, as_setting(default)):
            kept = f"{option}={'null' if old is None else old}"
            warn(f"{option}={value}: has no effect, because the run keeps {kept} of its first start; {FRESH}")


def check_pack(run: TrainingRun) -> None:
    """Check that a run resumes in the kind of pack that it started in, because its checkpoints are shared.

    Raises:
        StoreError: The run started in another sweep's pack, or on its own.
    """
    if not run.folder.exists():
        return
    old, new = (parse_part(RecordedPack, each.get("pack")) for each in (run.folder.run(), run.new_run_json))
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


def prepare_folders(runs: Sequence[TrainingRun], corpus: Corpus) -> None:
    """Create the folders of new runs, and read the run.json of those that resume. The folders are locked."""
    for run in runs:
        if not run.folder.exists():
            _create(run)
        run.run_json = run.folder.run()
        (run.folder.path / UNFINISHED).unlink(missing_ok=True)
        write_atomic(run.folder.path / TOKENIZER_FILE, to_json(corpus.tokenizer.state()))


def _choose_folder(config: RunConfig, record: dict[str, Any]) -> Path:
    """Return the folder of a run, and set the id and name of its record; run.fresh=true numbers a new folder."""
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


def _is_record_of_run(old: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Return whether a run.json describes the run of its folder's name, with every part of the right type.

    Raises:
        ConfigError: Its config has an unknown option, or a value outside the limits of its option.
    """
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
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def _create(run: TrainingRun) -> None:
    """Fill a new folder; run.json comes last, so that a kill in between leaves a folder that is no run yet."""
    folder, record, config = run.folder, run.new_run_json, run.config
    marker = folder.path / UNFINISHED
    if not marker.exists() and (remains := _remains(folder)):
        raise StoreError(
            f"{folder.path / RUN_FILE}: is missing, but the folder has {' and '.join(remains)} of a run; restore a "
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
    if not config.run.fresh and len(parse_part(RecordedPack, record.get("pack")).runs) < 2:
        parent = find_parent_run(folder.path.parent, record, config)
    if parent is not None:
        parent.branch(folder)
        record["continued_from"] = {"run_id": parent.folder.run_id, "step": parent.checkpoint.step}
    RunFolder.create(folder.path, record)


def _remains(folder: RunFolder) -> list[str]:
    """Return the names of a run's files in a folder without run.json."""
    files = {
        checkpoint.FOLDER: checkpoint.steps(folder.path / checkpoint.FOLDER),
        METRICS_FILE: folder.size(),
        STATUS_FILE: (folder.path / STATUS_FILE).exists(),
    }
    return [name for name, exists in files.items() if exists]
