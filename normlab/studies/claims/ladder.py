"""How much compute does a placement save, and does it save more in larger models?"""

from dataclasses import dataclass

from normlab.studies.base import AtLeast, AtMost, Claim, Grid, Picture, Study, Within, register_study
from normlab.studies.estimators import Share
from normlab.studies.over_sizes import ForecastError, Multiplier

# From 7 to 49 thousand weights in attention and MLPs. Tokens are 20 times as many, so that the compute grows 36 times
# from the first size to the last.
GRID = (
    "model=gpt2_nano model.depth=4 model.width=12,16,24,32 train.tokens_per_parameter=20 eval.every=1000 sweep.pack=16"
)
LOWER, MIDDLE, HIGHER = (
    f"optim.lr={rates}" for rates in ("1e-3,3e-3,1e-2,3e-2,1e-1", "3e-3,1e-2,3e-2,1e-1,3e-1", "1e-2,3e-2,1e-1,3e-1,1")
)
"""Grids of learning rates. At width 12 the best rate of one seed is inside the grid of each arm."""
EFFECT = 1.25
"""The compute multiplier for which the power of a claim is stated."""


@dataclass(frozen=True)
class Arm:
    name: str
    title: str
    options: str
    """Its options, which select its runs, too."""
    rates: str
    source: str

    @property
    def grid(self) -> Grid:
        return Grid(self.name, f"{GRID} {self.options.replace(',', ' ')} {self.rates}")


PRE = Arm("pre", "pre-norm", "placement=pre,model.qk_norm=off", MIDDLE, "")
ARMS = (
    Arm("peri", "Peri-LN", "placement=peri", HIGHER, "Kim et al. 2025, arXiv:2502.02732"),
    Arm("post", "post-norm with its warm-up", "placement=post", LOWER, "Takase et al. 2022, arXiv:2206.00330"),
    Arm("deepnorm", "DeepNorm", "placement=deepnorm", LOWER, "Wang et al. 2022, arXiv:2203.00555"),
    Arm(
        "qk_norm", "pre-norm with a norm on queries and keys", "placement=pre,model.qk_norm=head", MIDDLE,
        "Henry et al. 2020, arXiv:2010.04245",
    ),
    Arm(
        "attn_res", "pre-norm with attention residuals", "placement=attn_res", MIDDLE,
        "Kimi Team 2026, arXiv:2603.15031",
    ),
)  # fmt: skip


def claims_of(arm: Arm) -> list[Claim]:
    return [
        Claim(
            f"{arm.name}_saves",
            f"At the largest width {arm.title} needs no more compute than pre-norm for the same loss: a multiplier of "
            "1 or more.",
            Multiplier(arm.options, PRE.options),
            AtLeast(1.0),
            arm.source,
            effect=EFFECT,
        ),
        Claim(
            f"{arm.name}_grows",
            f"The multiplier of {arm.title} against pre-norm is at the largest width at least that at the smallest.",
            Multiplier(arm.options, PRE.options, growth=True),
            AtLeast(1.0),
            "this project",
            effect=EFFECT,
        ),
    ]


def forecast_claim(arm: Arm) -> Claim:
    return Claim(
        f"{arm.name}_forecast",
        f"The law of {arm.title} at the smaller widths forecasts its loss at the largest within 0.05 nats/token.",
        ForecastError(arm.options),
        Within(-0.05, 0.05),
        "this project",
    )


claims: list[Claim] = []
for compared in ARMS:
    claims += claims_of(compared)
claims += [forecast_claim(each) for each in (PRE, *ARMS)]

register_study(
    Study(
        name="ladder",
        question="How much compute does a placement save, and does it save more in larger models?",
        background=(
            "A gain at one size may grow, shrink or vanish with size. The compute multiplier of an arm is the factor "
            "by which pre-norm needs more compute for the same loss, by its law loss = E + A C^-alpha. Where a claim "
            "is refuted, the arm needs more compute than pre-norm, or its multiplier shrinks. Each size is trained on "
            "20 tokens for each weight in attention and MLPs. A learning rate that is right at one size and wrong at "
            "another would look like a law: here six seeds choose the rate of each arm at each size from five."
        ),
        limits=(
            "Depth 4, widths 12 to 32, 138 thousand to 983 thousand tokens, batches of 256 tokens, so that only the "
            "width grows; with --setting gpu depth 6, widths 64 to 176, and batches of 4,096 tokens. Each placement "
            "has its own init rule, and the warm-up is that of normlab, 50 steps. The multiplier depends on E and "
            "alpha of pre-norm's law, which six seeds determine badly and whose error is not in its interval. Whether "
            "it is above 1 does not depend on them, because the arms have equal compute (the FLOPs of matrix "
            "products). Nothing here is a forecast for models that people use: the largest size has 49 thousand "
            "weights in its blocks."
        ),
        grids=[arm.grid for arm in (PRE, *ARMS)],
        claims=claims,
        controls=[
            Claim("trains", "Pre-norm learns at some width.", Share(PRE.options, lr="every"), AtMost(0.5)),
        ],
        settings=("small", "gpu"),
        pictures=[Picture("scaling", {"color": "placement", "style": "model.qk_norm"})],
    )
)
