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
from normlab.sweeps.files import PackOutcome, log_of
from normlab.sweeps.plan import PlannedSweep, threads_of, tokens_of
from normlab.sweeps.stored_plan import is_completed
from normlab.tracking.console import SafeStream, format_duration

EVERY_S = 60.0
"""Time, in seconds, between two lines on the progress of the sweep."""


def plan_lines(sweep: PlannedSweep, options: SweepOptions, *, with_packs: bool) -> Iterator[str]:
    """Yield a sweep's name, runs, packs, GPUs, jobs, notes and tokens, and (`with_packs`) its open packs."""
    plan, jobs = sweep.plan, options.jobs or sweep.plan.parallel_packs
    left = {index for index, run in enumerate(plan.runs) if not is_completed(run_of(sweep.folder, run))}
    packs = [pack for pack in plan.packs if left.intersection(pack.runs)]
    completed = len(plan.runs) - len(left)
    yield f"sweep   {plan.name}"
    yield f"runs    {len(plan.runs)}" + (f" ({completed} completed already, not trained again)" if completed else "")
    yield from (f"note    {note}" for note in plan.notes)
    if not packs:
        yield "packs   none: nothing is left to train"
        return
    largest = max(len(pack.runs) for pack in packs)
    size = f"up to {largest} runs" if largest > 1 else "one run each"
    yield f"packs   {len(packs)}, {size} (sweep.pack={plan.pack})"
    if sweep.gpus:
        indices = ", ".join(str(gpu.index) for gpu in sweep.gpus)
        names = ", ".join(dict.fromkeys(gpu.name for gpu in sweep.gpus))
        yield f"gpus    {indices} ({names}), {counted(jobs, 'pack')} at once on each (sweep.jobs={jobs})"
    elif options.on == "local" and jobs > 1:
        threads = threads_of(jobs) if "OMP_NUM_THREADS" in os.environ else plan.threads or threads_of(jobs)
        yield f"jobs    {jobs} packs at once, {counted(threads, 'thread')} each (sweep.jobs={jobs})"
    yield f"tokens  {sum(tokens_of(plan.runs[index]) for index in left):,} to train on"
    for pack in packs if with_packs else ():
        yield f"pack {pack.number:<3} {label_of(plan, pack)}"


def label_of(plan: Plan, pack: Pack) -> str:
    """Return the overrides (or the id) of a pack's first run, and the number of other runs."""
    first, *others = plan.runs_of(pack)
    return (" ".join(first.overrides) or first.run_id) + (f" and {len(others)} more" if others else "")


def result_lines(plan: Plan, folder: Path, failed: Mapping[int, PackOutcome]) -> Iterator[str]:
    failures = {index for pack in plan.packs if pack.number in failed for index in pack.runs}
    states = Counter[str]()
    for index, run in enumerate(plan.runs):
        state = _outcome(folder, run)
        # A second Ctrl-C kills runs, but their packs have not failed.
        states[state or ("failed" if index in failures else "left to train")] += 1
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    yield f"{plan.name}: {counted(len(plan.runs), 'run')}, {counts}"
    for pack_number, outcome in sorted(failed.items()):
        # A task of Slurm that ends before its pack starts has a log of its own, which the detail names.
        log = f" ({os.path.relpath(path)})" if (path := log_of(folder, pack_number)).exists() else ""
        label = label_of(plan, plan.pack_of(pack_number))
        yield f"pack {pack_number} {outcome.cause}: {label}: {outcome.detail}{log}"
    if failed:
        yield "failed packs are skipped; the same command with --retry-failed retries them"
    if states["left to train"]:
        yield "the same command trains the remaining runs"
    name = plan.name if folder.parent.parent == Path("results") else folder
    test = " --test anytime" if plan.design.baseline else ""
    yield f"normlab summarize {name}{test}"


def _outcome(folder: Path, run: PlannedRun) -> str:
    """Return the outcome of a completed run, "damaged" for one that cannot be read, and "" for any other."""
    try:
        record = run_of(folder, run)
        if not record.exists():
            return ""
        status = record.read_status()
        # A run that diverged in a pack which trains on has that state before it has an outcome.
        return status.outcome or (DIVERGED if status.state == DIVERGED else "")
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
        counts = Counter(_outcome(self._folder, run) for run in self._plan.runs_of(pack))
        outcomes = ", ".join(f"{count} {state}" if len(pack.runs) > 1 else state for state, count in counts.items())
        cause = outcomes if outcome.cause == FINISHED else f"{outcome.cause}: {outcome.detail}"
        split = f"; split into packs {' and '.join(str(half.number) for half in halves)}" if halves else ""
        self.print(f"pack {pack.number} {label_of(self._plan, pack)}: {cause}{split}")

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
        for index, run in enumerate(self._plan.runs):
            if self._done[index] < 1:
                self._done[index] = _fraction(self._folder, run)
        costs = [_cost(run) for run in self._plan.runs]
        return sum(self._done[index] * cost for index, cost in enumerate(costs)) / sum(costs)

    def _summary(self, work: float) -> str:
        completed = sum(fraction == 1 for fraction in self._done.values())
        # A run whose status.json is lost is not completed, though its rows end at its last step.
        percent = round(100 * work) if completed == len(self._done) else min(99, round(100 * work))
        parts = [f"{completed} completed", f"{percent}% of the work done"]
        if self._failed:
            parts.append(f"{counted(len(self._failed), 'pack')} failed")
        if (gained := work - self._work_before) > 0:
            parts.append(f"left {format_duration((1 - work) * (time.monotonic() - self._started) / gained)}")
        return f"{counted(len(self._done), 'run')}: {', '.join(parts)}"


def _fraction(folder: Path, run: PlannedRun) -> float:
    """Return the fraction of a run that is done; 1 for a completed run."""
    if _outcome(folder, run) in OUTCOMES:
        return 1.0
    try:
        row = read_last_row(run_of(folder, run).metrics_path)
    except StoreError:
        return 0.0
    return min(0.99, (row["step"] if row else 0) / max(1, run.config["train"]["steps"]))


def _cost(run: PlannedRun) -> float:
    """Return the relative cost of a run: its tokens times its weights."""
    model = run.config["model"]
    return max(1, tokens_of(run)) * model["width"] * (model["depth"] * 12 * model["width"] + 512)
