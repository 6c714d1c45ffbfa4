"""All statistics, one entry each, and the values of measured and derived ones. Imports no torch.

An entry has a name, a title, the tensors that it is computed from, a formula, a unit, the question that it answers, a
source, and one line of code. To add a statistic, copy an entry: the model offers the tensors (`instrument.py`), and the
files of a run, reports and pages take the rest from the entry. Entries are in the order of `statistic.OF`.

Shapes: N tokens, D width, d a channel, v a vocabulary entry, L layers, S measured steps; B examples, H heads, T keys;
x_l the residual stream that enters layer l, x_{L+1} the one that enters the LM head; w a parameter, g its gradient;
`mean` is over all axes that it does not name.

Activations and parameters have no unit (1), so a gradient has that of the loss (nats).
"""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normlab.base.errors import StatisticsError
from normlab.catalogue.statistics import derived
from normlab.catalogue.statistics.profiles import Array, Profiles
from normlab.catalogue.statistics.statistic import EXTENDED, LARGEST, LAYERS, ONE, PROBE, StatisticEntry

extended = partial(StatisticEntry, tier=EXTENDED, merge="pass")
probe = partial(StatisticEntry, tier=PROBE, merge="pass")
of_gain = partial(StatisticEntry, of="gain", unit="1", merge="step", source="normlab")
of_logits = partial(
    StatisticEntry,
    of="head",
    sent=ONE,
    source="Wortsman et al. 2023, arXiv:2309.14322; z-loss: Chowdhery et al. 2022, arXiv:2204.02311",
)


def quotient(numerator: str, denominator: str, formula: str = "", **fields: Any) -> StatisticEntry:
    """Return the statistic `numerator / denominator`, site by site."""
    return StatisticEntry(
        formula=formula or f"{numerator} / {denominator}",
        unit="1",
        merge="derived",
        derive=partial(derived.quotient, numerator=numerator, denominator=denominator),
        needs=(numerator, denominator),
        **fields,
    )


SIZES = {
    "rms": lambda x: x.mean_square,
    "kurt": lambda x: x.kurtosis,
    "absmax": lambda x: x.absmax,
    "nonfinite": lambda x: x.nonfinite,
}
"""The functions of `sizes`. Statistics that have the same function are computed together."""

TENSORS = {"resid": "the residual stream", "attn": "the output of attention", "mlp": "the output of the MLP"}
"""The tensors of `sizes`, as their questions call them."""


# fmt: off
def sizes(of: str) -> list[StatisticEntry]:
    """Return the statistics of size of the residual stream, or of what a sub-layer adds to it."""
    tensor, is_stream = TENSORS[of], of == "resid"
    # Of a sub-layer's output W&B receives the size only.
    sent_of_stream = nonfinite_sent = note = ""
    if is_stream:
        sent_of_stream, nonfinite_sent = LAYERS, LARGEST
        note = " In pre-norm it grows with depth, in post-norm it has the size of the gain."
    return [
        # `rms` merges mean squares of micro-batches and takes the root last, so the value is the mean square.
        StatisticEntry(
            name=f"{of}_rms", title=f"RMS of {tensor}",
            sent=LAYERS, shown=is_stream, of=of, unit="1", merge="rms", value=SIZES["rms"],
            formula="sqrt(mean x^2)",
            question=f"How large is {tensor} in each layer?{note}",
            source="Xiong et al. 2020, arXiv:2002.04745; Kim et al. 2025, arXiv:2502.02732",
        ),
        StatisticEntry(
            name=f"{of}_kurt", title=f"kurtosis of {tensor}",
            sent=sent_of_stream, shown=is_stream, of=of, unit="1", merge="mean", value=SIZES["kurt"],
            formula="mean_N(mean_d x^4 / (mean_d x^2)^2): 3 for a Gaussian, D for a single channel",
            question=f"Do a few channels of a token dominate {tensor}? The moments are around zero.",
            source="after He et al. 2024, arXiv:2405.19279, who compute it over tokens",
        ),
        StatisticEntry(
            name=f"{of}_absmax", title=f"largest absolute value of {tensor}",
            of=of, unit="1", merge="max", value=SIZES["absmax"],
            formula="max |x|", question=f"What is the largest absolute value in {tensor}?",
            source="after Sun et al. 2024, arXiv:2402.17762 (massive activations)",
        ),
        StatisticEntry(
            name=f"{of}_nonfinite", title=f"non-finite share of {tensor}",
            sent=nonfinite_sent, of=of, unit="1", merge="mean",
            value=SIZES["nonfinite"],
            formula="share of tokens whose mean_d x^2 is not finite in float32",
            question=f"In which layer does {tensor} become NaN or infinite first when a run diverges?",
            source="OLMo-core and torchtitan count it",
        ),
        quotient(
            f"{of}_absmax", f"{of}_rms", name=f"{of}_crest", title=f"crest factor of {tensor}",
            sent=sent_of_stream, shown=is_stream, of=of,
            question=f"Does {tensor} have massive activations? A Gaussian has a crest factor of 4 to 6.",
            source="after Sun et al. 2024, arXiv:2402.17762",
        ),
    ]


