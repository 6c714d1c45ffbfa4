"""Plan the grids of a study. Its sweeps are ordinary ones: they resume, and pack, and run on Slurm."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from normlab.analysis.arms import CHOOSING_SEEDS, StudyRuns
from normlab.base.errors import ConfigError, StoreError
from normlab.base.parsing import canonical_hash
from normlab.config.schema import RunConfig
from normlab.store.plans import has_plan, read_plan, study_note, study_of, sweep_folder
from normlab.store.record import RunRecord
from normlab.store.run_json import Machine
from normlab.store.runs import RunFolder
from normlab.store.status import RecordedPack
from normlab.studies.base import LOOKS, SETTINGS, Claim, Grid, Study

if TYPE_CHECKING:
    from normlab.config.sweep_options import SweepOptions
    from normlab.sweeps.plan import PlannedSweep

ComposedRun = tuple[list[str], RunConfig]
"""The overrides of a run, and its config."""

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
    composed: Sequence[ComposedRun]
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
        ends = [0, CHOOSING_SEEDS]
        ends += [CHOOSING_SEEDS + n for n in LOOKS]
        return [range(self.first_seed + start, self.first_seed + end) for start, end in pairwise(ends)]

    def sweep_folder(self, grid: Grid, block: range) -> Path:
        name = f"study-{self.study.name}-{grid.name}-{self.setting}-{block.start}"
        return sweep_folder(self.results_dir, name)

    def folders(self, last: range | None = None) -> list[Path]:
        """Return the folders of the sweeps that have been planned; with `last`, of the blocks up to it."""
        blocks = self.blocks
        if last is not None:
            blocks = blocks[: blocks.index(last) + 1]
        planned_folders: list[Path] = []
        for block in blocks:
            for grid in self.study.grids:
                folder = self.sweep_folder(grid, block)
                if has_plan(folder):
                    planned_folders.append(folder)
        return planned_folders

    def check_plans(self) -> None:
        """Check that no plan is lost: without its runs, a verdict would be of other seeds.

        Raises:
            StoreError: A sweep has no plan, and its folder is there, or the same grid has one for later seeds.
        """
        for grid in self.study.grids:
            folders = [self.sweep_folder(grid, block) for block in self.blocks]
            # Blocks are planned in order, so that each one before the last folder had a plan.
            while folders and not os.path.isdir(folders[-1]):
                folders.pop()
            for folder in folders:
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
    ) -> Iterator[tuple[Grid, SweepOptions, Sequence[ComposedRun]]]:
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

        The choosing seeds have every run. A stored plan keeps its runs, and gets those that are needed besides: the
        rule by which claims stay open may have changed since. The notes of a plan hold the hash of the criterion.

        Raises:
            ConfigError, DataError, StoreError: As `normlab sweep`.
        """
        from normlab.config.arms import design_of
        from normlab.config.recorded import load_config
        from normlab.sweeps.plan import make_plan

        note = study_note(self.study.name, self.study.criterion_hash())
        grids = list(self.compose(block, overrides))
        planned_runs: list[RunRecord] = []
        for _, _, composed in grids:
            planned_runs += [_planned(config) for _, config in composed]
        needed_ids = {run.run_id for run in planned_runs}
        if block != self.blocks[0]:
            needed_ids = set(_needed(claims, planned_runs, results))
        for grid, options, composed in grids:
            folder = self.sweep_folder(grid, block)
            is_stored = has_plan(folder)
            ids = needed_ids
            if is_stored:
                ids = ids | {load_config(run.config).config_hash for run in read_plan(folder).runs}
            needed_runs = [(run_overrides, config) for run_overrides, config in composed if config.config_hash in ids]
            if needed_runs:
                design = design_of(self.overrides_of(grid, block, overrides))
                sweep = make_plan(options, needed_runs, extend=is_stored, design=design)
                notes = sweep.plan.notes
                # A sweep that was planned before keeps the criterion of that time, so that a change is found.
                if criterion_of(notes) is None:
                    sweep = replace(sweep, plan=replace(sweep.plan, notes=[*notes, note]))
                yield PlannedGrid(options, needed_runs, sweep)


def _needed(claims: Sequence[Claim], planned_runs: Sequence[RunRecord], results: Sequence[RunRecord]) -> Iterator[str]:
    """Yield the hash of each planned config that an estimate uses: at the chosen learning rates, or at all of them."""
    recorded = StudyRuns(results)
    for claim in claims:
        runs = StudyRuns(planned_runs)
        # Planned runs have no loss, but the estimator takes the same arms from them, which are then in `used`.
        claim.estimator.estimate(runs)
        for where, arm in runs.used.items():
            if where in runs.chosen_only:
                continue
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
    # Grids may share runs, which are trained once.
    by_identity = {canonical_hash(config.identity()): config for config in configs}
    planned_runs = [_planned(config) for config in by_identity.values()]
    for claim in (*study.claims, *study.controls):
        runs = StudyRuns(planned_runs)
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
    """Return the hash of the criterion in the notes of a plan, or None if no study planned it."""
    study_and_criterion = study_of(notes)
    return None if study_and_criterion is None else study_and_criterion[1]
