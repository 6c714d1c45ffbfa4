"""Does pre-norm enable depth, and does Keel train where post-norm does not?"""

from normlab.studies.base import (
    MEAN_OVER_RATES,
    NANO,
    RATES,
    AtLeast,
    AtMost,
    Claim,
    Grid,
    Picture,
    Study,
    register_study,
)
from normlab.studies.estimators import Share, Slope, difference

GRID = f"{NANO} {RATES}"
DEEP = "model.depth=16"
PRE, POST, KEEL = (f"placement={name},{DEEP}" for name in ("pre", "post", "keel"))
WRONG = f"placement=deepnorm,init=deepnorm_inverse,{DEEP}"
CHEN = "Chen & Wei 2026, arXiv:2601.19895"
RANGE = "five learning rates from 3e-4 to 3e-2 within 300 steps (77 thousand tokens)"

register_study(
    Study(
        name="depth",
        question="Does pre-norm enable depth, and does Keel train where post-norm does not?",
        background=(
            "Takase et al. 2022 write that the training of post-norm with ten or more layers often fails. Keel (Chen & "
            "Wei 2026) multiplies the residual stream so that deep models train with norms after the addition; the "
            "paper reports a lower perplexity than that of pre-norm. DeepNorm has its own study, deepnorm."
        ),
        limits=(
            "Depth 16 and 300 steps show only which placement has the lower loss by then. They do not show which one "
            "is better after long training, nor what happens at a depth of 100 and more. Keel's paper has 64 layers "
            "and more. The best rate of each arm is one of five. Placement and init rule differ together: a part of a "
            "difference may be the rule's."
        ),
        grids=[
            Grid("depth", f"{GRID} placement=pre,post,keel model.depth=4,8,16"),
            Grid("control", f"{GRID} placement=deepnorm init=deepnorm_inverse {DEEP}"),
        ],
        claims=[
            Claim(
                "post_stuck",
                "At depth 16 half of the seeds of post-norm or more stay stuck at " + RANGE + ".",
                Share(POST, lr="every"),
                AtLeast(0.5),
                "Takase et al. 2022, arXiv:2206.00330",
            ),
            Claim(
                "keel_trains",
                "At depth 16 half of the seeds of Keel or more learn at one or more of " + RANGE + ".",
                Share(KEEL, lr="every"),
                AtMost(0.5),
                CHEN,
            ),
            Claim(
                "keel_beats_pre",
                "Keel has a lower loss than pre-norm at depth 16 after 300 steps.",
                difference(KEEL, PRE),
                AtMost(0.0),
                CHEN,
                effect=-0.05,
            ),
            Claim(
                "pre_gains_from_depth",
                "After 300 steps the loss of pre-norm does not rise with depth, from 4 to 16: its slope on ln L is at "
                "most 0.",
                Slope("placement=pre", "model.depth"),
                AtMost(0.0),
                "this project",
                effect=-0.02,
            ),
        ],
        controls=[
            # The claims compare with pre-norm, so that it must learn.
            Claim(
                "pre_trains",
                "At depth 16 half of the seeds of pre-norm or more learn at one or more of the five rates.",
                Share(PRE, lr="every"),
                AtMost(0.5),
            ),
            # The study deepnorm claims it; here its outcome is known.
            Claim(
                "wrong_exponent",
                "At depth 16, with the wrong exponent, half of the seeds or more stay stuck at all five rates.",
                Share(WRONG, lr="every"),
                AtLeast(0.5),
            ),
        ],
        amendments={
            "4d3aa5996736": (
                "the claims on DeepNorm repeated those of the study deepnorm, and are only there; that pre-norm learns "
                "is a control, since the other claims need it; protocol 3 adds seeds until the claims are decided."
            ),
            "ef15f0e03b1d": MEAN_OVER_RATES,
        },
        pictures=[Picture("factor", {"x": "model.depth", "color": "placement"}, "init!=deepnorm_inverse")],
    )
)
