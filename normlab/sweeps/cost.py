"""What the plan of a sweep will cost: weights, FLOPs, memory, disk and time.

Weights and FLOPs are closed forms of the config. Memory, disk and time are the medians of equal packs that this machine
has trained. Where there are none, memory and disk are lower bounds, and the time is not known.
"""

import heapq
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from normlab.base.errors import StoreError, counted
from normlab.config.memory import format_size, num_embeddings, num_weights
from normlab.config.schema import RunConfig
from normlab.config.train import FOLDER_OF_WEIGHTS, LOG
from normlab.model.flops import flops_per_token
from normlab.store.files import size_of
from normlab.store.plans import run_of
from normlab.store.query import sweep_folders
from normlab.sweeps.files import PackOutcome, read_outcomes
from normlab.sweeps.measured_packs import PackMeasurement, evaluation_steps, evaluations, kind_beside, kind_of
from normlab.sweeps.plan import PlannedSweep, ResolvedRun, packs_at_once
from normlab.sweeps.stored_plan import is_completed
from normlab.tracking.console import format_duration
from normlab.training.optim import kept_step

BYTES = 4
"""Of a weight or a moment in a checkpoint: float32."""


@dataclass(frozen=True, slots=True)
class EqualPacks:
    """Packs of one kind that were measured."""

    median: PackMeasurement
    """The median of each number."""
    count: int
    are_rehearsed: bool = False
    """Whether only their first steps were trained, by --measure."""

    @classmethod
    def of(cls, measurements: Sequence[PackMeasurement], *, are_rehearsed: bool = False) -> "EqualPacks":
        numbers: dict[str, list[Any]] = {}
        for measurement in measurements:
            for name, value in asdict(measurement).items():
                # Only packs that were the first of their process say how long its start takes.
                if value is not None and (name, value) != ("start_seconds", 0.0):
                    numbers.setdefault(name, []).append(value)
        kind = measurements[0].kind
        del numbers["kind"]
        medians = {name: median(values) for name, values in numbers.items()}
        return cls(PackMeasurement(kind=kind, **medians), len(measurements), are_rehearsed)


def recorded_packs(results_dir: str | Path) -> dict[str, EqualPacks]:
    """Return the measured packs on record in a results folder, by their kind (`kind_beside`)."""
    by_kind: dict[str, list[PackMeasurement]] = {}
    for _, measurement in _measurements(results_dir):
        by_kind.setdefault(measurement.kind, []).append(measurement)
    return {kind: EqualPacks.of(measurements) for kind, measurements in by_kind.items()}


def recorded_errors(results_dir: str | Path) -> list[float]:
    """Return the time of each pack on record that had a forecast, relative to the forecast; the smallest first."""
    ratios: list[float] = []
    for outcome, measurement in _measurements(results_dir):
        if outcome.forecast_seconds:
            ratios.append(measurement.seconds / outcome.forecast_seconds)
    return sorted(ratios)


def _measurements(results_dir: str | Path) -> list[tuple[PackOutcome, PackMeasurement]]:
    """Return each measured pack of a results folder, with its outcome; leave out what cannot be read."""
    outcomes: list[PackOutcome] = []
    with suppress(StoreError):
        for folder in sweep_folders(results_dir):
            # The command that trains the sweep warns about its lines.
            with suppress(StoreError):
                outcomes += read_outcomes(folder, warns=False)
    return [(outcome, outcome.measured) for outcome in outcomes if outcome.measured is not None]


