"""Declares the extended statistics: a forward pass over a fixed batch, and a backward pass for each example.

`stats/measure/extended.py` runs the passes.

Shapes: B examples, H heads, S queries, T keys, N tokens, D width, d a channel, M hidden width; `mean` is over all axes
that it does not name.
"""

from __future__ import annotations

import numpy as np

from normlab.stats.profiles import Array, Profiles, mean_of_later_half
from normlab.stats.statistic import EXTENDED, Statistic, register

QUERIES = 128
"""Most queries of a sequence in the attention statistics: evenly spaced, the last one included."""
MOST_TOKENS = 2048
"""Most tokens of a covariance, evenly spaced."""


def noise_scale(profiles: Profiles) -> dict[str, Array]:
    """Return tr(S) / |G|^2 of each parameter, (S, L + 2), and of all of them together as site "all", (S,).

    Numerator and denominator are averaged over measured steps before the division: the ratio of two noisy numbers is
    biased, and its mean need not exist. NaN where the averaged |G|^2 is not positive.
    """
    trace, square = (profiles.get(name) for name in ("gns_trace", "gns_square"))

    def ratio(trace: Array, square: Array) -> Array:
        trace, square = mean_of_later_half(trace), mean_of_later_half(square)
        return np.divide(trace, square, out=np.full_like(trace, np.nan), where=square > 0)

    totals = [profiles.select([name]).values.sum(axis=1, dtype=np.float64) for name in ("gns_trace", "gns_square")]
    return {site: ratio(trace[site], square[site]) for site in trace} | {"all": ratio(*totals)}


for name, of, formula, unit, value, question, source in (
    (
        "attn_logit_max", "attention", "max of scale q.k over the keys that a query attends to; of at most 128 queries",
        "nats", lambda a: a.logits.amax(),
        "Do attention logits grow until the softmax is one-hot? QK-norm bounds them.",
        "Wortsman et al. 2023, arXiv:2309.14322",
    ),
    (
        "attn_entropy", "attention", "mean over heads and at most 128 queries of -sum_T p log p", "nats",
        lambda a: a.entropy_H.mean(), "To how many tokens does a query attend? Its exponential.",
        "Zhai et al. 2023, arXiv:2303.06296 (entropy collapse)",
    ),
    (
        "attn_entropy_min", "attention", "the smallest of the heads' mean entropies", "nats",
        lambda a: a.entropy_H.amin(), "Has a head collapsed?", "Zhai et al. 2023, arXiv:2303.06296",
    ),
    (
        "attn_sink", "attention", "mean p of the first token, of at most 128 queries after it", "1",
        lambda a: a.sink, "Is the first token an attention sink, as in models with massive activations?",
        "Xiao et al. 2023, arXiv:2309.17453",
    ),
    (
        "neuron_kurt", "resid",
        "mean_d s^4 / (mean_d s^2)^2, s_d = sqrt(mean_N x_d^2): 1 for equal channels, D for a single one", "1",
        lambda x: x.neuron_kurt, "Are there outlier channels, the same for all tokens?",
        "He et al. 2024, arXiv:2405.19279",
    ),
    (
        "token_cos", "resid", "mean cos(x_i, x_j) over pairs of tokens", "1", lambda x: x.token_cos,
        "Do the tokens become equal?", "Dong et al. 2021, arXiv:2103.03404 (rank collapse), as a cosine",
    ),
    (
        "part_ratio", "resid",
        "tr(C)^2 / |C|_F^2, C the covariance of at most 2048 tokens: 1 to min(N, D), 0 for equal tokens", "1",
        lambda x: x.part_ratio, "How many directions does the stream use?", "the participation ratio of physics",
    ),
    (
        "dead_frac", "hidden", "share of hidden channels whose mean_N |h| is below a thousandth of the mean over all",
        "1", lambda h: h.dead, "How much of the MLP is unused?", "normlab",
    ),
    (
        "gns_trace", "parameter",
        "tr(S) of each parameter: (mean_b |g_b|^2 - |mean_b g_b|^2) B / (B - 1) of B <= 8 examples' g",
        "(nats / of w)^2", None,
        "How much do the gradients of single examples scatter? Unbiased: average it over steps.",
        "McCandlish et al. 2018, arXiv:1812.06162, appendix A.1",
    ),
    (
        "gns_square", "parameter",
        "|G|^2 of each parameter: (B |mean_b g_b|^2 - mean_b |g_b|^2) / (B - 1) of B <= 8 examples' g",
        "(nats / of w)^2", None,
        "How large is the gradient without its noise? Unbiased, so it can be negative: average it over steps.",
        "McCandlish et al. 2018, arXiv:1812.06162, appendix A.1",
    ),
    (
        "radial_cos", "parameter", "<g, w> / (|g| |w|), of each matrix", "1", None,
        "Is the loss independent of the weight's scale? Exactly 0 where a norm that removes scale follows the weight.",
        "van Laarhoven 2017, arXiv:1706.05350",
    ),
    (
        "adam_rms", "parameter", "sqrt(mean u^2) of each matrix, u = m^ / (sqrt(v^) + eps), Adam's update", "1", None,
        "Are Adam's steps as long as the learning rate? 1 where successive gradients agree.", "normlab",
    ),
    (
        "adam_eps_frac", "parameter", "share of sqrt(v^) < 10 eps in each matrix", "1", None,
        "Does Adam's eps determine the step?", "Wortsman et al. 2023, arXiv:2309.14322, section 4",
    ),
):  # fmt: skip
    register(
        Statistic(
            name=name, tier=EXTENDED, of=of, formula=formula, unit=unit, merge="pass", value=value,
            question=question, source=source,
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
        undefined="the averaged |G|^2 is not positive: too few examples to separate the gradient from its noise",
        question="At what batch size do more examples stop helping? That of the norms predicts that of all parameters.",
        source="McCandlish et al. 2018, arXiv:1812.06162; Gray et al. 2024, arXiv:2411.00999",
    )
)
