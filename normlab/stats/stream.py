"""Statistics of the stream, of what the sub-layers add to it, and of the logits.

Shapes: S measured steps, L blocks, N tokens, D width, d a channel, v a vocabulary entry; `mean` is over all axes that
it does not name.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from normlab.stats.profiles import Array, Profiles, combine, slope_over_layers
from normlab.stats.statistic import Statistic, register


def ratio(profiles: Profiles, numerator: str, denominator: str) -> dict[str, Array]:
    """Return the quotient of two statistics, site by site."""
    return combine(np.divide, profiles, numerator, denominator)


def resid_growth(profiles: Profiles) -> dict[str, Array]:
    """Return ln(resid_rms at the head / at block 1) / L, (S,)."""
    values = profiles.single_site("resid_rms").astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return {"": np.log(values[:, -1] / values[:, 1]) / profiles.layout.depth}


def dresid_growth(profiles: Profiles) -> dict[str, Array]:
    """Return the slope of ln dresid_rms over the layers, (S,)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        values = profiles.single_site("dresid_rms")
        return {"": slope_over_layers(np.log(values), np.arange(1, values.shape[1]))}


for of in ("resid", "attn", "mlp"):
    for name, formula, unit, merge, value, question, source in (
        (
            "rms", "sqrt(mean x^2)", "of x", "rms", lambda x: x.mean_square,
            "How large is it? A pre-norm stream grows with depth, a post-norm stream has the size of its gain.",
            "Xiong et al. 2020, arXiv:2002.04745; Kim et al. 2025, arXiv:2502.02732",
        ),
        (
            "kurt", "mean_N(mean_d x^4 / (mean_d x^2)^2): 3 for a Gaussian, D for a single channel", "1", "mean",
            lambda x: x.kurtosis, "Do a few channels dominate a token? Computed for each token, around zero.",
            "after He et al. 2024, arXiv:2405.19279, who compute it over tokens",
        ),
        (
            "absmax", "max |x|", "of x", "max", lambda x: x.absmax, "How large is the largest value?",
            "after Sun et al. 2024, arXiv:2402.17762 (massive activations)",
        ),
        (
            "nonfinite", "share of tokens whose mean_d x^2 is not finite in float32", "1", "mean",
            lambda x: x.nonfinite, "At which layer does a diverging run break first?",
            "OLMo-core and torchtitan count it",
        ),
    ):  # fmt: skip
        register(
            Statistic(
                name=f"{of}_{name}", of=of, formula=formula, unit=unit, merge=merge, value=value, question=question,
                source=source,
            )
        )  # fmt: skip
    register(
        Statistic(
            name=f"{of}_crest",
            of=of,
            formula=f"{of}_absmax / {of}_rms",
            unit="1",
            merge="derived",
            derive=partial(ratio, numerator=f"{of}_absmax", denominator=f"{of}_rms"),
            needs=(f"{of}_absmax", f"{of}_rms"),
            question="Are there massive activations? A Gaussian has 4 to 6.",
            source="after Sun et al. 2024, arXiv:2402.17762",
        )
    )

for of in ("attn", "mlp"):
    register(
        Statistic(
            name=f"{of}_ratio",
            of=of,
            formula=f"{of}_rms / resid_rms of the same block",
            unit="1",
            merge="derived",
            derive=partial(ratio, numerator=f"{of}_rms", denominator="resid_rms"),
            needs=(f"{of}_rms", "resid_rms"),
            question="Does a deep block still change the stream?",
            source="Sun et al. 2025, arXiv:2502.05795 (the curse of depth)",
        )
    )

register(
    Statistic(
        name="resid_uniform",
        of="resid",
        formula="mean_N(D (mean_d x)^2 / mean_d x^2) = D cos^2(x, 1): 1 for a random direction",
        unit="1",
        merge="mean",
        value=lambda x: x.uniform,
        question="How large is the component along the vector of ones, which LayerNorm removes and RMSNorm keeps?",
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
        question="Does the block turn the stream? 1 for a block that could be removed.",
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
        question="Is the gradient the same at all layers? The factor N makes it independent of the batch size.",
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

for name, formula, unit, merge, value, question in (
    ("logz", "mean_N log sum_v exp z_v", "nats", "mean", lambda z: z.logz, "Do the logits drift together?"),
    (
        "logz2", "mean_N (log sum_v exp z_v)^2", "nats^2", "mean", lambda z: z.logz.square(),
        "How large would the z-loss be?",
    ),
    ("logit_mean", "mean z", "nats", "mean", lambda z: z.mean, "Do all logits share an offset, which costs no loss?"),
    ("logit_absmax", "max |z|", "nats", "max", lambda z: z.absmax, "How confident does the head become?"),
):  # fmt: skip
    register(
        Statistic(
            name=name, of="head", formula=formula, unit=unit, merge=merge, value=value, question=question,
            source="Wortsman et al. 2023, arXiv:2309.14322; z-loss: Chowdhery et al. 2022, arXiv:2204.02311",
        )
    )  # fmt: skip
