"""The sweeps of one command: a plain sweep, one that grows, or a search and the sweep that judges what it has found.

`optim.lr=search(1e-4,1e-1)` has two sweeps. NAME-search has the trials: `sweep.trials` for each cell of the grid, a few
at a time, all with one seed. NAME has the runs with the seeds of the command, each cell with the values of its best
trial. Optuna chooses the values of a trial from the losses of the trials before it alone, so that a search that was
killed makes the same trials.

`seed=until(placement=pre,max=24)` adds seeds to the sweep until each difference from this baseline is decided.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from normlab.analysis.conditions import select_where
from normlab.analysis.factor_tests.run import run_test
from normlab.analysis.intervals import LEVEL
from normlab.analysis.table import summarize_by
from normlab.base.errors import ConfigError, counted
from normlab.base.options import plain_tree
from normlab.base.parsing import canonical_hash
from normlab.config.arms import design_of
from normlab.config.compose import PACKAGED, More, UserConfigs, compose_sweep, no_more
from normlab.config.schema import RunConfig
from normlab.config.searches import EXAMPLE, Range, Until, read_searches, read_until
from normlab.config.sweep_options import SweepOptions
from normlab.store.plans import SEARCH, Plan, PlannedRun, has_plan, read_plan, sweep_folder
from normlab.store.record import RunEntry, flatten
from normlab.store.runs import RunFolder
from normlab.sweeps.plan import PlannedSweep, check_configs, make_plan, no_sweep_to_extend
from normlab.sweeps.proposals import CellOverrides, TrialOverrides
from normlab.sweeps.stored_plan import OTHER_NAME
from normlab.sweeps.trials import SweepCommand, Trials, planned_values, values_of_cell

BLOCK = 4
"""Seeds that are added at once with `seed=until(...)`."""

ComposedRuns = Sequence[tuple[list[str], RunConfig]]


class Search:
    """The sweeps of a command, one after the other: `while planned := search.next_plan(): train(planned)`.

    Which trials and seeds are trained is read from the folders of the sweeps, so the command of a search that was
    killed makes the same plans. Nothing is written.

    Args:
        overrides: The overrides of `normlab sweep`.
        configs: The user's own configs.
        show_progress: Receives a line on the progress of the planning.
        extend: Whether runs may be added to a sweep that has been trained.

    Raises:
        ConfigError, DataError, StoreError: As `make_plan`; or a search is malformed, or another search has judged the
            sweep of this name.
    """

    def __init__(
        self,
        overrides: Sequence[str],
        configs: UserConfigs = PACKAGED,
        show_progress: Callable[[str], None] = lambda _: None,
        *,
        extend: bool = False,
    ) -> None:
        ranges, without_ranges = read_searches(overrides)
        self._until, texts = read_until(without_ranges)
        design = replace(design_of(texts), searched=[limits.option for limits in ranges])
        if self._until is not None:
            design = replace(design, baseline=self._until.against)
        self._command = SweepCommand(texts, design, configs, show_progress)
        self._extend = extend
        """Whether runs may be added to the stored plan of the sweep that judges."""
        self._trials: Trials | None = None
        """None if no option is searched, or all trials are known."""
        self._more, self._notes = no_more, list[str]()
        """The values of each cell in the sweep that judges, and the notes on them."""
        self._seeds = 0
        """With `seed=until(...)`, the number of seeds."""
        self._has_judged = False
        """Whether the sweep that judges has been returned."""
        if not ranges:
            _check_no_trials(texts)
            if self._until is None:
                return
        options, composed = compose_sweep(texts, configs)
        check_configs([config for _, config in composed])
        if self._until is not None:
            _check_baseline(self._until, composed)
        if ranges:
            options.name = _name_of_search(ranges, texts, options)
        if options.name is None:
            raise ConfigError("seed=until(...): the sweep grows, so it needs a name; add sweep.name=...")
        folder = sweep_folder(composed[0][1].results_dir, options.name)
        stored = read_plan(folder) if has_plan(folder) else None
        if self._until is not None:
            self._seeds = _seeds_of(stored, self._until)
            self._extend = stored is not None
        if ranges:
            self._start_trials(ranges, options, composed, folder, stored, extend=extend)

    def next_plan(self) -> PlannedSweep | None:
        """Return the plan of the next sweep to train; None after the last one.

        Call it again only after the sweep is trained. The sweep that judges is returned at least once, so that the
        command prints it, even if nothing of it is left to train.

        Raises:
            ConfigError, DataError, StoreError: As `make_plan`.
        """
        if self._trials is not None:
            planned = self._trials.next_plan()
            if planned is not None:
                return planned
            # All trials are known: the sweep that judges has each cell at its best values.
            best = {cell: [trial.values] for cell, trial in self._trials.best().items()}
            self._more, self._notes = partial(values_of_cell, best), self._trials.notes()
            self._trials = None
        if self._until is not None:
            return self._next_seeds(self._until)
        if self._has_judged:
            return None
        self._has_judged = True
        return self._plan_judging(self._more)

    def _next_seeds(self, until: Until) -> PlannedSweep | None:
        """Return the sweep with the seeds so far or, once they are trained, with more of them until all is decided."""
        while True:
            planned = self._plan_judging(self._more)
            if not planned.is_completed():
                break
            if self._seeds >= until.most or _is_decided(planned.folder, until):
                if self._has_judged:
                    return None
                break
            # The next plan adds runs to the one that is trained now.
            self._seeds = min(self._seeds + BLOCK, until.most)
            self._extend = True
        self._has_judged = True
        return planned

    def _plan_judging(self, more: More) -> PlannedSweep:
        """Return the plan of the sweep with the seeds of the command; its cells have the values of `more`."""
        command, overrides = self._command, list(self._command.overrides)
        if self._until is not None:
            overrides.append(f"seed=range({self._seeds})")
        options, composed = compose_sweep(overrides, command.configs, more)
        planned = make_plan(options, composed, command.show_progress, extend=self._extend, design=command.design)
        if has_plan(planned.folder):
            return planned
        return replace(planned, plan=replace(planned.plan, notes=[*planned.plan.notes, *self._notes]))

    def _start_trials(
        self,
        ranges: Sequence[Range],
        options: SweepOptions,
        composed: ComposedRuns,
        folder: Path,
        stored: Plan | None,
        *,
        extend: bool,
    ) -> None:
        """Check everything that could stop the search after some of its trials are trained.

        Args:
            ranges: The searched options.
            options: The options of the sweep that judges, with its name.
            composed: The runs of the command without the searched options.
            folder: The folder of the sweep that judges.
            stored: Its plan, if an earlier command has made one.
            extend: Whether the command has `--extend`.

        Raises:
            ConfigError: The sweep of this name is not that of this search, or there is none to extend.
        """
        folder_of_trials = folder.with_name(f"{folder.name}{SEARCH}")
        judging = [flatten(plain_tree(config)) for _, config in composed]
        if stored is not None:
            # Its seeds may be others than those of this command.
            judging += [flatten(run.config) for run in stored.runs]
        elif extend and not has_plan(folder_of_trials):
            raise no_sweep_to_extend(folder.name)
        # Without a name in the overrides, that of the sweep would depend on the values that the search finds.
        texts = [text for text in self._command.overrides if not text.startswith("sweep.name=")]
        self._command = replace(self._command, overrides=[*texts, f"sweep.name={folder.name}"])
        self._extend = self._extend and stored is not None
        self._trials = Trials(self._command, ranges, options, composed, folder_of_trials, judging)
        if stored is not None:
            self._check_judged(self._trials, stored, folder, extend=extend)

    def _check_judged(self, trials: Trials, stored: Plan, folder: Path, *, extend: bool) -> None:
        """Check, before any trial is trained, that the sweep which an earlier command has judged can be continued.

        Its runs stay in its plan, so a cell whose best trial becomes another one would have two values.

        Raises:
            ConfigError: It is not of this search, cells are added without `--extend`, runs are left out, or the search
                finds other values than those that were judged.
        """
        searched = self._command.design.searched
        existing = f"sweep.name={stored.name}: the existing sweep of this name"
        if set(stored.design.searched) != set(searched):
            raise ConfigError(f"{existing} is not of a search of {', '.join(searched)}; {OTHER_NAME}")
        judged: dict[CellOverrides, list[TrialOverrides]] = {}
        for cell, values in planned_values(folder, trials.cells).items():
            if values:
                judged[cell] = values
        if not judged:
            raise ConfigError(f"{existing} has none of these cells; vary the options that it varies, or {OTHER_NAME}")
        if len(judged) < len(trials.cells) and not extend:
            cells = counted(len(trials.cells), "cell")
            raise ConfigError(f"{existing} has {len(judged)} of these {cells}; add --extend, or {OTHER_NAME}")
        if not trials.find(judged):
            raise ConfigError(
                f"sweep.trials={trials.count}: sweep {stored.name} has been judged after other trials; choose another "
                "sweep.name: runs that are completed are not trained again"
            )
        # Whatever else cannot be continued, as other seeds or another `sweep.pack`, is an error of this plan.
        self._plan_judging(partial(values_of_cell, judged))


def reason_search_stops(plan: Plan, retry: str) -> str:
    """Return why a search stops after a trial has failed, and how to `retry` it; empty if the sweep is not a search."""
    if not plan.name.endswith(SEARCH):
        return ""
    return (
        f"sweep {plan.name.removesuffix(SEARCH)} is not trained, because the search needs the losses of all trials; "
        f"train the failed ones again: {retry}"
    )


def _check_no_trials(overrides: Sequence[str]) -> None:
    for text in overrides:
        if text.startswith("sweep.trials="):
            raise ConfigError(f"{text}: nothing is searched; search an option, as in {EXAMPLE}")


def _name_of_search(ranges: Sequence[Range], overrides: Sequence[str], options: SweepOptions) -> str:
    """Return the name of the sweep that judges: that of the command, or one that its overrides decide.

    Raises:
        ConfigError: It is the name of a search.
    """
    if options.name is None:
        settings = [text for text in overrides if not text.startswith("sweep.")]
        return f"search-{canonical_hash(sorted([*map(repr, ranges), *settings]))[:8]}"
    if options.name.endswith(SEARCH):
        raise ConfigError(f"sweep.name={options.name}: is the name of a search; leave {SEARCH} out")
    return options.name


def _check_baseline(until: Until, composed: ComposedRuns) -> None:
    """Check that some runs, and not all, are those of the baseline.

    Raises:
        ConfigError: None are, or all.
    """
    runs: list[RunEntry] = []
    for varied, config in composed:
        run = PlannedRun("", varied, config.recorded())
        runs.append(RunEntry(RunFolder(Path()), "", options=flatten(run.config), arm=run.arm))
    if len(select_where(runs, [until.against], "seed=until")) == len(runs):
        raise ConfigError(f"seed=until({until.against},...): every run has it; name a value of an option that you vary")


def _seeds_of(stored: Plan | None, until: Until) -> int:
    """Return the number of seeds of a sweep that grows: those of its plan, or the first ones."""
    if stored is None or not stored.runs:
        return min(BLOCK, until.most)
    return max(run.config["seed"] for run in stored.runs) + 1


def _is_decided(folder: Path, until: Until) -> bool:
    """Whether the sign of every difference from the baseline is known, by intervals that hold at every look."""
    table = summarize_by(folder)
    rows = run_test("anytime", table.cells, table.factors, against=until.against)
    return all(row["p_holm"] is not None and row["p_holm"] < 1 - LEVEL for row in rows)
