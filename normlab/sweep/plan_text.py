"""Text and tables of a sweep: its plan before it starts, and its result."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from normlab.report.summary import row_of
from normlab.store.outcome import OUTCOMES, REGRESSED, STUCK
from normlab.store.plans import FAILURES, Job, Pack, PackOutcome, Plan, log_of, run_of
from normlab.store.record import RunRecord
from normlab.store.schema import DAMAGED, DIVERGED, RUNNING
from normlab.sweep.plan import all_completed, is_completed, tokens_of
from normlab.sweep.progress import MOST_LINES

Row = dict[str, Any]


def plan_lines(plan: Plan, folder: Path) -> Iterator[str]:
    """Yield a sweep's name, runs, packs, notes and tokens, a line each."""
    left = [job for job in plan.jobs if not is_completed(run_of(folder, job))]
    completed = len(plan.jobs) - len(left)
    yield f"sweep   {plan.name}"
    yield f"runs    {len(plan.jobs)}" + (
        f", {completed} of them completed already: not trained again" if completed else ""
    )
    if left:
        packs = [pack for pack in plan.packs if not all_completed(folder, plan.jobs_of(pack))]
        largest = max((len(pack.jobs) for pack in packs), default=0)
        size = f"up to {largest} runs" if largest > 1 else "one run each"
        yield f"packs   {len(packs)}, {size} (sweep.pack={plan.pack})"
    else:
        yield "packs   none: nothing is left to train"
    for note in plan.notes:
        yield f"note    {note}"
    if left:
        yield f"tokens  {sum(map(tokens_of, left)):,} to train on"


def pack_rows(plan: Plan, folder: Path) -> list[Row]:
    """Return a row for every pack that is not completed."""
    return [
        {
            "pack": pack.number,
            "runs": len(pack.jobs),
            "tokens": f"{sum(map(tokens_of, plan.jobs_of(pack))):,}",
            "overrides": _label(plan, pack),
        }
        for pack in plan.packs
        if not all_completed(folder, plan.jobs_of(pack))
    ]


def run_rows(plan: Plan, folder: Path, failed: Mapping[int, PackOutcome]) -> list[Row]:
    """Return a row for every run; with many runs, only for failed, diverged, regressed, stuck and damaged ones."""
    rows = _all_rows(plan, folder, failed)
    if len(rows) <= MOST_LINES:
        return rows
    return [row for row in rows if row["state"] in (*FAILURES, STUCK, REGRESSED, DIVERGED, DAMAGED)]


def result_lines(plan: Plan, folder: Path, failed: Mapping[int, PackOutcome]) -> Iterator[str]:
    """Yield the counts of outcomes, the failures, what to do about them, and the command that shows the results."""
    states = Counter[str]()
    for row in _all_rows(plan, folder, failed):
        state = row["state"]
        states["failed" if state in FAILURES else state if state in (*OUTCOMES, DAMAGED) else "left to train"] += 1
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    yield f"{plan.name}: {len(plan.jobs)} {'run' if len(plan.jobs) == 1 else 'runs'}, {counts}"
    for number, outcome in sorted(failed.items()):
        yield (
            f"pack {number} {FAILURES[outcome.cause]}: {_label(plan, plan.pack_of(number))}: {outcome.detail} "
            f"({os.path.relpath(log_of(folder, number))})"
        )
    if failed:
        yield "failed packs are skipped; the same command with --retry-failed retries them"
    if states["left to train"]:
        yield "the same command trains what is left"
    results = folder.parent.parent
    yield f"normlab summarize {plan.name if results == Path('results') else folder}"


def _all_rows(plan: Plan, folder: Path, failed: Mapping[int, PackOutcome]) -> list[Row]:
    outcomes = {index: failed.get(pack.number) for pack in plan.packs for index in pack.jobs}
    return [_row(folder, job, outcomes.get(index)) for index, job in enumerate(plan.jobs)]


def _row(folder: Path, job: Job, outcome: PackOutcome | None) -> Row:
    entry = RunRecord.read(run_of(folder, job)) if run_of(folder, job).exists() else None
    row = row_of(entry) if entry else {}
    state, note = row.get("state", "waiting"), entry.problem if entry else ""
    if outcome is not None and state not in OUTCOMES:
        state, note = outcome.cause, f"{FAILURES[outcome.cause]}: {outcome.detail}"
    return {
        "run": " ".join(job.overrides) or job.run_id,
        "id": job.run_id,
        "state": "running elsewhere" if state == RUNNING else state,
        **{key: row.get(key) for key in ("step", "val_loss", "last_val_loss")},
        "steps": job.config["train"]["steps"],
        "note": note,
    }


def _label(plan: Plan, pack: Pack) -> str:
    """Return the overrides that all runs of a pack share, and the number of runs."""
    jobs = plan.jobs_of(pack)
    if len(jobs) == 1:
        return " ".join(jobs[0].overrides) or jobs[0].run_id
    shared = [override for override in jobs[0].overrides if all(override in job.overrides for job in jobs)]
    return " ".join([*shared, f"({len(jobs)} runs)"])