def ratio_to_stream(of: str) -> StatisticEntry:
    """Return the statistic of the size of a sub-layer's update, relative to the residual stream."""
    return quotient(
        f"{of}_rms", "resid_rms", name=f"{of}_ratio", title=f"relative size of {TENSORS[of]}",
        of=of, sent=LAYERS, shown=True,
        formula=f"{of}_rms / resid_rms of the same layer",
        question=f"How large is {TENSORS[of]} relative to the residual stream? Near 0 the layer hardly changes it.",
        source="Sun et al. 2025, arXiv:2502.05795 (the curse of depth)",
    )


ENTRIES = (
    *sizes("resid"),
    StatisticEntry(
        name="resid_uniform", title="uniform component of the residual stream",
        sent=LAYERS, shown=True, of="resid", unit="1", merge="mean", value=lambda x: x.uniform,
        formula="mean_N(D (mean_d x)^2 / mean_d x^2) = D cos^2(x, 1): 1 for a random direction",
        question="How large is the residual stream along the vector of ones, which LayerNorm removes and RMSNorm "
        "keeps?",
        source="after Gupta et al. 2024, arXiv:2409.12951",
    ),
    StatisticEntry(
        name="resid_growth", title="growth of the residual stream over depth",
        sent=ONE, of="resid", unit="1/layer", merge="derived", derive=derived.resid_growth,
        needs=("resid_rms",),
        formula="ln(resid_rms at the LM head / at layer 1) / L",
        question="How fast does the residual stream grow with depth?",
        source="after OLMo 2, arXiv:2501.00656, which fits it over depth",
    ),
    StatisticEntry(  # the step computes it, from the gradient at each tap
        name="dresid_rms", title="RMS of the stream's gradient",
        sent=LAYERS, shown=True, of="resid", unit="nats", merge="rms",
        formula="N sqrt(mean (dL/dx)^2), L the mean loss of the step's N tokens",
        question="How large is the gradient of the residual stream in each layer? The factor N makes it independent of "
        "the batch size.",
        source="Xiong et al. 2020, arXiv:2002.04745, section 3",
    ),
    StatisticEntry(
        name="dresid_growth", title="growth of the stream's gradient over depth",
        sent=ONE, of="resid", unit="1/layer", merge="derived", derive=derived.dresid_growth,
        needs=("dresid_rms",),
        formula="slope of ln dresid_rms over the layers and the LM head, by least squares",
        question="Do the gradients of the residual stream vanish or explode? Above 0 they are larger in later layers.",
        source="after Xiong et al. 2020, arXiv:2002.04745",
    ),
    extended(
        name="neuron_kurt", title="kurtosis across channels",
        of="resid", unit="1", value=lambda x: x.neuron_kurt,
        formula="mean_d s^4 / (mean_d s^2)^2, s_d = sqrt(mean_N x_d^2): 1 for equal channels, D for a single one",
        question="Does the residual stream have outlier channels, the same for all tokens?",
        source="He et al. 2024, arXiv:2405.19279",
    ),
    extended(
        name="token_cos", title="cosine of tokens",
        sent=LAYERS, shown=True, of="resid", unit="1", value=lambda x: x.token_cos,
        formula="mean cos(x_i, x_j) over pairs of tokens",
        question="Do the residual streams of different tokens become equal?",
        source="Dong et al. 2021, arXiv:2103.03404 (rank collapse), as a cosine",
    ),
    extended(
        name="part_ratio", title="participation ratio",
        sent=LAYERS, shown=True, of="resid", unit="1", value=lambda x: x.part_ratio,
        formula="tr(C)^2 / |C|_F^2, C the covariance of at most 2048 tokens: 1 to min(N, D), 0 for equal tokens",
        question="In how many directions do tokens differ? By the sum of squared eigenvalues.",
        source="the participation ratio of physics",
    ),
    probe(
        name="erank", title="effective rank",
        sent=LAYERS, shown=True, of="resid", unit="1",
        formula="exp(-sum p log p), p the eigenvalues of the tokens' covariance over their sum",
        question="In how many directions do tokens differ? By the entropy of the eigenvalues.",
        source="Roy & Vetterli 2007 (effective rank)",
    ),
    probe(
        name="jac_gain", title="gain of the Jacobian",
        shown=True, of="resid", unit="1",
        formula="mean |J^T v|^2 / |v|^2 of 4 Gaussian v, J the Jacobian of x_{L+1} by layer l's x_l",
        question="How much do the later layers amplify a small change of the residual stream?",
        source="after Pennington et al. 2017, arXiv:1711.04735",
    ),

    StatisticEntry(
        name="stream_rms", title="RMS of each stream",
        of="streams", unit="1", merge="rms", value=lambda x, total: x.mean_square,
        formula="sqrt(mean x^2) of each stream",
        question="Does the model use all of its streams, or is one much larger than the others?", source="normlab",
    ),
    StatisticEntry(
        name="stream_cos", title="cosine of a stream with the sum of all",
        of="streams", unit="1", merge="mean", value=lambda x, total: x.cosine(total),
        formula="mean_N cos(x, s), s the sum of the streams",
        question="Do several streams carry different things? 1 if they are equal.", source="normlab",
    ),

    *sizes("attn"),
    ratio_to_stream("attn"),
    *sizes("mlp"),
    ratio_to_stream("mlp"),

    StatisticEntry(
        name="adj_cos", title="cosine across a layer",
        sent=LAYERS, shown=True, of="block", unit="1", merge="mean",
        value=lambda x, after: x.cosine(after),
        formula="mean_N cos(x, x'), x before the layer and x' after it",
        question="Does a layer change the direction of the residual stream? 1 for a layer that could be removed.",
        source="Gromov et al. 2024, arXiv:2403.17887; 1 - this is Men et al.'s BI, arXiv:2403.03853",
    ),
    probe(
        name="layer_drop", title="loss rise without a layer",
        sent=LAYERS, shown=True, of="block", unit="nats",
        formula="loss without the layer - loss", question="By how much does the loss rise when a layer is removed?",
        source="after Men et al. 2024, arXiv:2403.03853",
    ),
    probe(
        name="angular", title="angular distance",
        of="block", unit="pi rad",
        formula="mean_N arccos(cos(x_l, x_{l+n})) / pi, the site being n",
        question="Which n consecutive layers could be removed?",
        source="Gromov et al. 2024, arXiv:2403.17887, of all tokens",
    ),

    extended(
        name="attn_logit_max", title="largest attention logit",
        sent=LAYERS, of="attention", unit="nats", value=lambda a: a.largest,
        formula="max of scale q.k over the keys that a query attends to; of at most 128 queries",
        question="Do the attention logits grow until the softmax is one-hot? QK-norm bounds them.",
        source="Wortsman et al. 2023, arXiv:2309.14322",
    ),
    extended(
        name="attn_entropy", title="attention entropy",
        sent=LAYERS, shown=True, of="attention", unit="nats", value=lambda a: a.entropy_H.mean(-1),
        formula="mean over heads and at most 128 queries of -sum_T p log p",
        question="Over how many tokens does a query spread its attention? Their number is about exp(attn_entropy).",
        source="Zhai et al. 2023, arXiv:2303.06296 (entropy collapse)",
    ),
    extended(
        name="attn_entropy_min", title="smallest attention entropy of a head",
        of="attention", unit="nats", value=lambda a: a.entropy_H.amin(-1),
        formula="the smallest of the heads' mean entropies",
        question="Has an attention head collapsed to a single token?",
        source="Zhai et al. 2023, arXiv:2303.06296",
    ),
    extended(
        name="attn_sink", title="attention sink",
        shown=True, of="attention", unit="1", value=lambda a: a.sink,
        formula="mean p of the first token, of at most 128 queries after it",
        question="How much attention does the first token get, which is an attention sink in many models?",
        source="Xiao et al. 2023, arXiv:2309.17453",
    ),
    extended(
        name="dead_frac", title="share of dead hidden channels",
        of="hidden", unit="1", value=lambda h: h.dead,
        formula="share of hidden channels whose mean_N |h| is below a thousandth of the mean over all",
        question="What share of the MLP's hidden channels is unused?", source="normlab",
    ),

    StatisticEntry(
        name="norm_in_rms", title="RMS of a norm's input",
        shown=True, of="norm", unit="1", merge="rms", value=lambda x, y: x.mean_square,
        formula="sqrt(mean x^2) of a norm's input",
        question="Is the input of the norm so small that eps dominates its divisor?",
        source="normlab",
    ),
    StatisticEntry(
        name="norm_in_uniform", title="uniform component of a norm's input",
        of="norm", unit="1", merge="mean", value=lambda x, y: x.uniform,
        formula="mean_N(D (mean_d x)^2 / mean_d x^2) of a norm's input",
        question="How large is the component of the norm's input that LayerNorm removes and RMSNorm keeps?",
        source="after Gupta et al. 2024, arXiv:2409.12951",
    ),
    StatisticEntry(
        name="norm_out_rms", title="RMS of a norm's output",
        of="norm", unit="1", merge="rms", value=lambda x, y: y.mean_square,
        formula="sqrt(mean y^2) of a norm's output",
        question="How large is the output of the norm?", source="normlab",
    ),
    quotient(
        "norm_out_rms", "norm_in_rms", name="norm_gain", title="effective gain of a norm",
        shown=True, of="norm",
        question="By what factor does the norm scale its input? The gradient is multiplied by about the same factor.",
        source="normlab",
    ),
    of_gain(
        name="gain_rms", title="RMS of the gains",
        shown=True, value=lambda g: g.norm / g.width**0.5,
        formula="sqrt(mean_d g^2)", question="Do the gains of the norms grow or shrink during training?",
    ),
    of_gain(
        name="gain_min", title="smallest gain",
        value=lambda g: g.x.amin(-1),
        formula="min_d g", question="Does a norm switch a channel off (gain 0) or invert it (gain below 0)?",
    ),
    of_gain(
        name="gain_absmax", title="largest absolute gain",
        sent=LARGEST, value=lambda g: g.x.abs().amax(-1),
        formula="max_d |g|", question="Does the gain of a norm have an outlier channel?",
    ),
    of_gain(
        name="gain_cv", title="coefficient of variation of the gains",
        value=lambda g: g.coefficient_of_variation,
        formula="std_d(g) / |mean_d g|, std over all D",
        question="How much does the gain of a norm differ between channels?",
    ),
    of_gain(
        name="gain_negative", title="share of negative gains",
        value=lambda g: (g.x < 0).mean(-1, dtype=g.x.dtype),
        formula="share of g < 0", question="What share of channels does a norm invert?",
    ),

    # These three have no value of a view: the step has the tensors, and norms of gradients also serve clipping.
    StatisticEntry(
        name="grad_norm", title="gradient norm",
        of="parameter", unit="nats", merge="step",
        formula="|g|_2, before clipping",
        question="Which parameters dominate the norm of the global gradient?",
        source="Composer and OLMo log it",
    ),
    StatisticEntry(
        name="param_norm", title="parameter norm",
        of="parameter", unit="1", merge="step",
        formula="|w|_2, before the update",
        question="Does a weight that a norm makes scale-invariant grow, so that its effective steps shrink?",
        source="van Laarhoven 2017, arXiv:1706.05350",
    ),
    StatisticEntry(
        name="update_norm", title="update norm",
        of="parameter", unit="1", merge="step",
        formula="|w' - w|_2, w' after the update: weight decay and projection included",
        question="How far does a step move the parameter?", source="Composer logs it",
    ),
    StatisticEntry(
        name="grad_share", title="share of the squared gradient norm",
        sent=ONE, shown=True, of="parameter", unit="1", merge="derived",
        derive=derived.gradient_shares,
        needs=("grad_norm",),
        formula="sum of grad_norm^2 over a family of parameters / over all of them",
        question="What share of the squared gradient norm have embeddings, attention, MLPs, norms, wiring and LM head?",
        source="normlab, after Marin's report of a spike that came from the LM head alone",
    ),
    quotient(
        "update_norm", "param_norm", name="update_ratio", title="update ratio",
        sent=LARGEST, sent_sites=".weight", of="parameter",
        question="By what fraction does one step change a parameter? Infinite for a parameter that is initially 0.",
        source="folklore; 1e-3 is often called healthy",
    ),
    extended(
        name="gns_trace", title="trace of the gradient noise",
        of="parameter", unit="nats^2",
        formula="tr(S) of each parameter: (mean_b |g_b|^2 - |mean_b g_b|^2) B / (B - 1) of B <= 8 examples' g",
        question="How much do the gradients of single examples vary? The estimate is unbiased; average it over steps.",
        source="McCandlish et al. 2018, arXiv:1812.06162, appendix A.1",
    ),
    extended(
        name="gns_square", title="squared norm of the gradient without noise",
        of="parameter", unit="nats^2",
        formula="|G|^2 of each parameter: (B |mean_b g_b|^2 - mean_b |g_b|^2) / (B - 1) of B <= 8 examples' g",
        question="How large is the gradient without its noise? The estimate is unbiased and can be negative.",
        source="McCandlish et al. 2018, arXiv:1812.06162, appendix A.1",
    ),
    StatisticEntry(
        name="gns", title="gradient noise scale",
        tier=EXTENDED, of="parameter", unit="examples", merge="derived", derive=derived.noise_scale,
        needs=("gns_trace", "gns_square"), averaged=True,
        undefined="the averaged |G|^2 is not positive: too few examples to separate the gradient from its noise",
        formula="mean gns_trace / mean gns_square, each over the later half of the measured steps so far",
        question="At what batch size do more examples stop helping? The gns of norms predicts that of all parameters.",
        source="McCandlish et al. 2018, arXiv:1812.06162; Gray et al. 2024, arXiv:2411.00999",
    ),
    extended(
        name="radial_cos", title="radial cosine of the gradient",
        of="parameter", unit="1",
        formula="<g, w> / (|g| |w|), of each matrix",
        question="Is the loss independent of a weight's scale? Exactly 0 where a scale-invariant norm follows.",
        source="van Laarhoven 2017, arXiv:1706.05350",
    ),
    extended(
        name="adam_rms", title="RMS of Adam's update",
        of="parameter", unit="1",
        formula="sqrt(mean u^2) of each matrix, u = m^ / (sqrt(v^) + eps), Adam's update",
        question="Are Adam's updates as large as the learning rate? 1 where successive gradients agree.",
        source="normlab",
    ),
    extended(
        name="adam_eps_frac", title="share of parameters limited by Adam's eps",
        of="parameter", unit="1",
        formula="share of sqrt(v^) < 10 eps in each matrix",
        question="For what share of the parameters does Adam's eps limit the update?",
        source="Wortsman et al. 2023, arXiv:2309.14322, section 4",
    ),
    probe(
        name="spec_norm", title="spectral norm",
        of="parameter", unit="1",
        formula="largest singular value of each matrix",
        question="By what factor can the matrix stretch a vector at most?", source="folklore",
    ),
    probe(
        name="stable_rank", title="stable rank",
        of="parameter", unit="1",
        formula="|w|_F^2 / spec_norm^2 of each matrix", question="In how many directions does the matrix act?",
        source="Rudelson & Vershynin 2007",
    ),

    of_logits(
        name="logz", title="log Z",
        shown=True, unit="nats", merge="mean", value=lambda z: z.logz,
        formula="mean_N log sum_v exp z_v",
        question="Does log Z, the logarithm of the softmax's denominator, drift during training?",
    ),
    of_logits(
        name="logz2", title="squared log Z",
        unit="nats^2", merge="mean", value=lambda z: z.logz.square(),
        formula="mean_N (log sum_v exp z_v)^2", question="How large would the z-loss be, before its coefficient?",
    ),
    of_logits(
        name="logit_mean", title="mean logit",
        unit="nats", merge="mean", value=lambda z: z.mean,
        formula="mean z", question="Do all logits share an offset, to which the loss is indifferent?",
    ),
    of_logits(
        name="logit_absmax", title="largest absolute logit",
        unit="nats", merge="max", value=lambda z: z.absmax,
        formula="max |z|", question="How large do the logits become?",
    ),

    probe(
        name="sharpness", title="sharpness",
        sent=ONE, shown=True, of="model", unit="nats",
        formula="largest eigenvalue of the loss's Hessian, to a relative error of about 1e-3",
        question="How large is the largest curvature of the loss? Gradient descent keeps it near 2 / learning rate.",
        source="Cohen et al. 2021, arXiv:2103.00065; by Lanczos, at most 20 products",
    ),
    probe(
        name="sharpness_pre", title="preconditioned sharpness",
        sent=ONE, shown=True, of="model", unit="1",
        formula="largest eigenvalue of P^(-1/2) H P^(-1/2), H the Hessian, P Adam's sqrt(v^) + eps",
        question="How large is the largest curvature of the loss in Adam's preconditioned coordinates?",
        source="after Cohen et al. 2022, arXiv:2207.14484; by Lanczos, at most 20 products",
    ),
)
# fmt: on
STATISTICS = {statistic.name: statistic for statistic in ENTRIES}

