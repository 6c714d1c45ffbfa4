"""Is RMSNorm as good as LayerNorm, and are the inputs of the norms nearly zero-mean?"""

from normlab.studies.base import (
    MEAN_OVER_RATES,
    NANO,
    RATES,
    AtMost,
    Claim,
    Grid,
    Picture,
    Study,
    Within,
    register_study,
)
from normlab.studies.estimators import Contrast, Share, difference
from normlab.studies.measures import Statistic

ZHANG, GUPTA = "Zhang & Sennrich 2019, arXiv:1910.07467", "Gupta et al. 2024, arXiv:2409.12951"
UNTRAINED = "norm=rmsnorm,train.steps=1"


def trained(norm: str) -> str:
    return f"norm={norm},train.steps=300"


register_study(
    Study(
        name="centering",
        question="Is RMSNorm as good as LayerNorm, and are the inputs of the norms nearly zero-mean?",
        background=(
            "RMSNorm subtracts no mean. Zhang & Sennrich 2019 report comparable quality; Gupta et al. 2024 find that "
            "the hidden vectors of language models are on average orthogonal to the vector of ones, so that there is "
            "no mean to subtract. A random vector has a squared component of 1 in its unit: the claim says that the "
            "mean is no larger than chance, not that it is small, and after training with LayerNorm it is smaller "
            "(figure 1). The margin in nats/token is ours. The log of modded-nanogpt has 3.2796 and 3.2793 for the two "
            "norms at 124M parameters (n=5). The time is in the study norm_cost."
        ),
        limits=(
            "Depth 8, 300 steps (77 thousand tokens) at five learning rates from 3e-4 to 3e-2. A difference in loss of "
            "0.01 nats/token needs models and data of size large."
        ),
        grids=[
            Grid("train", f"{NANO} placement=pre model.depth=8 norm=layernorm,rmsnorm {RATES}"),
            Grid(
                "untrained",
                "model=gpt2_nano placement=pre model.depth=8 norm=rmsnorm train.steps=1 stats.every=1 optim.lr=1e-3 "
                "train.batch_size=64 sweep.pack=4",
            ),
        ],
        claims=[
            # In the unit of the statistic a random vector has 1: the expected effect is a mean no larger than chance.
            Claim(
                "zero_mean",
                "The squared component of RMSNorm's inputs along the vector of ones is at most twice that of a random "
                "vector, at step 200 (median over sites and layers).",
                Contrast({trained("rmsnorm"): 1.0}, Statistic("norm_in_uniform")),
                AtMost(2.0),
                GUPTA,
                effect=1.0,
            ),
            Claim(
                "same_loss",
                "RMSNorm and LayerNorm have the same loss within 0.03 nats/token after 300 steps.",
                difference(trained("rmsnorm"), trained("layernorm")),
                Within(-0.03, 0.03),
                ZHANG,
                effect=0.0,
            ),
        ],
        controls=[
            Claim("trains", "RMSNorm learns at depth 8.", Share(trained("rmsnorm"), lr="every"), AtMost(0.5)),
            # It follows from random weights, so that its outcome is known.
            Claim(
                "zero_mean_at_start",
                "Before training the squared component of RMSNorm's inputs along the vector of ones is at most twice "
                "that of a random vector, over 64 sequences (median over sites and layers).",
                Contrast({UNTRAINED: 1.0}, Statistic("norm_in_uniform", at="first")),
                AtMost(2.0),
            ),
        ],
        amendments={
            "3a0c70ea9f9e": (
                "the claims on time are in the study norm_cost, whose widths are fixed; same_loss_closely, which small "
                "models cannot decide, is no longer listed; the inputs before training are those of 64 sequences; "
                "protocol 3 adds seeds until the claims are decided."
            ),
            "a64811b09cfe": f"{MEAN_OVER_RATES} zero_mean_at_start follows from random weights, and is a control.",
        },
        pictures=[
            Picture("layers", {"statistic": "norm_in_uniform mlp.in", "color": "norm"}, "train.steps=300"),
            Picture("lr", {"color": "norm"}, "train.steps=300"),
        ],
    )
)
