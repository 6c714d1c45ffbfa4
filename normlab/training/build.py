"""Builds the parts of a training loop: data, models, optimiser, statistics, the step and its inputs, in this order.

`build_parts` is read from top to bottom, like a training script. The loop (`loop.py`) receives the parts and knows
nothing of how they are made, so that a test can hand it a fake step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from normlab.base.errors import notify
from normlab.catalogue.placements.base import projects
from normlab.config.schema import RunConfig
from normlab.data.batches import Batches, validation_windows
from normlab.data.corpus import Corpus
from normlab.model.gpt import GPT
from normlab.model.groups import groups_of, parameter_rows
from normlab.model.init import build_model
from normlab.model.runner import ModelRunner, SingleRun, StackedRuns
from normlab.system.process_memory import PeakMemory
from normlab.system.ranks import Ranks
from normlab.training.average import WeightAverage
from normlab.training.evaluate import Validation
from normlab.training.graph import ComputeStep, ReplayedSteps
from normlab.training.loop import Parts
from normlab.training.machine import RuntimeSettings
from normlab.training.measure.core import Measurement
from normlab.training.measure.schedule import StatisticsSchedule
from normlab.training.optim import HyperparameterTable, Optimizer, families
from normlab.training.state import TrainingState
from normlab.training.step import LossScale, Step, StepOutput
from normlab.training.step_inputs import StepInputs
from normlab.training.training_run import TrainingRun
from normlab.training.writer import Writer


def build_parts(runs: Sequence[TrainingRun], settings: RuntimeSettings, corpus: Corpus) -> Parts:
    """Return the parts of the loop of a run, or of those of a pack, and give each run its table of parameters.

    Raises:
        DataError: The corpus is too short.
    """
    config, ranks = runs[0].config, Ranks.current()
    peak_memory = PeakMemory(settings.device)  # first, so that it counts what is built here

    # The writer. Only rank 0 writes.
    writer = Writer(enabled=ranks.rank == 0)
    for run in runs:
        run.writer = writer

    # The data. Before the models: a corpus that is too short fails before anything large is built.
    batches = _training_batches(runs, settings, corpus, ranks)
    validation = _validation(config, settings, corpus, ranks)

    # The models and the optimiser. The buffers of stacked runs have the order of the optimiser's families.
    models = _models(runs, settings, corpus.tokenizer.vocab_size)
    options = [run.config.optim for run in runs]
    groups = groups_of(models[0])
    runner = _runner(runs, models, groups, settings)
    optimizer = Optimizer(options, runner.params, groups, config.model.factors_of)

    # The statistics, in a step and between steps.
    schedule = StatisticsSchedule(config, runner, optimizer, options, validation, ranks)

    # The step, and the memory from which it reads its inputs.
    step = _step(runs, settings, runner, optimizer, schedule, ranks)
    like = next(iter(runner.params.values()))
    # A graph of the step would freeze Python numbers.
    with_numbers = settings.device == "cpu" and settings.graph == "off"
    hyperparameters = HyperparameterTable(optimizer.families, config.train.steps, like, numbers=with_numbers)
    inputs = StepInputs(config, batches, hyperparameters, settings.device, ranks.rank)

    return Parts(
        inputs=inputs,
        compute_step=_compute_step(runs, settings, step, inputs),
        evaluate=lambda: validation(runner, step.average),
        measure_initialisation=lambda: _measure_initialisation(step, inputs),
        schedule=schedule,
        state=TrainingState(runs, runner, step, writer, ranks),
        groups=groups,
        writer=writer,
        peak_memory=peak_memory,
    )


def _training_batches(runs: Sequence[TrainingRun], settings: RuntimeSettings, corpus: Corpus, ranks: Ranks) -> Batches:
    config = runs[0].config
    seeds = [run.config.data_seed for run in runs]
    rows = config.rows_of_device(ranks.rank) if ranks.count > 1 else None
    return Batches(
        corpus.train, config.model.context, config.train.batch_size, seeds[0] if len(runs) == 1 else seeds,
        settings.torch_device, rows,
    )  # fmt: skip


def _validation(config: RunConfig, settings: RuntimeSettings, corpus: Corpus, ranks: Ranks) -> Validation:
    device = settings.torch_device
    tokens_NT, targets_NT = validation_windows(corpus.val, config.model.context, config.eval.sequences)
    return Validation(
        tokens_NT=tokens_NT.to(device),
        targets_NT=targets_NT.to(device),
        batch_size=config.train.batch_size // config.train.accumulation,
        autocast=settings.autocast(),
        batch_statistics=config.batch_statistics,
        ranks=ranks,
    )


def _models(runs: Sequence[TrainingRun], settings: RuntimeSettings, vocab_size: int) -> list[GPT]:
    """Return the initial model of each run, on its device."""
    models: list[GPT] = []
    for run in runs:
        model = build_model(run.config, vocab_size)
        # Before the weights of a folder are copied: the table shows what the init rule gives.
        run.parameters = parameter_rows(run.config, model)
        for name, values in run.weights.items():
            model.get_parameter(name).data.copy_(values)
        models.append(model.to(settings.torch_device))
    return models


def _runner(
    runs: Sequence[TrainingRun], models: Sequence[GPT], groups: dict[str, str], settings: RuntimeSettings
) -> ModelRunner:
    compiled = settings.compile == "on"
    if len(models) == 1:
        return SingleRun(models[0], compiled=compiled)
    factors_of = runs[0].config.model.factors_of
    order: list[str] = []
    for family in families([run.config.optim for run in runs], groups, factors_of):
        order += family.names
    return StackedRuns(models, order=order, compiled=compiled)


def _step(
    runs: Sequence[TrainingRun], settings: RuntimeSettings, runner: ModelRunner, optimizer: Optimizer,
    schedule: StatisticsSchedule, ranks: Ranks,
) -> Step:  # fmt: skip
    config, device = runs[0].config, settings.torch_device
    clip: float | Tensor | None = config.optim.clip
    if len(runs) > 1 and clip is not None:
        clip = torch.tensor([run.config.optim.clip for run in runs], dtype=torch.float32, device=device)
    # Parts that only some runs have.
    project = average = loss_scale = None
    if projects(config.placement):
        project = config.placement.project
    if config.eval.ema is not None:
        average = WeightAverage(runner.params, config.eval.ema)
    if settings.precision == "fp16":
        loss_scale = LossScale(device)
    return Step(
        runner,
        optimizer,
        accumulation=config.micro_batches,
        clip=clip,
        autocast=settings.autocast(),
        project=project,
        measure=schedule.measure,
        ranks=ranks,
        average=average,
        qk_clip=config.optim.qk_clip,
        loss_scale=loss_scale,
    )


def _compute_step(
    runs: Sequence[TrainingRun], settings: RuntimeSettings, step: Step, inputs: StepInputs
) -> ComputeStep:
    """Return the function that computes the step whose inputs are loaded; with CUDA graphs, it replays them."""

    def compute_step(measured: bool) -> StepOutput:
        tokens, targets = inputs.batches.read()
        return step(tokens, targets, inputs.hyperparameters.now, measured=measured)

    def record_failed_graph(problem: str) -> None:
        notify(f"train.graph: a step cannot be captured ({problem}); training without graphs")
        for run in runs:
            run.progress.graph_problem = problem

    if settings.graph == "on":
        return ReplayedSteps(compute_step, record_failed_graph)
    return compute_step


def _measure_initialisation(step: Step, inputs: StepInputs) -> Measurement | None:
    """Return the core statistics of the first batch without an update, for a run of no steps; None without any."""
    if step.measure is None:
        return None
    inputs.load_batch(0)
    return step.measure_batch(*inputs.batches.read())
