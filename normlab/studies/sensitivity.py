"""Does normalisation lower the sensitivity of the loss to learning rate and initial weights?"""

from normlab.studies.base import NANO, AtLeast, AtMost, Claim, Grid, Picture, Study, register_study
from normlab.studies.estimators import Share
from normlab.studies.over_grid import OverGrid

GRID = f"{NANO} model.depth=4 init=xavier,gpt2,gpt2_scaled optim.lr=1e-3,3e-3,1e-2,3e-2,1e-1,3e-1,1 seed=range(6)"
TUTORIALS = "tutorials for practitioners"
WORTSMAN = "Wortsman et al. 2023, arXiv:2309.14322"


def arm(norm: str, placement: str = "pre", init: str = ",init=gpt2_scaled") -> str:
    return f"norm={norm},placement={placement}{init}"


register_study(
    Study(
        name="sensitivity",
        question="Does normalisation lower the sensitivity of the loss to learning rate and initial weights?",
        background=(
            "The sensitivity S of Wortsman et al. 2023 is the mean loss over a grid of learning rates minus the "
            "lowest. We know of no public test of norms and placements crossed with init rules."
        ),
        limits=(
            "S depends on the grid: seven learning rates from 1e-3 to 1. Depth 4, width 32, 300 steps. In a deeper "
            "model the differences between placements grow."
        ),
        grids=[
            Grid("norms", f"{GRID} placement=pre norm=none,layernorm,rmsnorm,dyt"),
            Grid("placements", f"{GRID} placement=post,peri norm=rmsnorm"),
        ],
        claims=[
            Claim(
                "learning_rate",
                "RMSNorm lowers S over learning rates, with the rule gpt2_scaled.",
                OverGrid("sensitivity", arm("none"), arm("rmsnorm")),
                AtLeast(0.0),
                TUTORIALS,
                effect=0.1,
            ),
            Claim(
                "learning_rate_and_init",
                "RMSNorm lowers S over learning rates and init rules together.",
                OverGrid("sensitivity", arm("none", init=""), arm("rmsnorm", init="")),
                AtLeast(0.0),
                TUTORIALS,
                effect=0.1,
            ),
            Claim(
                "layernorm",
                "LayerNorm lowers S over learning rates, with the rule gpt2_scaled.",
                OverGrid("sensitivity", arm("none"), arm("layernorm")),
                AtLeast(0.0),
                TUTORIALS,
                effect=0.1,
            ),
            Claim(
                "dyt",
                "DyT lowers S over learning rates, with the rule gpt2_scaled.",
                OverGrid("sensitivity", arm("none"), arm("dyt")),
                AtLeast(0.0),
                "Zhu et al. 2025, arXiv:2503.10622",
                effect=0.1,
            ),
            Claim(
                "post",
                "Post-norm has a larger S than pre-norm, with the rule gpt2_scaled.",
                OverGrid("sensitivity", arm("rmsnorm", "post"), arm("rmsnorm")),
                AtLeast(0.0),
                WORTSMAN,
                effect=0.1,
            ),
            Claim(
                "peri",
                "Peri-LN has a smaller S than pre-norm, with the rule gpt2_scaled.",
                OverGrid("sensitivity", arm("rmsnorm", "peri"), arm("rmsnorm")),
                AtMost(0.0),
                "Kim et al. 2025, arXiv:2502.02732",
                effect=-0.05,
            ),
        ],
        controls=[
            Claim("trains", "RMSNorm learns.", Share(arm("rmsnorm"), lr="every"), AtMost(0.5)),
        ],
        pictures=[
            Picture("lr", {"color": "norm", "panel": ["init"]}, "placement=pre"),
            Picture("lr", {"color": "placement", "panel": ["init"]}, "norm=rmsnorm"),
        ],
    )
)
