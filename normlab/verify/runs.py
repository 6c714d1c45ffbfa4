"""Verify the blocks of recorded runs."""

import json
from collections.abc import Iterator, Sequence

from normlab.base.errors import NormlabError
from normlab.base.options import plain_tree
from normlab.loaded.run import LoadedRun
from normlab.model.fingerprint import fingerprint
from normlab.store.runs import RunFolder
from normlab.training.changed_plugins import changed_plugins
from normlab.verify.check import Check, check_equal
from normlab.verify.norms import size_of_run
from normlab.verify.selection import CHECKED_PARTS, all_checks_of_run


def load_runs(folders: Sequence[RunFolder], *, trust: bool) -> tuple[list[LoadedRun], list[NormlabError]]:
    """Return the runs that can be verified, and why the others cannot be; with `trust`, execute their plugins."""
    runs: list[LoadedRun] = []
    problems: list[NormlabError] = []
    for folder in folders:
        try:
            run = LoadedRun(folder, trust=trust)
            # Reading the config may fail too, for example at a plugin that is not trusted.
            plain_tree(run.config)
            runs.append(run)
        except NormlabError as error:
            problems.append(error)
    return runs, problems


def verify_runs(runs: Sequence[LoadedRun]) -> Iterator[Check]:
    """Yield the checks of each different block of the runs; the first is whether the run trained this block."""
    # Runs that differ in seeds, data or optimiser have one block, which is checked once.
    blocks: dict[str, LoadedRun] = {}
    for run in runs:
        tree = plain_tree(run.config)
        parts = [tree[part] for part in CHECKED_PARTS]
        block = json.dumps([run.record.run.fingerprint, run.config.init_rule, size_of_run(run.config), parts])
        blocks.setdefault(block, run)
    for run in blocks.values():
        subject, trained = f"run {run.folder.run_id}", run.record.run.fingerprint
        changed = changed_plugins(run.config, run.record.run.identity.versions)
        note = f"{' and '.join(changed)} in its folder has changed since" if changed else ""
        yield check_equal(subject, "has the block that was trained", trained, fingerprint(run.config), note)
        yield from all_checks_of_run(run.config)
