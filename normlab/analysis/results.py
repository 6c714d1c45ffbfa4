"""The results of runs: state, losses and seeds; and the settings in which runs differ, as text.

Runs differ in options, which the user sets, and in circumstances: corpus, device, torch version. Only options define
cells.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from normlab.analysis.settings import (
    differing_settings,
    is_config_option,
    select_where,
    settings_of,
)
from normlab.store.format import DAMAGED, DIVERGED, FAILED, FINISHED
from normlab.store.outcome import OUTCOMES
from normlab.store.query import count_not_started
from normlab.store.record import RunEntry, RunRecord, Setting

UNFINISHED = "unfinished"
STATES = (*OUTCOMES, FAILED, UNFINISHED)
"""The outcomes of completed runs, and the states of runs without an outcome."""
MAX_VALUES = 6


@dataclass(frozen=True, eq=False)
class RunResult:
    record: RunRecord

    @property
    def lr(self) -> float:
        return self.record.config.optim.lr

    @cached_property
    def state(self) -> str:
        return self.record.outcome or (FAILED if self.record.state == FAILED else UNFINISHED)

    @cached_property
    def replicate(self) -> tuple[Setting, Setting]:
        """The seeds of the weights and of the data order; equal replicates of two cells form a pair."""
        return self.record.config.seed, self.record.config.data.seed

    @cached_property
    def loss(self) -> float:
        """Final validation loss, nats/token; infinite if the run diverged, NaN if it has no outcome."""
        loss = self.record.status.val_loss if self.has_loss else None
        return math.inf if self.state == DIVERGED else math.nan if loss is None else loss

    @property
    def has_loss(self) -> bool:
        return self.state in OUTCOMES

    @property
    def has_learned(self) -> bool:
        """Whether the run finished with a loss below the band around the unigram entropy."""
        return self.state == FINISHED and self.record.references.level(self.loss) == 0

    @cached_property
    def settings(self) -> Mapping[str, Setting]:
        return settings_of(self.record)


def read_results(records: Sequence[RunEntry]) -> tuple[list[RunResult], list[str]]:
    """Return the result of each started run whose record is intact, and warnings about the other runs."""
    not_started = count_not_started(records)
    warnings = [f"runs that have not started: {not_started} of {len(records)}"] if not_started else []
    damaged = [record for record in records if record.state == DAMAGED]
    warnings += [f"run {record.run_id} is damaged and is left out: {record.problem}" for record in damaged]
    return [RunResult(record) for record in records if isinstance(record, RunRecord)], warnings


def select_results(results: Sequence[RunResult], where: Sequence[str], flag: str = "--where") -> list[RunResult]:
    """Return the runs that meet all conditions; errors as in `select_where`."""
    selected = set(select_where([run.record for run in results], where, flag))
    return [run for run in results if run.record in selected]


def mixed_settings(results: Sequence[RunResult], ignored: Iterable[str] = ()) -> dict[str, str]:
    """Return the settings besides learning rate and seeds in which runs differ.

    The keys are names, the values phrases: `model.depth` -> `model.depth 4 and 8`. The options `ignored` may differ,
    and so may the options below them (norm: norm.eps).
    """
    ignored = tuple(ignored)
    phrases: dict[str, str] = {}
    for name, values in differing_settings([run.settings for run in results]).items():
        if not any(name == option or name.startswith((f"{option}.", f"the {option}'s")) for option in ignored):
            more = [f"{len(values) - MAX_VALUES} more"] if len(values) > MAX_VALUES else []
            *first, last = [*values[:MAX_VALUES], *more]
            phrases[name] = f"{name} {', '.join(first)} and {last}"
    return phrases


def comparability_warnings(results: Sequence[RunResult]) -> list[str]:
    """Return a line that names the circumstances in which runs differ, or no line."""
    mixed = [phrase for name, phrase in mixed_settings(results).items() if not is_config_option(name)]
    return [f"the runs differ in {'; '.join(mixed)}"] if mixed else []


def reason_not_comparable(results: Sequence[RunResult]) -> str:
    """Return why the losses of the runs cannot be ranked, or an empty text."""
    mixed = mixed_settings(results)
    different = [mixed[name] for name in ("corpus", "tokenizer") if name in mixed]
    return f"the runs differ in {'; '.join(different)}, so their losses are not comparable" if different else ""
