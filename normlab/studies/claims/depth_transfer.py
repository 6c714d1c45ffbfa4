"""Does the best learning rate depend on the depth, with and without CompleteP?"""

from normlab.studies.base import NANO, AtMost, Claim, Grid, Picture, Study, Within, register_study
from normlab.studies.estimators import Share
from normlab.studies.over_grid import BestRateSlope

# One init rule for both arms, so that they differ in their scaling alone; each rate is twice the one before.
GRID = f"{NANO} placement=pre init=gpt2 model.depth=2,4,8,16,32 optim.lr=1e-3,2e-3,4e-3,8e-3,1.6e-2,3.2e-2,6.4e-2"
DEY = "Dey et al. 2025, arXiv:2505.01618"
PLAIN, COMPLETEP = "model.scaling=none", "model.scaling=completep"

register_study(
    Study(
        name="depth_transfer",
        question="Does the best learning rate depend on the depth, with and without CompleteP?",
        background=(
            "CompleteP multiplies each sub-layer by (base depth) / depth and scales eps, so that the best learning "
            "rate is to be the same at every depth (Dey et al. 2025, arXiv:2505.01618). The base has depth 2 and the "
            "width of all models; both arms have N(0, 0.02) as initial weights."
        ),
        limits=(
            "Pre-norm of width 32, depths 2 to 32, 300 steps (77 thousand tokens). The best rate of each seed is the "
            "lowest loss among seven rates from 1e-3 to 0.064, each twice the one before, and the slope is that of "
            "its logarithm; a seed that is best at an end of these rates counts with it. With CompleteP most of the "
            "slope is the step from depth 2, the base, to 4. The third estimate is the slope without CompleteP minus "
            "that with it, over the seeds that have both. In CompleteP attention divides by the width of a head, not "
            "by its root, at every depth."
        ),
        grids=[
            Grid("plain", f"{GRID} {PLAIN}"),
            # The base has the width of all models, so that the depth alone is scaled.
            Grid("completep", f"{GRID} {COMPLETEP} model.base_width=32 model.base_depth=2"),
        ],
        claims=[
            Claim(
                "plain", "Without scaling the best learning rate falls with depth: slope of ln(rate) on ln(depth) at "
                "most -0.1.", BestRateSlope(PLAIN, "model.depth"), AtMost(-0.1), DEY,
            ),
            Claim(
                "completep", "With CompleteP the best learning rate does not depend on the depth: slope 0 ± 0.15.",
                BestRateSlope(COMPLETEP, "model.depth"), Within(-0.15, 0.15), DEY,
            ),
            Claim(
                "difference", "The slope with CompleteP is above that without.",
                BestRateSlope(PLAIN, "model.depth", minus=COMPLETEP), AtMost(0.0), DEY,
            ),
        ],
        controls=[
            Claim(
                "trains", "Pre-norm learns at depth 32.", Share(f"{PLAIN},model.depth=32", lr="every"), AtMost(0.5),
            ),
        ],
        pictures=[Picture("lr", {"color": "model.depth", "panel": ["model.scaling"]})],
    )
)  # fmt: skip
