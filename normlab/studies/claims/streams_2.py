"""Do the streams of 2026 lower the loss at equal cost, and does their mixing make them alike?"""

from normlab.studies.base import NANO, AtLeast, AtMost, Claim, Grid, Picture, Study, Within, register_study
from normlab.studies.estimators import Share, difference
from normlab.studies.measures import Statistic

GRID = f"{NANO} init=gpt2 model.depth=16 optim.lr=1e-3,3e-3,1e-2,3e-2"
QWEN, HY4 = "Qwen3.8-Flash-Next (gated residual)", "Hy4-Preview (iHC)"
MHC_LITE, KROM_HC = "mHC-lite, arXiv:2601.05732", "KromHC, arXiv:2601.21579"
ALIKE_SOURCE = "issue 2 of tokenbender/mHC-manifold-constrained-hyper-connections"
GATED, IHC = "placement=gated_residual", "placement=identity_hc,placement.variant=hy4"
SINKHORN, PERMUTATIONS, KRONECKER = (
    f"placement=mhc,placement.mixing={mixing}" for mixing in ("sinkhorn", "permutations", "kronecker")
)
FREE = "placement=hyper_connections"
# The number is the width of the pre-norm to compare with, which has at least as many FLOPs and parameters.
COMPARED = (
    ("gated_residual", "The gated residual", GATED, 40, QWEN),
    ("ihc", "iHC of Hy4", IHC, 36, HY4),
    ("permutations", "mHC-lite, mixing by permutations,", PERMUTATIONS, 44, MHC_LITE),
    ("kronecker", "KromHC, mixing by a Kronecker product,", KRONECKER, 40, KROM_HC),
)
ALIKE = Statistic("stream_cos", over="last")
"""The cosine of a stream with the sum of all, in the last block; 1 if all streams are equal."""


def wide(width: int) -> str:
    return f"placement=pre,model.width={width}"


def lower_loss_claims() -> list[Claim]:
    claims: list[Claim] = []
    for name, title, streams, width, source in COMPARED:
        claims.append(
            Claim(
                name,
                f"{title} of width 32 has a lower loss than pre-norm of width {width}.",
                difference(streams, wide(width)),
                AtMost(0.0),
                source,
                effect=-0.05,
            )
        )
    return claims


def equal_loss_claims() -> list[Claim]:
    claims: list[Claim] = []
    for name, title, streams, source in (
        ("permutations", "permutations", PERMUTATIONS, MHC_LITE),
        ("kronecker", "a Kronecker product", KRONECKER, KROM_HC),
    ):
        claims.append(
            Claim(
                f"{name}_equals_sinkhorn",
                f"Mixing by {title} has a loss within 0.05 nats/token of that of mixing by Sinkhorn's iterations.",
                difference(streams, SINKHORN),
                Within(-0.05, 0.05),
                source,
                effect=0.0,
            )
        )
    return claims


def alike_claims() -> list[Claim]:
    claims: list[Claim] = []
    for name, title, streams, baseline_title, baseline in (
        ("sinkhorn_none", "mHC", SINKHORN, "iHC, which do not mix", IHC),
        ("permutations_none", "mHC-lite", PERMUTATIONS, "iHC, which do not mix", IHC),
        ("kronecker_none", "KromHC", KRONECKER, "iHC, which do not mix", IHC),
        ("sinkhorn_free", "mHC", SINKHORN, "hyper-connections, which mix by any matrix", FREE),
    ):
        claims.append(
            Claim(
                f"alike_{name}",
                f"After 200 steps the streams of {title} are more alike in the last block than those of "
                f"{baseline_title}.",
                difference(streams, baseline, ALIKE),
                AtLeast(0.0),
                ALIKE_SOURCE,
            )
        )
    return claims


register_study(
    Study(
        name="streams_2",
        question="Do the streams of 2026 lower the loss at equal cost, and does their mixing make them alike?",
        background=(
            "Models of 2026 have several residual streams: gated ones without another norm (Qwen3.8-Flash-Next), "
            "streams that do not mix (iHC of Hy4), and streams that mix by a doubly stochastic matrix: from Sinkhorn's "
            "iterations (mHC), from permutations (mHC-lite) or as a Kronecker product (KromHC). Their reports compare "
            "at equal width. Here the comparison is with a wider pre-norm. Of width 32 and depth 16, the gated "
            "residual has 25 % more FLOPs and 29 % more parameters than pre-norm, iHC 16 % and 16 %, mHC-lite 68 % and "
            "63 %, KromHC 30 % and 24 %. Pre-norm of width 36 has 24 % and 26 % more than that of width 32, of width "
            "40 51 % and 54 %, of width 44 80 % and 85 %. In a public reproduction of mHC the mixing matrices stayed "
            "at the identity with its default settings; with a higher temperature their products approached the mean "
            "over streams, so that the streams became alike. Orthogonal mixing (oHC, arXiv:2609.02672) is not here: "
            "only its abstract can be read."
        ),
        limits=(
            "Depth 16, 300 steps (77 thousand tokens), learning rates from 1e-3 to 3e-2, of streams that do not mix by "
            "a doubly stochastic matrix to 1e-1, init=gpt2 in every arm, four streams. In wider models the weights of "
            "the streams cost less, so that the comparison at equal width there is nearer to that at equal cost. "
            "Pre-norm has 7 to 21 % more FLOPs than what it is compared with: three widths serve four placements. The "
            "cosine is that of step 200; the streams start equal."
        ),
        grids=[
            Grid("gated", f"{GRID},1e-1 placement=gated_residual"),
            Grid("ihc", f"{GRID},1e-1 placement=identity_hc placement.variant=hy4"),
            Grid("mixing", f"{GRID} placement=mhc placement.mixing=sinkhorn,permutations,kronecker"),
            Grid("free", f"{GRID},1e-1 placement=hyper_connections"),
            # Wide enough to have no fewer FLOPs and parameters than the placements of several streams.
            Grid("wider", f"{GRID} placement=pre model.width=36,40,44"),
        ],
        claims=[*lower_loss_claims(), *equal_loss_claims(), *alike_claims()],
        controls=[
            Claim("trains", "Pre-norm of width 36 learns.", Share(wide(36), lr="every"), AtMost(0.5)),
        ],
        settings=("small",),
        pictures=[
            Picture(
                "lr",
                {"color": "placement", "style": "placement.mixing", "panel": ["model.width"]},
                by=["placement", "model.width", "placement.mixing"],
            )
        ],
    )
)  # fmt: skip
