"""Plan, train and read the grids of a study. Its sweeps are ordinary ones: they resume, and pack, and run on Slurm."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normlab.analysis.arms import CHOOSING_SEEDS, StudyRuns
from normlab.analysis.comparability import intact_runs
from normlab.base.errors import ConfigError, StoreError
from normlab.config.schema import canonical_hash
from normlab.store.format import CHECKS_FILE
from normlab.store.plans import Plan, has_plan, read_plan, study_note, study_of, sweep_folder
from normlab.store.query import Selection, select_runs
from normlab.store.reading import HOW_TO_FIX, read_record
from normlab.store.record import Machine, RunRecord
from normlab.store.runs import RunFolder
from normlab.store.status import RecordedPack
from normlab.studies.base import LOOKS, SETTINGS, Claim, Grid, Study

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
REPLICATION = 1000
"""The first seeds of attempts are multiples of this number, which is above the number of seeds of an attempt."""


@dataclass(frozen=True, slots=True)
class PlannedGrid:
    options: SweepOptions
    composed: Sequence[Composed]
    sweep: PlannedSweep


@dataclass(frozen=True, slots=True)
class Attempt:
    """One test of a study: on one setting of model and corpus, with its own seeds."""

    study: Study
    results_dir: str
    setting: str = "small"
    first_seed: int = 0
    """The first of the choosing seeds; the judging seeds follow."""

    @property
    def blocks(self) -> list[range]:
        """The seeds of each block: the choosing seeds, then those of each look."""
        ends = [0, CHOOSING_SEEDS, *(CHOOSING_SEEDS + n for n in LOOKS)]
        return [range(self.first_seed + a, self.first_seed + b) for a, b in pairwise(ends)]

    def sweep_folder(self, grid: Grid, block: range) -> Path:
        name = f"study-{self.study.name}-{grid.name}-{self.setting}-{block.start}"
        return sweep_folder(self.results_dir, name)

    def folders(self) -> list[Path]:
        """Return the folders of the sweeps that have been planned."""
        every = [self.sweep_folder(grid, block) for block in self.blocks for grid in self.study.grids]
        return [folder for folder in every if has_plan(folder)]

    def check_plans(self) -> None:
        """Check that no plan is lost: without its runs, a verdict would be of other seeds.

        Raises:
            StoreError: A sweep has no plan, and its folder is there, or the same grid has one for later seeds.
        """
        for grid in self.study.grids:
            folders = [self.sweep_folder(grid, block) for block in self.blocks]
            last = max((index for index, folder in enumerate(folders) if os.path.isdir(folder)), default=-1)
            for folder in folders[: last + 1]:
                if not has_plan(folder):
                    raise StoreError(
                        f"{folder}: has no plan, and its runs are part of the study; `normlab study run "
                        f"{self.study.arguments}` makes it again and uses the runs that are there"
                    )

    def overrides_of(self, grid: Grid, block: range, more: Sequence[str] = ()) -> list[str]:
        """Return the overrides of a grid's sweep for the seeds of a block."""
        from normlab.config.compose import quote

        # The seeds vary slowest, so that the arms of a seed are trained one after the other.
        seeds = f"seed=range({block.start},{block.stop})"
        name, folder = self.sweep_folder(grid, block).name, quote(self.results_dir)
        setting = shlex.split(SETTINGS[self.setting])
        return [seeds, *grid.arguments, *setting, *more, f"sweep.name={name}", f"results_dir={folder}"]

    def compose(
        self, block: range, overrides: Sequence[str] = ()
    ) -> Iterator[tuple[Grid, SweepOptions, Sequence[Composed]]]:
        """Yield each grid with the options of its sweep and the config of each run, for the seeds of a block.

        Raises:
            ConfigError: An override is invalid.
        """
        from normlab.config.compose import compose_sweep

        for grid in self.study.grids:
            yield grid, *compose_sweep(self.overrides_of(grid, block, overrides))

    def plan(
        self, block: range, claims: Sequence[Claim], results: Sequence[RunRecord], overrides: Sequence[str] = ()
    ) -> Iterator[PlannedGrid]:
        """Yield the plan of each grid for a block of seeds: only the runs that the estimates of these claims need.

        The choosing seeds have every run. The notes of a plan hold the hash of the criterion.

        Raises:
            ConfigError, DataError, StoreError: As `normlab sweep`.
        """
        from normlab.config.arms import design_of
        from normlab.sweeps.plan import make_plan

        note = study_note(self.study.name, self.study.criterion_hash())
        grids = list(self.compose(block, overrides))
        planned = [_planned(config) for _, _, composed in grids for _, config in composed]
        needed = None if block == self.blocks[0] else set(_needed(claims, planned, results))
        for grid, options, composed in grids:
            kept = [each for each in composed if needed is None or each[1].config_hash in needed]
            if kept:
                sweep = make_plan(options, kept, design=design_of(self.overrides_of(grid, block, overrides)))
                notes = sweep.plan.notes
                if criterion_of(notes) is None:
                    sweep = replace(sweep, plan=replace(sweep.plan, notes=[*notes, note]))
                yield PlannedGrid(options, kept, sweep)


