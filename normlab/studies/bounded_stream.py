"""Does Peri-LN bound the residual stream, with fewer divergences and a lower loss than pre-norm?"""

from normlab.studies.base import NANO, AtLeast, AtMost, Claim, Grid, Picture, Study, Within, register_study
from normlab.studies.estimators import Share, Slope, difference
from normlab.studies.measures import Statistic
from normlab.studies.over_grid import OverGrid

PRE, PERI = "placement=pre", "placement=peri"
STABLE = "optim.lr<=3e-2"
STREAM = Statistic("resid_rms", over="last", log=True)
KIM = "Kim et al. 2025, arXiv:2502.02732"

register_study(
    Study(
        name="bounded_stream",
        question="Does Peri-LN bound the residual stream, allow higher learning rates and lower the loss?",
        background=(
            "Peri-LN has a second norm on the output of each sub-layer. Its paper, and Ding et al. 2021 "
            "(arXiv:2105.13290) before it, report that the stream of pre-norm grows in training and that of Peri-LN "
            "does not, with fewer divergences and a lower loss."
        ),
        limits=(
            "Depth 8, width 32, 300 steps; the stream is that of step 200. A difference in loss of 0.005 nats/token, "
            "as in the papers, needs models and data of size large."
        ),
        grids=[
            Grid(
                "stream",
                f"{NANO} placement=pre,peri model.depth=8 optim.lr=1e-3,3e-3,1e-2,3e-2,1e-1,3e-1,1,3 seed=range(8)",
            )
        ],
        claims=[
            Claim(
                "pre_grows",
                "The stream of pre-norm grows with the learning rate: d ln RMS / d ln LR is 0.5 or more.",
                Slope(f"{PRE},{STABLE}", "optim.lr", STREAM),
                AtLeast(0.5),
                KIM,
            ),
            Claim(
                "peri_does_not",
                "The stream of Peri-LN hardly depends on the learning rate: d ln RMS / d ln LR is at most 0.15.",
                Slope(f"{PERI},{STABLE}", "optim.lr", STREAM),
                AtMost(0.15),
                KIM,
                under_review=(
                    "its learning rates end at 0.03, a tenth of the best one of Peri-LN; over those up to 0.3 the "
                    "slope is 0.209 [0.204, 0.214], above the criterion"
                ),
            ),
            Claim(
                "higher_rate",
                "Peri-LN learns at learning rates 1.5 times as high or more.",
                OverGrid("highest_rate", PERI, PRE),
                AtLeast(1.5),
                KIM,
            ),
            Claim(
                "lower_loss",
                "Peri-LN has a lower loss than pre-norm.",
                difference(PERI, PRE),
                AtMost(0.0),
                KIM,
                effect=-0.03,
            ),
            Claim(
                "same_loss",
                "The losses are within 0.005 nats/token.",
                difference(PERI, PRE),
                Within(-0.005, 0.005),
                "marin's experiments 4993, 9290 and 961",
                effect=0.0,
                needs_large=True,
            ),
        ],
        controls=[
            Claim("trains", "Pre-norm learns.", Share(PRE, lr="every"), AtMost(0.5)),
        ],
        amendments={
            "ca5d8977f9c4": "the best learning rate of Peri-LN was 0.3, the highest of the grid, which now goes to 3.",
        },
        pictures=[
            Picture("layers", {"statistic": "resid_rms", "color": "placement"}, "optim.lr=3e-2"),
            Picture("lr", {"color": "placement"}),
        ],
    )
)
