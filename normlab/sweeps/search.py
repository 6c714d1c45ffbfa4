"""The sweeps of one command: a plain sweep, one that grows, or a search and the sweep that judges what it has found.

`optim.lr=search(1e-4,1e-1)` has two sweeps. NAME-search has the trials: `sweep.trials` for each cell of the grid, a few
at a time, all with one seed. NAME has the runs with the seeds of the command, each cell with the values of its best
trial. Optuna chooses the values of a trial from the losses of the trials before it alone, so that a search that was
killed makes the same trials.

`seed=until(placement=pre,max=24)` adds seeds to the sweep until each difference from this baseline is decided.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from normlab.analysis.cells import BAD_OUTCOMES
from normlab.analysis.factor_tests import run_test
from normlab.analysis.intervals import LEVEL
from normlab.analysis.settings import SEEDS, select_where
from normlab.analysis.table import summarize_by
from normlab.base.errors import ConfigError, counted
from normlab.base.options import plain_tree
from normlab.config.arms import SweepDesign, design_of
from normlab.config.compose import PACKAGED, More, UserConfigs, compose_sweep, no_more
from normlab.config.schema import RunConfig, canonical_hash
from normlab.config.searches import EXAMPLE, Range, Until, read_searches, read_until, without_seeds
from normlab.config.sweep_options import SweepOptions
from normlab.store.files import write_atomic
from normlab.store.outcome import format_loss
from normlab.store.plans import SEARCH, Plan, PlannedRun, has_plan, read_plan, run_of, sweep_folder
from normlab.store.record import RunEntry, RunRecord, Setting, flatten
from normlab.store.runs import RunFolder
from normlab.sweeps.plan import PlannedSweep, make_plan
from normlab.sweeps.stored_plan import all_completed, is_completed

AT_ONCE = 4
"""Trials of a cell that are made at once. The first ones, before any loss is known, are spread evenly."""
BLOCK = 4
"""Seeds that are added at once with `seed=until(...)`."""
SEED = 1_000_000
"""The seed of every trial, and of the order of its data; the runs that judge have others (`_check_seeds`)."""
_OF_TRIALS = (f"seed={SEED}", f"data.seed={SEED}")
JOURNAL = "search.journal"
"""The trials as Optuna's journal, in the folder of the search."""

Cell = tuple[str, ...]
"""The varied overrides of a cell, without the seed."""
Values = tuple[str, ...]
"""The searched options of a trial, as overrides."""


class Trial(NamedTuple):
    values: Values
    result: str
    loss: float
    """Infinite if it diverged."""
    bounded_loss: float
    """The loss, at most that of a uniform guess, ln V: Optuna takes no infinite one."""


