"""Does DeepNorm train deep where post-norm does not, and what does one exponent of the wrong sign do?"""

from normlab.studies.base import NANO, RATES, AtLeast, AtMost, Claim, Grid, Picture, Study, register_study
from normlab.studies.estimators import Share, difference

GRID = f"{NANO} model.depth=4,8,16,24 {RATES} seed=range(6)"
PRE, POST = "placement=pre", "placement=post"
RIGHT, WRONG = "placement=deepnorm,init=deepnorm", "placement=deepnorm,init=deepnorm_inverse"
DEEPNET = "Wang et al. 2022, arXiv:2203.00555"
THIS = "this project"
DEEP, SHALLOW = "model.depth=24", "model.depth=4"

register_study(
    Study(
        name="deepnorm",
        question="Does DeepNorm train where post-norm is stuck, and what does one exponent of the wrong sign change?",
        background=(
            "DeepNorm (Wang et al. 2022, arXiv:2203.00555) multiplies the residual stream by (2L)^(1/4) and the "
            "initial weights of values, attention output and MLP by (8L)^(-1/4). The arm with the wrong exponent "
            "(init=deepnorm_inverse) multiplies these weights by (8L)^(+1/4), and the stream by (2L)^(1/4) as in the "
            "paper. It is a variation of the formula, not the code of another project, of which none was run."
        ),
        limits=(
            "The models have 4 to 24 blocks of width 32 and train for 300 steps of 256 bytes. Placement and init rule "
            "differ together: pre-norm has the rule of GPT-2, post-norm Xavier's. The claims are whether a model "
            "learns to use its context, and the sign of a difference. They say nothing of its size in large models, "
            "nor whether a longer warm-up or training would free the stuck models."
        ),
        grids=[
            Grid("depth", f"{GRID} placement=pre,post"),
            Grid("exponent", f"{GRID} placement=deepnorm init=deepnorm,deepnorm_inverse"),
        ],
        claims=[
            Claim(
                "post_stuck",
                "Post-norm learns at no learning rate at depth 24, in half of the seeds or more.",
                Share(f"{POST},{DEEP}", lr="every"),
                AtLeast(0.5),
                "Xiong et al. 2020, arXiv:2002.04745",
            ),
            Claim(
                "deepnorm_trains",
                "DeepNorm learns at depth 24, in half of the seeds or more.",
                Share(f"{RIGHT},{DEEP}", lr="every"),
                AtMost(0.5),
                DEEPNET,
            ),
            Claim(
                "wrong_stuck",
                "With the wrong exponent it learns at no learning rate at depth 24, in half of the seeds or more.",
                Share(f"{WRONG},{DEEP}", lr="every"),
                AtLeast(0.5),
                THIS,
            ),
            Claim(
                "wrong_shallow",
                "With the wrong exponent DeepNorm is worse by 0.2 nats/token or more at depth 4.",
                difference(f"{WRONG},{SHALLOW}", f"{RIGHT},{SHALLOW}"),
                AtLeast(0.2),
                THIS,
                effect=0.4,
            ),
            Claim(
                "beats_pre_shallow",
                "DeepNorm has a lower loss than pre-norm at depth 4.",
                difference(f"{RIGHT},{SHALLOW}", f"{PRE},{SHALLOW}"),
                AtMost(0.0),
                DEEPNET,
                effect=-0.05,
            ),
            Claim(
                "beats_pre_deep",
                "DeepNorm has a lower loss than pre-norm at depth 24.",
                difference(f"{RIGHT},{DEEP}", f"{PRE},{DEEP}"),
                AtMost(0.0),
                DEEPNET,
                effect=-0.05,
            ),
        ],
        controls=[
            Claim(
                "pre_trains",
                "Pre-norm learns at depth 24, in half of the seeds or more.",
                Share(f"{PRE},{DEEP}", lr="every"),
                AtMost(0.5),
            ),
        ],
        pictures=[Picture("factor", {"x": "model.depth", "color": "placement", "style": "init"})],
    )
)
