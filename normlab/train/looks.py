"""When a run is looked into, and by what: measured steps, the closer look now and then, the probe at few moments."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from normlab.config import RunConfig
from normlab.stats.profiles import Column, Layout, Profiles
from normlab.stats.statistic import CORE, EXTENDED, PROBE
from normlab.train.bound import Alone, Bound
from normlab.train.closer import MOST_EXAMPLES, CloserLook
from normlab.train.columns import families
from normlab.train.evaluate import Validation
from normlab.train.measure import Measure, Measured
from normlab.train.optim import Optimizer
from normlab.train.probing import Probe, adam_measure, examples, fits, probed_steps


@dataclass(slots=True)
class Looks:
    """What looks into a run, or into the steps of a pack.

    What it sees is told, with the step before which, or in which, it was. What takes more than the steps themselves,
    the closer look and the probe, is of lone runs.
    """

    config: RunConfig
    bound: Bound
    optimizer: Optimizer
    validation: Validation
    tell: Callable[[str, Profiles], None]
    """Takes a tier and what was seen."""
    measure: Measure | None = field(init=False)
    """For the steps that are measured."""
    _closer: CloserLook | None = field(init=False)
    _probed_at: frozenset[int] = field(init=False)
    _probes: list[float] = field(default_factory=list, init=False)
    """Seconds of each probe."""
    _began: tuple[int, float] | None = field(default=None, init=False)
    """The step at which looking began, and when."""
    _layouts: dict[tuple[Column, ...], tuple[Layout, Any]] = field(default_factory=dict, init=False)
    """Of what was measured, and the order that brings it into the layout."""

    def __post_init__(self) -> None:
        """Make what is asked for."""
        config, windows = self.config, self.validation
        core, extended, probed = (config.stats.names(tier) for tier in (CORE, EXTENDED, PROBE))
        self.measure = Measure(self.bound, core) if core else None
        picked = slice(None, None, -(-len(windows.tokens_NT) // MOST_EXAMPLES))
        self._closer = None
        if extended:
            assert isinstance(self.bound, Alone), "a pack's runs are looked into in their steps only"
            self._closer = CloserLook(
                self.bound, extended, windows.tokens_NT[picked], windows.targets_NT[picked], self.optimizer,
                apart=not config.norm.batch_statistics, autocast=windows.autocast,
            )  # fmt: skip
            if missing := sorted(extended - self._closer.names):
                print(f"normlab: not measured: {', '.join(missing)} (needs two independent examples)", file=sys.stderr)
        self._probed_at = probed_steps(config)
        if probed and not self._probed_at:
            print(
                f"normlab: {config.train.steps} steps are too few for a probe within stats.probe_share="
                f"{config.stats.probe_share}; `normlab inspect RUN --probe` makes one afterwards",
                file=sys.stderr,
            )

    def is_measured(self, step: int) -> bool:
        """Whether the step that follows `step` updates is one of those."""
        every = self.config.stats.every
        return every is not None and step % every == 0

    def before(self, step: int) -> float:
        """What is due before a step; how long it took, in seconds."""
        every, since = self.config.stats.extended_every, time.perf_counter()
        if self._began is None:
            self._began = step, since
        if self._closer is not None and every is not None and step % every == 0:
            self._tell(EXTENDED, step, self._closer())
        if step in self._probed_at:
            self._probe(step)
        return time.perf_counter() - since

    def at_end(self, step: int) -> None:
        """What is due after the last update."""
        if step in self._probed_at:
            self._probe(step)

    def profiles(self, step: int, seen: Measured, values: Any = None) -> Profiles:
        """What was seen, in the order in which it is kept; `values` are those of `seen` where the host has them."""
        if seen.columns not in self._layouts:
            self._layouts[seen.columns] = Layout.of(seen.columns, self.config.model.depth, families(self.bound.model))
        layout, order = self._layouts[seen.columns]
        values = seen.values.cpu().numpy() if values is None else values
        return Profiles(layout, np.array([step]), values[None, order])

    def _tell(self, tier: str, step: int, seen: Measured) -> None:
        """Tell what was seen, if there was anything: before the first update Adam has nothing to show."""
        if seen.columns:
            self.tell(tier, self.profiles(step, seen))

    def _probe(self, step: int) -> None:
        """Probe the model as it stands after `step` updates, and say how long that took; or why not."""
        stats, since = self.config.stats, time.perf_counter()
        first, began = self._began or (step, since)
        assert stats.probe_share is not None
        seconds = since - began - sum(self._probes)
        if not fits(stats.probe_share, self.config.train.steps, step - first, seconds, self._probes):
            print(
                f"normlab: not probed after step {step}: by those before it would take more than stats.probe_share="
                f"{stats.probe_share} of the run; `normlab inspect RUN --probe` makes one afterwards",
                file=sys.stderr,
            )
            return
        windows, count = self.validation, examples(self.config.train.batch_size)
        moments = self.optimizer.moments.get("square", {})
        probe = Probe(
            self.bound.model, stats.names(PROBE), windows.tokens_NT[:count], windows.targets_NT[:count],
            adam_measure(self.config.optim, moments, self.optimizer.count),
        )  # fmt: skip
        self._tell(PROBE, step, probe())
        self._probes.append(time.perf_counter() - since)
        print(f"normlab: probed after step {step}, in {self._probes[-1]:.1f} s", file=sys.stderr)