def planned_sweeps(
    overrides: Sequence[str],
    configs: UserConfigs = PACKAGED,
    show_progress: Callable[[str], None] = lambda _: None,
    *,
    extend: bool = False,
) -> Iterator[tuple[SweepOptions, PlannedSweep]]:
    """Yield each sweep of a command with its options; the caller trains it before it asks for the next one.

    Raises:
        ConfigError, DataError, StoreError: As `make_plan`; or a search is malformed.
    """
    ranges, rest = read_searches(overrides)
    until, rest = read_until(rest)
    design = replace(
        design_of(rest), searched=[each.option for each in ranges], baseline="" if until is None else until.against
    )
    if not ranges:
        if given := [text for text in rest if text.startswith("sweep.trials=")]:
            raise ConfigError(f"{given[0]}: nothing is searched; search an option, as in {EXAMPLE}")
        yield from _judging(rest, configs, no_more, until, show_progress, design, extend=extend)
        return
    options, composed = compose_sweep(rest, configs)
    _check_baseline(until, composed)
    judging = [flatten(plain_tree(config)) for _, config in composed]
    _check_limits(ranges, rest, configs, [config for _, config in composed])
    if options.name is not None and options.name.endswith(SEARCH):
        raise ConfigError(f"sweep.name={options.name}: is the name of a search; leave {SEARCH} out")
    cells = list(dict.fromkeys(_cell_of(varied) for varied, _ in composed))
    texts = [*map(repr, ranges), *(text for text in rest if not text.startswith("sweep."))]
    name = options.name or f"search-{canonical_hash(sorted(texts))[:8]}"
    folder = sweep_folder(composed[0][1].results_dir, f"{name}{SEARCH}")
    if has_plan(folder.with_name(name)):  # an earlier command may have judged more seeds
        judging += [flatten(run.config) for run in read_plan(folder.with_name(name)).runs]
    trials: dict[Cell, list[Trial]] = {cell: [] for cell in cells}
    results = _results(folder, cells)
    for first in range(0, options.trials, AT_ONCE):
        count = min(AT_ONCE, options.trials - first)
        proposals = {
            cell: [*(each.values for each in trials[cell]), *_ask(ranges, cell, trials[cell], count)] for cell in cells
        }
        is_new = not has_plan(folder)
        # In the last round every run is planned, so that all trials are those of these overrides.
        is_last = first + count == options.trials
        if is_last or any(values not in results[cell] for cell in cells for values in proposals[cell]):
            planned_before = _planned(folder, cells)
            runs = {cell: list(dict.fromkeys([*proposals[cell], *planned_before[cell]])) for cell in cells}
            _, composed = compose_sweep([*without_seeds(rest), *_OF_TRIALS], configs, partial(_of_cell, runs))
            _check_seeds([config for _, config in composed], judging)
            search = replace(options, name=folder.name)
            trials_design = replace(design, baseline="")
            planned = make_plan(search, composed, show_progress, extend=not is_new, design=trials_design)
            if planned.extended and has_plan(folder.with_name(name)) and not extend:
                raise ConfigError(
                    f"sweep.trials={options.trials}: sweep {name} has been judged after other trials; choose another "
                    "sweep.name: runs that are completed are not trained again"
                )
            if is_new:
                of_each, count = counted(options.trials, "trial"), counted(len(cells), "cell")
                note = f"{of_each} for each of {count}, {AT_ONCE} at once; then sweep {name}"
                linear = [_linear_note(each) for each in ranges if not each.is_log]
                planned = replace(planned, plan=replace(planned.plan, notes=[*planned.plan.notes, note, *linear]))
            if planned.extended or is_new or not all_completed(folder, planned.plan.runs):
                yield search, planned
            results = _results(folder, cells)
        trials = {cell: [results[cell][values] for values in proposals[cell]] for cell in cells}
        _write_journal(folder / JOURNAL, ranges, trials)
    best = {cell: min(trials[cell], key=lambda trial: trial.loss) for cell in cells}
    notes = [
        f"{' '.join([*cell, *trial.values])}: the best of {len({*trials[cell]})} trials "
        f"(loss {format_loss(trial.loss)}{f', {trial.result}' if trial.result in BAD_OUTCOMES else ''})"
        for cell, trial in best.items()
    ]
    values_of = {cell: [trial.values] for cell, trial in best.items()}
    named = [text for text in rest if not text.startswith("sweep.name=")] + [f"sweep.name={name}"]
    more = partial(_of_cell, values_of)
    yield from _judging(named, configs, more, until, show_progress, design, notes=notes, extend=extend)


def reason_search_stops(plan: Plan, retry: str) -> str:
    """Return why a search stops after a trial has failed, and how to `retry` it; empty if the sweep is not a search."""
    if not plan.name.endswith(SEARCH):
        return ""
    return (
        f"sweep {plan.name.removesuffix(SEARCH)} is not trained, because the search needs the losses of all trials; "
        f"train the failed ones again: {retry}"
    )


