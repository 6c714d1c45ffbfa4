"""What is printed of a sweep before it starts and after it has ended."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from normlab.store.plans import FAILURES, End, Job, Pack, Plan, log_of, run_of
from normlab.store.query import examine
from normlab.store.schema import DAMAGED, DIVERGED, FINISHED, RUNNING, number
from normlab.sweep.plan import has_ended, is_done, tokens_of
from normlab.sweep.progress import MOST_LINES

Row = dict[str, Any]

KNOWN = (FINISHED, DIVERGED, DAMAGED)
"""States that are counted by their own names at the end; all others but failures are left to train."""


def plan_lines(plan: Plan, folder: Path, *, to_be_tried: bool = False) -> Iterator[str]:
    """A sweep in a few lines: its name, runs, packs and tokens, and what is done of it already.

    Args:
        plan: The sweep's.
        folder: The sweep's.
        to_be_tried: Whether its packs are decided when it starts.
    """
    ended = [has_ended(run_of(folder, job)) for job in plan.jobs]
    left = [job for job, done in zip(plan.jobs, ended, strict=True) if not done]
    yield f"sweep   {plan.name}"
    yield f"runs    {len(plan.jobs)}" + (
        f", {sum(ended)} of them ended already: used, not repeated" if any(ended) else ""
    )
    if not left:
        yield "packs   none: nothing is left to train"
        return
    yield from pack_lines(plan, folder, to_be_tried=to_be_tried)
    yield f"tokens  {sum(map(tokens_of, left)):,} to train on"


def pack_lines(plan: Plan, folder: Path, *, to_be_tried: bool = False) -> Iterator[str]:
    """How many packs are left to train, and what was tried before they were made."""
    packs = [pack for pack in plan.packs if not is_done(folder, plan.members(pack))]
    largest = max((len(pack.jobs) for pack in packs), default=0)
    of = f"up to {largest} runs" if largest > 1 else "one run each"
    if to_be_tried and len(packs) > 1:
        of += ", unless more at once prove faster when it starts"
    for group in plan.tried:
        yield f"tried   {_tried(plan, group)}"
    yield f"packs   {len(packs)}, {of} (sweep.pack={plan.pack})"


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
    """A row for every run; of many runs only for those that failed or diverged."""
    pack_of = {index: pack for pack in plan.packs for index in pack.jobs}
    rows: list[Row] = []
    for index, job in enumerate(plan.jobs):
        end = failed.get(pack_of[index].number) if index in pack_of else None
        row = _row(folder, job, end)
        if len(plan.jobs) <= MOST_LINES or row["state"] in (*FAILURES, DIVERGED, DAMAGED):
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


def _tried(plan: Plan, group: Row) -> str:
    """What was measured of a group of runs before it was decided how many train together."""
    ids = set(group["runs"])
    jobs = [index for index, job in enumerate(plan.jobs) if job.run_id in ids]
    seen = ", ".join(
        f"{trial['runs']} at once {trial['step_s'] / trial['runs'] * 1e3:.3g} ms a step of each"
        for trial in group["trials"]
        if not trial["error"]
    )
    return f"{_words(plan, Pack(0, jobs))}: {seen + ': ' if seen else ''}{group['most']} at once ({group['why']})"


def _row(folder: Path, job: Job, end: End | None) -> Row:
    entry = examine(run_of(folder, job)) if run_of(folder, job).exists() else None
    state = entry.state if entry else "waiting"
    status = entry.status if entry else {}
    note = entry.problem if entry else ""
    if end is not None and state not in (FINISHED, DIVERGED):
        state, note = end.cause, f"{FAILURES[end.cause]}: {end.detail}"
    return {
        "run": " ".join(job.words) or job.run_id,
        "id": job.run_id,
        "state": "running elsewhere" if state == RUNNING else state,
        "step": number(status.get("step")),
        "steps": job.config["train"]["steps"],
        "val_loss": number(status.get("val_loss")),
        "note": note,
    }


def _words(plan: Plan, pack: Pack) -> str:
    """What a pack's runs have in common of what the sweep varies, and how many they are."""
    members = plan.members(pack)
    if len(members) == 1:
        return " ".join(members[0].words) or members[0].run_id
    shared = [word for word in members[0].words if all(word in job.words for job in members)]
    return " ".join([*shared, f"({len(members)} runs)"])
