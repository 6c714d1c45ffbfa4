"""What the records of an attempt hold: the runs that are intact, the checks of their blocks, and notes on the plans."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normlab.analysis.comparability import intact_runs
from normlab.base.errors import StoreError
from normlab.config.schema import RunConfig
from normlab.store.format import CHECKS_FILE
from normlab.store.plans import Plan, read_plan, sweep_folder
from normlab.store.query import Selection, select_runs
from normlab.store.reading import HOW_TO_FIX, read_record
from normlab.store.record import RunRecord
from normlab.studies.base import PROTOCOL, SETTINGS, Study
from normlab.studies.run import REPLICATION, Attempt, ComposedRun, criterion_of


@dataclass(frozen=True, slots=True)
class BlockChecks:
    sweep: str
    """The name of the sweep in whose folder they are; empty before they are written."""
    checked: list[str]
    failed: dict[str, str]
    """The first failed check of a block, by its name."""


def verify_blocks(composed: Sequence[ComposedRun]) -> BlockChecks:
    """Check the blocks of some runs by `normlab verify`."""
    from normlab.verify.selection import checks_of_run

    # The name of a block does not tell the options of its norm and placement; it passes only with those of all runs.
    configs: dict[str, RunConfig] = {}
    for _, config in composed:
        configs.setdefault(repr((config.norm, config.placement, config.init_rule)), config)
    checked: set[str] = set()
    failed: dict[str, str] = {}
    for config in configs.values():
        block = block_of(config, config.init_rule)
        checked.add(block)
        problems = [str(check) for check in checks_of_run(config) if not check.passed]
        if problems:
            failed.setdefault(block, problems[0])
    return BlockChecks("", sorted(checked), failed)


def block_of(config: Any, init: str) -> str:
    """Return the name of a block: those of its norm (or of the norm's preset), its placement and its init rule."""
    return f"{config.norm.label} {config.placement.name} {init}"


def block_of_run(run: RunRecord) -> str:
    return block_of(run.config, run.machine.init)


@dataclass(frozen=True, slots=True)
class Evidence:
    results: list[RunRecord]
    unverified: dict[str, str]
    """The failed check of each block that fails, or that has not been checked."""
    notes: list[str]
    """Warnings about the records, and notes on the criterion."""
    selection: Selection
    missing: int
    """Number of runs that have not started or cannot be read."""
    damaged: dict[str, str]
    """Why a run that has started is left out, by its id."""


def attempts_of(study: Study, results_dir: str) -> list[Attempt]:
    """Return the attempts of a study that a results folder has: those of the first seeds first."""
    attempts: list[Attempt] = []
    grids = "|".join(re.escape(grid.name) for grid in study.grids)
    name = re.compile(rf"study-{study.name}-(?:{grids})-({'|'.join(SETTINGS)})-(\d+)")
    for folder in sorted(sweep_folder(results_dir, "").glob(f"study-{study.name}-*")):
        match = name.fullmatch(folder.name)
        if match:  # also without its plan, which `check_plans` names
            first_block_seed = int(match[2])
            first_seed = first_block_seed - first_block_seed % REPLICATION
            attempt = Attempt(study, results_dir, match[1], first_seed)
            if attempt not in attempts:
                attempts.append(attempt)
    settings = list(SETTINGS)
    return sorted(attempts, key=lambda attempt: (attempt.first_seed, settings.index(attempt.setting)))


def read_evidence(attempt: Attempt, last: range | None = None) -> Evidence:
    """Return what the records of an attempt hold; with `last`, those of its blocks up to it.

    A resumed study decides again after each block, by the records up to it: a later block may have been interrupted,
    and then has no checks yet.

    Raises:
        StoreError: No grid has been run.
    """
    study, folders = attempt.study, attempt.folders(last)
    if not folders:
        raise StoreError(
            f"study {study.name}: {attempt.results_dir} has no sweep of setting {attempt.setting} with seeds from "
            f"{attempt.first_seed} on; make it with `normlab study run {study.arguments}`, or `study replicate`"
        )
    selection = select_runs([str(folder) for folder in folders], attempt.results_dir)
    intact, notes = intact_runs(selection.records)
    damaged = {run.run_id: run.problem for run in selection.started if not isinstance(run, RunRecord)}
    results: list[RunRecord] = []
    for run in intact:
        # A measure would take the last row that is left for the last row of the run.
        problem = run.folder.metrics_problem() or run.folder.statistics_problem()
        if problem:
            notes.append(f"run {run.run_id} is left out: {problem}")
            damaged[run.run_id] = problem
        else:
            results.append(run)
    unverified: dict[str, str] = {}
    for folder in folders:
        plan = read_plan(folder)
        notes += _criterion_notes(study, plan.notes)
        planned_ids = ids_of(plan)
        unverified |= _unverified(folder, [run for run in results if run.run_id in planned_ids])
    missing = len(selection.records) - len(results)
    return Evidence(results, unverified, list(dict.fromkeys(notes)), selection, missing, damaged)


def check_records(evidence: Evidence) -> None:
    """Check that the records are intact, before more seeds are trained.

    Raises:
        StoreError: A run cannot be read, or its numbers are not those that were written.
    """
    for run_id, problem in evidence.damaged.items():
        raise StoreError(f"run {run_id}: {problem}; more seeds would be trained without it, so nothing more is")


def ids_of(plan: Plan) -> set[str]:
    return {run.run_id for run in plan.runs}


def _unverified(folder: Path, runs: Sequence[RunRecord]) -> dict[str, str]:
    """Return the failed check of each block of a sweep that fails, or that has not been checked.

    Raises:
        StoreError: The checks cannot be read, or are those of another sweep.
    """
    path = folder / CHECKS_FILE
    blocks = set(map(block_of_run, runs))
    if not path.exists():
        return dict.fromkeys(blocks, "it has not been checked")
    checks = read_record(path, BlockChecks)
    # The checks of another sweep may be of an older version of the same blocks.
    if checks.sweep != folder.name:
        raise StoreError(f"{path}: is of sweep {checks.sweep}, not of {folder.name}; {HOW_TO_FIX[CHECKS_FILE]}")
    return dict.fromkeys(blocks - set(checks.checked), "it has not been checked") | checks.failed


def _criterion_notes(study: Study, notes: Sequence[str]) -> list[str]:
    planned, now = criterion_of(notes), study.criterion_hash()
    if planned == now:
        return []
    if planned is None:
        return ["The plan of the runs names no criterion: they were not planned by this study."]
    change = f"The criterion was changed after the runs were planned ({planned}, now {now})"
    if study.protocol_of(planned) is not None:
        return [f"{change}: the claims are the same, and are judged by protocol {PROTOCOL}."]
    reason = study.amendments.get(planned)
    if not reason:
        return [f"{change}, without a reason in the study's amendments."]
    return [f"{change}: {reason}"]