def _judging(
    overrides: Sequence[str],
    configs: UserConfigs,
    more: More,
    until: Until | None,
    show_progress: Callable[[str], None],
    design: SweepDesign,
    *,
    notes: Sequence[str] = (),
    extend: bool,
) -> Iterator[tuple[SweepOptions, PlannedSweep]]:
    """Yield the sweep with the seeds of the command: once, or each time with more seeds until all is decided.

    A sweep with nothing left to train is yielded once, too.
    """

    def plan(seeds: list[str], *, extend: bool) -> tuple[SweepOptions, PlannedSweep]:
        options, composed = compose_sweep([*overrides, *seeds], configs, more)
        planned = make_plan(options, composed, show_progress, extend=extend, design=design)
        if not has_plan(planned.folder):
            planned = replace(planned, plan=replace(planned.plan, notes=[*planned.plan.notes, *notes]))
        return options, planned

    if until is None:
        yield plan([], extend=extend)
        return
    options, composed = compose_sweep(overrides, configs, more)
    _check_baseline(until, composed)
    if options.name is None:
        raise ConfigError("seed=until(...): the sweep grows, so it needs a name; add sweep.name=...")
    folder = sweep_folder(composed[0][1].results_dir, options.name)
    stored = read_plan(folder).runs if has_plan(folder) else ()
    seeds = max((run.config["seed"] + 1 for run in stored), default=min(BLOCK, until.most))
    has_trained = False
    while True:
        is_new = not has_plan(folder)
        options, planned = plan([f"seed=range({seeds})"], extend=not is_new)
        if planned.extended or is_new or not all_completed(folder, planned.plan.runs):
            has_trained = True
            yield options, planned
        if seeds >= until.most or _is_decided(folder, until):
            break
        seeds = min(seeds + BLOCK, until.most)
    if not has_trained:
        yield options, planned


def _check_baseline(until: Until | None, composed: Sequence[tuple[Sequence[str], RunConfig]]) -> None:
    """Check that some runs, and not all, are those of the baseline.

    Raises:
        ConfigError: None are, or all.
    """
    if until is None:
        return
    planned = [PlannedRun("", list(varied), config.recorded()) for varied, config in composed]
    runs = [RunEntry(RunFolder(Path()), "", options=flatten(each.config), arm=each.arm) for each in planned]
    if len(select_where(runs, [until.against], "seed=until")) == len(runs):
        raise ConfigError(f"seed=until({until.against},...): every run has it; name a value of an option that you vary")


def _check_seeds(trials: Sequence[RunConfig], judging: Sequence[Mapping[str, Setting]]) -> None:
    """Check that no trial has a seed of the runs that judge: the best trial would be the best on this very seed.

    Raises:
        ConfigError: One has. An arm, or a preset of the user, may set the seeds of both.
    """
    for option in SEEDS:
        judged = {options.get(option) for options in judging}
        for trial in trials:
            if (seed := flatten(plain_tree(trial))[option]) in judged:
                raise ConfigError(
                    f"{option}={seed}: is a seed of the trials of the search, so no run with it can judge what the "
                    "search finds; choose other seeds, or leave the search out"
                )


def _check_limits(
    ranges: Sequence[Range], overrides: Sequence[str], configs: UserConfigs, composed: Sequence[RunConfig]
) -> None:
    """Check that the option of each range takes both limits, before any trial is trained.

    Args:
        composed: The config of each run without the searched options.

    Raises:
        ConfigError: It does not take one of them: `optim.lr=search(0,1e-1)`; or it does not exist, or takes no number.
    """
    for each in ranges:
        takes_numbers = all(_takes_numbers(each.option, config) for config in composed)
        for limit in (each.low, each.high):
            try:
                compose_sweep([*without_seeds(overrides), *_OF_TRIALS, each.text(limit)], configs)
            except ConfigError as error:
                advice = f"; choose another limit, as in {EXAMPLE}" if takes_numbers else ""
                raise ConfigError(f"{each.option}=search({each.low:g},{each.high:g}): {error}{advice}") from error


def _takes_numbers(option: str, config: RunConfig) -> bool:
    """Whether a config has an option, and its value is a number or null."""
    values = flatten(plain_tree(config))
    return option in values and (values[option] is None or type(values[option]) in (int, float))


def _linear_note(limits: Range) -> str:
    """Return the note that an option is not searched by its logarithm."""
    return f"{limits.option} is searched on a linear scale, because its lower limit {limits.low:g} has no logarithm"


def _is_decided(folder: Path, until: Until) -> bool:
    """Whether the sign of every difference from the baseline is known, by intervals that hold at every look."""
    table = summarize_by(folder)
    rows = run_test("anytime", table.cells, table.factors, against=until.against)
    return all(row["p_holm"] is not None and row["p_holm"] < 1 - LEVEL for row in rows)


