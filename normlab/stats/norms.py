"""Statistics of norms: their inputs, their outputs and their learned gains.

Shapes: N tokens, D width, d a channel; `mean` is over all axes that it does not name.
"""

from __future__ import annotations

import numpy as np

from normlab.stats.profiles import combine
from normlab.stats.statistic import Statistic, register

for name, formula, unit, merge, value, question, source in (
    (
        "norm_in_rms", "sqrt(mean x^2) of a norm's input", "of x", "rms", lambda x, y: x.mean_square,
        "Is the input so small that eps dominates the norm?", "normlab",
    ),
    (
        "norm_in_uniform", "mean_N(D (mean_d x)^2 / mean_d x^2) of a norm's input", "1", "mean",
        lambda x, y: x.uniform, "How much of each token would centring remove?",
        "after Gupta et al. 2024, arXiv:2409.12951",
    ),
    (
        "norm_out_rms", "sqrt(mean y^2) of a norm's output", "of y", "rms", lambda x, y: y.mean_square,
        "How large is the input of the sub-layer, or of the stream?", "normlab",
    ),
):  # fmt: skip
    register(
        Statistic(
            name=name, of="norm", formula=formula, unit=unit, merge=merge, value=value, question=question,
            source=source,
        )
    )  # fmt: skip

register(
    Statistic(
        name="norm_gain",
        of="norm",
        formula="norm_out_rms / norm_in_rms",
        unit="1",
        merge="derived",
        derive=lambda profiles: combine(np.divide, profiles, "norm_out_rms", "norm_in_rms"),
        needs=("norm_out_rms", "norm_in_rms"),
        question="How much does the norm scale? The backward pass multiplies the gradient by about the same factor.",
        source="normlab",
    )
)

for name, formula, value, question in (
    ("gain_rms", "sqrt(mean_d g^2)", lambda g: g.mean_square.sqrt(), "Do norms of deep blocks grow or shrink?"),
    ("gain_min", "min_d g", lambda g: g.x.amin(-1), "Is a channel switched off or inverted?"),
    ("gain_absmax", "max_d |g|", lambda g: g.x.abs().amax(-1), "Is there an outlier channel?"),
    (
        "gain_cv", "std_d(g) / |mean_d g|, std over all D", lambda g: g.coefficient_of_variation,
        "Has the gain learned to differ between channels?",
    ),
    ("gain_negative", "share of g < 0", lambda g: (g.x < 0).to(g.x.dtype).mean(-1), "How many channels are inverted?"),
):  # fmt: skip
    register(
        Statistic(
            name=name, of="gain", formula=formula, unit="1", merge="step", value=value, question=question,
            source="normlab",
        )
    )  # fmt: skip
