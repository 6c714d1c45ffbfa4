"""Does DeepNorm train deep models, and what does one exponent of the wrong sign do?"""

from normlab.studies.base import NANO, RATES, AtLeast, AtMost, Claim, Grid, Picture, Study, register_study
from normlab.studies.estimators import Share, difference

GRID = f"{NANO} model.depth=4,32 {RATES}"
PRE = "placement=pre"
RIGHT, WRONG = "placement=deepnorm,init=deepnorm", "placement=deepnorm,init=deepnorm_inverse"
DEEPNET = "Wang et al. 2022, arXiv:2203.00555"
THIS = "this project"
# Only at depth 32 does the arm with the wrong exponent have both factors of a public code.
DEEP, SHALLOW = "model.depth=32", "model.depth=4"
RANGE = "five learning rates from 3e-4 to 3e-2 within 300 steps (77 thousand tokens)"

register_study(
    Study(
        name="deepnorm",
        question="Does DeepNorm train deep models, and what does one exponent of the wrong sign change?",
        background=(
            "DeepNorm (Wang et al. 2022, arXiv:2203.00555) multiplies the residual stream by (2L)^(1/4) and the "
            "initial weights of values, attention output and MLP by (8L)^(-1/4). The arm with the wrong exponent "
            "(init=deepnorm_inverse) multiplies these weights by (8L)^(+1/4), and the stream by (2L)^(1/4). The code "
            "of pixeli99/MixLN (commit ff45826, modeling_llama.py) has the exponent +1/4 and multiplies the stream by "
            "2.828 at every depth, which is (2L)^(1/4) at depth 32: at depth 32, and only there, the arm has both "
            "factors of that code. The code itself was not run. That post-norm stays stuck is a claim of the study "
            "depth."
        ),
        limits=(
            "Models of 4 and 32 blocks train for 300 steps of 256 bytes. Placement and init rule differ together: "
            "pre-norm has the rule of GPT-2. The claims are whether a model learns to use its context, and the sign of "
            "a difference. They do not show whether a longer warm-up or training frees the stuck models. At depth 32 "
            "the verdict depends on the rate that six seeds choose: 0.003 at first, where 8 of 12 seeds of DeepNorm "
            "learn, with a mean of 2.73; 0.001 with the fresh seeds, where all learn, with 2.91. Table 1 of Mix-LN "
            "(arXiv:2412.13795) has a perplexity of 22.77 for DeepNorm with 250M parameters and 24 layers after 3.9 "
            "billion tokens, close to 21.92 for pre-norm, and 1410.94 with 1B parameters: if that is the public code, "
            "its form trains at depth 24 with 40,000 steps and a warm-up of 4,000."
        ),
        grids=[
            Grid("pre", f"{GRID} placement=pre"),
            Grid("exponent", f"{GRID} placement=deepnorm init=deepnorm,deepnorm_inverse"),
        ],
        claims=[
            Claim(
                "deepnorm_trains",
                "At depth 32 half of the seeds of DeepNorm or more learn at one or more of " + RANGE + ".",
                Share(f"{RIGHT},{DEEP}", lr="every"),
                AtMost(0.5),
                DEEPNET,
            ),
            Claim(
                "wrong_stuck",
                "At depth 32, with both factors of the code of MixLN (2.828 and (8L)^(+1/4)), half of the seeds or "
                "more stay stuck at " + RANGE + ".",
                Share(f"{WRONG},{DEEP}", lr="every"),
                AtLeast(0.5),
                THIS,
            ),
            Claim(
                "wrong_stuck_shallow",
                "At depth 4, with the wrong exponent, half of the seeds or more stay stuck at " + RANGE + ".",
                Share(f"{WRONG},{SHALLOW}", lr="every"),
                AtLeast(0.5),
                THIS,
            ),
            Claim(
                "beats_pre_shallow",
                "DeepNorm has a lower loss than pre-norm at depth 4 after 300 steps.",
                difference(f"{RIGHT},{SHALLOW}", f"{PRE},{SHALLOW}"),
                AtMost(0.0),
                THIS,
                effect=-0.05,
            ),
            Claim(
                "beats_pre_deep",
                "DeepNorm has a lower loss than pre-norm at depth 32 after 300 steps.",
                difference(f"{RIGHT},{DEEP}", f"{PRE},{DEEP}"),
                AtMost(0.0),
                DEEPNET,
                effect=-0.05,
            ),
        ],
        controls=[
            Claim(
                "pre_trains",
                "At depth 32 half of the seeds of pre-norm or more learn at one or more of the five rates.",
                Share(f"{PRE},{DEEP}", lr="every"),
                AtMost(0.5),
            ),
        ],
        amendments={
            "201e858df49b": (
                "the largest depth is 32, not 24: only there does the arm with the wrong exponent have the two "
                "factors of a public code; depth 8, of no claim, is gone, and so is post-norm, which the study depth "
                "tests. The claim wrong_shallow compared the losses of runs that have not learned, and is now whether "
                "they learn. Protocol 3 adds seeds until the claims are decided."
            ),
        },
        pictures=[Picture("factor", {"x": "model.depth", "color": "placement", "style": "init"})],
    )
)
