"""Show the plan, the progress (on stderr) and the result of a sweep, one line for each event."""

import os
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from normlab.base.errors import StoreError, counted, printable
from normlab.config.sweep_options import SweepOptions
from normlab.store.format import DAMAGED, DIVERGED, FINISHED
from normlab.store.outcome import OUTCOMES
from normlab.store.plans import Pack, Plan, PlannedRun, run_of
from normlab.store.reading import read_last_row
from normlab.sweeps.cost import Cost
from normlab.sweeps.files import PackOutcome, log_of
from normlab.sweeps.plan import PlannedSweep, tokens_of
from normlab.sweeps.stored_plan import is_completed
from normlab.tracking.console import SafeStream, format_duration

EVERY_S = 60.0
"""Time, in seconds, between two lines on the progress of the sweep."""


def plan_lines(
    sweep: PlannedSweep, options: SweepOptions, cost: Cost, *, with_packs: bool, skipped: Collection[int] = ()
) -> Iterator[str]:
    """Yield a sweep's name, runs, packs, GPUs, jobs, notes and cost, and (`with_packs`) its open packs.

    `skipped` has the numbers of the packs that have failed and are not trained again.
    """
    plan, jobs = sweep.plan, sweep.jobs
    incomplete_runs = {index for index, run in enumerate(plan.runs) if not is_completed(run_of(sweep.folder, run))}
    incomplete_packs = [pack for pack in plan.packs if incomplete_runs.intersection(pack.runs)]
    packs = [pack for pack in incomplete_packs if pack.number not in skipped]
    completed = len(plan.runs) - len(incomplete_runs)
    yield f"sweep   {plan.name}"
    if completed:
        yield f"runs    {len(plan.runs)} ({completed} completed already, not trained again)"
    else:
        yield f"runs    {len(plan.runs)}"
    for note in plan.notes:
        yield f"note    {note}"
    if len(packs) < len(incomplete_packs):
        failed = counted(len(incomplete_packs) - len(packs), "pack")
        yield f"skipped {failed} with failed runs; --retry-failed trains them again"
    if not packs:
        yield "packs   none: nothing is left to train"
        return
    largest = max(len(pack.runs) for pack in packs)
    size = "one run each"
    if largest > 1:
        size = f"each trains up to {largest} runs together"
    yield f"packs   {len(packs)}, {size} (sweep.pack={plan.pack})"
    if sweep.gpus:
        indices: list[str] = []
        names: dict[str, None] = {}
        for gpu in sweep.gpus:
            indices.append(str(gpu.index))
            names[gpu.name] = None
        at_once = f"{counted(jobs, 'pack')} at once on each (sweep.jobs={jobs})"
        yield f"gpus    {', '.join(indices)} ({', '.join(names)}), {at_once}"
    elif options.on == "local" and jobs > 1:
        yield f"jobs    {jobs} packs at once, {counted(sweep.threads, 'thread')} each (sweep.jobs={jobs})"
    yield from cost.lines()
    if with_packs:
        for pack in packs:
            yield f"pack {pack.number:<3} {label_of(plan, pack)}"


def label_of(plan: Plan, pack: Pack) -> str:
    """Return the overrides (or the id) of a pack's first run, and the number of other runs."""
    first, *other_runs = plan.runs_of(pack)
    # A sweep of one run varies no option.
    label = " ".join(first.overrides) or first.run_id
    if other_runs:
        label += f" and {len(other_runs)} more"
    return label


def result_lines(plan: Plan, folder: Path, failed: Mapping[int, PackOutcome]) -> Iterator[str]:
    failures: set[int] = set()
    for pack in plan.packs:
        if pack.number in failed:
            failures.update(pack.runs)
    states = Counter[str]()
    for index, run in enumerate(plan.runs):
        state = _outcome(folder, run)
        # A second Ctrl-C kills runs, but their packs have not failed.
        states[state or ("failed" if index in failures else "left to train")] += 1
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    yield f"{plan.name}: {counted(len(plan.runs), 'run')}, {counts}"
    for pack_number, outcome in sorted(failed.items()):
        # A task of Slurm that ends before its pack starts has a log of its own, which the detail names.
        path = log_of(folder, pack_number)
        log = f" ({os.path.relpath(path)})" if path.exists() else ""
        label = label_of(plan, plan.pack_of(pack_number))
        yield f"pack {pack_number} {outcome.cause}: {label}: {outcome.detail}{log}"
    if failed:
        yield "failed packs are skipped; the same command with --retry-failed retries them"
    if states["left to train"]:
        yield "the same command trains the remaining runs"
    # A name is found in the default results folder only.
    name = plan.name if folder.parent.parent == Path("results") else folder
    command = f"normlab summarize {name}"
    # Seeds were added until the differences were decided, which only this test allows for.
    if plan.design.baseline:
        command += " --test anytime"
    yield command


