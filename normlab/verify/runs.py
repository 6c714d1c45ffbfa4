"""Verify the blocks of recorded runs, and write the result to the folder of each run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain

from normlab.errors import NormlabError, StoreError, warn
from normlab.loaded_run import LoadedRun
from normlab.model.fingerprint import fingerprint
from normlab.options import plain_tree
from normlab.store.files import check_links, write_atomic
from normlab.store.format import CHECKS_FILE, with_checksum
from normlab.store.runs import RunFolder
from normlab.verify.check import Check, check_equal
from normlab.verify.norms import size_of_run
from normlab.verify.selection import CHECKED_PARTS, all_checks_of_run


def load_runs(folders: Sequence[RunFolder], *, trust: bool) -> tuple[list[LoadedRun], list[NormlabError]]:
    """Return the runs that can be verified, and why the others cannot be; with `trust`, execute their plugins."""
    runs: list[LoadedRun] = []
    problems: list[NormlabError] = []
    for folder in folders:
        try:
            check_links(folder.path)  # the result is written there
            run = LoadedRun(folder, trust=trust)
            plain_tree(run.config)
            runs.append(run)
        except NormlabError as error:
            problems.append(error)
    return runs, problems


def verify_runs(runs: Sequence[LoadedRun]) -> Iterator[Check]:
    """Yield the checks of each different block of the runs; the first is whether the run trained this block.

    The result of a block is written to the folders of its runs when all its checks are made: the recorded fingerprint,
    the number of checks, and the lines of the failed checks. A folder that cannot be written gives a warning.
    """
    blocks: dict[str, list[LoadedRun]] = {}
    for run in runs:
        tree = plain_tree(run.config)
        parts = [tree[part] for part in CHECKED_PARTS]
        block = json.dumps([run.record.run.fingerprint, run.config.init_rule, size_of_run(run.config), parts])
        blocks.setdefault(block, []).append(run)
    for same in blocks.values():
        config, recorded = same[0].config, same[0].record.run.fingerprint
        checks: list[Check] = []
        for check in chain([_is_trained_block(same[0])], all_checks_of_run(config)):
            checks.append(check)
            yield check
        failed = [str(check) for check in checks if not check.passed]
        content = with_checksum({"fingerprint": recorded, "checks": len(checks), "failed": failed})
        for run in same:
            try:
                write_atomic(run.folder.path / CHECKS_FILE, content)
            except StoreError as error:
                warn(error)


def _is_trained_block(run: LoadedRun) -> Check:
    subject, claim = f"run {run.folder.run_id}", "has the block that was trained"
    return check_equal(subject, claim, run.record.run.fingerprint, fingerprint(run.config))
