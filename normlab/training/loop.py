"""The training loop of one run or of a pack: batches, step, record; evaluations and checkpoints when they are due.

Between two steps the order is fixed: write the record, evaluate, save a checkpoint, check for a request to stop. A
checkpoint therefore knows the exact length of the record, and a resume repeats nothing. A thread writes, in that order
(`writer.py`): record and checkpoints are copied where the loop waits for the device anyway, and the next steps are
taken while the disk works.

The runs of a pack are one stacked computation and take every step together; each has its own record. A run that
diverges is frozen and stays in the stack, so the numbers of the others do not change.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from normlab.catalogue.statistics.profiles import Profiles
from normlab.catalogue.statistics.statistic import CORE
from normlab.config.schema import RunConfig
from normlab.store.format import DIVERGED, RUNNING
from normlab.store.status import Status
from normlab.system.process_memory import PeakMemory
from normlab.system.ranks import Ranks
from normlab.training.graph import ComputeStep
from normlab.training.machine import RuntimeSettings
from normlab.training.measure.core import Measurement
from normlab.training.measure.schedule import StatisticsSchedule
from normlab.training.optim import kept_step
from normlab.training.signals import StopRequest
from normlab.training.state import TrainingState
from normlab.training.step import StepOutput
from normlab.training.step_inputs import StepInputs
from normlab.training.training_run import TrainingRun
from normlab.training.writer import Writer

AGREE_EVERY = 10
"""Steps after which ranks on GPUs agree whether to stop."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a loop is made of (`build.py`)."""

    inputs: StepInputs
    compute_step: ComputeStep
    """Computes the step whose inputs are loaded; the argument says whether it is measured."""
    evaluate: Callable[[], Mapping[str, Sequence[float]]]
    """Returns the validation losses of each run, by name."""
    measure_initialisation: Callable[[], Measurement | None]
    """Returns the core statistics of the first batch, for a run of no steps."""
    schedule: StatisticsSchedule
    state: TrainingState
    groups: Mapping[str, str]
    """The group of each parameter, by its name."""
    writer: Writer
    peak_memory: PeakMemory


class _Due(NamedTuple):
    """What is due after a step, besides the next one."""

    evaluation: bool
    checkpoint: bool
    weights: bool
    """Whether the weights are kept (`train.keep`)."""
    record: bool
    """Whether the pending steps are written; anything else that is due writes them too."""


