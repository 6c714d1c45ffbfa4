"""What a statistic is, and the list of those that are known. Imports no torch.

A statistic is an entry: its name, what it is read of, its formula, and the one line of tensor code that computes
it. The model shows tensors (`show.py`) and the entry says what is made of them:

    register(Statistic(name="resid_rms", of="resid", value=lambda x: x.mean_square.mean(), merge="rms", ...))

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
    PROBE: "at a few moments of a run, or of its checkpoints by `normlab inspect RUN --probe`",
}
"""When a statistic is measured."""

OF = {
    "resid": "the stream that enters a block, and the head",
    "attn": "what attention adds to the stream, as it is added: after norms, learned scales and factors",
    "mlp": "what the MLP adds to the stream, as it is added",
    "block": "the streams before and after a block",
    "attention": "queries, keys and the scale of their product, as the softmax gets them",
    "hidden": "the MLP's hidden activations, before a norm that may follow",
    "norm": "what enters and leaves a norm",
    "gain": "the gain of a norm that ends in one for each channel, 1 + gain where it has a unit offset",
    "parameter": "a parameter, its gradient and its update",
    "head": "the logits",
    "model": "the model as a whole",
}
"""What a statistic is read of."""

MERGES = {
    "mean": "mean of the micro-batches'",
    "rms": "root of the mean of the micro-batches' squares",
    "max": "largest of the micro-batches'",
    "step": "of the whole step: gradients are summed over the micro-batches first",
    "pass": "of one pass over a fixed batch",
    "derived": "of other statistics, when they are read",
}
"""How the values of a step's micro-batches become one; those of ranks, which have equal shares, would alike."""


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """One statistic. Registered under `name`."""

    name: str
    tier: str = CORE
    of: str
    """What it is read of: a key of `OF`."""
    formula: str
    """On one line, with what its letters mean."""
    unit: str
    merge: str
    """A key of `MERGES`. What `value` gives for `rms` is a square."""
    question: str
    """What it answers."""
    source: str
    """Who asked it so first, or whose definition this is."""
    value: Callable[..., Any] | None = None
    """Of what is shown (`views.View`): for `mean` and `rms` a number a token, of which the mean is taken; else one.
    Nothing where the step itself makes it, or other statistics do."""
    derive: Callable[[Profiles], dict[str, Array]] | None = None
    """Of what was measured, by site: (S, L + 2), a number a place, or (S,)."""
    needs: tuple[str, ...] = ()
    """The statistics that `derive` reads."""
    averaged: bool = False
    """Whether `derive` averages over measured steps (`profiles.mean_of_later_half`)."""
    undefined: str = ""
    """Why a value can be NaN although everything that was measured is finite."""


STATISTICS: dict[str, Statistic] = {}


def register(statistic: Statistic) -> Statistic:
    """Make a statistic known by its name.

    Raises:
        ConfigError: The name is taken, or a word of it is none that is known.
    """
    name = statistic.name
    for what, word, known in (
        ("tier", statistic.tier, TIERS), ("of", statistic.of, OF), ("merge", statistic.merge, MERGES)
    ):  # fmt: skip
        if word not in known:
            raise ConfigError(f"statistic {name!r}: " + unknown(what, word, known))
    if not (statistic.merge == "derived") == (statistic.derive is not None) == bool(statistic.needs):
        raise ConfigError(f"statistic {name!r}: merge='derived', `derive` and `needs` go together; set all or none")
    if name in STATISTICS:
        raise ConfigError(f"statistic {name!r}: the name is taken; choose another")
    STATISTICS[name] = statistic
    return statistic


def in_order() -> list[Statistic]:
    """All that are known, from the stream to the parameters: in the order of `OF`."""
    return sorted(STATISTICS.values(), key=lambda one: list(OF).index(one.of))


def places_of(profiles: Profiles, name: str) -> dict[str, NDArray[np.bool_]]:
    """Where a statistic is, by site, (L + 2,): it may well be NaN there. Nothing where it has no places.

    Raises:
        StatisticsError: As `values_of`.
    """
    ones = Profiles(profiles.layout, np.zeros(1, dtype=np.int64), np.ones((1, profiles.layout.width)))
    return {site: ~np.isnan(values[0]) for site, values in values_of(ones, name).items() if values.ndim == 2}


def values_of(profiles: Profiles, name: str) -> dict[str, Array]:
    """A statistic by site, measured or derived: (S, L + 2), NaN where it is not, or (S,).

    A statistic that older records hold and that is derived today is returned as it was recorded.

    Raises:
        StatisticsError: It was not measured, or something that it is made of.
    """
    statistic = STATISTICS.get(name)
    if name in profiles:
        return profiles.get(name)
    if statistic is None or statistic.derive is None:
        raise StatisticsError(f"{name}: was not measured")
    for need in statistic.needs:
        if need not in profiles:
            raise StatisticsError(f"{name}: {need}, of which it is made, was not measured")
    try:
        return statistic.derive(profiles)
    except KeyError as error:  # a site or a family that a damaged layout does not have
        raise StatisticsError(f"{name}: {error.args[0]!r}, of which it is made, was not measured") from error
