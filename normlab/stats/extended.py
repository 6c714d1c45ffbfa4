"""The extended statistics: of a pass over a fixed batch, forward as the model trains, backward by example.

Shapes: B examples, H heads, S queries, T keys, N tokens, D width, d a channel, M hidden width; `mean` is over whatever
it does not name.
"""

from __future__ import annotations

import numpy as np

from normlab.stats.profiles import Array, Profiles, mean_of_later_half
from normlab.stats.statistic import EXTENDED, Statistic, register

QUERIES = 128
"""Most queries of a sequence whose attention is looked at, evenly spaced and the last among them."""
MOST_TOKENS = 2048
"""Most tokens whose covariance is looked at, evenly spaced."""


def noise_scale(profiles: Profiles) -> dict[str, Array]:
    """Return tr(S) / |G|^2 of each parameter, (S, L + 2), and of all of them together as site "all", (S,).

    Numerator and denominator are averaged over measured steps before the division: the ratio of two noisy numbers is
    biased, and its mean need not exist. NaN where the averaged |G|^2 is not positive.
    """
    trace, square = (profiles.get(name) for name in ("gns_trace", "gns_square"))

    def ratio(trace: Array, square: Array) -> Array:
        trace, square = mean_of_later_half(trace), mean_of_later_half(square)
        return np.divide(trace, square, out=np.full_like(trace, np.nan), where=square > 0)

    whole = [profiles.select([name]).values.sum(axis=1, dtype=np.float64) for name in ("gns_trace", "gns_square")]
    return {site: ratio(trace[site], square[site]) for site in trace} | {"all": ratio(*whole)}


for name, formula, unit, value, question, source in (
    (
        "attn_logit_max", "max of scale q.k over the keys that a query sees; of at most 128 queries", "nats",
        lambda a: a.logits.amax(), "Do attention's logits grow until the softmax is one-hot? QK-norm bounds them.",
        "Wortsman et al. 2023, arXiv:2309.14322",
    ),
    (
        "attn_entropy", "mean over heads and at most 128 queries of -sum_T p log p", "nats",
        lambda a: a.entropy_H.mean(), "How many tokens does a query look at? exp of it.",
        "Zhai et al. 2023, arXiv:2303.06296 (entropy collapse)",
    ),
    (
        "attn_entropy_min", "the least of the heads' mean entropies", "nats",
        lambda a: a.entropy_H.amin(), "Has a head collapsed?", "Zhai et al. 2023, arXiv:2303.06296",
    ),
    (
        "attn_sink", "mean p of the first token, of at most 128 queries after it", "1",
        lambda a: a.sink, "Is the first token a sink, as where there are massive activations?",
        "Xiao et al. 2023, arXiv:2309.17453",
    ),
):  # fmt: skip
    register(
        Statistic(
            name=name, tier=EXTENDED, of="attention", formula=formula, unit=unit, merge="pass", value=value,
            question=question, source=source,
        )
    )  # fmt: skip

for name, formula, value, question, source in (
    (
        "neuron_kurt", "mean_d s^4 / (mean_d s^2)^2, s_d = sqrt(mean_N x_d^2): 1 where channels are alike, D for one",
        lambda x: x.neuron_kurt, "Are there outlier channels, the same for all tokens?",
        "He et al. 2024, arXiv:2405.19279",
    ),
    (
        "token_cos", "mean cos(x_i, x_j) over pairs of tokens", lambda x: x.token_cos,
        "Do tokens become one another's copies?", "Dong et al. 2021, arXiv:2103.03404 (rank collapse), as a cosine",
    ),
    (
        "part_ratio", "tr(C)^2 / |C|_F^2, C the covariance of at most 2048 tokens: 1 to min(N, D), or 0 of copies",
        lambda x: x.part_ratio,
        "How many directions does the stream use?", "the participation ratio, of physics",
    ),
):  # fmt: skip
    register(
        Statistic(
            name=name, tier=EXTENDED, of="resid", formula=formula, unit="1", merge="pass", value=value,
            question=question, source=source,
        )
    )  # fmt: skip

register(
    Statistic(
        name="dead_frac",
        tier=EXTENDED,
        of="hidden",
        formula="share of hidden channels whose mean_N |h| is below a thousandth of the mean over all",
        unit="1",
        merge="pass",
        value=lambda h: h.dead,
        question="How much of the MLP is unused?",
        source="normlab",
    )
)
for name, formula, question in (
    (
        "gns_trace", "tr(S) of each parameter: (mean_b |g_b|^2 - |mean_b g_b|^2) B / (B - 1) of B <= 8 examples' g",
        "How much do the gradients of single examples scatter? Unbiased: average it over steps.",
    ),
    (
        "gns_square", "|G|^2 of each parameter: (B |mean_b g_b|^2 - mean_b |g_b|^2) / (B - 1) of B <= 8 examples' g",
        "How large is the gradient without its noise? Unbiased, and so below 0 at times: average it over steps.",
    ),
):  # fmt: skip
    register(
        Statistic(
            name=name, tier=EXTENDED, of="parameter", formula=formula, unit="(nats / of w)^2", merge="pass",
            question=question, source="McCandlish et al. 2018, arXiv:1812.06162, appendix A.1",
        )
    )  # fmt: skip
register(
    Statistic(
        name="gns",
        tier=EXTENDED,
        of="parameter",
        formula="mean gns_trace / mean gns_square, each over the later half of the measured steps so far",
        unit="examples",
        merge="derived",
        derive=noise_scale,
        needs=("gns_trace", "gns_square"),
        averaged=True,
        undefined="the averaged |G|^2 is not positive: too few examples to tell the gradient from its noise",
        question="How many examples would a batch need before more of them stop helping? Of norms it foretells all.",
        source="McCandlish et al. 2018, arXiv:1812.06162; Gray et al. 2024, arXiv:2411.00999",
    )
)
for name, formula, question, source in (
    (
        "radial_cos", "<g, w> / (|g| |w|), of each matrix",
        "Is the loss blind to the weight's size? 0 exactly where a norm that removes scale follows it.",
        "van Laarhoven 2017, arXiv:1706.05350",
    ),
    (
        "adam_rms", "sqrt(mean u^2) of each matrix, u = m^ / (sqrt(v^) + eps) as the update has it",
        "Are Adam's steps as long as the learning rate says? 1 where gradients agree.",
        "normlab",
    ),
    (
        "adam_eps_frac", "share of sqrt(v^) < 10 eps in each matrix", "Does Adam's eps decide the step?",
        "Wortsman et al. 2023, arXiv:2309.14322, section 4",
    ),
):  # fmt: skip
    register(
        Statistic(
            name=name, tier=EXTENDED, of="parameter", formula=formula, unit="1", merge="pass", question=question,
            source=source,
        )
    )  # fmt: skip
