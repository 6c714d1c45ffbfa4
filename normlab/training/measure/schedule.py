"""The schedule of statistics: core in measured steps, extended passes between steps, and three probes."""

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from normlab.base.errors import notify, warn
from normlab.catalogue.optimizers.options import OptimConfig
from normlab.catalogue.statistics.profiles import Layout, Profiles, StatisticColumn
from normlab.catalogue.statistics.registry import UPDATE_STATISTICS
from normlab.catalogue.statistics.statistic import CORE, EXTENDED, PROBE
from normlab.config.schema import RunConfig
from normlab.model.runner import ModelRunner
from normlab.system.ranks import Ranks, local_statistics
from normlab.training.evaluate import Validation
from normlab.training.measure.core import CoreStatistics, Measurement, parameter_families
from normlab.training.measure.extended import MOST_EXAMPLES, ExtendedPass
from normlab.training.measure.probe import Probe, adam_preconditioner
from normlab.training.optim import Optimizer

EXAMPLE_FRACTION = 8
"""A probe uses 1 / EXAMPLE_FRACTION of a batch's examples."""


@dataclass(slots=True)
class StatisticsSchedule:
    """Decides when to measure, and measures between steps. Probes are for single runs only."""

    config: RunConfig
    runner: ModelRunner
    optimizer: Optimizer
    options: Sequence[OptimConfig]
    """The optimiser options of each run."""
    validation: Validation
    ranks: Ranks = Ranks()
    """The ranks that share each batch. Every rank makes the whole of each pass between steps."""
    measure: CoreStatistics | None = field(init=False)
    """Computes the core statistics in measured steps; None without core statistics."""
    _extended: ExtendedPass | None = field(init=False)
    _probe_steps: frozenset[int] = field(init=False)
    _layouts: dict[tuple[StatisticColumn, ...], tuple[Layout, Any]] = field(default_factory=dict, init=False)
    """The layout of each set of columns, and the permutation into it."""

    def __post_init__(self) -> None:
        config, windows = self.config, self.validation
        core, extended = config.stats.names(CORE), config.stats.names(EXTENDED)
        if config.train.steps == 0:
            core -= {*UPDATE_STATISTICS}
        self.measure = CoreStatistics(self.runner, core, self.ranks) if core else None
        self._extended = None
        if extended:
            spread = slice(None, None, -(-len(windows.tokens_NT) // MOST_EXAMPLES))
            self._extended = ExtendedPass(
                self.runner, extended, windows.tokens_NT[spread], windows.targets_NT[spread], self.optimizer,
                self.options, independent=not config.batch_statistics,
                # Without a loss scale, small gradients would vanish in float16.
                autocast=nullcontext if config.precision == "fp16" else windows.autocast,
            )  # fmt: skip
            missing = sorted(extended - self._extended.names)
            if missing:
                warn(f"not measured: {', '.join(missing)} (needs two independent examples)")
        self._probe_steps = probe_steps(config)

    def is_measured(self, step: int) -> bool:
        """Return whether the step after `step` updates is measured."""
        every = self.config.stats.every
        return every is not None and step % every == 0

    def is_due(self, step: int) -> bool:
        """Return whether an extended pass or a probe is due after `step` updates."""
        return self._extended_due(step) is not None or step in self._probe_steps

    def passes(self, step: int) -> Iterator[tuple[str, Measurement]]:
        """Yield the tier and the statistics of each pass that is due after `step` updates, as soon as it is made."""
        extended = self._extended_due(step)
        if extended is not None:
            with local_statistics():
                measurement = extended(step)
            # Statistics of Adam alone are undefined before the first update.
            if measurement.columns:
                yield EXTENDED, measurement
        yield from self.probe_if_due(step)

    def _extended_due(self, step: int) -> ExtendedPass | None:
        every = self.config.stats.extended_every
        if every is None or step % every:
            return None
        return self._extended

    def profiles(self, step: int, columns: tuple[StatisticColumn, ...], values: Any) -> Profiles:
        """Return the values of a run, (K,), on the host, in the order of their layout."""
        if columns not in self._layouts:
            families = parameter_families(self.runner.model)
            self._layouts[columns] = Layout.of(columns, self.config.model.depth, families)
        layout, order = self._layouts[columns]
        return Profiles(layout, np.array([step]), values[None, order])

    def probe_if_due(self, step: int) -> Iterator[tuple[str, Measurement]]:
        """Yield the tier and the statistics of a probe, if one is due after `step` updates."""
        if step not in self._probe_steps:
            return
        start = time.perf_counter()
        windows, count = self.validation, probe_examples(self.config.train.batch_size)
        moments = self.optimizer.moments.get("square", {})
        probe = Probe(
            self.runner.model, self.config.stats.names(PROBE), windows.tokens_NT[:count], windows.targets_NT[:count],
            adam_preconditioner(self.config.optim, moments, self.optimizer.count),
        )  # fmt: skip
        with local_statistics():
            measurement = probe()
        if measurement.columns:
            yield PROBE, measurement
        notify(f"probe after step {step} took {time.perf_counter() - start:.1f} s")


def probe_examples(batch_size: int) -> int:
    return max(1, batch_size // EXAMPLE_FRACTION)


def probe_steps(config: RunConfig) -> frozenset[int]:
    """Return the update counts after which a run is probed: at its start, half and end."""
    if not config.stats.names(PROBE):
        return frozenset()
    steps = config.train.steps
    return frozenset((0, steps // 2, steps))
