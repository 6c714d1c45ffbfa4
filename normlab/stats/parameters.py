"""Statistics of parameters: their gradients, their lengths, and how far an update moves them.

Shapes: S measured steps, L blocks, w a parameter, g its gradient.
"""

from __future__ import annotations

import numpy as np

from normlab.stats.profiles import Array, Profiles, per_place
from normlab.stats.statistic import Statistic, register

BY_A_COPY = ("param_norm", "update_norm")
"""Statistics for which a measured step copies every parameter before the update."""


def shares(profiles: Profiles) -> dict[str, Array]:
    """The share of each family in the square of the whole gradient's norm, (S,) each."""
    sums: dict[str, Array] = {}
    found = profiles.get("grad_norm")
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for group in profiles.layout.groups:
            if group.statistic == "grad_norm":
                norms = found[group.site][:, list(group.places)]
                family = profiles.layout.families[group.site]
                sums[family] = sums.get(family, 0.0) + np.square(norms, dtype=np.float64).sum(axis=1)
        whole = sum(sums.values())
        return {family: own / whole for family, own in sums.items()}


register(
    Statistic(
        name="grad_norm",
        of="parameter",
        formula="|g|_2, before clipping",
        unit="nats / of w",
        merge="step",
        question="Which parameters does the norm of the whole gradient come from?",
        source="Composer and OLMo log it",
    )
)
register(
    Statistic(
        name="grad_share",
        of="parameter",
        formula="sum of grad_norm^2 over a family of parameters / over all of them",
        unit="1",
        merge="derived",
        derive=shares,
        needs=("grad_norm",),
        question="Embeddings, attention, MLPs, norms, the wiring or the head: whose gradient is it?",
        source="normlab, after Marin's diary of a spike that was all the head's",
    )
)
register(
    Statistic(
        name="param_norm",
        of="parameter",
        formula="|w|_2, before the update",
        unit="of w",
        merge="step",
        question="Does a weight that a norm makes scale-free drift outwards, so that its steps shrink?",
        source="van Laarhoven 2017, arXiv:1706.05350",
    )
)
register(
    Statistic(
        name="update_norm",
        of="parameter",
        formula="|w' - w|_2, w' after the update: weight decay and projection included",
        unit="of w",
        merge="step",
        question="What did the optimiser make of the gradient?",
        source="Composer logs it",
    )
)
register(
    Statistic(
        name="update_ratio",
        of="parameter",
        formula="update_norm / param_norm",
        unit="1",
        merge="derived",
        derive=lambda profiles: per_place(np.divide, profiles, "update_norm", "param_norm"),
        needs=("update_norm", "param_norm"),
        question="What is the learning rate in effect? Infinite where a parameter starts at 0.",
        source="folklore; 1e-3 is often called healthy",
    )
)
