"""Does Peri-LN bound the residual stream, with fewer divergences and a lower loss than pre-norm?"""

from normlab.studies.base import MEAN_OVER_RATES, NANO, AtLeast, AtMost, Claim, Grid, Picture, Study, register_study
from normlab.studies.estimators import Share, Slope, difference
from normlab.studies.measures import Statistic
from normlab.studies.over_grid import NEAR, OverGrid

# The best rate of Peri-LN was 0.3 when that was the highest of the grid, which therefore goes to 3.
GRID = f"{NANO} placement=pre,peri model.depth=8 optim.lr=1e-3,3e-3,1e-2,3e-2,1e-1,3e-1,1,3"
# AdamW decays more at a higher rate, unless its decay is independent of it: the ratio of rates is claimed with both.
FIXED = "optim.decay_mode=independent"
PRE, PERI = (f"placement={name},optim.decay_mode=proportional" for name in ("pre", "peri"))
PRE_FIXED, PERI_FIXED = (f"placement={name},{FIXED}" for name in ("pre", "peri"))
STREAM = Statistic("resid_rms", over="last", log=True)
KIM, THIS = "Kim et al. 2025, arXiv:2502.02732", "this project"

register_study(
    Study(
        name="bounded_stream",
        question="Does Peri-LN bound the residual stream, allow higher learning rates and lower the loss?",
        background=(
            "Peri-LN has a second norm on the output of each sub-layer. Kim et al. 2025 report that the stream of "
            "pre-norm grows in training more than that of Peri-LN, and that Peri-LN trains more stably to a lower "
            "loss. They measure the growth over depth and steps; its dependence on the learning rate is a measure of "
            "this project. The weight decay of AdamW is the learning rate times 0.1, so that a higher rate also decays "
            "more; with optim.decay_mode=independent it is 1e-4 a step at every rate."
        ),
        limits=(
            "Depth 8, 300 steps; the stream is that of step 200. The learning rates go from 1e-3 to 3. Each slope is "
            "over a range that holds the best rate of its arm: up to 0.03 for pre-norm, up to 1 for Peri-LN. The "
            "lowest rates weigh as much as the best one, and a narrower range has another slope. Where a seed still "
            "trains well at the highest rate, the ratio of the highest rates is a lower bound. The sign of the "
            "difference in loss depends on the depth: in the study warmup Peri-LN has the lower loss at depth 4. A "
            "difference of 0.005 nats/token needs models and data of size large."
        ),
        grids=[
            Grid("stream", f"{GRID} optim.decay_mode=proportional"),
            Grid("fixed_decay", f"{GRID} {FIXED} optim.weight_decay=1e-4"),
        ],
        claims=[
            # Each slope is over a range that holds the best rate of its arm.
            Claim(
                "pre_grows",
                "From learning rate 1e-3 to 0.03 the stream of pre-norm grows with the rate: d ln RMS / d ln LR is 0.5 "
                "or more.",
                Slope(f"{PRE},optim.lr<=3e-2", "optim.lr", STREAM),
                AtLeast(0.5),
                THIS,
            ),
            Claim(
                "peri_does_not",
                "From learning rate 1e-3 to 1 the stream of Peri-LN hardly depends on the rate: d ln RMS / d ln LR is "
                "at most 0.15.",
                Slope(f"{PERI},optim.lr<=1", "optim.lr", STREAM),
                AtMost(0.15),
                THIS,
            ),
            Claim(
                "higher_rate",
                f"Peri-LN trains well (within {NEAR} nats/token of its lowest loss) at learning rates 1.5 times as "
                "high or more.",
                OverGrid("highest_rate", PERI, PRE),
                AtLeast(1.5),
                THIS,
            ),
            Claim(
                "higher_rate_fixed_decay",
                f"Peri-LN trains well (within {NEAR} nats/token of its lowest loss) at learning rates 1.5 times as "
                "high or more, with a weight decay of 1e-4 a step at every rate.",
                OverGrid("highest_rate", PERI_FIXED, PRE_FIXED),
                AtLeast(1.5),
                THIS,
            ),
            Claim(
                "lower_loss",
                "Peri-LN has a lower loss than pre-norm after 300 steps.",
                difference(PERI, PRE),
                AtMost(0.0),
                KIM,
                effect=-0.03,
            ),
        ],
        controls=[
            Claim("trains", "Pre-norm learns.", Share(PRE, lr="every"), AtMost(0.5)),
        ],
        amendments={
            "ca5d8977f9c4": "the best learning rate of Peri-LN was 0.3, the highest of the grid, which now goes to 3.",
            "878db62b8c3d": (
                "the slope of Peri-LN ended at a rate of 0.03, a tenth of its best one, and now goes to 1; the claim "
                "same_loss, which small models cannot decide, is no longer listed; higher_rate is repeated with a "
                "weight decay that does not depend on the rate; protocol 3 adds seeds until the claims are decided."
            ),
            "9e4ad649aea4": (
                f"{MEAN_OVER_RATES} Before, the highest rate was the highest one of the grid at which a run learned "
                "at all."
            ),
        },
        pictures=[
            Picture(
                "layers",
                {"statistic": "resid_rms", "color": "placement"},
                "optim.lr=3e-2,optim.decay_mode=proportional",
            ),
            Picture(
                "lr",
                {"color": "placement", "panel": ["optim.decay_mode"]},
                by=["placement", "optim.decay_mode"],
            ),
        ],
    )
)