@dataclass(frozen=True, slots=True)
class PackCost:
    """The cost of a pack that is left to train."""

    number: int
    """The number of the pack."""
    runs: list[ResolvedRun]
    kind: str
    """`kind_beside` the other packs."""
    packs_at_once: int
    equal: EqualPacks | None
    """The equal packs that were measured; None without any."""
    steps: int
    """Steps that each run has left."""
    written_bytes: int
    """What the runs have written before."""

    @property
    def config(self) -> RunConfig:
        """The config of the first run, for what all runs of a pack share."""
        return self.runs[0].config

    @property
    def seconds(self) -> float | None:
        """The time in its process, without the start of the process; None if it is not known."""
        if self.equal is None:
            return None
        count = evaluations(self.steps, self.config.eval.every)
        if self.steps < self.config.train.steps:
            # It was evaluated before its first step then.
            count -= 1
        steps = self.steps + count * evaluation_steps(self.config)
        return self.equal.median.fixed_seconds + steps * self.equal.median.seconds_per_step

    @property
    def start_seconds(self) -> float:
        """The time until a new process trains it; 0 if that is not known."""
        return self.equal.median.start_seconds if self.equal is not None else 0.0

    @property
    def needs_new_process(self) -> bool:
        """Whether no process trains another pack before or after it (`Worker.is_reusable`)."""
        return bool(self.config.plugins) or self.config.devices > 1

    @property
    def memory_bytes(self) -> float:
        """Peak memory; a lower bound if it is not known."""
        bound = self.runs[0].peak_of(len(self.runs))
        if self.equal is None:
            return bound
        return max(bound, self.equal.median.memory_bytes or 0)

    @property
    def disk_bytes(self) -> float:
        """What the runs will write; a lower bound if it is not known."""
        config, vocab_size = self.config, self.runs[0].vocab_size
        bytes_of_run = count_kept(config) * BYTES * num_weights(config, vocab_size)
        if self.equal is None:
            bytes_of_run += count_checkpoints(config) * _least_checkpoint(config, vocab_size)
        else:
            equal = self.equal.median
            bytes_of_run += equal.fixed_bytes + equal.bytes_per_step * config.train.steps
            bytes_of_run += count_checkpoints(config) * equal.checkpoint_bytes
        return max(0.0, len(self.runs) * bytes_of_run - self.written_bytes)