def _needed(claims: Sequence[Claim], planned: Sequence[RunRecord], results: Sequence[RunRecord]) -> Iterator[str]:
    """Yield the hash of each planned config that an estimate uses: at the chosen learning rates, or at all of them."""
    recorded = StudyRuns(results)
    for claim in claims:
        used = StudyRuns(planned)
        claim.estimator.estimate(used)
        for where, arm in used.used.items():
            lrs = set(arm.learning_rates)
            if len(lrs) > 1 and not claim.estimator.every_rate:
                lrs = set(recorded.arm_of_grid(where).chosen_lrs)
            yield from (run.run_id for run in arm.runs if run.lr in lrs)


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


def check_arms(study: Study, configs: Sequence[RunConfig]) -> None:
    """Check, before any run of a study, that its grids have the arms of all claims.

    Raises:
        ConfigError: No run meets the conditions of an arm, they leave an option free, or the arms of a claim differ in
            compute or data by an option that no condition names; the message names the claim.
    """
    by_identity = {canonical_hash(config.identity()): config for config in configs}
    planned = [_planned(config) for config in by_identity.values()]
    for claim in (*study.claims, *study.controls):
        runs = StudyRuns(planned)
        try:
            claim.estimator.estimate(runs)
            reason = runs.reason_not_comparable(claim.intended)
        except ConfigError as error:
            raise ConfigError(f"study {study.name}: claim {claim.name}: {error}") from None
        if reason:
            raise ConfigError(
                f"study {study.name}: claim {claim.name}: {reason}; give all arms one value, or name the option in "
                "their conditions or in the claim's `intended`"
            )


def _planned(config: RunConfig) -> RunRecord:
    machine = Machine(
        device=None, device_name=None, devices=config.devices, precision=config.precision, compile=config.compile,
        graph=config.train.graph, deterministic=config.deterministic is True, init=config.init_rule, decayed=None,
        threads=None, instructions=None, attention=None,
    )  # fmt: skip
    return RunRecord.planned(RunFolder(config.config_hash), config, machine, RecordedPack())


def criterion_of(notes: Sequence[str]) -> str | None:
    found = study_of(notes)
    return None if found is None else found[1]


@dataclass(frozen=True, slots=True)
class BlockChecks:
    sweep: str
    """The name of the sweep in whose folder they are; empty before they are written."""
    checked: list[str]
    failed: dict[str, str]
    """The first failed check of a block, by its name."""


def verify_blocks(composed: Sequence[Composed]) -> BlockChecks:
    """Check the blocks of some runs by `normlab verify`."""
    from normlab.verify.selection import checks_of_run

    blocks = {block_of(config, config.init_rule): config for _, config in composed}
    wrong = {block: [str(each) for each in checks_of_run(blocks[block]) if not each.passed] for block in sorted(blocks)}
    return BlockChecks("", list(wrong), {block: each[0] for block, each in wrong.items() if each})


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
    found: dict[tuple[str, int], Attempt] = {}
    names = "|".join(re.escape(grid.name) for grid in study.grids)
    for folder in sorted(sweep_folder(results_dir, "").glob(f"study-{study.name}-*")):
        match = re.fullmatch(rf"study-{study.name}-(?:{names})-({'|'.join(SETTINGS)})-(\d+)", folder.name)
        if match:  # also without its plan, which `check_plans` names
            first = int(match[2]) - int(match[2]) % REPLICATION
            found[match[1], first] = Attempt(study, results_dir, match[1], first)
    return [found[key] for key in sorted(found, key=lambda key: (key[1], list(SETTINGS).index(key[0])))]


def read_evidence(attempt: Attempt) -> Evidence:
    """Return what the records of an attempt hold.

    Raises:
        StoreError: No grid has been run.
    """
    study, folders = attempt.study, attempt.folders()
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
        if problem := run.folder.metrics_problem() or run.folder.statistics_problem():
            notes.append(f"run {run.run_id} is left out: {problem}")
            damaged[run.run_id] = problem
        else:
            results.append(run)
    unverified: dict[str, str] = {}
    for folder in folders:
        plan = read_plan(folder)
        notes += _criterion_notes(study, plan.notes)
        unverified |= _unverified(folder, [run for run in results if run.run_id in ids_of(plan)])
    missing = len(selection.records) - len(results)
    return Evidence(results, unverified, list(dict.fromkeys(notes)), selection, missing, damaged)


def check_records(attempt: Attempt, evidence: Evidence, block: range) -> None:
    """Check that the records of the seeds up to those of a block are intact, before more seeds are trained.

    Raises:
        StoreError: A run cannot be read, or its numbers are not those that were written.
    """
    trained: set[str] = set()
    for earlier in attempt.blocks[: attempt.blocks.index(block) + 1]:
        for grid in attempt.study.grids:
            folder = attempt.sweep_folder(grid, earlier)
            if has_plan(folder):
                trained |= ids_of(read_plan(folder))
    for run_id, problem in evidence.damaged.items():
        if run_id in trained:
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
    if checks.sweep != folder.name:
        raise StoreError(f"{path}: is of sweep {checks.sweep}, not of {folder.name}; {HOW_TO_FIX[CHECKS_FILE]}")
    return dict.fromkeys(blocks - set(checks.checked), "it has not been checked") | checks.failed


def _criterion_notes(study: Study, notes: Sequence[str]) -> list[str]:
    planned, now = criterion_of(notes), study.criterion_hash()
    if planned == now:
        return []
    if planned is None:
        return ["The plan of the runs names no criterion: they were not planned by this study."]
    reason = study.amendments.get(planned)
    text = f"The criterion was changed after the runs were planned ({planned}, now {now})"
    return [f"{text}: {reason}" if reason else f"{text}, without a reason in the study's amendments."]
