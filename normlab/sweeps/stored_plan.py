"""The stored plan of a sweep that has started: which of its runs are completed, and what may change in it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from normlab.base.errors import ConfigError, StoreError, counted
from normlab.store.format import COMPLETED_STATES
from normlab.store.plans import Pack, Plan, PlannedRun, run_of
from normlab.store.runs import RunFolder

OTHER_NAME = "choose another sweep.name, or none: runs that are completed are not trained again"


def reconcile(stored: Plan, plan: Plan, folder: Path) -> Plan:
    """Return the plan of the command's overrides, with the packs of the stored plan.

    The configs, and so the plugins that are executed, come from the command's overrides: a stored plan is only data.

    Raises:
        ConfigError: The stored plan has other runs, other names of arms or another `sweep.pack`, or some of its
            completed runs were deleted.
        StoreError: The record of a run cannot be read.
    """
    # A run that was added, left out or changed has another id.
    run_by_id = {run.run_id: run for run in plan.runs}
    stored_ids = {run.run_id for run in stored.runs}
    if stored_ids != run_by_id.keys():
        hint = f"to add runs, give the old values beside the new ones and add --extend; or {OTHER_NAME}"
        if stored_ids < run_by_id.keys():
            hint = f"add --extend, or {OTHER_NAME}"
        elif run_by_id.keys() < stored_ids:
            hint = f"give the values of its other runs too, or {OTHER_NAME}"
        raise ConfigError(
            f"sweep.name={stored.name}: the existing sweep of this name has {counted(len(stored_ids), 'run')}; these "
            f"overrides make {len(run_by_id)}, of which {len(stored_ids & run_by_id.keys())} are the same; {hint}"
        )
    if stored.pack != plan.pack:
        raise ConfigError(
            f"sweep.pack={plan.pack}: sweep {stored.name} started with sweep.pack={stored.pack}, and other packs "
            f"would change its losses; use sweep.pack={stored.pack}, or choose another sweep.name"
        )
    for run in stored.runs:
        new_name = run_by_id[run.run_id].arm
        # The name of an arm is no part of its run, but tables and tests compare arms by their names.
        if run.arm and run.arm != new_name:
            raise ConfigError(
                f"sweep.name={stored.name}: its arm {run.arm} is called {new_name or 'nothing'} here; keep its name, "
                "or choose another sweep.name"
            )
    runs = [run_of(folder, run) for run in stored.runs]
    completed = {index for index, run in enumerate(runs) if is_intact_and_completed(run)}
    # A run without a pack was completed when the plan was made, and the runs of a pack start and end together.
    pack_of: dict[int, list[int]] = {}
    for pack in stored.packs:
        pack_of |= dict.fromkeys(pack.runs, pack.runs)
    for index, run in enumerate(runs):
        if run.exists():
            continue
        missing = f"sweep.name={stored.name}: run {run.run_id} is missing"
        if index not in pack_of:
            raise ConfigError(f"{missing}, which an earlier sweep had trained; restore its folder, or {OTHER_NAME}")
        if completed.intersection(pack_of[index]):
            names = ", ".join(stored.runs[member].run_id for member in pack_of[index])
            raise ConfigError(
                f"{missing}, and the others of its pack are completed: alone it would not have the same bits; restore "
                f"its folder, or delete those of the whole pack to train it again ({names})"
            )
    return replace(stored, runs=[run_by_id[run.run_id] for run in stored.runs])


def halve(plan: Plan, pack: Pack) -> Plan:
    """Return the plan with a pack replaced by its two halves, which get new numbers."""
    middle = len(pack.runs) // 2
    # The old number keeps its outcomes, so the halves get numbers that no pack has had.
    number = max(pack.number for pack in plan.packs) + 1
    first = Pack(number, pack.runs[:middle], halved_from=pack.number)
    second = Pack(number + 1, pack.runs[middle:], halved_from=pack.number)
    note = (
        f"pack {pack.number} of {len(pack.runs)} runs ran out of memory and is halved: its runs train in packs of "
        f"{len(first.runs)} and {len(second.runs)}"
    )
    position = plan.packs.index(pack)
    packs = [*plan.packs[:position], first, second, *plan.packs[position + 1 :]]
    return replace(plan, packs=packs, notes=[*plan.notes, note])


def is_completed(run: RunFolder) -> bool:
    """Return whether a run has finished or diverged.

    Raises:
        StoreError: The status of the run cannot be read.
    """
    return run.exists() and run.read_status().state in COMPLETED_STATES


def is_intact_and_completed(run: RunFolder) -> bool:
    """Return whether a run has finished or diverged and its run.json is intact, so that a plan leaves it out.

    Raises:
        StoreError: Its status or its run.json cannot be read: nothing else would report it.
    """
    if not is_completed(run):
        return False
    run.run()
    return True


def all_completed(folder: Path, runs: Sequence[PlannedRun]) -> bool:
    """Return whether all runs of a pack have finished or diverged; False if a record is damaged."""
    try:
        return all(is_completed(run_of(folder, run)) for run in runs)
    except StoreError:
        # The process that resumes the run reports the damage.
        return False
