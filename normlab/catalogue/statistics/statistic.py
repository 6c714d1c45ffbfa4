"""`StatisticEntry`, and the values of its fields. `registry.py` holds the entries."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from normlab.catalogue.statistics.profiles import Array, Profiles

CORE, EXTENDED, PROBE = "core", "extended", "probe"
TIERS = {
    CORE: "in the step itself, every stats.every steps",
    EXTENDED: "in a pass over a fixed batch, every stats.extended_every steps",
    PROBE: "at a run's start, half and end",
}
"""When a statistic is measured."""

OF = {
    "resid": "the residual stream that enters each layer and the LM head",
    "streams": "each of the streams of a placement that has several, and their sum",
    "attn": "the tensor that attention adds to the residual stream, after norms, learned scales and factors",
    "mlp": "the tensor that the MLP adds to the residual stream, after norms, learned scales and factors",
    "block": "the residual stream before and after a layer",
    "attention": "queries, keys, and the scale and the softcap of their product, as the softmax gets them",
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


LAYERS, ONE, LARGEST = "layers", "one", "largest"
"""What W&B receives of a statistic: its value in each layer; its only value at a step and a site, or that of the last
layer; or the largest of all layers and sites."""


@dataclass(frozen=True, kw_only=True)
class StatisticEntry:
    name: str
    title: str
    """What papers call it, in words; the name is its key in files and commands."""
    tier: str = CORE
    of: str
    """The tensors that it is computed from: a key of `OF`."""
    formula: str
    """One line, with the meaning of its letters."""
    unit: str
    """Unit of a value; `1` for ratios, other dimensionless numbers, activations and parameters."""
    merge: str
    """A key of `MERGES`. For `rms`, `value` returns the square."""
    question: str
    """The question that it answers."""
    source: str
    """The publication or code that defines it."""
    value: Callable[..., Any] | None = None
    """Computes the values of many sites at once from a view of their observed tensors (`views.View`): one for each
    token, which are averaged, or one for each site. None if the step or `derive` computes it."""
    derive: Callable[[Profiles], dict[str, Array]] | None = None
    """Computes a derived statistic by site from measured ones: (S, L + 2), or (S,), for S steps and L blocks."""
    needs: tuple[str, ...] = ()
    """The statistics that `derive` reads."""
    averaged: bool = False
    """Whether `derive` averages over measured steps (`derived.mean_of_later_half`)."""
    shown: bool = False
    """Whether `normlab inspect RUN` shows it; all others are shown by name."""
    sent: str = ""
    """What W&B receives: `LAYERS`, `ONE` or `LARGEST`; nothing if empty."""
    sent_sites: str = ""
    """The end of the names of the sites that `LARGEST` compares; empty for all sites."""
    undefined: str = ""
    """Why a value can be NaN although all measured values are finite."""
