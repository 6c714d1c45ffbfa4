"""Statistics of parameters: gradient norms, parameter norms and update norms.

Shapes: S measured steps, L blocks, w a parameter, g its gradient.
"""

from __future__ import annotations

import numpy as np

from normlab.stats.profiles import Array, Profiles, combine
from normlab.stats.statistic import Statistic, register

NEEDS_PARAMETER_COPY = ("param_norm", "update_norm")
"""Statistics for which a measured step copies every parameter before the update."""


def gradient_shares(profiles: Profiles) -> dict[str, Array]:
    """Return the share of each parameter family in the squared norm of the whole gradient, (S,) each."""
    sums: dict[str, Array] = {}
    norms = profiles.get("grad_norm")
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for group in profiles.layout.groups:
            if group.statistic == "grad_norm":
                family = profiles.layout.families[group.site]
                squares = np.square(norms[group.site][:, list(group.layers)], dtype=np.float64)
                sums[family] = sums.get(family, 0.0) + squares.sum(axis=1)
        total = sum(sums.values())
        return {family: share / total for family, share in sums.items()}


for name, formula, unit, question, source in (
    (
        "grad_norm", "|g|_2, before clipping", "nats / of w",
        "Which parameters dominate the norm of the whole gradient?", "Composer and OLMo log it",
    ),
    (
        "param_norm", "|w|_2, before the update", "of w",
        "Does a weight that a norm makes scale-invariant grow, so that its effective steps shrink?",
        "van Laarhoven 2017, arXiv:1706.05350",
    ),
    (
        "update_norm", "|w' - w|_2, w' after the update: weight decay and projection included", "of w",
        "How far does the optimiser move the parameter?", "Composer logs it",
    ),
):  # fmt: skip
    register(
        Statistic(name=name, of="parameter", formula=formula, unit=unit, merge="step", question=question, source=source)
    )
register(
    Statistic(
        name="grad_share",
        of="parameter",
        formula="sum of grad_norm^2 over a family of parameters / over all of them",
        unit="1",
        merge="derived",
        derive=gradient_shares,
        needs=("grad_norm",),
        question="Which family has the gradient: embeddings, attention, MLPs, norms, the wiring or the head?",
        source="normlab, after Marin's report of a spike that came from the head alone",
    )
)
register(
    Statistic(
        name="update_ratio",
        of="parameter",
        formula="update_norm / param_norm",
        unit="1",
        merge="derived",
        derive=lambda profiles: combine(np.divide, profiles, "update_norm", "param_norm"),
        needs=("update_norm", "param_norm"),
        question="What is the effective learning rate? Infinite for a parameter that starts at 0.",
        source="folklore; 1e-3 is often called healthy",
    )
)
