"""Do magnitudes drift with depth without normalisation, and does training diverge?"""

from normlab.studies.base import AtLeast, Claim, Grid, Picture, Study, Within, register_study
from normlab.studies.estimators import Contrast, Share
from normlab.studies.measures import Statistic
from normlab.studies.over_grid import OverGrid

INIT = "model=gpt2_nano placement=pre train.steps=1 stats.every=1 optim.lr=1e-3 seed=range(8) sweep.pack=16"
TRAIN = "model=gpt2_nano placement=pre train.steps=300 eval.every=100 stats.every=100 sweep.pack=16"
RULES = "init=xavier,gpt2,gpt2_scaled"
GROWTH = Statistic("resid_rms", over="growth", at="first")
TUTORIALS = "tutorials for practitioners"


def untrained(norm: str, init: str) -> str:
    return f"norm={norm},init={init},model.depth=32,train.steps=1"


def trained(norm: str, init: str) -> str:
    return f"norm={norm},init={init},train.steps=300"


register_study(
    Study(
        name="drift",
        question="Do magnitudes drift with depth without normalisation, and does a norm allow higher learning rates?",
        background=(
            "Articles for practitioners motivate normalisation by magnitudes that grow or vanish with depth. Without a "
            "norm the growth of each block depends on the initial weights: it is large under Xavier's rule and nearly "
            "absent under that of GPT-2."
        ),
        limits=(
            "Width 32: the growth at initialisation depends on the width under the rule of GPT-2, whose standard "
            "deviation is 0.02 at any width. The highest learning rate is one of a grid with ratios of three."
        ),
        grids=[
            Grid("untrained", f"{INIT} norm=none,rmsnorm {RULES} model.depth=4,8,16,32"),
            Grid("overflow", f"{INIT.replace('range(8)', 'range(16)')} norm=none init=xavier model.depth=48"),
            Grid(
                "trained",
                f"{TRAIN} norm=none,rmsnorm {RULES} model.depth=8 optim.lr=1e-3,3e-3,1e-2,3e-2,1e-1,3e-1,1 "
                "seed=range(6)",
            ),
        ],
        claims=[
            Claim(
                "xavier_grows",
                "Without a norm and with Xavier's rule the stream grows by more than 1.2 a block at depth 32.",
                Contrast({untrained("none", "xavier"): 1.0}, GROWTH),
                AtLeast(1.2),
                TUTORIALS,
            ),
            Claim(
                "gpt2_does_not",
                "Without a norm and with GPT-2's rule the stream keeps its size within 2 % a block at depth 32.",
                Contrast({untrained("none", "gpt2"): 1.0}, GROWTH),
                Within(0.98, 1.02),
                TUTORIALS,
            ),
            Claim(
                "norm_bounds_it",
                "With RMSNorm and Xavier's rule the stream grows by a factor of 1 to 1.2 a block at depth 32.",
                Contrast({untrained("rmsnorm", "xavier"): 1.0}, GROWTH),
                Within(1.0, 1.2),
                TUTORIALS,
            ),
            *(
                Claim(
                    f"higher_rate_{init}",
                    f"RMSNorm learns at learning rates three times as high or more with the rule {init} at depth 8.",
                    OverGrid("highest_rate", trained("rmsnorm", init), trained("none", init)),
                    AtLeast(2.9),
                    TUTORIALS,
                )
                for init in ("xavier", "gpt2", "gpt2_scaled")
            ),
        ],
        controls=[
            Claim(
                "overflow",
                "Without a norm and with Xavier's rule a model of depth 48 diverges.",
                Share("model.depth=48", lr="every", states=("diverged",)),
                AtLeast(0.5),
            ),
        ],
        amendments={
            "457410a3470a": "of the 8 seeds of the control overflow 7 diverged, too few for its criterion; it has 16.",
        },
        pictures=[
            Picture(
                "layers",
                {"statistic": "resid_rms", "moment": "first", "color": "norm", "panel": ["init"]},
                "train.steps=1,model.depth=32",
            ),
            Picture("lr", {"color": "norm", "panel": ["init"]}, "train.steps=300"),
        ],
    )
)
