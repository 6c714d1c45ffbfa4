"""Which runs have a record, and the settings besides learning rate and seeds in which they differ, as text.

Runs differ in options, which the user sets, and in circumstances: corpus, device, torch version. Only options define
cells.
"""

from collections.abc import Iterable, Sequence

from normlab.analysis.settings import (
    ARM,
    differing_settings,
    is_config_option,
    settings_of,
)
from normlab.store.format import DAMAGED
from normlab.store.query import count_not_started
from normlab.store.record import RunEntry, RunRecord

MAX_VALUES = 6


def intact_runs(records: Sequence[RunEntry]) -> tuple[list[RunRecord], list[str]]:
    """Return the started runs whose records are intact, and warnings about the other runs."""
    not_started = count_not_started(records)
    warnings = [f"runs that have not started: {not_started} of {len(records)}"] if not_started else []
    damaged = [record for record in records if record.state == DAMAGED]
    warnings += [f"run {record.run_id} is damaged and is left out: {record.problem}" for record in damaged]
    return [record for record in records if isinstance(record, RunRecord)], warnings


def mixed_settings(runs: Sequence[RunRecord], ignored: Iterable[str] = ()) -> dict[str, str]:
    """Return the settings besides learning rate and seeds in which runs differ.

    The keys are names, the values phrases: `model.depth` -> `model.depth 4 and 8`. The options `ignored` may differ,
    and so may the options below them (norm: norm.eps) and those that follow from them (arm: all that arms differ in).
    """
    ignored = tuple(ignored)
    phrases: dict[str, str] = {}
    for name, values in differing_settings(map(settings_of, runs)).items():
        if ARM in ignored and _follows_from_arm(name, runs):
            continue
        if not any(name == option or name.startswith((f"{option}.", f"the {option}'s")) for option in ignored):
            more = [f"{len(values) - MAX_VALUES} more"] if len(values) > MAX_VALUES else []
            *first, last = [*values[:MAX_VALUES], *more]
            phrases[name] = f"{name} {', '.join(first)} and {last}"
    return phrases


def _follows_from_arm(name: str, runs: Sequence[RunRecord]) -> bool:
    """Whether a setting is an option with one value in each arm."""
    values = {(run.arm, settings_of(run).get(name)) for run in runs}
    return is_config_option(name) and len(values) == len({run.arm for run in runs})


def comparability_warnings(runs: Sequence[RunRecord]) -> list[str]:
    """Return a line that names the circumstances in which runs differ, or no line."""
    mixed = [phrase for name, phrase in mixed_settings(runs).items() if not is_config_option(name)]
    return [f"the runs differ in {'; '.join(mixed)}"] if mixed else []


def reason_not_comparable(runs: Sequence[RunRecord]) -> str:
    """Return why the losses of the runs cannot be ranked, or an empty text."""
    mixed = mixed_settings(runs)
    different = [mixed[name] for name in ("corpus", "tokenizer") if name in mixed]
    return f"the runs differ in {'; '.join(different)}, so their losses are not comparable" if different else ""
