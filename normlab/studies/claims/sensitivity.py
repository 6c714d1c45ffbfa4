"""Does normalisation lower the sensitivity of the loss to learning rate and initial weights?"""

from normlab.studies.base import NANO, AtLeast, AtMost, Claim, Grid, Picture, Study, register_study
from normlab.studies.estimators import Share
from normlab.studies.over_grid import OverGrid

# From 3e-4, for models whose best rate is low, to 3: the best rate of Peri-LN with a fixed decay was 1 on some seeds.
GRID = f"{NANO} model.depth=4 optim.lr=3e-4,1e-3,3e-3,1e-2,3e-2,1e-1,3e-1,1,3"
# AdamW decays more at a higher rate, unless its decay is independent of it: claims are repeated with such a decay.
FIXED = "optim.decay_mode=independent"
THIS = "this project"


def arm(norm: str, placement: str = "pre", init: str = "gpt2_scaled", mode: str = "proportional") -> str:
    return f"norm={norm},placement={placement},init={init},optim.decay_mode={mode}"


def fixed(norm: str, placement: str = "pre") -> str:
    """Return the arm with a weight decay that does not depend on the learning rate."""
    return arm(norm, placement, mode="independent")


def claim(name: str, text: str, more: str, less: str, effect: float = 0.1) -> Claim:
    """Return the claim that one arm has a larger S than another."""
    return Claim(name, text, OverGrid("sensitivity", more, less), AtLeast(0.0), THIS, effect)


register_study(
    Study(
        name="sensitivity",
        question="Does normalisation lower the sensitivity of the loss to the learning rate, also with a fixed decay?",
        background=(
            "The sensitivity S of Wortsman et al. 2023 (arXiv:2309.14322) is the mean over a grid of learning rates of "
            "the loss, at most that at the start, minus the lowest loss. They use a weight decay that does not depend "
            "on the rate. We know of no public test of these norms and placements by S. The weight decay of AdamW is "
            "the learning rate times 0.1, so that a higher rate also decays more; with optim.decay_mode=independent it "
            "is 1e-4 a step at every rate."
        ),
        limits=(
            "S depends on the grid: nine learning rates from 3e-4 to 3. Runs that diverge, 60 of the first 756, count "
            "as ln V, the loss of a uniform guess; stuck ones, 262, with their own loss. So S depends mostly on which "
            "rates train at all. It does not show which arm has the lower loss at its best rate. "
            "With Xavier's rule a part of a smaller S is a higher lowest loss. Depth 4, 300 steps (77 thousand tokens)."
        ),
        grids=[
            Grid("norms", f"{GRID} placement=pre norm=layernorm,dyt init=gpt2_scaled optim.decay_mode=proportional"),
            Grid(
                "inits", f"{GRID} placement=pre norm=none,rmsnorm init=xavier,gpt2_scaled optim.decay_mode=proportional"
            ),
            Grid(
                "placements",
                f"{GRID} placement=post,peri norm=rmsnorm init=gpt2_scaled optim.decay_mode=proportional",
            ),
            Grid(
                "fixed_norms",
                f"{GRID} placement=pre norm=none,rmsnorm init=gpt2_scaled {FIXED} optim.weight_decay=1e-4",
            ),
            Grid(
                "fixed_placements",
                f"{GRID} placement=post,peri norm=rmsnorm init=gpt2_scaled {FIXED} optim.weight_decay=1e-4",
            ),
        ],
        claims=[
            claim(
                "learning_rate",
                "RMSNorm lowers S, the mean loss over the learning rates minus the lowest, with the rule gpt2_scaled.",
                arm("none"),
                arm("rmsnorm"),
            ),
            claim(
                "learning_rate_xavier",
                "RMSNorm lowers S over learning rates, with Xavier's rule.",
                arm("none", init="xavier"),
                arm("rmsnorm", init="xavier"),
            ),
            claim(
                "learning_rate_fixed_decay",
                "RMSNorm lowers S over learning rates, with a weight decay of 1e-4 a step at every rate.",
                fixed("none"),
                fixed("rmsnorm"),
            ),
            claim(
                "layernorm",
                "LayerNorm lowers S over learning rates, with the rule gpt2_scaled.",
                arm("none"),
                arm("layernorm"),
            ),
            claim("dyt", "DyT lowers S over learning rates, with the rule gpt2_scaled.", arm("none"), arm("dyt")),
            claim(
                "post",
                "Post-norm has a larger S than pre-norm, with the rule gpt2_scaled.",
                arm("rmsnorm", "post"),
                arm("rmsnorm"),
            ),
            claim(
                "post_fixed_decay",
                "Post-norm has a larger S than pre-norm, with a weight decay of 1e-4 a step at every rate.",
                fixed("rmsnorm", "post"),
                fixed("rmsnorm"),
            ),
            claim(
                "peri",
                "Pre-norm has a larger S than Peri-LN, with the rule gpt2_scaled.",
                arm("rmsnorm"),
                arm("rmsnorm", "peri"),
                0.05,
            ),
            claim(
                "peri_fixed_decay",
                "Pre-norm has a larger S than Peri-LN, with a weight decay of 1e-4 a step at every rate.",
                fixed("rmsnorm"),
                fixed("rmsnorm", "peri"),
                0.05,
            ),
        ],
        controls=[
            Claim("trains", "RMSNorm learns.", Share(arm("rmsnorm"), lr="every"), AtMost(0.5)),
        ],
        amendments={
            "1fa18a77ff30": (
                "the claims on norm and placement are repeated with a weight decay that does not depend on the rate; "
                "the claim over all init rules counted the runs of the claim learning_rate again, and is now on "
                "Xavier's rule alone; other arms have one init rule, which no other claim used. The grid has a lower "
                "rate, for models whose best rate is low. Protocol 3 adds seeds until the claims are decided."
            ),
            "23cb22f774fa": (
                "an arm of which no run learns has no S: DyT had learned at none of these rates, and its claim was "
                "supported because its losses were all alike. S is defined in the first claim."
            ),
            "803df143f441": (
                "the best rate of Peri-LN with a fixed decay was 1 for fresh seeds, the highest of the grid, which now "
                "goes to 3. The first seeds are now from 1000 on, and the fresh ones from 2000 on."
            ),
        },
        pictures=[
            Picture("lr", {"color": "norm", "panel": ["init"]}, "placement=pre,optim.decay_mode=proportional"),
            Picture(
                "lr",
                {"color": "placement", "panel": ["optim.decay_mode"]},
                "norm=rmsnorm,init=gpt2_scaled",
                by=["placement", "optim.decay_mode"],
            ),
        ],
    )
)
