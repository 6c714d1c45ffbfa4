"""Statistics of the logits.

Shapes: N tokens, v a word of the vocabulary.
"""

from __future__ import annotations

from normlab.stats.statistic import Statistic, register

for name, formula, unit, merge, value, question in (
    ("logz", "mean_N log sum_v exp z_v", "nats", "mean", lambda z: z.logz, "Do the logits drift as a whole?"),
    (
        "logz2",
        "mean_N (log sum_v exp z_v)^2",
        "nats^2",
        "mean",
        lambda z: z.logz.square(),
        "What is the z-loss?",
    ),
    ("logit_mean", "mean z", "nats", "mean", lambda z: z.mean, "Do they drift together, which costs nothing?"),
    ("logit_absmax", "max |z|", "nats", "max", lambda z: z.absmax, "How sure does the head get?"),
):
    register(
        Statistic(
            name=name, of="head", formula=formula, unit=unit, merge=merge, value=value, question=question,
            source="Wortsman et al. 2023, arXiv:2309.14322; z-loss: Chowdhery et al. 2022, arXiv:2204.02311",
        )
    )  # fmt: skip
