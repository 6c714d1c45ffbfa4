"""What is printed of a sweep before it starts and after it has ended."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from normlab.report.summary import row_of
from normlab.store.outcome import OUTCOMES, REGRESSED, STUCK
from normlab.store.plans import FAILURES, End, Job, Pack, Plan, log_of, run_of
from normlab.store.query import examine
from normlab.store.schema import DAMAGED, DIVERGED, RUNNING
from normlab.sweep.plan import has_ended, is_done, tokens_of
from normlab.sweep.progress import MOST_LINES

Row = dict[str, Any]

KNOWN = (*OUTCOMES, DAMAGED)
"""States that are counted by their own names at the end; all others but failures are left to train."""


def plan_lines(plan: Plan, folder: Path) -> Iterator[str]:
    """A sweep in a few lines: its name, runs, packs, notes and tokens, and what is done of it already."""
    ended = [has_ended(run_of(folder, job)) for job in plan.jobs]
    left = [job for job, done in zip(plan.jobs, ended, strict=True) if not done]
    yield f"sweep   {plan.name}"
    yield f"runs    {len(plan.jobs)}" + (
        f", {sum(ended)} of them ended already: used, not repeated" if any(ended) else ""
    )
    if left:
        packs = [pack for pack in plan.packs if not is_done(folder, plan.members(pack))]
        largest = max((len(pack.jobs) for pack in packs), default=0)
        of = f"up to {largest} runs" if largest > 1 else "one run each"
        yield f"packs   {len(packs)}, {of} (sweep.pack={plan.pack})"
    else:
        yield "packs   none: nothing is left to train"
    for note in plan.notes:
        yield f"note    {note}"
    if left:
        yield f"tokens  {sum(map(tokens_of, left)):,} to train on"


def pack_rows(plan: Plan, folder: Path) -> list[Row]:
    """A row for every pack that is to be trained."""
    return [
        {
            "pack": pack.number,
            "runs": len(pack.jobs),
            "tokens": f"{sum(map(tokens_of, plan.members(pack))):,}",
            "words": _words(plan, pack),
        }
        for pack in plan.packs
        if not is_done(folder, plan.members(pack))
    ]


def end_rows(plan: Plan, folder: Path, failed: Mapping[int, End]) -> list[Row]:
    """A row for every run; of many runs only for those that failed, diverged, regressed or are stuck."""
    pack_of = {index: pack for pack in plan.packs for index in pack.jobs}
    rows: list[Row] = []
    for index, job in enumerate(plan.jobs):
        end = failed.get(pack_of[index].number) if index in pack_of else None
        row = _row(folder, job, end)
        if len(plan.jobs) <= MOST_LINES or row["state"] in (*FAILURES, STUCK, REGRESSED, DIVERGED, DAMAGED):
            rows.append(row)
    return rows


def closing_lines(plan: Plan, folder: Path, failed: Mapping[int, End]) -> Iterator[str]:
    """How the sweep stands, what to do about what failed, and where the numbers are."""
    pack_of = {index: pack for pack in plan.packs for index in pack.jobs}
    states = Counter[str]()
    for index, job in enumerate(plan.jobs):
        end = failed.get(pack_of[index].number) if index in pack_of else None
        state = _row(folder, job, end)["state"]
        states["failed" if state in FAILURES else state if state in KNOWN else "left to train"] += 1
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    yield f"{plan.name}: {len(plan.jobs)} {'run' if len(plan.jobs) == 1 else 'runs'}, {counts}"
    for pack_number, end in sorted(failed.items()):
        yield (
            f"pack {pack_number} {FAILURES[end.cause]}: {_words(plan, plan.pack_of(pack_number))}: {end.detail} "
            f"({os.path.relpath(log_of(folder, pack_number))})"
        )
    if failed:
        yield "what failed is not tried again, unless the same command has --retry-failed"
    if states["left to train"]:
        yield "the same command goes on with what is left to train"
    results = folder.parent.parent
    yield f"normlab summarize {plan.name if results == Path('results') else folder}"


def _row(folder: Path, job: Job, end: End | None) -> Row:
    entry = examine(run_of(folder, job)) if run_of(folder, job).exists() else None
    row = row_of(entry) if entry else {}
    state, note = row.get("state", "waiting"), entry.problem if entry else ""
    if end is not None and state not in OUTCOMES:
        state, note = end.cause, f"{FAILURES[end.cause]}: {end.detail}"
    return {
        "run": " ".join(job.words) or job.run_id,
        "id": job.run_id,
        "state": "running elsewhere" if state == RUNNING else state,
        **{key: row.get(key) for key in ("step", "val_loss", "last_val_loss")},
        "steps": job.config["train"]["steps"],
        "note": note,
    }


def _words(plan: Plan, pack: Pack) -> str:
    """What a pack's runs have in common of what the sweep varies, and how many they are."""
    members = plan.members(pack)
    if len(members) == 1:
        return " ".join(members[0].words) or members[0].run_id
    shared = [word for word in members[0].words if all(word in job.words for job in members)]
    return " ".join([*shared, f"({len(members)} runs)"])
