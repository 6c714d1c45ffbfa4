"""Plan, train and read the grids of a study. Its sweeps are ordinary ones: they resume, and pack, and run on Slurm."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normlab.analysis.arms import StudyRuns
from normlab.analysis.comparability import intact_runs
from normlab.config.schema import canonical_hash
from normlab.errors import ConfigError, StoreError
from normlab.store.format import CHECKS_FILE
from normlab.store.plans import has_plan, read_plan, sweep_folder
from normlab.store.query import Selection, select_runs
from normlab.store.reading import read_record
from normlab.store.record import Machine, RunRecord
from normlab.store.runs import RunFolder
from normlab.store.status import RecordedPack
from normlab.studies.base import Grid, Study

if TYPE_CHECKING:
    from normlab.config.schema import RunConfig
    from normlab.config.sweep_options import SweepOptions
    from normlab.sweeps.plan import PlannedSweep

    Composed = tuple[list[str], RunConfig]

ALLOWED = (
    "sweep.jobs=", "sweep.on=", "sweep.slurm.", "sweep.timeout_minutes=", "device=", "tracking.",
    "plugins=",
)  # fmt: skip
"""The overrides that a study accepts: they change no run of its grids."""


def sweep_folder_of(study: Study, grid: Grid, results_dir: str) -> Path:
    return sweep_folder(results_dir, f"study-{study.name}-{grid.name}")


def check_overrides(overrides: Sequence[str]) -> None:
    """Reject overrides that would change what a study measures.

    Raises:
        ConfigError: The message names the override and those that are allowed.
    """
    for override in overrides:
        varies = "," in override and not override.startswith(("plugins=", "sweep.slurm."))
        if not override.startswith(ALLOWED) or varies:
            raise ConfigError(
                f"{override}: would change the study; only one value of {', '.join(ALLOWED)} is allowed; copy the "
                "study's file into a plugin to change its grid"
            )


@dataclass(frozen=True, slots=True)
class PlannedGrid:
    options: SweepOptions
    composed: Sequence[Composed]
    sweep: PlannedSweep


def compose(
    study: Study, results_dir: str, overrides: Sequence[str] = ()
) -> Iterator[tuple[Grid, SweepOptions, Sequence[Composed]]]:
    """Yield each grid of a study with the options of its sweep and the config of each run.

    Raises:
        ConfigError: An override is invalid.
    """
    from normlab.config.compose import compose_sweep

    for grid in study.grids:
        own = [f"sweep.name={sweep_folder_of(study, grid, results_dir).name}", f"results_dir={results_dir}"]
        yield grid, *compose_sweep([*grid.arguments, *overrides, *own])


def plan(study: Study, results_dir: str, overrides: Sequence[str] = ()) -> Iterator[PlannedGrid]:
    """Yield the plan of each grid of a study; the notes of a plan hold the hash of the criterion.

    Raises:
        ConfigError, DataError, StoreError: As `normlab sweep`; a grid has changed since its runs were planned.
    """
    from normlab.sweeps.plan import make_plan

    note = f"study {study.name}, criterion {study.criterion_hash()}"
    for _, options, composed in compose(study, results_dir, overrides):
        planned = make_plan(options, composed)
        notes = planned.plan.notes
        if criterion_of(notes) is None:
            planned = replace(planned, plan=replace(planned.plan, notes=[*notes, note]))
        yield PlannedGrid(options, composed, planned)


def check_arms(study: Study, configs: Sequence[RunConfig]) -> None:
    """Check, before any run of a study, that its grids have the arms of all claims.

    Raises:
        ConfigError: No run meets the conditions of an arm, or they leave an option free; the message names the claim.
    """
    by_identity = {canonical_hash(config.identity()): config for config in configs}
    planned = [_planned(config) for config in by_identity.values()]
    for claim in (*study.claims, *study.controls):
        try:
            claim.estimator.estimate(StudyRuns(planned))
        except ConfigError as error:
            raise ConfigError(f"study {study.name}: claim {claim.name}: {error}") from None


def _planned(config: RunConfig) -> RunRecord:
    machine = Machine(
        device=None, device_name=None, devices=config.devices, precision=config.precision, compile=config.compile,
        graph=config.train.graph, deterministic=config.deterministic is True, init=config.init_rule, decayed=None,
        threads=None, instructions=None,
    )  # fmt: skip
    return RunRecord.planned(RunFolder(config.config_hash), config, machine, RecordedPack())


def criterion_of(notes: Sequence[str]) -> str | None:
    found = (re.match(r"study \w+, criterion ([0-9a-f]{12})$", note) for note in notes)
    return next((match[1] for match in found if match), None)


@dataclass(frozen=True, slots=True)
class BlockChecks:
    checked: list[str]
    failed: dict[str, str]
    """The first failed check of a block, by its name."""


def verify_blocks(composed: Sequence[Composed]) -> BlockChecks:
    """Check the blocks of some runs by `normlab verify`."""
    from normlab.verify.selection import checks_of_run

    blocks = {block_of(config, config.init_rule): config for _, config in composed}
    wrong = {block: [str(each) for each in checks_of_run(blocks[block]) if not each.passed] for block in sorted(blocks)}
    return BlockChecks(list(wrong), {block: each[0] for block, each in wrong.items() if each})


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


def has_runs(study: Study, results_dir: str) -> bool:
    """Whether a results folder has the plan of a grid of a study."""
    return any(has_plan(sweep_folder_of(study, grid, results_dir)) for grid in study.grids)


def read_evidence(study: Study, results_dir: str) -> Evidence:
    """Return what the records of a study hold.

    Raises:
        StoreError: A grid has not been run.
    """
    folders = [sweep_folder_of(study, grid, results_dir) for grid in study.grids]
    if missing := [folder.name for folder in folders if not has_plan(folder)]:
        raise StoreError(
            f"study {study.name}: {results_dir} has no sweep {missing[0]}; make it with `normlab study run "
            f"{study.name}`, which trains only the runs that are missing"
        )
    selection = select_runs([str(folder) for folder in folders], results_dir)
    results, notes = intact_runs(selection.records)
    notes += [note for folder in folders for note in _criterion_notes(study, read_plan(folder).notes)]
    checks = [read_record(folder / CHECKS_FILE, BlockChecks) for folder in folders if (folder / CHECKS_FILE).exists()]
    checked = {block for each in checks for block in each.checked}
    unverified = dict.fromkeys({*map(block_of_run, results)} - checked, "it has not been checked")
    for each in checks:
        unverified |= each.failed
    return Evidence(results, unverified, list(dict.fromkeys(notes)), selection, len(selection.records) - len(results))


def _criterion_notes(study: Study, notes: Sequence[str]) -> list[str]:
    planned, now = criterion_of(notes), study.criterion_hash()
    if planned == now:
        return []
    if planned is None:
        return ["The plan of the runs names no criterion: they were not planned by this study."]
    reason = study.amendments.get(planned)
    text = f"The criterion was changed after the runs were planned ({planned}, now {now})"
    return [f"{text}: {reason}" if reason else f"{text}, without a reason in the study's amendments."]