ADAM_STATISTICS = ("adam_rms", "adam_eps_frac", "sharpness_pre")
"""Statistics of optimisers with `adam_constants` only."""
PER_EXAMPLE_STATISTICS = ("gns", "gns_trace", "gns_square")
"""Statistics that compare the gradients of at least two independent examples."""
NEEDS_PARAMETER_COPY = ("update_norm",)
"""Statistics for which a measured step copies every parameter before the update."""
UPDATE_STATISTICS = ("update_norm", "update_ratio", "adam_rms", "adam_eps_frac")
"""Statistics of an update, undefined for a run without steps."""


def layers_of(profiles: Profiles, name: str) -> dict[str, NDArray[np.bool_]]:
    """Return the layers at which a statistic exists, by site, (L + 2,); empty for one without layers.

    A layer counts even if all its values are NaN.

    Raises:
        StatisticsError: As `values_of`.
    """
    # Measured values may be NaN anywhere, so the layers are those of a profile of ones with the same layout.
    ones = Profiles(profiles.layout, np.zeros(1, dtype=np.int64), np.ones((1, profiles.layout.width)))
    return {site: ~np.isnan(values[0]) for site, values in values_of(ones, name).items() if values.ndim == 2}


def values_of(profiles: Profiles, name: str) -> dict[str, Array]:
    """Return a measured or derived statistic by site: (S, L + 2), NaN at layers without it, or (S,).

    Raises:
        StatisticsError: The statistic, or one that it is derived from, was not measured.
    """
    statistic = STATISTICS[name]
    if statistic.derive is None:
        if name not in profiles:
            raise StatisticsError(f"{name}: was not measured")
        return profiles.get(name)
    for need in statistic.needs:
        if need not in profiles:
            raise StatisticsError(f"{name}: is derived from {need}, which was not measured")
    try:
        return statistic.derive(profiles)
    except KeyError as error:  # a damaged layout lacks a site or a family
        raise StatisticsError(f"{name}: is derived from {error.args[0]!r}, which was not measured") from error