class Loop:
    """Trains a single run, or the runs of a pack, from their progress to their last step."""

    def __init__(self, runs: Sequence[TrainingRun], settings: RuntimeSettings, parts: Parts) -> None:
        self.runs, self.settings, self.parts = runs, settings, parts
        self.state = parts.state
        self.ranks = Ranks.current()
        """The ranks that train the run together; a pack has one."""
        self._pending: list[StepOutput] = []
        """The outputs of steps whose rows are not recorded yet."""

    @property
    def config(self) -> RunConfig:
        """The first run's config, for the options that all runs of a pack share."""
        return self.runs[0].config

    @property
    def is_single(self) -> bool:
        """Whether this is one run, which has no axis of runs."""
        return len(self.runs) == 1

    @property
    def active(self) -> list[TrainingRun]:
        """The runs that have not diverged."""
        return [run for run in self.runs if run.diverged is None]

    def run(self, stop: StopRequest) -> str:
        """Train until the last step, a stop request, or the divergence of every run.

        Returns:
            finished, interrupted, or diverged (every run); `TrainingRun.diverged` tells which runs of a pack did.
        """
        state, schedule, steps = self.state, self.parts.schedule, self.config.train.steps
        if not self.active:  # killed after that checkpoint and before the last status
            return "diverged"

        # Before the first step.
        self._record_start()
        stopping, start = self._is_stopping(stop), time.perf_counter()

        while state.step_count < steps and not stopping:
            # Statistics between steps. The record was written before, so no step is timed from here.
            if schedule.is_due(state.step_count):
                self._record_passes(schedule.passes(state.step_count))
                start = time.perf_counter()

            # One step. Its output stays on the device until something is due: to read it, the host waits for a GPU.
            self._pending.append(self.take_step(state.step_count))
            state.step_count += 1
            due = self._due_after(state.step_count)
            # Several ranks must stop after the same step. To agree on it, the host waits for a GPU.
            agrees = self.ranks.count == 1 or self.settings.device == "cpu" or state.step_count % AGREE_EVERY == 0
            stopping = (any(due) or agrees) and self._is_stopping(stop)
            if not any(due) and not stopping:
                continue

            # Write the record.
            active_before = len(self.active)
            self._record_pending(start)
            if len(self.active) < active_before:
                state.save()  # of all runs: the others can resume from the step at which one was frozen
                if not self.active:
                    return "diverged"
                self._write_status()
            if due.weights:
                state.keep_weights()

            # Evaluate.
            if due.evaluation:
                self._evaluate()
            if state.step_count == steps:
                self._record_passes(schedule.probe_if_due(steps))

            # Save a checkpoint.
            if due.checkpoint:
                state.save()
            if due.evaluation or due.checkpoint:
                self._write_status()

            # Check for a request to stop: a signal may have arrived during the evaluation or the save.
            if self.ranks.count == 1:
                stopping = self._is_stopping(stop)
            start = time.perf_counter()

        state.save()
        return "finished" if state.step_count == steps else "interrupted"

    def take_step(self, step: int) -> StepOutput:
        """Take the step after `step` updates; its measurements stay on the device."""
        self.parts.inputs.load(step)
        return self.parts.compute_step(self.parts.schedule.is_measured(step))

    def status(self, run: TrainingRun, state: str) -> Status:
        return run.status(state, self.parts.peak_memory.num_bytes())

    # What is due.

    def _due_after(self, step: int) -> _Due:
        """Return what is due after `step` updates."""
        config = self.config
        is_last = step == config.train.steps
        evaluation = is_last or (config.eval.every > 0 and step % config.eval.every == 0)
        # Runs of other lengths can start from the checkpoint before the decay of the learning rate.
        before_decay = {kept_step(run.config.optim, config.train.steps) for run in self.runs}
        checkpoint_every = config.train.checkpoint_every
        checkpoint = is_last or step in before_decay or (checkpoint_every > 0 and step % checkpoint_every == 0)
        record = len(self._pending) == config.train.log_every or self.parts.schedule.is_due(step)
        return _Due(evaluation, checkpoint, config.train.keeps(step), record)

    def _is_stopping(self, stop: StopRequest) -> bool:
        """Return whether any rank has received a signal."""
        return self.ranks.any(stop.received is not None, self.settings.torch_device)

    # The record.

    def _record_start(self) -> None:
        """Record a new run's loss before its first step; of a run of no steps also the statistics."""
        is_new = any(run.progress.val_loss is None for run in self.active)
        if is_new:
            self._evaluate()
        self._write_status()
        if self.config.train.steps == 0 and is_new:
            self._record_passes(self.parts.schedule.passes(0))
            measurement = self.parts.measure_initialisation()
            if measurement is not None:
                self._record_measurement(CORE, 0, measurement)
        if self.state.step_count == 0 and self.config.train.keeps(0):
            self.state.keep_weights()

    def _record_pending(self, start: float) -> None:
        """Copy the measurements of the pending steps from the device, at once, and add them to the record.

        Args:
            start: When the host started the first of these steps.
        """
        run_count, step_count = len(self.runs), len(self._pending)
        first = self.state.step_count - step_count

        # One copy for all numbers of all steps: four of each run, then the statistics of measured steps.
        measured = {step: out.measured for step, out in enumerate(self._pending, first) if out.measured is not None}
        parts = [out.scalars.flatten() for out in self._pending]
        parts += [measurement.values.flatten() for measurement in measured.values()]
        numbers = torch.cat(parts).cpu()
        seconds = time.perf_counter() - start  # after the copy: until then, a GPU still computes the steps
        scalars_SKR = numbers[: 4 * run_count * step_count].view(-1, 4, run_count)
        statistics_KR = numbers[scalars_SKR.numel() :].numpy().reshape(-1, run_count)

        # The rows of each run. Its interval of steps ends with its pace.
        tokens = step_count * self.config.train.batch_size * self.config.model.context
        for index, run in enumerate(self.runs):
            if run.diverged is not None:
                continue
            rows = run.add_steps(first, scalars_SKR[..., index].tolist())
            run.progress.seconds += seconds
            # The statistics first: a reader that sees the last row of an interval finds all its numbers.
            for profiles in self._profiles(run, measured, statistics_KR[:, index]):
                run.record_statistics(CORE, profiles)
            pace = {"kind": "pace", "step": run.progress.step, "seconds": run.progress.seconds}
            run.record_rows([*rows, {**pace, "tokens_per_s": tokens / max(seconds, 1e-9)}])
        self._pending.clear()

    def _profiles(
        self, run: TrainingRun, measured: Mapping[int, Measurement], values: np.ndarray[Any, Any]
    ) -> Iterator[Profiles]:
        """Yield the core statistics of a run's measured steps, up to the step that diverged."""
        for step, measurement in measured.items():
            if run.diverged is None or step <= run.progress.step:
                columns = measurement.columns
                yield self.parts.schedule.profiles(step, columns, values[: len(columns)])
            values = values[len(measurement.columns) :]

    def _record_passes(self, passes: Iterable[tuple[str, Measurement]]) -> None:
        """Record the statistics of passes between steps, each before the next one is made."""
        for tier, measurement in passes:
            self._record_measurement(tier, self.state.step_count, measurement)

    def _record_measurement(self, tier: str, step: int, measurement: Measurement) -> None:
        """Record the statistics after `step` updates, of each run that has not diverged."""
        values_KR = measurement.values.cpu().numpy().reshape(-1, len(self.runs))
        for index, run in enumerate(self.runs):
            if run.diverged is None:
                profiles = self.parts.schedule.profiles(step, measurement.columns, values_KR[:, index])
                run.record_statistics(tier, profiles)

    def _evaluate(self) -> None:
        losses = self.parts.evaluate()
        for index, run in enumerate(self.runs):
            if run.diverged is None:
                run.record_evaluation({name: by_run[index] for name, by_run in losses.items()})

    def _write_status(self) -> None:
        jobs: list[Callable[[], None]] = []
        for run in self.runs:
            status = self.status(run, DIVERGED if run.diverged else RUNNING)
            jobs.append(partial(run.write_status, status))
        self.parts.writer.add(*jobs)
