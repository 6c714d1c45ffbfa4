"""Does pre-norm converge faster than post-norm, and is post-norm better in shallow models?"""

from normlab.studies.base import AtMost, Claim, Grid, Picture, Study, register_study
from normlab.studies.estimators import Contrast, Share, difference
from normlab.studies.measures import StepsTo

# Evaluations every 20 steps, between which the number of steps to the target is interpolated.
GRID = (
    "model=gpt2_nano train.steps=600 eval.every=20 stats.every=200 sweep.pack=16 placement=pre,post model.depth=2,4,6 "
    "optim.lr=3e-4,1e-3,3e-3,1e-2,3e-2,1e-1"
)
TARGET = 2.7
XIONG = "Xiong et al. 2020, arXiv:2002.04745"
TAKASE = "Takase et al. 2022, arXiv:2206.00330"


def arms(depth: int) -> tuple[str, str]:
    return f"placement=pre,model.depth={depth}", f"placement=post,model.depth={depth}"


register_study(
    Study(
        name="speed",
        question="Does pre-norm converge faster than post-norm, and is post-norm better in shallow models?",
        background=(
            "Xiong et al. 2020 report that pre-norm converges faster. Takase et al. 2022 write that post-norm is "
            "better in shallow models, of six layers or fewer, and that its later layers get larger gradients."
        ),
        limits=(
            "The target is a loss of 2.7 nats/byte, early in training; 600 steps (154 thousand tokens) are far from "
            "convergence. The best rate of each arm is one of six from 3e-4 to 0.1, and that of the lowest final loss. "
            "Each placement has its own init rule, GPT-2's or Xavier's, and a part of the difference may be the "
            "rule's: it is not tested here. Both papers study translation. Both statements may be reversed in long "
            "training."
        ),
        grids=[Grid("speed", GRID)],
        claims=[
            *(
                Claim(
                    f"faster_at_{depth}",
                    f"Pre-norm needs fewer steps than post-norm to a loss of {TARGET} at depth {depth}.",
                    Contrast({arms(depth)[0]: 1.0, arms(depth)[1]: -1.0}, StepsTo(TARGET), is_ratio=True),
                    AtMost(1.0),
                    XIONG,
                    effect=0.8,
                )
                for depth in (2, 6)
            ),
            *(
                Claim(
                    f"post_better_at_{depth}",
                    f"Post-norm has a lower loss than pre-norm at depth {depth} after 600 steps.",
                    difference(arms(depth)[1], arms(depth)[0]),
                    AtMost(0.0),
                    TAKASE,
                    effect=-0.03,
                )
                for depth in (2, 4, 6)
            ),
        ],
        controls=[
            Claim("pre_trains", "Pre-norm learns at depth 6.", Share(arms(6)[0], lr="every"), AtMost(0.5)),
        ],
        amendments={
            "4bd491b68082": ("the claims are the same; protocol 3 adds seeds until the claims are decided."),
        },
        pictures=[
            Picture("loss", {"color": "placement", "panel": ["model.depth"]}),
            Picture("lr", {"color": "placement", "panel": ["model.depth"]}),
        ],
    )
)