def _outcome(folder: Path, run: PlannedRun) -> str:
    """Return the outcome of a completed run, "damaged" for one that cannot be read, and "" for any other."""
    try:
        record = run_of(folder, run)
        if not record.exists():
            return ""
        status = record.read_status()
        # A run that diverged in a pack which trains on has that state before it has an outcome.
        if not status.outcome and status.state == DIVERGED:
            return DIVERGED
        return status.outcome or ""
    except StoreError:
        return DAMAGED


class ProgressDisplay:
    """Prints the progress of a sweep, which it reads from the folders of the runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stream = SafeStream(sys.stderr)

    def start(self, plan: Plan, left: int, failed: Collection[int]) -> None:
        """Show the progress if packs are left; the supervisor adds to `failed`, the numbers of the failed packs."""
        self._plan, self._failed = plan, failed
        self._done = dict.fromkeys(range(len(plan.runs)), 0.0)
        self._started = self._printed = time.monotonic()
        self._work_before = self._read()
        if left:
            self.print(self._summary(self._work_before))

    def pack_ended(self, pack: Pack, outcome: PackOutcome, halves: Sequence[Pack]) -> None:
        """Show the outcome of a pack, and the halves that replace one that ran out of memory."""
        if outcome.cause != FINISHED:
            text = f"{outcome.cause}: {outcome.detail}"
        elif len(pack.runs) == 1:
            text = _outcome(self._folder, self._plan.runs_of(pack)[0])
        else:
            counts = Counter(_outcome(self._folder, run) for run in self._plan.runs_of(pack))
            text = ", ".join(f"{count} {state}" for state, count in counts.items())
        if halves:
            text += f"; split into packs {' and '.join(str(half.number) for half in halves)}"
        self.print(f"pack {pack.number} {label_of(self._plan, pack)}: {text}")

    def refresh(self) -> None:
        """Print the progress of the sweep every `EVERY_S`."""
        if time.monotonic() - self._printed >= EVERY_S:
            self._printed = time.monotonic()
            self.print(self._summary(self._read()))

    def print(self, line: str) -> None:
        self._stream.write(f"normlab: {printable(line)}\n")
        self._stream.flush()

    def _read(self) -> float:
        """Read the records of the runs that are not completed, and return the fraction of the work that is done."""
        completed_cost, total_cost = 0.0, 0
        for index, run in enumerate(self._plan.runs):
            # The record of a completed run does not change, and a sweep may have thousands of them.
            if self._done[index] < 1:
                self._done[index] = _fraction(self._folder, run)
            cost = _cost(run)
            completed_cost += self._done[index] * cost
            total_cost += cost
        return completed_cost / total_cost

    def _summary(self, work: float) -> str:
        completed = list(self._done.values()).count(1)
        percent = round(100 * work)
        # A run whose status.json is lost is not completed, though its rows end at its last step.
        if completed < len(self._done):
            percent = min(99, percent)
        parts = [f"{completed} completed", f"{percent}% of the work done"]
        if self._failed:
            parts.append(f"{counted(len(self._failed), 'pack')} failed")
        # By the pace of this command: nothing records how long the work before it took.
        gained = work - self._work_before
        if gained > 0:
            seconds = (1 - work) * (time.monotonic() - self._started) / gained
            parts.append(f"left {format_duration(seconds)}")
        return f"{counted(len(self._done), 'run')}: {', '.join(parts)}"


def _fraction(folder: Path, run: PlannedRun) -> float:
    """Return the fraction of a run that is done; 1 for a completed run."""
    if _outcome(folder, run) in OUTCOMES:
        return 1.0
    try:
        row = read_last_row(run_of(folder, run).metrics_path)
    except StoreError:
        return 0.0
    if row is None:
        return 0.0
    return min(0.99, row["step"] / max(1, run.config["train"]["steps"]))


def _cost(run: PlannedRun) -> float:
    """Return the relative cost of a run: its tokens times its weights."""
    model = run.config["model"]
    return max(1, tokens_of(run)) * model["width"] * (model["depth"] * 12 * model["width"] + 512)
