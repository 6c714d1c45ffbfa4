"""Statistics of the stream, and of what the sub-layers add to it.

Shapes: S measured steps, L blocks, N tokens, D width, d a channel; `mean` is over whatever it does not name.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from normlab.stats.profiles import Array, Profiles, per_place, slope_over_places
from normlab.stats.statistic import Statistic, register

STREAM = ("resid", "attn", "mlp")
"""What enters a block or the head, and what its two sub-layers add."""


def crest(profiles: Profiles, site: str) -> dict[str, Array]:
    """The largest number over the RMS."""
    return per_place(np.divide, profiles, f"{site}_absmax", f"{site}_rms")


def ratio(profiles: Profiles, branch: str) -> dict[str, Array]:
    """What a sub-layer adds, over what its block is given."""
    return per_place(np.divide, profiles, f"{branch}_rms", "resid_rms")


def resid_growth(profiles: Profiles) -> dict[str, Array]:
    """The logarithm of what is at the head over what is at block 1, for each block."""
    values = profiles.one("resid_rms").astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return {"": np.log(values[:, -1] / values[:, 1]) / profiles.layout.depth}


def dresid_growth(profiles: Profiles) -> dict[str, Array]:
    """The slope of the gradient's logarithm."""
    with np.errstate(divide="ignore", invalid="ignore"):
        values = profiles.one("dresid_rms")
        return {"": slope_over_places(np.log(values), np.arange(1, values.shape[1]))}


for site in STREAM:
    register(
        Statistic(
            name=f"{site}_rms",
            of=site,
            formula="sqrt(mean x^2)",
            unit="of x",
            merge="rms",
            value=lambda x: x.mean_square,
            question="How large is it? Pre-norm's stream grows with depth, post-norm's is its gain.",
            source="Xiong et al. 2020, arXiv:2002.04745; Kim et al. 2025, arXiv:2502.02732",
        )
    )
    register(
        Statistic(
            name=f"{site}_kurt",
            of=site,
            formula="mean_N(mean_d x^4 / (mean_d x^2)^2): 3 for a Gaussian, D for a single channel",
            unit="1",
            merge="mean",
            value=lambda x: x.fourth,
            question="Do a few channels carry a token? Of each token apart, about zero, and without the - 3.",
            source="after He et al. 2024, arXiv:2405.19279, who take it over tokens",
        )
    )
    register(
        Statistic(
            name=f"{site}_absmax",
            of=site,
            formula="max |x|",
            unit="of x",
            merge="max",
            value=lambda x: x.absmax,
            question="How far out is the furthest number?",
            source="after Sun et al. 2024, arXiv:2402.17762 (massive activations)",
        )
    )
    register(
        Statistic(
            name=f"{site}_crest",
            of=site,
            formula=f"{site}_absmax / {site}_rms",
            unit="1",
            merge="derived",
            derive=partial(crest, site=site),
            needs=(f"{site}_absmax", f"{site}_rms"),
            question="Are there massive activations? Of a Gaussian it is 4 to 6.",
            source="after Sun et al. 2024, arXiv:2402.17762",
        )
    )
    register(
        Statistic(
            name=f"{site}_nonfinite",
            of=site,
            formula="share of tokens whose mean_d x^2 is not finite in float32",
            unit="1",
            merge="mean",
            value=lambda x: x.broken,
            question="Where does a run that diverges break first?",
            source="OLMo-core and torchtitan count it",
        )
    )

for site in ("attn", "mlp"):
    register(
        Statistic(
            name=f"{site}_ratio",
            of=site,
            formula=f"{site}_rms / resid_rms of the same block",
            unit="1",
            merge="derived",
            derive=partial(ratio, branch=site),
            needs=(f"{site}_rms", "resid_rms"),
            question="Does a deep block still do anything?",
            source="Sun et al. 2025, arXiv:2502.05795 (the curse of depth)",
        )
    )

register(
    Statistic(
        name="resid_uniform",
        of="resid",
        formula="mean_N(D (mean_d x)^2 / mean_d x^2) = D cos^2(x, 1): 1 for a direction drawn at random",
        unit="1",
        merge="mean",
        value=lambda x: x.uniform,
        question="Is there anything along the vector of ones, which LayerNorm takes out and RMSNorm leaves?",
        source="after Gupta et al. 2024, arXiv:2409.12951",
    )
)
register(
    Statistic(
        name="resid_growth",
        of="resid",
        formula="ln(resid_rms at the head / at block 1) / L",
        unit="per block",
        merge="derived",
        derive=resid_growth,
        needs=("resid_rms",),
        question="How fast does the stream grow with depth, in one number?",
        source="after OLMo 2, arXiv:2501.00656, which fits it over depth",
    )
)
register(
    Statistic(
        name="adj_cos",
        of="block",
        formula="mean_N cos(x, x'), x before the block and x' after it",
        unit="1",
        merge="mean",
        value=lambda x, after: x.cosine(after),
        question="Does the block turn the stream at all? 1 where it could be left out.",
        source="Gromov et al. 2024, arXiv:2403.17887; 1 - this is Men et al.'s BI, arXiv:2403.03853",
    )
)
register(
    Statistic(
        name="dresid_rms",
        of="resid",
        formula="N sqrt(mean (dL/dx)^2), L the mean loss of the step's N tokens",
        unit="nats / of x",
        merge="rms",
        question="Is the gradient the same at the top as at the bottom? N makes it free of the batch's size.",
        source="Xiong et al. 2020, arXiv:2002.04745, section 3",
    )
)
register(
    Statistic(
        name="dresid_growth",
        of="resid",
        formula="slope of ln dresid_rms over the blocks and the head, by least squares",
        unit="per block",
        merge="derived",
        derive=dresid_growth,
        needs=("dresid_rms",),
        question="Do gradients vanish or explode with depth? Above 0 they are larger at the top.",
        source="after Xiong et al. 2020, arXiv:2002.04745",
    )
)
