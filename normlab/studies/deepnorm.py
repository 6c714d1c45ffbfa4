"""Does DeepNorm train deep where post-norm does not, and what does one wrong exponent in its initial weights do?"""

from normlab.studies.base import AtLeast, AtMost, Claim, Grid, Picture, Study, register_study
from normlab.studies.estimators import Share, difference

MODEL = "model=gpt2_nano model.width=48 model.context=48 train.steps=300 eval.every=100 stats.every=50"
DEPTHS = "model.depth=4,8,16,24 optim.lr=3e-4,1e-3,3e-3,1e-2 seed=range(5)"
PRE, POST = "placement=pre,model.depth=16", "placement=post,model.depth=16"
RIGHT = "placement=deepnorm,init=deepnorm,model.depth=16"
WRONG = "placement=deepnorm,init=deepnorm_inverse,model.depth=16"
STUCK = ("diverged", "stuck", "regressed")

register_study(
    Study(
        name="deepnorm",
        question="Does DeepNorm train where post-norm is stuck, and what does one wrong exponent change?",
        background=(
            "DeepNorm (Wang et al. 2022, arXiv:2203.00555) scales the residual stream by (2L)^(1/4) and the initial "
            "weights of values, attention output and MLP by (8L)^(-1/4). Public code that others have copied has the "
            "exponent +1/4 for the weights."
        ),
        limits=(
            "The models have width 48 and train for 300 steps: the claims are whether a model leaves the unigram "
            "loss, and the sign of a difference at depth 16. They say nothing on the size of a difference at scale."
        ),
        grids={
            "small": [
                Grid("depth", f"{MODEL} placement=pre,post {DEPTHS}"),
                Grid("right", f"{MODEL} placement=deepnorm init=deepnorm {DEPTHS}"),
                Grid("wrong", f"{MODEL} placement=deepnorm init=deepnorm_inverse {DEPTHS}"),
            ]
        },
        claims=[
            Claim(
                "post_stuck",
                "Post-norm stays at the unigram loss at depth 16.",
                Share(POST, states=STUCK),
                AtLeast(0.5),
                "Xiong et al. 2020, arXiv:2002.04745",
            ),
            Claim(
                "deepnorm_trains",
                "DeepNorm trains at depth 16, at any learning rate of the grid up to 3e-3.",
                Share(f"{RIGHT},optim.lr<=3e-3", lr="any", states=STUCK),
                AtMost(0.25),
                "Wang et al. 2022, arXiv:2203.00555",
            ),
            Claim(
                "deepnorm_beats_pre",
                "DeepNorm has a lower loss than pre-norm at depth 16.",
                difference(RIGHT, PRE),
                AtMost(0.0),
                "Wang et al. 2022, arXiv:2203.00555",
                effect=-0.05,
            ),
            Claim(
                "wrong_exponent",
                "With the wrong exponent DeepNorm is worse than pre-norm by 0.2 nats/token or more at depth 16.",
                difference(WRONG, PRE),
                AtLeast(0.2),
                "the code of MixLN and LayerNorm-Scaling",
                effect=0.5,
            ),
        ],
        controls=[
            Claim("pre_trains", "Pre-norm trains at depth 16.", Share(f"{PRE},optim.lr<=3e-3", lr="any"), AtMost(0.25)),
        ],
        pictures=[Picture("depth", "factor", {"x": "model.depth", "color": "placement"})],
    )
)
