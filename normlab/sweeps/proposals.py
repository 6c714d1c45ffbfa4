"""Which values a search tries next in a cell, from the losses of its trials so far; Optuna chooses them."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from normlab.base.errors import ConfigError
from normlab.base.parsing import canonical_hash
from normlab.config.searches import Range
from normlab.store.files import write_atomic

AT_ONCE = 4
"""Trials of a cell that are made at once. The first ones, before any loss is known, are spread evenly."""

CellOverrides = tuple[str, ...]
"""The varied overrides of a cell, without the seed."""
TrialOverrides = tuple[str, ...]
"""The searched options of a trial, as overrides."""


class Trial(NamedTuple):
    values: TrialOverrides
    result: str
    loss: float
    """Infinite if it diverged."""
    bounded_loss: float
    """The loss, at most that of a uniform guess, ln V: Optuna takes no infinite one."""


def propose(ranges: Sequence[Range], cell: CellOverrides, trials: Sequence[Trial], most: int) -> list[TrialOverrides]:
    """Return the values of the next trials of a cell, at most `AT_ONCE`, and `most` with the trials so far.

    The first ones are the centres of equal parts of the ranges, in an order of its own for each option; later ones are
    those of a tree-structured Parzen estimator (Bergstra et al. 2011, NeurIPS 24).
    """
    count = min(AT_ONCE, most - len(trials))
    # From the cell and its trials alone: a search that was killed proposes the same values.
    seed = int(canonical_hash([*cell, len(trials)])[:8], 16)
    if not trials:
        random = np.random.default_rng(seed)
        centres: list[TrialOverrides] = [()] * count
        for limits in ranges:
            for index, part in enumerate(random.permutation(count)):
                centres[index] += (limits.text(limits.at((part + 0.5) / count)),)
        return centres
    optuna = import_optuna()
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=0, constant_liar=True)
    study = optuna.create_study(sampler=sampler)
    _add(study, ranges, trials)
    proposals: list[TrialOverrides] = []
    for _ in range(count):
        params = study.ask(_distributions(ranges)).params
        proposals.append(tuple(limits.text(params[limits.option]) for limits in ranges))
    return proposals


def replay(
    ranges: Sequence[Range], cell: CellOverrides, completed: Mapping[TrialOverrides, Trial], most: int
) -> tuple[list[Trial], list[TrialOverrides]]:
    """Return the trials of a search whose losses are known, and the values of the first ones that are not completed."""
    trials: list[Trial] = []
    while len(trials) < most:
        proposals = propose(ranges, cell, trials, most)
        missing = [values for values in proposals if values not in completed]
        if missing:
            return trials, missing
        trials += [completed[values] for values in proposals]
    return trials, []


def write_journal(path: Path, ranges: Sequence[Range], trials: Mapping[CellOverrides, Sequence[Trial]]) -> None:
    """Write the trials of all cells as a file that `optuna-dashboard` reads."""
    optuna = import_optuna()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        journal = Path(folder) / path.name
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(journal)))
        for cell, trials_of_cell in trials.items():
            study = optuna.create_study(storage=storage, study_name=" ".join(cell) or "all runs")
            _add(study, ranges, trials_of_cell)
        write_atomic(path, journal.read_bytes())


def import_optuna() -> Any:
    """Return the package.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise ConfigError(
            "search(...): needs Optuna, which is not installed; pip install optuna, or sweep some values instead"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distributions(ranges: Sequence[Range]) -> dict[str, Any]:
    kinds = import_optuna().distributions
    distributions: dict[str, Any] = {}
    for limits in ranges:
        if limits.is_whole:
            distribution = kinds.IntDistribution(int(limits.low), int(limits.high), log=limits.is_log)
        else:
            distribution = kinds.FloatDistribution(limits.low, limits.high, log=limits.is_log)
        distributions[limits.option] = distribution
    return distributions


def _add(study: Any, ranges: Sequence[Range], trials: Sequence[Trial]) -> None:
    """Add completed trials to a study of Optuna."""
    create_trial = import_optuna().trial.create_trial
    # Values that were proposed twice are one run, so they count once.
    for trial in dict.fromkeys(trials):
        params = {limits.option: limits.value(text) for limits, text in zip(ranges, trial.values, strict=True)}
        study.add_trial(create_trial(params=params, distributions=_distributions(ranges), value=trial.bounded_loss))
