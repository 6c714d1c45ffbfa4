"""The sweep NAME-search: `sweep.trials` trials in each cell, a few at a time, all with one seed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from normlab.analysis.cells import BAD_OUTCOMES
from normlab.analysis.settings import SEEDS
from normlab.base.errors import ConfigError, counted
from normlab.base.options import plain_tree
from normlab.config.arms import SweepDesign
from normlab.config.compose import UserConfigs, compose_sweep
from normlab.config.schema import RunConfig
from normlab.config.searches import EXAMPLE, Range, without_seeds
from normlab.config.sweep_options import SweepOptions
from normlab.store.outcome import format_loss
from normlab.store.plans import PlannedRun, has_plan, read_plan, run_of
from normlab.store.record import RunRecord, Setting, flatten
from normlab.sweeps.plan import PlannedSweep, make_plan
from normlab.sweeps.proposals import (
    AT_ONCE,
    CellOverrides,
    Trial,
    TrialOverrides,
    import_optuna,
    propose,
    replay,
    write_journal,
)
from normlab.sweeps.stored_plan import is_completed

SEED = 1_000_000
"""The seed of every trial, and of the order of its data; the runs that judge have others (`_check_seeds`)."""
_OF_TRIALS = (f"seed={SEED}", f"data.seed={SEED}")
JOURNAL = "search.journal"
"""The trials as Optuna's journal, in the folder of the search."""


@dataclass(frozen=True, slots=True)
class SweepCommand:
    """The overrides of a sweep without its searches and without `seed=until(...)`, and with what they are composed."""

    overrides: list[str]
    design: SweepDesign
    configs: UserConfigs
    show_progress: Callable[[str], None]


class Trials:
    """The trials of a search; which of them are made is read from the folder of their sweep.

    Args:
        command: The command, whose seeds the trials do not have.
        ranges: The searched options.
        options: The options of the sweep that judges what the search finds, with its name.
        composed: The runs of the command without the searched options.
        folder: The folder of the trials.
        judging: The settings of the runs that judge, which have other seeds than the trials.

    Raises:
        ConfigError: Optuna is not installed, an option does not take the limits of its range, or a run that judges has
            the seed of the trials.
    """

    def __init__(
        self,
        command: SweepCommand,
        ranges: Sequence[Range],
        options: SweepOptions,
        composed: Sequence[tuple[Sequence[str], RunConfig]],
        folder: Path,
        judging: Sequence[Mapping[str, Setting]],
    ) -> None:
        # The first trials do not need Optuna, so without this line they would be trained before the error.
        import_optuna()
        self._command = command
        self._ranges = ranges
        self._options = options
        self._folder = folder
        self.cells = list(dict.fromkeys(cell_of(varied) for varied, _ in composed))
        self._trials: dict[CellOverrides, list[Trial]] = {cell: [] for cell in self.cells}
        """The trials whose losses are known; equally many in each cell, so that cells train in the same packs."""
        self._has_checked_plan = False
        """Whether all trials have been planned by this command."""
        trials = _check_limits(ranges, command, [config for _, config in composed])
        _check_seeds(trials, judging)

    @property
    def count(self) -> int:
        """The number of trials of each cell."""
        return self._options.trials

    def next_plan(self) -> PlannedSweep | None:
        """Return the plan with the next trials of each cell; None if the losses of all trials are known."""
        completed = completed_trials(self._folder, _stored_runs(self._folder), self.cells)
        while len(self._trials[self.cells[0]]) < self.count:
            proposals = {cell: propose(self._ranges, cell, self._trials[cell], self.count) for cell in self.cells}
            are_completed = all(completed[cell].keys() >= set(proposals[cell]) for cell in self.cells)
            is_last = len(self._trials[self.cells[0]]) + AT_ONCE >= self.count
            # The stored trials may be those of other overrides: before the last ones count, all are planned once.
            if not are_completed or (is_last and not self._has_checked_plan):
                planned = self._plan(proposals)
                self._has_checked_plan = is_last
                if not planned.is_completed():
                    return planned
                completed = completed_trials(self._folder, planned.plan.runs, self.cells)
            for cell in self.cells:
                self._trials[cell] += [completed[cell][values] for values in proposals[cell]]
            write_journal(self._folder / JOURNAL, self._ranges, self._trials)
        return None

    def best(self) -> dict[CellOverrides, Trial]:
        """Return the trial of each cell with the lowest loss."""
        best: dict[CellOverrides, Trial] = {}
        for cell, trials in self._trials.items():
            best[cell] = min(trials, key=lambda trial: trial.loss)
        return best

    def notes(self) -> list[str]:
        """Return a note on the best trial of each cell."""
        notes: list[str] = []
        for cell, trial in self.best().items():
            setting = " ".join([*cell, *trial.values])
            outcome = f", {trial.result}" if trial.result in BAD_OUTCOMES else ""
            count = len(set(self._trials[cell]))
            notes.append(f"{setting}: the best of {count} trials (loss {format_loss(trial.loss)}{outcome})")
        return notes

    def find(self, values_of: Mapping[CellOverrides, Sequence[TrialOverrides]]) -> bool:
        """Return whether the trials find these values in these cells, as far as their sweep shows."""
        # The sweep of the trials was deleted, so the same trials are made again.
        if not has_plan(self._folder):
            return True
        planned = planned_values(self._folder, self.cells)
        completed = completed_trials(self._folder, _stored_runs(self._folder), self.cells)
        for cell, values in values_of.items():
            trials, missing = replay(self._ranges, cell, completed[cell], self.count)
            # A trial that is planned may have failed, and is then made again.
            if not set(missing) <= set(planned[cell]):
                return False
            if not missing and min(trials, key=lambda trial: trial.loss).values not in values:
                return False
        return True

    def _plan(self, proposals: Mapping[CellOverrides, list[TrialOverrides]]) -> PlannedSweep:
        """Return the plan of all trials so far and these ones."""
        planned_before = planned_values(self._folder, self.cells)
        values_of: dict[CellOverrides, list[TrialOverrides]] = {}
        for cell in self.cells:
            earlier = [trial.values for trial in self._trials[cell]]
            values_of[cell] = list(dict.fromkeys([*earlier, *proposals[cell], *planned_before[cell]]))
        command, is_new = self._command, not has_plan(self._folder)
        overrides = [*without_seeds(command.overrides), *_OF_TRIALS]
        _, composed = compose_sweep(overrides, command.configs, partial(values_of_cell, values_of))
        options = replace(self._options, name=self._folder.name)
        design = replace(command.design, baseline="")
        planned = make_plan(options, composed, command.show_progress, extend=not is_new, design=design)
        if is_new:
            notes = [*planned.plan.notes, *self._notes_of_plan()]
            planned = replace(planned, plan=replace(planned.plan, notes=notes))
        return planned

    def _notes_of_plan(self) -> list[str]:
        trials, cells = counted(self.count, "trial"), counted(len(self.cells), "cell")
        notes = [f"{trials} for each of {cells}, {AT_ONCE} at once; then sweep {self._options.name}"]
        for limits in self._ranges:
            if not limits.is_log:
                notes.append(
                    f"{limits.option} is searched on a linear scale, because its lower limit {limits.low:g} has no "
                    "logarithm"
                )
        return notes


