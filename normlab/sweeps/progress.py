"""Show the plan, the progress (on stderr) and the result of a sweep.

A terminal shows the progress as a live table; any other stream receives a line per event.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from normlab.config.memory import format_size
from normlab.config.sweep_options import SweepOptions
from normlab.errors import StoreError, printable
from normlab.report.runs_table import row_of
from normlab.report.tables import render
from normlab.store import format as record_format
from normlab.store.outcome import OUTCOMES, REGRESSED, STUCK, final_losses
from normlab.store.plans import (
    FAILURES,
    FINISHED,
    GPU_FAULT,
    INTERRUPTED,
    Pack,
    PackOutcome,
    Plan,
    PlannedRun,
    log_of,
    run_of,
)
from normlab.store.reading import read_last_row
from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder
from normlab.sweeps.plan import PlannedSweep, is_completed, threads_of, tokens_of
from normlab.tracking.console import SafeStream, format_duration

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

REFRESH_S = 0.5
"""Shortest time, in seconds, between two updates of the table."""
PLAIN_EVERY_S = 60.0
"""Time, in seconds, between two progress lines without a terminal."""
MOST_LINES = 30
"""Most packs or runs that a table shows completely; of more, a table shows those that run, failed, or are unusual."""
WAITING, RUNNING, STOPPED = "waiting", "running", "stopped"


def plan_lines(sweep: PlannedSweep, options: SweepOptions, *, with_packs: bool) -> Iterator[str]:
    """Yield a sweep's name, runs, packs, GPUs, jobs, memory, notes and tokens, and (`with_packs`) its open packs.

    Args:
        sweep: The plan and its folder, GPUs and memory.
        options: The options of the sweep.
        with_packs: Whether to list the open packs.
    """
    plan, folder, jobs = sweep.plan, sweep.folder, options.jobs or sweep.plan.parallel_packs
    left = {index for index, run in enumerate(plan.runs) if not is_completed(run_of(folder, run))}
    packs = [pack for pack in plan.packs if left.intersection(pack.runs)]
    completed = len(plan.runs) - len(left)
    yield f"sweep   {plan.name}"
    note = f" ({completed} completed already, not trained again)" if completed else ""
    yield f"runs    {len(plan.runs)}{note}"
    if left:
        largest = max((len(pack.runs) for pack in packs), default=0)
        size = f"up to {largest} runs" if largest > 1 else "one run each"
        yield f"packs   {len(packs)}, {size} (sweep.pack={plan.pack})"
    else:
        yield "packs   none: nothing is left to train"
    if packs and sweep.gpus:
        indices = ", ".join(str(gpu.index) for gpu in sweep.gpus)
        names = ", ".join(dict.fromkeys(gpu.name for gpu in sweep.gpus))
        yield f"gpus    {indices} ({names}), {_count(jobs, 'pack')} at once on each (sweep.jobs={jobs})"
    elif packs and options.on == "local":
        yield from _thread_lines(plan, jobs)
    if packs:
        yield f"memory  at least {format_size(max(map(sweep.pack_bytes, packs)))} for the largest pack"
    for note in [*plan.notes, *sweep.resolved_differences]:
        yield f"note    {note}"
    if left:
        yield f"tokens  {sum(tokens_of(plan.runs[index]) for index in left):,} to train on"
    if with_packs and packs:
        rows = [
            {
                "pack": pack.number,
                "runs": len(pack.runs),
                "tokens": f"{sum(map(tokens_of, plan.runs_of(pack))):,}",
                "memory": format_size(sweep.pack_bytes(pack)),
                "overrides": plan.label(pack),
            }
            for pack in packs
        ]
        yield from render(rows).split("\n")


def _thread_lines(plan: Plan, jobs: int) -> Iterator[str]:
    """Yield the packs that train at once on a CPU, and whether their threads differ from those of the plan."""
    here = threads_of(jobs)
    forced = "OMP_NUM_THREADS" in os.environ
    threads = here if forced or plan.threads is None else plan.threads
    if jobs > 1:
        yield f"jobs    {jobs} packs at once, {_count(threads, 'thread')} each (sweep.jobs={jobs})"
    if plan.threads not in (None, threads):
        yield (
            f"note    the sweep was planned with {_count(plan.threads, 'thread')} for each process, and "
            f"OMP_NUM_THREADS={here} changes the rounding of the runs that are left"
        )
    elif threads != here:
        yield (
            f"note    each process has {_count(threads, 'thread')} as planned, since bits depend on them; a new sweep "
            f"would have {here} here"
        )


def result_lines(plan: Plan, folder: Path, failed: Mapping[int, PackOutcome]) -> Iterator[str]:
    """Yield a table of the runs, the counts of outcomes, the failures, and suggested commands.

    With more than `MOST_LINES` runs, the table shows only failed, diverged, regressed, stuck and damaged runs, at most
    `MOST_LINES` of them.
    """
    failures = {index: failed[pack.number] for pack in plan.packs if pack.number in failed for index in pack.runs}
    rows = [_result_row(run_of(folder, run), run, failures.get(index)) for index, run in enumerate(plan.runs)]
    unusual = (*FAILURES, STUCK, REGRESSED, record_format.DIVERGED, record_format.DAMAGED)
    shown = rows
    if len(rows) > MOST_LINES and (shown := [row for row in rows if row["state"] in unusual]):
        more = f"; the first {MOST_LINES} are" if len(shown) > MOST_LINES else ""
        yield f"failed, diverged, regressed, stuck or damaged: {len(shown)} of {len(rows)} runs{more}:"
    if shown:
        yield from render(shown[:MOST_LINES]).split("\n")
    states = Counter[str]()
    for index, state in enumerate(row["state"] for row in rows):
        # A second Ctrl-C kills runs, but their packs have not failed.
        left = "failed" if index in failures else "left to train"
        states[state if state in (*OUTCOMES, record_format.DAMAGED) else left] += 1
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    yield f"{plan.name}: {_count(len(plan.runs), 'run')}, {counts}"
    for number, outcome in sorted(failed.items()):
        # A task of Slurm that ends before its pack starts has a log of its own, which the detail names.
        log = f" ({os.path.relpath(path)})" if (path := log_of(folder, number)).exists() else ""
        yield f"pack {number} {FAILURES[outcome.cause]}: {plan.label(plan.pack_of(number))}: {outcome.detail}{log}"
    if failed:
        yield "failed packs are skipped; the same command with --retry-failed retries them"
    if states["left to train"]:
        yield "the same command trains the remaining runs"
    yield f"normlab summarize {plan.name if folder.parent.parent == Path('results') else folder}"


def _result_row(run: RunFolder, planned: PlannedRun, failure: PackOutcome | None) -> dict[str, Any]:
    entry = RunRecord.read(run) if run.exists() else None
    row = row_of(entry) if entry else {}
    state, note = row.get("state", WAITING), entry.problem if entry else ""
    if failure is not None and state not in OUTCOMES:
        state, note = failure.cause, f"{FAILURES[failure.cause]}: {failure.detail}"
    return {
        "run": " ".join(planned.overrides) or planned.run_id,
        "id": planned.run_id,
        "state": "running elsewhere" if state == record_format.RUNNING else state,
        **{key: row.get(key) for key in ("step", "val_loss", "last_val_loss")},
        "steps": planned.config["train"]["steps"],
        "note": note,
    }


class PackProgress:
    """The progress of a pack, from the records of its runs (0 without a readable one).

    Args:
        folder: The folder of the sweep.
        plan: The plan of the sweep.
        pack: The pack; its runs have the same number of steps.
        state: waiting, running, stopped, finished, or one of `FAILURES`.
    """

    def __init__(self, folder: Path, plan: Plan, pack: Pack, state: str = WAITING) -> None:
        runs = plan.runs_of(pack)
        self.steps: int = runs[0].config["train"]["steps"]
        self.cost = sum(map(_cost, runs))
        """Relative cost of the whole pack: tokens times weights, summed over its runs."""
        self.label = plan.label(pack)
        self._runs = [run_of(folder, run) for run in runs]
        self.start(state)

    def start(self, state: str = RUNNING, gpu: int | None = None) -> None:
        """Set the state and the index of the GPU, and measure the speed from now on."""
        self.update()
        self._gpu, self.state, self._started, self._fraction_at_start = gpu, state, time.monotonic(), self.fraction

    def update(self) -> None:
        """Read the records of the runs."""
        progress = [_progress(run) for run in self._runs]
        self.outcomes = Counter(state for state, _, _ in progress if state in OUTCOMES)
        """Number of completed runs, by outcome."""
        self.unusual = Counter({outcome: count for outcome, count in self.outcomes.items() if outcome != FINISHED})
        """Number of runs with an outcome other than finished, by outcome."""
        steps = [self.steps if state in OUTCOMES else step for state, step, _ in progress]
        self.step = sum(steps) / len(steps)
        """Mean number of steps done over the runs; all steps for a completed run."""
        self.fraction = self.step / self.steps if self.steps else self.outcomes.total() / len(progress)
        """Fraction of the work that is done, 0 to 1."""
        self.loss = progress[0][2] if len(progress) == 1 else None
        """Latest validation loss, in nats/token; None for several runs or a diverged one."""

    @property
    def gained(self) -> float:
        """Fraction of the work done since the pack started."""
        return self.fraction - self._fraction_at_start

    @property
    def status(self) -> str:
        """State, GPU while the pack runs, step and validation loss as text."""
        parts = [FAILURES.get(self.state, self.state)]
        if len(self._runs) == 1:
            parts = list(self.unusual) or parts
        else:
            parts += [f"{count} of {len(self._runs)} {outcome}" for outcome, count in self.unusual.items()]
        if self.state == RUNNING and self._gpu is not None:
            parts.append(f"GPU {self._gpu}")
        if self.state not in (WAITING, FINISHED):
            parts.append(f"step {self.step:.0f}/{self.steps}")
        if self.state == FINISHED and self.loss is not None:
            parts.append(f"val {self.loss:.4f}")
        return "  ".join(parts)

    @property
    def seconds_left(self) -> float:
        """Estimated time left of a running pack, seconds; 0 if unknown."""
        return _seconds_left(self.gained, 1 - self.fraction, self._started) if self.state == RUNNING else 0.0


class ProgressDisplay:
    """Shows the progress of a sweep, which it reads from the folders of the runs.

    Args:
        folder: The folder of the sweep.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._packs: dict[int, PackProgress] = {}
        self._completed_before = 0
        self._started = self._drawn_at = time.monotonic()
        self._live: Live | None = None
        self._stream = SafeStream(sys.stderr)

    def start(self, plan: Plan, packs: Sequence[Pack], failed: Mapping[int, PackOutcome]) -> None:
        """Show the packs to train and the failed packs; on a terminal, start the table.

        Args:
            plan: The plan of the sweep; all packs that are in neither argument below are completed.
            packs: The packs to train.
            failed: Outcomes of the packs that failed earlier, by number.
        """
        states = dict.fromkeys((pack.number for pack in packs), WAITING)
        states |= {number: outcome.cause for number, outcome in failed.items()}
        for pack in plan.packs:
            if pack.number in states:
                self._packs[pack.number] = PackProgress(self._folder, plan, pack, states[pack.number])
        self._completed_before = len(plan.packs) - len(states)
        if packs and self._stream.is_terminal():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(self._table(), console=Console(file=cast("TextIO", self._stream)), auto_refresh=False)
            self._live.start()
        elif packs:
            self.print(self._summary())

    def pack_started(self, number: int, gpu: int | None = None) -> None:
        """Show that a pack runs, and the index of its GPU if it has one."""
        self._packs[number].start(gpu=gpu)

    def pack_requeued(self, number: int) -> None:
        """Show that a pack that has run waits again; without a terminal, print a line."""
        pack = self._packs[number]
        pack.start(WAITING)
        if self._live is None:
            self.print(f"pack {number} {pack.label}: queued again at step {pack.step:.0f}/{pack.steps}")

    def pack_ended(self, plan: Plan, outcome: PackOutcome, halves: Sequence[Pack]) -> None:
        """Show the outcome of a pack; without a terminal, print a line.

        Args:
            plan: The plan, with the halves.
            outcome: The outcome.
            halves: The packs that replace a pack that ran out of memory.
        """
        pack = self._packs[outcome.pack]
        # After a fault of its GPU, the pack waits for another one.
        pack.state = {GPU_FAULT: WAITING, INTERRUPTED: STOPPED}.get(outcome.cause, outcome.cause)
        pack.update()
        if halves:
            del self._packs[outcome.pack]
            self._packs |= {half.number: PackProgress(self._folder, plan, half) for half in halves}
        if self._live is None or halves:
            detail = f": {outcome.detail}" if outcome.detail else ""
            split = f"; split into packs {' and '.join(str(half.number) for half in halves)}" if halves else ""
            self.print(f"pack {outcome.pack} {pack.label}: {pack.status}{detail}{split}")

    def refresh(self) -> None:
        """Update the table every `REFRESH_S`, or print a progress line every `PLAIN_EVERY_S`."""
        now = time.monotonic()
        if now - self._drawn_at < (PLAIN_EVERY_S if self._live is None else REFRESH_S):
            return
        self._drawn_at = now
        running = [pack for pack in self._packs.values() if pack.state == RUNNING]
        for pack in running:
            pack.update()
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        else:
            self.print("; ".join([self._summary(), *(f"{pack.label} {pack.status}" for pack in running)]))

    def print(self, line: str) -> None:
        """Print a line: above the table on a terminal, else on stderr."""
        line = printable(line)
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False)
        else:
            self._stream.write(f"normlab: {line}\n")
            self._stream.flush()

    def finish(self) -> None:
        """Show the final state and stop the table."""
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            self._live.stop()
            self._live = None

    def _table(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 2, 0, 0), caption_justify="left")
        for heading in ("pack", "runs", "", "progress", "left"):
            table.add_column(heading, no_wrap=heading != "runs")
        for number, pack in self._packs.items():
            is_quiet = pack.state in (WAITING, FINISHED, STOPPED) and not pack.unusual
            if len(self._packs) <= MOST_LINES or not is_quiet:
                bar = ProgressBar(total=1.0, completed=pack.fraction, width=20)
                label, left = Text(printable(pack.label)), _duration(pack.seconds_left)
                table.add_row(str(number), label, bar, Text(pack.status), left)
        table.caption = Text(self._summary())
        return table

    def _summary(self) -> str:
        """Return as text the packs by state, the unusual outcomes and the time left."""
        packs = self._packs.values()
        states = Counter("failed" if pack.state in FAILURES else pack.state for pack in packs)
        states["completed"] = states.pop(FINISHED, 0) + self._completed_before
        order = ("completed", RUNNING, "failed", STOPPED, WAITING)
        parts = [f"{states[state]} {state}" for state in order if states[state]]
        outcomes = sum((pack.unusual for pack in packs), Counter[str]())
        parts += [f"{_count(count, 'run')} {outcome}" for outcome, count in outcomes.items()]
        gained = sum(pack.gained * pack.cost for pack in packs)
        left = sum((1 - pack.fraction) * pack.cost for pack in packs if pack.state in (WAITING, RUNNING))
        # The sweep ends with its slowest pack, which may be slower than those before it.
        seconds = max([_seconds_left(gained, left, self._started), *(pack.seconds_left for pack in packs)])
        if seconds:
            parts[-1] += f"; left {_duration(seconds)}"
        return f"{_count(self._completed_before + len(packs), 'pack')}: " + ", ".join(parts)


def _seconds_left(gained: float, left: float, started: float) -> float:
    """Return the estimated seconds for the work `left` at the speed so far; 0 if unknown."""
    return left * (time.monotonic() - started) / gained if gained > 0 else 0.0


def _duration(seconds: float) -> str:
    return format_duration(seconds) if seconds else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _progress(run: RunFolder) -> tuple[str, float, float | None]:
    """Return a run's outcome or state, its number of updates, and its latest validation loss."""
    try:
        if not run.exists():
            return "", 0, None
        status, row = run.read_status(), read_last_row(run.metrics_path)
    except StoreError:
        return "", 0, None
    # The step of a training row counts from 0; the step of any other row is the number of updates so far.
    step = row["step"] + (row["kind"] == "train") if row else 0
    state = status.outcome or status.state
    return state, step, final_losses(state, status.val_loss)[0]


def _cost(run: PlannedRun) -> float:
    model = run.config["model"]
    return tokens_of(run) * model["width"] * (model["depth"] * 12 * model["width"] + 512)
