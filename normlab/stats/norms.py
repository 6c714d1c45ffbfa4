"""Statistics of norms: what enters them, what leaves them, and what their gains have learned.

Shapes: N tokens, D width, d a channel; `mean` is over whatever it does not name.
"""

from __future__ import annotations

import numpy as np

from normlab.stats.profiles import per_place
from normlab.stats.statistic import Statistic, register

register(
    Statistic(
        name="norm_in_rms",
        of="norm",
        formula="sqrt(mean x^2) of what enters a norm",
        unit="of x",
        merge="rms",
        value=lambda x, y: x.mean_square,
        question="Is the norm near its eps, where it stops being one?",
        source="normlab",
    )
)
register(
    Statistic(
        name="norm_in_uniform",
        of="norm",
        formula="mean_N(D (mean_d x)^2 / mean_d x^2) of what enters a norm",
        unit="1",
        merge="mean",
        value=lambda x, y: x.uniform,
        question="What would centring each token take out of it?",
        source="after Gupta et al. 2024, arXiv:2409.12951",
    )
)
register(
    Statistic(
        name="norm_out_rms",
        of="norm",
        formula="sqrt(mean y^2) of what leaves a norm",
        unit="of y",
        merge="rms",
        value=lambda x, y: y.mean_square,
        question="What does the sub-layer, or the stream, get?",
        source="normlab",
    )
)
register(
    Statistic(
        name="norm_gain",
        of="norm",
        formula="norm_out_rms / norm_in_rms",
        unit="1",
        merge="derived",
        derive=lambda profiles: per_place(np.divide, profiles, "norm_out_rms", "norm_in_rms"),
        needs=("norm_out_rms", "norm_in_rms"),
        question="How hard does the norm work? On the way back the gradient is multiplied by about as much.",
        source="normlab",
    )
)

for name, formula, value, question in (
    ("gain_rms", "sqrt(mean_d g^2)", lambda g: g.mean_square.sqrt(), "Do norms of deep blocks grow or shrink?"),
    ("gain_min", "min_d g", lambda g: g.x.amin(-1), "Is a channel switched off, or turned round?"),
    ("gain_absmax", "max_d |g|", lambda g: g.x.abs().amax(-1), "Does a channel stand out?"),
    ("gain_cv", "std_d(g) / |mean_d g|, std over all D", lambda g: g.spread, "Has the gain learned anything at all?"),
    ("gain_negative", "share of g < 0", lambda g: (g.x < 0).to(g.x.dtype).mean(-1), "How many channels turned round?"),
):
    register(
        Statistic(
            name=name, of="gain", formula=formula, unit="1", merge="step", value=value, question=question,
            source="normlab",
        )
    )  # fmt: skip
