"""The `Statistic` entry, the registry of statistics, and the values of measured and derived ones. Imports no torch.

An entry is a name, the kind of tensor, a formula, and one line of tensor code. The model offers tensors
(`instrument.py`), and the entry computes a value from them:

    register(Statistic(name="resid_rms", of="resid", value=lambda x: x.mean_square, merge="rms", ...))

Shapes: S measured steps, L blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normlab.errors import ConfigError, StatisticsError, unknown
from normlab.stats.profiles import Array, Profiles

CORE, EXTENDED, PROBE = "core", "extended", "probe"
TIERS = {
    CORE: "in the step itself, every stats.every steps",
    EXTENDED: "in a pass over a fixed batch, every stats.extended_every steps",
    PROBE: "at a few steps of a run, or on its checkpoints with `normlab inspect RUN --probe`",
}
"""When a statistic is measured."""

OF = {
    "resid": "the stream that enters a block, and the head",
    "attn": "what attention adds to the stream, after norms, learned scales and factors",
    "mlp": "what the MLP adds to the stream, after norms, learned scales and factors",
    "block": "the streams before and after a block",
    "attention": "queries, keys and the scale of their product, as the softmax gets them",
    "hidden": "the MLP's hidden activations, before a norm that may follow",
    "norm": "the input and the output of a norm",
    "gain": "a norm's per-channel gain, 1 + gain for a norm with unit offset",
    "parameter": "a parameter, its gradient and its update",
    "head": "the logits",
    "model": "the model as a whole",
}
"""The tensors that a statistic is computed from."""

MERGES = {
    "mean": "mean over the micro-batches",
    "rms": "root of the mean of the micro-batches' squares",
    "max": "maximum over the micro-batches",
    "step": "of the whole step: gradients are summed over the micro-batches first",
    "pass": "of one pass over a fixed batch",
    "derived": "computed from other statistics when a report reads them",
}
"""How the values of a step's micro-batches become one value."""


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """One statistic. Registered under `name`."""

    name: str
    tier: str = CORE
    of: str
    """The tensors that it is computed from: a key of `OF`."""
    formula: str
    """One line, with the meaning of its letters."""
    unit: str
    merge: str
    """A key of `MERGES`. For `rms`, `value` returns the square."""
    question: str
    """The question that it answers."""
    source: str
    """The publication or code that defines it."""
    value: Callable[..., Any] | None = None
    """Computes the value from views of the observed tensors (`views.View`): one value per token for `mean` and `rms`,
    which the collector averages, else one value. None where the step computes it, or `derive` does."""
    derive: Callable[[Profiles], dict[str, Array]] | None = None
    """Computes the statistic by site from measured ones: (S, L + 2), or (S,)."""
    needs: tuple[str, ...] = ()
    """The statistics that `derive` reads."""
    averaged: bool = False
    """Whether `derive` averages over measured steps (`profiles.mean_of_later_half`)."""
    undefined: str = ""
    """Why a value can be NaN although everything measured is finite."""


STATISTICS: dict[str, Statistic] = {}


def register(statistic: Statistic) -> None:
    """Add a statistic to the registry.

    Raises:
        ConfigError: The name is taken, a field has an unknown value, or fields contradict each other.
    """
    name = statistic.name
    for field, allowed in (("tier", TIERS), ("of", OF), ("merge", MERGES)):
        value = getattr(statistic, field)
        if value not in allowed:
            raise ConfigError(f"statistic {name!r}: " + unknown(field, value, allowed))
    if not (statistic.merge == "derived") == (statistic.derive is not None) == bool(statistic.needs):
        raise ConfigError(f"statistic {name!r}: merge='derived', `derive` and `needs` go together; set all or none")
    if name in STATISTICS:
        raise ConfigError(f"statistic {name!r}: the name is taken; choose another")
    STATISTICS[name] = statistic


def sorted_statistics() -> list[Statistic]:
    """Return all registered statistics in the order of `OF`, from the stream to the model."""
    return sorted(STATISTICS.values(), key=lambda statistic: list(OF).index(statistic.of))


def layers_of(profiles: Profiles, name: str) -> dict[str, NDArray[np.bool_]]:
    """Return the layers at which a statistic exists, by site, (L + 2,); empty for one without layers.

    A layer counts even if all its values are NaN.

    Raises:
        StatisticsError: As `values_of`.
    """
    ones = Profiles(profiles.layout, np.zeros(1, dtype=np.int64), np.ones((1, profiles.layout.width)))
    return {site: ~np.isnan(values[0]) for site, values in values_of(ones, name).items() if values.ndim == 2}


def values_of(profiles: Profiles, name: str) -> dict[str, Array]:
    """Return a measured or derived statistic by site: (S, L + 2), NaN at layers without it, or (S,).

    A statistic that an older record holds and that is derived today is returned as recorded.

    Raises:
        StatisticsError: The statistic, or one that it is derived from, was not measured.
    """
    if name in profiles:
        return profiles.get(name)
    statistic = STATISTICS.get(name)
    if statistic is None or statistic.derive is None:
        raise StatisticsError(f"{name}: was not measured")
    for need in statistic.needs:
        if need not in profiles:
            raise StatisticsError(f"{name}: is derived from {need}, which was not measured")
    try:
        return statistic.derive(profiles)
    except KeyError as error:  # a damaged layout lacks a site or a family
        raise StatisticsError(f"{name}: is derived from {error.args[0]!r}, which was not measured") from error
