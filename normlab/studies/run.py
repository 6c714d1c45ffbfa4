"""Plan, train and read the grids of a study. Its sweeps are ordinary ones: they resume, and pack, and run on Slurm."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from normlab.analysis.arms import StudyRuns
from normlab.analysis.results import RunResult, read_results
from normlab.config.schema import canonical_hash
from normlab.errors import ConfigError, StoreError
from normlab.store.format import CHECKS_FILE, with_checksum
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
    "sweep.jobs=", "sweep.gpus=", "sweep.on=", "sweep.slurm.", "sweep.timeout_minutes=", "device=", "tracking.",
    "plugins=",
)  # fmt: skip
"""The overrides that a study accepts: they change no run of its grids."""


def name_of_sweep(study: Study, size: str, grid: Grid) -> str:
    """Return the name of the sweep of a grid."""
    return f"study-{study.name}-{size}-{grid.name}"


def check_overrides(overrides: Sequence[str]) -> None:
    """Reject overrides that would change what a study measures.

    Raises:
        ConfigError: The message names the override and those that are allowed.
    """
    for override in overrides:
        varies = "," in override and not override.startswith(("plugins=", "sweep.gpus=", "sweep.slurm."))
        if not override.startswith(ALLOWED) or varies:
            raise ConfigError(
                f"{override}: would change the study; only one value of {', '.join(ALLOWED)} is allowed; copy the "
                "study's file into a plugin to change its grid"
            )


@dataclass(frozen=True, slots=True)
class PlannedGrid:
    """A grid of a study as a sweep that can be trained."""

    grid: Grid
    options: SweepOptions
    composed: Sequence[Composed]
    sweep: PlannedSweep


def compose(
    study: Study, size: str, results_dir: str, overrides: Sequence[str] = ()
) -> Iterator[tuple[Grid, SweepOptions, Sequence[Composed]]]:
    """Yield each grid of a study with the options of its sweep and the config of each run.

    Raises:
        ConfigError: An override is invalid.
    """
    from normlab.config.compose import compose_sweep

    for grid in study.grids_of(size):
        own = [f"sweep.name={name_of_sweep(study, size, grid)}", f"results_dir={results_dir}"]
        yield grid, *compose_sweep([*grid.arguments, *overrides, *own])


def plan(study: Study, size: str, results_dir: str, overrides: Sequence[str] = ()) -> Iterator[PlannedGrid]:
    """Yield the plan of each grid of a study; the notes of a plan hold the hash of the criterion.

    Raises:
        ConfigError, DataError, StoreError: As `normlab sweep`.
    """
    from normlab.sweeps.plan import make_plan

    note = f"study {study.name}, size {size}, criterion {study.criterion_hash(size)}"
    for grid, options, composed in compose(study, size, results_dir, overrides):
        folder = sweep_folder(results_dir, name_of_sweep(study, size, grid))
        try:
            planned = make_plan(options, composed)
        except ConfigError as error:
            if "the existing sweep of this name" not in str(error):
                raise
            raise ConfigError(
                f"study {study.name}: grid {grid.name} has changed since its runs were planned; delete {folder} (its "
                "runs are kept, and trained runs are used again), or choose another --results-dir"
            ) from None
        notes = planned.plan.notes
        if criterion_of(notes) is None:
            planned = replace(planned, plan=replace(planned.plan, notes=[*notes, note]))
        yield PlannedGrid(grid, options, composed, planned)


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


def _planned(config: RunConfig) -> RunResult:
    machine = Machine(
        device=None, device_name=None, devices=config.devices, precision=config.precision, compile=config.compile,
        graph=config.train.graph, deterministic=config.deterministic is True, init=config.init_rule, decayed=None,
        threads=None, instructions=None,
    )  # fmt: skip
    return RunResult(RunRecord.planned(RunFolder(config.config_hash), config, machine, RecordedPack()))


def criterion_of(notes: Sequence[str]) -> str | None:
    """Return the hash of the criterion in the notes of a plan."""
    found = [match[1] for note in notes if (match := re.match(r"study \w+, size \w+, criterion ([0-9a-f]{12})$", note))]
    return found[0] if found else None


@dataclass(frozen=True, slots=True)
class BlockChecks:
    """The content of `CHECKS_FILE`."""

    checked: list[str]
    """Names of blocks."""
    failed: dict[str, str]
    """The first failed check of a block, by its name."""


def verify_blocks(composed: Sequence[Composed]) -> bytes:
    """Check the blocks of some runs by `normlab verify`; return the content of `CHECKS_FILE`."""
    from normlab.verify.selection import checks_of_run

    failed: dict[str, str] = {}
    checked: set[str] = set()
    for _, config in composed:
        block = block_of(config.norm.label, config.placement.name, config.init_rule)
        if block not in checked:
            checked.add(block)
            wrong = [str(check) for check in checks_of_run(config) if not check.passed]
            failed |= {block: wrong[0]} if wrong else {}
    return with_checksum(asdict(BlockChecks(sorted(checked), failed)))


def block_of(norm: str | None, placement: str | None, init: object) -> str:
    """Return the name of a block: those of its norm (or of the norm's preset), its placement and its init rule."""
    return f"{norm} {placement} {init}"


def block_of_run(run: RunResult) -> str:
    """Return the name of a run's block."""
    norm = run.record.config.norm
    return block_of(norm.label, run.record.config.placement.name, run.record.machine.init)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the records of a study hold."""

    results: list[RunResult]
    unverified: dict[str, str]
    notes: list[str]
    selection: Selection
    """The records of all grids."""
    missing: int
    """Number of runs that have not started or cannot be read."""


def has_runs(study: Study, size: str, results_dir: str) -> bool:
    """Whether a results folder has the plan of a grid of a study."""
    return any(has_plan(sweep_folder(results_dir, name_of_sweep(study, size, grid))) for grid in study.grids_of(size))


def read_evidence(study: Study, size: str, results_dir: str) -> Evidence:
    """Return the runs of a study, the failed checks of its blocks, and notes on its criterion.

    Raises:
        StoreError: A grid has not been run.
    """
    unverified, notes, folders = {}, [], []
    for grid in study.grids_of(size):
        name = name_of_sweep(study, size, grid)
        folder = sweep_folder(results_dir, name)
        if not has_plan(folder):
            raise StoreError(
                f"study {study.name}: {results_dir} has no sweep {name}; make it with `normlab study run {study.name} "
                f"--size {size}`, which trains only the runs that are missing"
            )
        folders.append(folder)
        notes += _criterion_notes(study, size, criterion_of(read_plan(folder).notes))
    selection = select_runs([str(folder) for folder in folders], results_dir)
    results, warnings = read_results(selection.records)
    checked: set[str] = set()
    for folder in folders:
        if (folder / CHECKS_FILE).exists():
            checks = read_record(folder / CHECKS_FILE, BlockChecks)
            checked.update(checks.checked)
            unverified |= checks.failed
    for block in {block_of_run(run) for run in results} - checked:
        unverified[block] = "it has not been checked"
    missing = len(selection.records) - len(results)
    return Evidence(results, unverified, list(dict.fromkeys([*warnings, *notes])), selection, missing)


def _criterion_notes(study: Study, size: str, planned: str | None) -> list[str]:
    now = study.criterion_hash(size)
    if planned == now:
        return []
    if planned is None:
        return ["The plan of the runs names no criterion: they were not planned by this study."]
    reason = study.amendments.get(planned)
    text = f"The criterion was changed after the runs were planned ({planned}, now {now})"
    return [f"{text}: {reason}" if reason else f"{text}, without a reason in the study's amendments."]
