"""The training loop of one run or of a pack: batches, step, record; evaluations and checkpoints when they are due.

Between two steps the order is fixed: write the record, evaluate, save a checkpoint, check for a request to stop. A
checkpoint therefore knows the exact length of the record, and a resume repeats nothing. A thread writes, in that order
(`writer.py`): record and checkpoints are copied where the loop waits for the device anyway, and the next steps are
taken while the disk works.

The runs of a pack are one stacked computation and take every step together; each has its own record. A run that
diverges is frozen and stays in the stack, so the numbers of the others do not change.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normlab.base.errors import notify
from normlab.catalogue.placements.base import projects
from normlab.catalogue.statistics.profiles import Profiles
from normlab.catalogue.statistics.statistic import CORE
from normlab.config.schema import RunConfig
from normlab.data.batches import Batches, validation_windows
from normlab.data.corpus import Corpus
from normlab.model.groups import groups_of, parameter_rows
from normlab.model.init import build_model, derive_seed
from normlab.model.runner import ModelRunner, SingleRun, StackedRuns
from normlab.model.stack import empty_on_host, storages
from normlab.store.format import DIVERGED, RUNNING
from normlab.store.status import Status
from normlab.system.process_memory import PeakMemory
from normlab.system.ranks import Ranks
from normlab.training import checkpoint
from normlab.training.average import WeightAverage
from normlab.training.evaluate import Validation
from normlab.training.graph import ReplayedSteps, Take
from normlab.training.machine import RuntimeSettings
from normlab.training.measure.core import Measurement
from normlab.training.measure.schedule import StatisticsSchedule
from normlab.training.optim import HyperparameterTable, Optimizer, families, kept_step
from normlab.training.signals import StopRequest
from normlab.training.step import LossScale, Step, StepOutput
from normlab.training.training_run import TrainingRun
from normlab.training.writer import Writer

AGREE_EVERY = 10
"""Steps after which ranks on GPUs agree whether to stop."""


class Loop:
    """Trains a single run, or the runs of a pack, from their progress to their last step."""

    def __init__(self, runs: Sequence[TrainingRun], settings: RuntimeSettings, corpus: Corpus) -> None:
        self.runs, self.settings, self.corpus = runs, settings, corpus
        self.ranks = Ranks.current()
        """The ranks that train the run together; a pack has one."""
        self.step_count = 0
        """Updates made by the runs that have not diverged."""
        self.writer = Writer(enabled=self.ranks.rank == 0)
        for run in runs:
            run.writer = self.writer
        self._peak_memory = PeakMemory(settings.device)
        self._pending: list[StepOutput] = []
        """The outputs of steps whose rows are not recorded yet."""
        self._copy: dict[str, dict[str, Tensor]] = {}
        """The copy of the state that a checkpoint is written from; empty before the first one."""
        self._last_save: Future[None] | None = None
        self._build()

    def _build(self) -> None:
        config, device = self.config, self.settings.torch_device
        rows = config.rows_of_device(self.ranks.rank) if self.ranks.count > 1 else None
        # The data first: a corpus that is too short fails before anything large is built.
        seeds = [run.config.data_seed for run in self.runs]
        self.batches = Batches(
            self.corpus.train, config.model.context, config.train.batch_size, seeds[0] if self.is_single else seeds,
            device, rows,
        )  # fmt: skip
        tokens, targets = validation_windows(self.corpus.val, config.model.context, config.eval.sequences)
        self.validation = Validation(
            tokens_NT=tokens.to(device),
            targets_NT=targets.to(device),
            batch_size=config.train.batch_size // config.train.accumulation,
            autocast=self.settings.autocast(),
            batch_statistics=config.norm.batch_statistics,
            ranks=self.ranks,
        )
        vocab_size, compiled = self.corpus.tokenizer.vocab_size, self.settings.compile == "on"
        models = [build_model(run.config, vocab_size) for run in self.runs]
        for run, model in zip(self.runs, models, strict=True):
            run.new_run_json["parameters"] = [row.cells for row in parameter_rows(run.config, model)]
            for name, values in run.weights.items():
                model.get_parameter(name).data.copy_(values)
            model.to(device)
        options, self.groups = [run.config.optim for run in self.runs], groups_of(models[0])
        if self.is_single:
            self.runner: ModelRunner = SingleRun(models[0], compiled=compiled)
        else:
            order = [
                name for family in families(options, self.groups, config.model.factors_of) for name in family.names
            ]
            self.runner = StackedRuns(models, order=order, compiled=compiled)
        optimizer = Optimizer(options, self.runner.params, self.groups, config.model.factors_of)
        self.statistics_schedule = StatisticsSchedule(
            config, self.runner, optimizer, options, self.validation, self._record_statistics, self.ranks
        )
        self.step = Step(
            self.runner,
            optimizer,
            accumulation=config.micro_batches,
            clip=self._clip(),
            autocast=self.settings.autocast(),
            project=config.placement.project if projects(config.placement) else None,
            measure=self.statistics_schedule.measure,
            ranks=self.ranks,
            average=None if config.eval.ema is None else WeightAverage(self.runner.params, config.eval.ema),
            qk_clip=config.optim.qk_clip,
            loss_scale=LossScale(device) if self.settings.precision == "fp16" else None,
        )

        self.hyperparameters = HyperparameterTable(
            optimizer.families, config.train.steps, next(iter(self.runner.params.values())),
            numbers=device.type == "cpu" and self.settings.graph == "off",
        )  # fmt: skip
        self._take: Take = self._compute
        if self.settings.graph == "on":
            self._take = ReplayedSteps(self._compute, self._record_failed_graph)

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

    def _clip(self) -> float | Tensor | None:
        limits = [run.config.optim.clip for run in self.runs]
        if self.is_single or limits[0] is None:
            return limits[0]
        return torch.tensor(limits, dtype=torch.float32, device=self.settings.torch_device)

    # The state.

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state by the prefix of the names in a checkpoint; stacked runs have the axis of runs first."""
        optimizer = self.step.optimizer
        moments = {f"{kind}/": tensors for kind, tensors in optimizer.moments.items()}
        rest = {"alive": self.step.alive, "count": optimizer.count}
        if self.step.loss_scale is not None:
            rest |= self.step.loss_scale.tensors()
        means = {} if self.step.average is None else {"average/": self.step.average.tensors}
        return {"param/": self.runner.params, "buffer/": self.runner.buffers, **moments, **means, "": rest}

    def tensors(self, index: int) -> dict[str, Tensor]:
        """Return the state of one run by name, as its checkpoint holds it; for stacked runs, views of the stacks."""
        return self._tensors(index, self.state(), self.runs[index].progress.step)

    def _tensors(self, index: int, state: Mapping[str, Mapping[str, Tensor]], step: int) -> dict[str, Tensor]:
        named = {prefix + name: tensor for prefix, tensors in state.items() for name, tensor in tensors.items()}
        if self.is_single:
            return named
        # A run that diverged has made fewer updates than the stack.
        count = torch.full_like(named.pop("count"), step)
        return {name: tensor[index] for name, tensor in named.items()} | {"count": count}

    @torch.no_grad()
    def restore(self, saved: Sequence[checkpoint.Checkpoint]) -> None:
        """Restore each run from its checkpoint; all must be of one step, except those of diverged runs.

        Raises:
            StoreError: A checkpoint belongs to another run.
        """
        for index, (run, checkpoint_of_run) in enumerate(zip(self.runs, saved, strict=True)):
            run.restore(checkpoint_of_run, self.tensors(index))
        self.step_count = max((run.progress.step for run in self.active), default=self.runs[0].progress.step)
        if not self.is_single:
            self.step.optimizer.count.fill_(self.step_count)

    def share_state(self) -> None:
        """Give the state that rank 0 has restored to the other ranks."""
        run = self.runs[0]
        state = (self.step_count, run.progress, run.last_finite, run.diverged, run.saved_step)
        state = self.ranks.broadcast(state, list(self.tensors(0).values()))
        self.step_count, run.progress, run.last_finite, run.diverged, run.saved_step = state

    def save(self) -> None:
        """Copy the state, and add a checkpoint of each run that has made updates since its last one."""
        if self._last_save is not None:
            self.writer.wait(self._last_save)  # the copy is free, and `saved_step` is that of the last checkpoint
        due = {index: run for index, run in enumerate(self.runs) if run.saved_step != run.progress.step}
        if not due or self.ranks.rank:
            return
        self._copy_state()
        jobs: list[Callable[[], None]] = []
        for index, run in due.items():
            step = run.progress.step
            jobs.append(partial(run.save, step, run.meta(), partial(self._tensors, index, self._copy, step)))
        self._last_save = self.writer.add(*jobs)

    @torch.no_grad()
    def _copy_state(self) -> None:
        """Copy the state to the host, one copy for each buffer of a pack."""
        state = self.state()
        # One copy for all checkpoints: page-locked memory is slow to allocate.
        self._copy = self._copy or {prefix: empty_on_host(tensors) for prefix, tensors in state.items()}
        for prefix, tensors in state.items():
            for copy, tensor in zip(storages(self._copy[prefix]), storages(tensors), strict=True):
                copy.copy_(tensor, non_blocking=True)
        if self.settings.device == "cuda":
            torch.cuda.current_stream().synchronize()  # here, so that the time of the next steps is theirs alone

    @torch.no_grad()
    def _keep_weights(self) -> None:
        """Copy the weights to the host, and keep those of each run that has not diverged."""
        jobs: list[Callable[[], None]] = []
        weights = {f"param/{name}": tensor for name, tensor in self.runner.params.items()}
        weights |= {f"buffer/{name}": tensor for name, tensor in self.runner.buffers.items()}
        for index, run in enumerate(self.runs):
            if run.diverged is None and not self.ranks.rank:
                own = {name: tensor if self.is_single else tensor[index] for name, tensor in weights.items()}
                copies = {name: tensor.to("cpu", copy=True) for name, tensor in own.items()}
                jobs.append(partial(run.keep, self.step_count, copies))
        self.writer.add(*jobs)

    # The loop.

    def run(self, stop: StopRequest) -> str:
        """Train until the last step, a stop request, or the divergence of every run.

        Returns:
            finished, interrupted, or diverged (every run); `TrainingRun.diverged` tells which runs of a pack did.
        """
        steps = self.config.train.steps
        if not self.active:  # killed after that checkpoint and before the last status
            return "diverged"
        is_new = any(run.progress.val_loss is None for run in self.active)
        if is_new:
            self._evaluate()
        self._write_status()
        if steps == 0 and is_new:
            self._measure_initialisation()
        if self.step_count == 0 and self.config.train.keeps(0):
            self._keep_weights()
        schedule, start, stopping = self.statistics_schedule, time.perf_counter(), self._is_stopping(stop)
        while self.step_count < steps and not stopping:
            if schedule.before_step(self.step_count):
                start = time.perf_counter()  # the record was written before, so no step is timed from here
            self._pending.append(self.take_step(self.step_count))
            self.step_count += 1
            evaluation_due, checkpoint_due = self._due(self.step_count)
            log_due = len(self._pending) == self.config.train.log_every
            is_kept = self.config.train.keeps(self.step_count)
            is_due = evaluation_due or checkpoint_due or is_kept or log_due or schedule.is_due(self.step_count)
            # Several ranks must stop after the same step. To agree on it, the host waits for a GPU.
            agrees = self.ranks.count == 1 or self.settings.device == "cpu" or self.step_count % AGREE_EVERY == 0
            stopping = self._is_stopping(stop) if is_due or agrees else False
            if not (is_due or stopping):
                continue
            active_before = len(self.active)
            self._record_pending(start)
            if len(self.active) < active_before:
                self.save()  # of all runs: the others can resume from the step at which one was frozen
                if not self.active:
                    return "diverged"
                self._write_status()
            if is_kept:
                self._keep_weights()
            if evaluation_due:
                self._evaluate()
            if self.step_count == steps:
                schedule.probe_if_due(steps)
            if checkpoint_due:
                self.save()
            if evaluation_due or checkpoint_due:
                self._write_status()
            if self.ranks.count == 1:
                stopping = self._is_stopping(stop)  # a signal may have arrived during the evaluation or the save
            start = time.perf_counter()
        self.save()
        return "finished" if self.step_count == steps else "interrupted"

    def _is_stopping(self, stop: StopRequest) -> bool:
        """Return whether any rank has received a signal."""
        return self.ranks.any(stop.received is not None, self.settings.torch_device)

    def take_step(self, step: int) -> StepOutput:
        """Take the step after `step` updates; its measurements stay on the device."""
        self._load_batch(step)
        self.hyperparameters.load(step)
        return self._take(self.statistics_schedule.is_measured(step))

    def _load_batch(self, step: int) -> None:
        if self.config.plugins:
            self._seed_generator(step)
        self.batches.load(step)

    def _measure_initialisation(self) -> None:
        self.statistics_schedule.before_step(0)
        if self.step.measure is not None:
            self._load_batch(0)
            self._record_statistics(CORE, 0, self.step.measure_batch(*self.batches.read()))

    def _compute(self, measured: bool) -> StepOutput:
        """Take the step whose inputs are loaded; a CUDA graph may replay it."""
        tokens, targets = self.batches.read()
        return self.step(tokens, targets, self.hyperparameters.now, measured=measured)

    def _record_failed_graph(self, problem: str) -> None:
        """Print and record that the runs train without CUDA graphs."""
        notify(f"train.graph: a step cannot be captured ({problem}); training without graphs")
        for run in self.runs:
            run.progress.graph_problem = problem

    def _seed_generator(self, step: int) -> None:
        """Seed the generator of the device, for a plugin whose forward pass draws random numbers.

        It draws the same ones after a resume, and others on each rank. `torch.manual_seed` takes 200 times as long.
        """
        name = f"step/{step}" + (f"/rank/{self.ranks.rank}" if self.ranks.rank else "")
        on_gpu = self.settings.device == "cuda"
        generator = torch.cuda.default_generators[torch.cuda.current_device()] if on_gpu else torch.default_generator
        generator.manual_seed(derive_seed(self.config.seed, name) % 2**63)

    def _due(self, step: int) -> tuple[bool, bool]:
        """Return whether an evaluation and a checkpoint are due after `step` updates."""
        config, last = self.config, step == self.config.train.steps
        evaluation = last or (config.eval.every > 0 and step % config.eval.every == 0)
        every = config.train.checkpoint_every
        kept = {kept_step(run.config.optim, config.train.steps) for run in self.runs}
        return evaluation, last or step in kept or (every > 0 and step % every == 0)

    def _record_pending(self, start: float) -> None:
        """Copy the measurements of the pending steps from the device, at once, and add them to the record.

        Args:
            start: When the host started the first of these steps.
        """
        first, run_count, step_count = self.step_count - len(self._pending), len(self.runs), len(self._pending)
        scalars = [out.scalars.flatten() for out in self._pending]
        measured = {step: out.measured for step, out in enumerate(self._pending, first) if out.measured is not None}
        numbers = torch.cat([*scalars, *(each.values.flatten() for each in measured.values())]).cpu()
        seconds = time.perf_counter() - start  # after the copy: until then, a GPU still computes the steps
        scalars_SKR = numbers[: 4 * run_count * step_count].view(-1, 4, run_count)
        statistics_KR = numbers[scalars_SKR.numel() :].numpy().reshape(-1, run_count)
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
                yield self.statistics_schedule.profiles(step, columns, values[: len(columns)])
            values = values[len(measurement.columns) :]

    def _record_statistics(self, tier: str, step: int, measurement: Measurement) -> None:
        """Record the statistics of a pass between steps, of each run that has not diverged."""
        values_KR = measurement.values.cpu().numpy().reshape(-1, len(self.runs))
        for index, run in enumerate(self.runs):
            if run.diverged is None:
                profiles = self.statistics_schedule.profiles(step, measurement.columns, values_KR[:, index])
                run.record_statistics(tier, profiles)

    def _evaluate(self) -> None:
        losses = self.validation(self.runner, self.step.average)
        for index, run in enumerate(self.runs):
            if run.diverged is None:
                run.record_evaluation({name: by_run[index] for name, by_run in losses.items()})

    def _write_status(self) -> None:
        states = (DIVERGED if run.diverged else RUNNING for run in self.runs)
        statuses = [self.status(run, state) for run, state in zip(self.runs, states, strict=True)]
        self.writer.add(*(partial(run.write_status, status) for run, status in zip(self.runs, statuses, strict=True)))

    def status(self, run: TrainingRun, state: str) -> Status:
        return run.status(state, self._peak_memory.num_bytes())
