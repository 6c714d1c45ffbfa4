"""`normlab sweep --measure`: train the first steps of some packs in a temporary folder, to learn what packs cost.

A rehearsal is a sweep as any other, with the packs, the processes and the threads of the plan and fewer steps. Its
measurements are those of its outcomes.
"""

import tempfile
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace

from normlab.base.errors import NormlabError, counted, notify
from normlab.config.schema import RunConfig
from normlab.store.format import FINISHED
from normlab.store.plans import Pack
from normlab.sweeps.cost import EqualPacks, PackCost, cost_of, recorded_packs
from normlab.sweeps.files import read_outcomes
from normlab.sweeps.plan import PlannedSweep, ResolvedRun, make_plan
from normlab.sweeps.progress import ProgressDisplay
from normlab.sweeps.supervisor import supervise

LEAST_STEPS = 5
"""The least number of steps that are timed."""
LONGEST_CADENCE = 10
"""With `stats.every` up to this, the timed steps have the share of measured steps that the run has. With more, no timed
step is measured: measured steps take longer, but there are few."""
LEARNING_RATE = 1e-9
"""So small that no run diverges."""


class _Silent(ProgressDisplay):
    """Prints nothing: the progress of a rehearsal is not that of the sweep."""

    def print(self, line: str) -> None:
        del line


def rehearse(planned: PlannedSweep, measured: Mapping[str, EqualPacks]) -> dict[str, EqualPacks]:
    """Train the first steps of packs of each kind that was not measured yet, and return their measurements.

    The results folder is not touched.

    Raises:
        KeyboardInterrupt: A signal stopped the rehearsal.
        NormlabError: A pack failed.
    """
    rehearsed = _packs_of_new_kinds(planned, measured)
    # The machines of Slurm are not this one.
    if not rehearsed or planned.options.on == "slurm":
        return {}
    notify(f"measuring: the first steps of {counted(len(rehearsed), 'pack')}")
    # A process that is stopped may still write.
    with tempfile.TemporaryDirectory(prefix="normlab-measure-", ignore_cleanup_errors=True) as folder:
        sweep = _first_steps_of(planned, rehearsed, folder)
        result = supervise(sweep, sweep.options, _Silent(sweep.folder))
        if result.signal is not None:
            raise KeyboardInterrupt
        for outcome in read_outcomes(sweep.folder):
            if outcome.cause != FINISHED:
                raise NormlabError(f"--measure: {outcome.cause}: {outcome.detail}")
        by_kind = recorded_packs(folder)
    missing = {pack.kind for pack in rehearsed} - by_kind.keys()
    if missing:
        raise NormlabError(f"--measure: {len(missing)} of the kinds of packs could not be timed; leave --measure out")
    return {kind: replace(packs, are_rehearsed=True) for kind, packs in by_kind.items()}


def _packs_of_new_kinds(planned: PlannedSweep, measured: Mapping[str, EqualPacks]) -> list[PackCost]:
    """Return packs of each kind that was not measured: as many as train at once, if there are so many."""
    chosen: dict[str, list[PackCost]] = {}
    for pack in cost_of(planned, measured).packs:
        packs = chosen.setdefault(pack.kind, [])
        if pack.equal is None and len(packs) < pack.packs_at_once:
            packs.append(pack)
    return [pack for packs in chosen.values() for pack in packs]


def _first_steps_of(planned: PlannedSweep, packs: list[PackCost], folder: str) -> PlannedSweep:
    """Return the plan of the first steps of packs, with results in another folder."""
    configs: list[RunConfig] = []
    numbered: list[Pack] = []
    for number, pack in enumerate(packs, 1):
        indices = range(len(configs), len(configs) + len(pack.runs))
        numbered.append(Pack(number, list(indices)))
        # Without their schedules, two runs could be equal, so each has a learning rate of its own.
        for index, run in zip(indices, pack.runs, strict=True):
            configs.append(first_steps(run, folder, LEARNING_RATE * (1 + index)))
    options = replace(planned.options, name="measure", pack="off", jobs=planned.jobs)
    sweep = make_plan(options, [([], config) for config in configs])
    return replace(sweep, plan=replace(sweep.plan, packs=numbered, threads=planned.plan.threads))


def first_steps(run: ResolvedRun, folder: str, lr: float) -> RunConfig:
    """Return a config of a few steps, each of which is the same computation as a step of the run."""
    config = deepcopy(run.config)
    # The first half is not timed, because its first step takes longer.
    every, half = config.stats.every, LEAST_STEPS
    if every is not None and every <= LONGEST_CADENCE:
        half = every * -(-LEAST_STEPS // every)
    config.train.steps = 2 * half
    config.train.tokens_per_parameter = None
    config.train.log_every = half
    # What `auto` is depends on the number of steps.
    config.compile, config.train.graph = run.machine.compile, run.machine.graph
    # Nothing but steps, as far as possible.
    config.train.checkpoint_every = config.eval.every = 0
    config.train.keep, config.train.start_from = [], None
    config.optim.lr = lr
    config.optim.schedule, config.optim.warmup_steps = "constant", 0
    config.optim.final_lr_fraction = config.optim.decay_fraction = None
    config.results_dir, config.tracking.wandb, config.run.name = folder, "off", None
    return config