def cell_of(varied: Sequence[str]) -> CellOverrides:
    return tuple(without_seeds(varied))


def values_of_cell(values: Mapping[CellOverrides, list[TrialOverrides]], varied: list[str]) -> list[TrialOverrides]:
    """Return the values of the searched options with which a run of the grid is made; of a cell without any, none."""
    return values.get(cell_of(varied), [])


def planned_values(folder: Path, cells: Sequence[CellOverrides]) -> dict[CellOverrides, list[TrialOverrides]]:
    """Return the values of the searched options with which a sweep has planned runs of each cell."""
    values_of: dict[CellOverrides, list[TrialOverrides]] = {cell: [] for cell in cells}
    for run in _stored_runs(folder):
        # The varied overrides of a run start with those of its cell, and end with the values of the search.
        overrides = cell_of(run.overrides)
        for cell in cells:
            values = overrides[len(cell) :]
            if overrides[: len(cell)] == cell and values not in values_of[cell]:
                values_of[cell].append(values)
    return values_of


def completed_trials(
    folder: Path, runs: Sequence[PlannedRun], cells: Sequence[CellOverrides]
) -> dict[CellOverrides, dict[TrialOverrides, Trial]]:
    """Return the trials of each cell that have ended, by their values; `runs` are those of the sweep in `folder`."""
    trials: dict[CellOverrides, dict[TrialOverrides, Trial]] = {cell: {} for cell in cells}
    for planned in runs:
        run = run_of(folder, planned)
        if not is_completed(run):
            continue
        record = RunRecord.load(run)
        # The loss of a run that diverged is infinite.
        bounded_loss = min(record.loss, record.corpus.baselines.uniform)
        for cell in cells:
            if tuple(planned.overrides[: len(cell)]) == cell:
                values = tuple(planned.overrides[len(cell) :])
                trials[cell][values] = Trial(values, record.result, record.loss, bounded_loss)
    return trials


def _stored_runs(folder: Path) -> Sequence[PlannedRun]:
    """Return the runs of a sweep's plan; none if it has no plan."""
    if not has_plan(folder):
        return ()
    return read_plan(folder).runs


def _check_limits(ranges: Sequence[Range], command: SweepCommand, composed: Sequence[RunConfig]) -> list[RunConfig]:
    """Check that the option of each range takes both limits, and return the configs of trials at one of them.

    Args:
        composed: The config of each run without the searched options.

    Raises:
        ConfigError: It does not take one of them: `optim.lr=search(0,1e-1)`; or it does not exist, or takes no number.
    """
    overrides = [*without_seeds(command.overrides), *_OF_TRIALS]
    trials: list[RunConfig] = []
    for limits in ranges:
        takes_numbers = all(_takes_numbers(limits.option, config) for config in composed)
        for limit in (limits.low, limits.high):
            try:
                _, composed_trials = compose_sweep([*overrides, limits.text(limit)], command.configs)
            except ConfigError as error:
                advice = f"; choose another limit, as in {EXAMPLE}" if takes_numbers else ""
                raise ConfigError(f"{limits.option}=search({limits.low:g},{limits.high:g}): {error}{advice}") from error
            trials = [config for _, config in composed_trials]
    return trials


def _takes_numbers(option: str, config: RunConfig) -> bool:
    """Whether a config has an option, and its value is a number or null."""
    values = flatten(plain_tree(config))
    return option in values and (values[option] is None or type(values[option]) in (int, float))


def _check_seeds(trials: Sequence[RunConfig], judging: Sequence[Mapping[str, Setting]]) -> None:
    """Check that no trial has a seed of the runs that judge: the best trial would be the best on this very seed.

    Raises:
        ConfigError: One has. An arm, or a preset of the user, may set the seeds of both.
    """
    for option in SEEDS:
        judged = {settings.get(option) for settings in judging}
        for trial in trials:
            seed = flatten(plain_tree(trial))[option]
            if seed in judged:
                raise ConfigError(
                    f"{option}={seed}: is a seed of the trials of the search, so no run with it can judge what the "
                    "search finds; choose other seeds, or leave the search out"
                )