def _cell_of(varied: Sequence[str]) -> Cell:
    return tuple(without_seeds(varied))


def _of_cell(values: Mapping[Cell, list[Values]], varied: list[str]) -> list[Values]:
    return values[_cell_of(varied)]


def _ask(ranges: Sequence[Range], cell: Cell, trials: Sequence[Trial], count: int) -> list[Values]:
    """Return the values of the next trials of a cell.

    The first ones are the centres of equal parts of the ranges, in an order of its own for each option; later ones are
    those of a tree-structured Parzen estimator (Bergstra et al. 2011, NeurIPS 24).

    Raises:
        ConfigError: Optuna is not installed.
    """
    seed = int(canonical_hash([*cell, len(trials)])[:8], 16)
    if not trials:
        random = np.random.default_rng(seed)
        columns = [[each.at((part + 0.5) / count) for part in random.permutation(count)] for each in ranges]
        return [_texts(ranges, values) for values in zip(*columns, strict=True)]
    optuna = _optuna()
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=0, constant_liar=True)
    study = optuna.create_study(sampler=sampler)
    _add(study, ranges, trials)
    proposals = [study.ask(_distributions(ranges)) for _ in range(count)]
    return [_texts(ranges, [trial.params[each.option] for each in ranges]) for trial in proposals]


def _texts(ranges: Sequence[Range], values: Sequence[float]) -> Values:
    return tuple(each.text(value) for each, value in zip(ranges, values, strict=True))


def _planned(folder: Path, cells: Sequence[Cell]) -> dict[Cell, list[Values]]:
    """Return the values of the trials of each cell that are planned."""
    runs = [tuple(run.overrides) for run in read_plan(folder).runs] if has_plan(folder) else []
    return {cell: [run[len(cell) :] for run in runs if run[: len(cell)] == cell] for cell in cells}


def _results(folder: Path, cells: Sequence[Cell]) -> dict[Cell, dict[Values, Trial]]:
    """Return the trials of each cell that have ended, by their values."""
    results: dict[Cell, dict[Values, Trial]] = {cell: {} for cell in cells}
    for planned in read_plan(folder).runs if has_plan(folder) else ():
        run, overrides = run_of(folder, planned), tuple(planned.overrides)
        if not is_completed(run):
            continue
        record = RunRecord.load(run)
        bounded_loss = min(record.loss, record.corpus.baselines.uniform)
        for cell in (cell for cell in cells if overrides[: len(cell)] == cell):
            values = overrides[len(cell) :]
            results[cell][values] = Trial(values, record.result, record.loss, bounded_loss)
    return results


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise ConfigError(
            "search(...): needs Optuna, which is not installed; pip install optuna, or sweep some values instead"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distributions(ranges: Sequence[Range]) -> dict[str, Any]:
    kinds = _optuna().distributions
    return {
        each.option: kinds.IntDistribution(int(each.low), int(each.high), log=each.is_log)
        if each.is_whole
        else kinds.FloatDistribution(each.low, each.high, log=each.is_log)
        for each in ranges
    }


def _add(study: Any, ranges: Sequence[Range], trials: Sequence[Trial]) -> None:
    """Add completed trials to a study of Optuna."""
    for trial in dict.fromkeys(trials):
        params = {each.option: each.value(text) for each, text in zip(ranges, trial.values, strict=True)}
        known = _optuna().trial.create_trial(
            params=params, distributions=_distributions(ranges), value=trial.bounded_loss
        )
        study.add_trial(known)


def _write_journal(path: Path, ranges: Sequence[Range], trials: Mapping[Cell, Sequence[Trial]]) -> None:
    """Write the trials of all cells as a file that `optuna-dashboard` reads."""
    optuna = _optuna()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        new = Path(folder) / path.name
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(new)))
        for cell, made in trials.items():
            _add(optuna.create_study(storage=storage, study_name=" ".join(cell) or "all runs"), ranges, made)
        write_atomic(path, new.read_bytes())
