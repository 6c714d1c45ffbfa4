"""Is RMSNorm as good as LayerNorm, are the inputs of the norms nearly zero-mean, and does RMSNorm cost less?"""

from normlab.studies.base import NANO, RATES, AtLeast, AtMost, Claim, Grid, Picture, Study, Within, register_study
from normlab.studies.estimators import Contrast, Share, difference
from normlab.studies.measures import Statistic, TokenTime

ZHANG, GUPTA = "Zhang & Sennrich 2019, arXiv:1910.07467", "Gupta et al. 2024, arXiv:2409.12951"
WIDTHS = (64, 256, 1024)


def trained(norm: str) -> str:
    return f"norm={norm},model.width=32"


def timed(norm: str, width: int) -> str:
    return f"norm={norm},model.width={width}"


def cost_grid(width: int) -> Grid:
    """Return a grid of single runs in which LayerNorm and RMSNorm alternate."""
    return Grid(
        f"cost_{width}",
        f"model=gpt2_tiny model.depth=2 model.context=64 train.batch_size=8 train.steps={max(8000 // width, 40)} "
        f"train.log_every=4 eval.every=0 eval.sequences=8 stats=off optim.lr=1e-3 sweep.pack=off "
        f"model.width={width} seed=range(8) norm=layernorm,rmsnorm",
    )


register_study(
    Study(
        name="centering",
        question="Is RMSNorm as good as LayerNorm, are the norms' inputs nearly zero-mean, and is it cheaper?",
        background=(
            "RMSNorm subtracts no mean. Zhang & Sennrich 2019 report the same quality at less time; Gupta et "
            "al. 2024 find that the hidden vectors of language models are nearly orthogonal to the vector of ones, so "
            "that there is no mean to subtract. The log of modded-nanogpt has 3.2796 and 3.2793 for the two norms at "
            "124M parameters (n=5)."
        ),
        limits=(
            "The time is that of a CPU, where torch has a fused kernel for LayerNorm; a GPU may differ. "
            "A difference in loss of 0.01 nats/token needs size large."
        ),
        grids=[
            Grid("train", f"{NANO} placement=pre model.depth=8 norm=layernorm,rmsnorm {RATES} seed=range(10)"),
            *(cost_grid(width) for width in WIDTHS),
        ],
        claims=[
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
                "zero_mean_at_start",
                "The same holds before training.",
                Contrast({trained("rmsnorm"): 1.0}, Statistic("norm_in_uniform", at="first")),
                AtMost(2.0),
                GUPTA,
                effect=1.0,
            ),
            Claim(
                "same_loss",
                "RMSNorm and LayerNorm have the same loss within 0.03 nats/token.",
                difference(trained("rmsnorm"), trained("layernorm")),
                Within(-0.03, 0.03),
                ZHANG,
                effect=0.0,
            ),
            Claim(
                "same_loss_closely",
                "RMSNorm and LayerNorm have the same loss within 0.01 nats/token.",
                difference(trained("rmsnorm"), trained("layernorm")),
                Within(-0.01, 0.01),
                ZHANG,
                effect=0.0,
                needs_large=True,
            ),
            *(
                Claim(
                    f"cheaper_at_{width}",
                    f"A training step with LayerNorm takes 1.02 times as long or longer at width {width}.",
                    Contrast(
                        {timed("layernorm", width): 1.0, timed("rmsnorm", width): -1.0}, TokenTime(), is_ratio=True
                    ),
                    AtLeast(1.02),
                    ZHANG,
                )
                for width in WIDTHS
            ),
        ],
        controls=[
            Claim("trains", "RMSNorm learns at depth 8.", Share(trained("rmsnorm"), lr="every"), AtMost(0.5)),
        ],
        pictures=[
            Picture("layers", {"statistic": "norm_in_uniform mlp.in", "color": "norm"}, "model.width=32"),
            Picture("lr", {"color": "norm"}, "model.width=32"),
        ],
    )
)