def count_checkpoints(config: RunConfig) -> int:
    """Return the checkpoints that a run leaves: the two newest, and the one before the decay of a wsd schedule."""
    steps, every = config.train.steps, config.train.checkpoint_every
    saved = {steps}
    if every:
        # Of those before the last step, only the newest stays.
        saved.add((steps - 1) // every * every)
    before_decay = kept_step(config.optim, steps)
    if before_decay is not None:
        newest = sorted({*saved, before_decay})[-2:]
        saved = {*newest, before_decay}
    # There is none before the first step.
    return len(saved - {0})


def count_kept(config: RunConfig) -> int:
    """Return how often the weights of a run are kept (`train.keep`)."""
    if config.train.keep == LOG:
        # After 0, 1, 2, 4, 8, ... updates.
        return 1 + config.train.steps.bit_length()
    return len(config.train.keep)


def _least_checkpoint(config: RunConfig, vocab_size: int) -> int:
    """Return the bytes of the weights, their moments and their mean, without norms and biases."""
    embeddings = num_embeddings(config, vocab_size)
    matrices = num_weights(config, vocab_size) - embeddings
    copies = 1 if config.eval.ema is None else 2
    numbers = (copies + config.optim.of_group("matrices").kept) * matrices
    numbers += (copies + config.optim.of_group("embed").kept) * embeddings
    return BYTES * numbers


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of the packs of a plan that are left to train."""

    sweep: PlannedSweep
    packs: list[PackCost]

    @property
    def seconds(self) -> float | None:
        """The time of all packs on this machine; None if it is not known."""
        if self.sweep.options.on == "slurm":
            return None
        at_once = min((pack.packs_at_once for pack in self.packs), default=1)
        # For each place: when its process has ended a pack, and whether it can train another.
        places = [(0.0, False)] * at_once
        # As the supervisor does: the next pack starts where one has ended.
        for pack in self.packs:
            if pack.seconds is None:
                return None
            end, has_process = places[0]
            if not has_process or pack.needs_new_process:
                end += pack.start_seconds
            heapq.heapreplace(places, (end + pack.seconds, not pack.needs_new_process))
        return max(end for end, _ in places)

    def lines(self) -> Iterator[str]:
        """Yield a line each for tokens, weights, FLOPs, memory, disk and time."""
        weights: set[int] = set()
        tokens, flops = 0, 0.0
        for pack in self.packs:
            for run in pack.runs:
                weights.add(run.config.model.block_weights)
                tokens_of_run = pack.steps * run.config.train.batch_size * run.config.model.context
                tokens += tokens_of_run
                flops += flops_per_token(run.config, run.vocab_size) * tokens_of_run
        steps = {pack.steps for pack in self.packs}
        yield f"tokens  {tokens:,} to train on, in {_range(steps)} steps of each run"
        yield f"weights {_range(weights)} in attention and MLPs of each model"
        yield f"compute {flops:.2e} FLOPs in training steps"
        about = "about" if all(pack.equal is not None for pack in self.packs) else "at least"
        yield f"memory  {about} {self._memory()}"
        yield f"disk    {about} {self._disk()}"
        yield f"time    {self._time()}"

    def _memory(self) -> str:
        largest = max(self.packs, key=lambda pack: pack.memory_bytes)
        device = largest.runs[0].machine.device
        gpu_bytes = min((gpu.memory_bytes for gpu in self.sweep.gpus), default=0)
        limit = self.sweep.options.pack_memory(device, gpu_bytes, self.sweep.jobs)
        # A bound counts no torch and no corpus.
        counted_bytes = "for the tensors of" if largest.equal is None else "in"
        needed = f"{format_size(int(largest.memory_bytes))} {counted_bytes} the largest process"
        return f"{needed}; each may have {format_size(limit)}"

    def _disk(self) -> str:
        needed = sum(pack.disk_bytes for pack in self.packs)
        folder = self.sweep.folder.absolute()
        # The first run makes the results folder.
        while not os.path.exists(folder):
            folder = folder.parent
        return f"{format_size(int(needed))}; {format_size(shutil.disk_usage(folder).free)} are free"

    def _time(self) -> str:
        if self.sweep.options.on == "slurm":
            return "not known, because other machines train the packs"
        seconds = self.seconds
        if seconds is None:
            unknown = counted(sum(pack.equal is None for pack in self.packs), "pack")
            return f"not known: no equal pack on record for {unknown}; `normlab sweep` with --measure times a few steps"
        on_record = rehearsed = 0
        for equal in {pack.kind: pack.equal for pack in self.packs}.values():
            if equal is not None and equal.are_rehearsed:
                rehearsed += equal.count
            elif equal is not None:
                on_record += equal.count
        bases: list[str] = []
        if on_record:
            bases.append(f"{counted(on_record, 'equal pack')} on record")
        if rehearsed:
            bases.append(f"the first steps of {counted(rehearsed, 'pack')}")
        return f"about {format_duration(seconds)}, by {' and '.join(bases)}"


def _range(numbers: set[int]) -> str:
    """Return the smallest and the largest number as text; one if they are equal."""
    if len(numbers) == 1:
        return f"{min(numbers):,}"
    return f"{min(numbers):,} to {max(numbers):,}"


def cost_of(sweep: PlannedSweep, measured: Mapping[str, EqualPacks], skipped: Collection[int] = ()) -> Cost:
    """Return the cost of the packs that are left to train.

    Args:
        sweep: The plan.
        measured: The packs of each kind that were measured, as `recorded_packs`.
        skipped: The numbers of packs that are not to be trained.
    """
    packs: list[PackCost] = []
    for pack in sweep.plan.packs:
        runs = [sweep.resolved[sweep.plan.runs[index].run_id] for index in pack.runs]
        folders = [run_of(sweep.folder, run.planned) for run in runs]
        if pack.number in skipped or all(map(is_completed, folders)):
            continue
        # They resume from the newest checkpoint that all have.
        resumed_step = min(folder.read_status().checkpoint or 0 for folder in folders)
        config = runs[0].config
        steps = config.train.steps - max(resumed_step, _first_step(config))
        kind, at_once = _kind_of(sweep, runs)
        written = sum(size_of(folder.path) for folder in folders)
        packs.append(PackCost(pack.number, runs, kind, at_once, measured.get(kind), max(0, steps), written))
    return Cost(sweep, packs)


def _first_step(config: RunConfig) -> int:
    """Return the step from which a new run starts: that of the other run's checkpoint, or 0."""
    start = config.train.start_from
    if start is None or FOLDER_OF_WEIGHTS.fullmatch(start):
        return 0
    return int(start.rpartition("@")[2])


def _kind_of(sweep: PlannedSweep, runs: Sequence[ResolvedRun]) -> tuple[str, int]:
    """Return the kind of a pack, and how many packs train at once."""
    config, machine = runs[0].config, runs[0].machine
    if sweep.options.on == "slurm":
        return kind_beside(kind_of(config, machine, sweep.options.slurm.cpus, len(runs)), 1), 1
    threads = sweep.threads
    # The processes of a run on a CPU share its threads.
    if machine.device == "cpu":
        threads = max(1, threads // config.devices)
    at_once = packs_at_once(sweep.jobs, len(sweep.gpus), config.devices)
    return kind_beside(kind_of(config, machine, threads, len(runs)), at_once), at_once
