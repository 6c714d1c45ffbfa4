"""Finds what has changed where the same options make another run, above all the code of a plugin."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from normlab.base.errors import ConfigError, StoreError
from normlab.base.parsing import canonical_hash
from normlab.config.schema import RunConfig
from normlab.store.plans import Plan, PlannedRun, run_of
from normlab.store.run_json import Identity, Run
from normlab.store.runs import RunFolder
from normlab.training.identity import plugins_of, run_id_of, versions


def changed_plugins(config: RunConfig, recorded: Mapping[str, Any]) -> list[str]:
    """Return the files of the plugins of a config whose code is not that of the `versions` in a record."""
    now = versions(config)
    files: dict[str, None] = {}  # a file may have registered several parts
    for part, file in plugins_of(config).items():
        if now[part] != recorded.get(part):
            files[file] = None
    return list(files)


def change_warnings(new: Iterable[tuple[RunConfig, Identity]], runs: Path) -> list[str]:
    """Return a line for each plugin of some new runs that has changed since the same options were trained.

    Args:
        new: The config and the identity of each run.
        runs: The folder of all runs.
    """
    earlier: dict[str, list[str]] = {}
    recorded: dict[str, dict[str, Run]] = {}
    for config, identity in new:
        if not plugins_of(config):
            continue
        # The ids of the runs with this norm, placement and sizes begin alike.
        prefix = run_id_of(config, identity).rpartition("-")[0]
        if prefix not in recorded:
            recorded[prefix] = dict(_newest_by_options(runs, prefix))
        started_run = recorded[prefix].get(_options_key(identity))
        if started_run is None:
            continue
        for file in changed_plugins(config, started_run.identity.versions):
            earlier.setdefault(file, []).append(run_id_of(config, started_run.identity))
    lines = []
    for file, ids in earlier.items():
        started, consequence = f"run {ids[0]}", "this is a new run; to continue the old one"
        if len(ids) > 1:
            started, consequence = f"{started} and {len(ids) - 1} more", "these are new runs; to continue the old ones"
        lines.append(
            f"{file}: its code is not that with which {started} started with the same options, so {consequence}, undo "
            "the change or name the earlier file (comments and blank lines do not count)"
        )
    return lines


def reason_of_other_id(config: RunConfig, planned: Path) -> str:
    """Return why a config makes another run id than that of the folder for which it was planned."""
    with contextlib.suppress(StoreError):  # it has not started
        files = changed_plugins(config, RunFolder(planned).run(Run).identity.versions)
        if files:
            return f"{' and '.join(files)} has changed"
    return "a plugin, the corpus, the device or normlab has changed"


def check_same_code(stored: Plan, new: Iterable[tuple[PlannedRun, RunConfig]], folder: Path) -> None:
    """Check that the runs of a sweep's plan have the ids that the same options make now.

    Args:
        stored: The plan in the sweep's folder.
        new: The runs that the overrides of the command make, and their configs.
        folder: The folder of the sweep.

    Raises:
        ConfigError: A run has another id now, so that the sweep cannot resume it.
    """
    by_overrides = {tuple(planned.overrides): (planned, config) for planned, config in new}
    for old in stored.runs:
        planned, config = by_overrides.get(tuple(old.overrides), (old, None))
        if config is None or planned.run_id == old.run_id:
            continue
        if canonical_hash(planned.config) == canonical_hash(old.config):
            reason = reason_of_other_id(config, run_of(folder, old).path)
            raise ConfigError(
                f"sweep.name={stored.name}: run {old.run_id} of the existing sweep would be {planned.run_id} now: "
                f"{reason} since the sweep was planned; undo the change, or choose another sweep.name"
            )


def _newest_by_options(runs: Path, prefix: str) -> Iterator[tuple[str, Run]]:
    """Yield the readable runs with a beginning of their ids, oldest first, by their options."""
    started: list[Run] = []
    for folder in map(RunFolder, runs.glob(f"{prefix}-*")):
        with contextlib.suppress(StoreError):  # a damaged record is no run to resume
            started.append(folder.run(Run))
    for run in sorted(started, key=lambda run: run.created):
        yield _options_key(run.identity), run


def _options_key(identity: Identity) -> str:
    """Return a hash of an identity without the versions of its plugins, which are texts."""
    kept = {part: version for part, version in identity.versions.items() if not isinstance(version, str)}
    return canonical_hash(asdict(identity) | {"versions": kept})
