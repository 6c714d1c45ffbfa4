"""Does pre-norm enable depth, and do DeepNorm and Keel rescue post-norm?"""

from normlab.studies.base import NANO, RATES, AtLeast, AtMost, Claim, Grid, Picture, Study, register_study
from normlab.studies.estimators import Share, Slope, difference

GRID = f"{NANO} {RATES} seed=range(6)"
DEEP = "model.depth=16"
PRE, POST, KEEL = (f"placement={name},{DEEP}" for name in ("pre", "post", "keel"))
DEEPNORM = f"placement=deepnorm,init=deepnorm,{DEEP}"
WRONG = f"placement=deepnorm,init=deepnorm_inverse,{DEEP}"
DEEPNET, CHEN = "Wang et al. 2022, arXiv:2203.00555", "Chen & Wei 2026, arXiv:2601.19895"

register_study(
    Study(
        name="depth",
        question="Does pre-norm enable depth, and do DeepNorm and Keel rescue post-norm?",
        background=(
            "Deep post-norm models often fail to train. DeepNorm and Keel multiply the residual stream so that deep "
            "models train with norms after the addition, and both papers report a lower loss than pre-norm."
        ),
        limits=(
            "Depth 16 at width 32 and 300 steps shows only which placement learns first. It does not say "
            "which one is better after long training, nor what happens at a depth of 100 and more."
        ),
        grids=[
            Grid("depth", f"{GRID} placement=pre,post,deepnorm,keel model.depth=4,8,16"),
            Grid("control", f"{GRID} placement=deepnorm init=deepnorm_inverse {DEEP}"),
        ],
        claims=[
            Claim(
                "post_stuck",
                "Post-norm learns at no learning rate at depth 16, in half of the seeds or more.",
                Share(POST, lr="every"),
                AtLeast(0.5),
                "Xiong et al. 2020, arXiv:2002.04745",
            ),
            Claim(
                "pre_trains",
                "Pre-norm learns at depth 16, in half of the seeds or more.",
                Share(PRE, lr="every"),
                AtMost(0.5),
                DEEPNET,
            ),
            Claim(
                "deepnorm_trains",
                "DeepNorm learns at depth 16, in half of the seeds or more.",
                Share(DEEPNORM, lr="every"),
                AtMost(0.5),
                DEEPNET,
            ),
            Claim(
                "keel_trains",
                "Keel learns at depth 16, in half of the seeds or more.",
                Share(KEEL, lr="every"),
                AtMost(0.5),
                CHEN,
            ),
            Claim(
                "deepnorm_beats_pre",
                "DeepNorm has a lower loss than pre-norm at depth 16.",
                difference(DEEPNORM, PRE),
                AtMost(0.0),
                DEEPNET,
                effect=-0.05,
            ),
            Claim(
                "keel_beats_pre",
                "Keel has a lower loss than pre-norm at depth 16.",
                difference(KEEL, PRE),
                AtMost(0.0),
                CHEN,
                effect=-0.05,
            ),
            Claim(
                "pre_gains_from_depth",
                "The loss of pre-norm does not rise with depth (its slope on ln L is at most 0).",
                Slope("placement=pre", "model.depth"),
                AtMost(0.0),
                effect=-0.02,
            ),
        ],
        controls=[
            Claim(
                "wrong_exponent",
                "With the wrong exponent DeepNorm learns nowhere at depth 16, in half of the seeds or more.",
                Share(WRONG, lr="every"),
                AtLeast(0.5),
            ),
        ],
        pictures=[Picture("factor", {"x": "model.depth", "color": "placement"}, "init!=deepnorm_inverse")],
    )
)
