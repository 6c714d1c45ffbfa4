"""Does a training step with RMSNorm take less time than one with LayerNorm?"""

from normlab.studies.base import MEAN_OVER_RATES, AtLeast, Claim, Grid, Study, register_study
from normlab.studies.estimators import Contrast
from normlab.studies.measures import TokenTime

ZHANG = "Zhang & Sennrich 2019, arXiv:1910.07467"
WIDTHS = (64, 256, 1024)


def timed(norm: str, width: int) -> str:
    return f"norm={norm},model.width={width}"


def cost_grid(width: int) -> Grid:
    """Return a grid of single runs, one at a time, in which LayerNorm and RMSNorm alternate."""
    # One run at a time and without statistics: of two at a time, equal runs differed by 5 to 15 %.
    return Grid(
        f"cost_{width}",
        f"model=gpt2_tiny model.depth=2 model.context=64 train.batch_size=8 train.steps={max(25600 // width, 40)} "
        f"train.log_every=4 eval.every=0 eval.sequences=8 stats=off optim.lr=1e-3 sweep.pack=off "
        f"sweep.jobs=1 model.width={width} norm=layernorm,rmsnorm",
    )


register_study(
    Study(
        name="norm_cost",
        question="Does a training step with RMSNorm take less time than one with LayerNorm?",
        background=(
            "RMSNorm subtracts no mean. Zhang & Sennrich 2019 report that it reduces the running time by 7 % to 64 %, "
            "with the code and the GPUs of 2019."
        ),
        limits=(
            "Depth 2, context 64, batch size 8, in float32 on a CPU, where torch has a fused kernel for LayerNorm. A "
            "GPU or a compiler may differ. Other processes on the machine disturb the times. At width 256 the first "
            "seeds ended with 26 of 30, by a rule that took 24 for the most."
        ),
        grids=[cost_grid(width) for width in WIDTHS],
        claims=[
            Claim(
                f"cheaper_at_{width}",
                f"A training step with LayerNorm takes 1.02 times as long or longer at width {width}.",
                Contrast({timed("layernorm", width): 1.0, timed("rmsnorm", width): -1.0}, TokenTime(), is_ratio=True),
                AtLeast(1.02),
                ZHANG,
                effect=1.07,
            )
            for width in WIDTHS
        ],
        controls=[
            Claim(
                "wider_is_slower",
                "A training step with LayerNorm takes twice as long or longer at width 1024 than at width 64.",
                Contrast({timed("layernorm", 1024): 1.0, timed("layernorm", 64): -1.0}, TokenTime(), is_ratio=True),
                AtLeast(2.0),
                # A wider model trains fewer steps, so that its runs take no longer; the claim is about the time of one.
                intended=["train.steps"],
            )
        ],
        settings=("small",),
        amendments={
            "334f1b736641": (
                "with two runs at a time of 40 to 125 steps the times of equal runs differed by 5 to 15 %; the runs "
                "are longer, and one at a time."
            ),
            "443a6f9e6018": MEAN_OVER_RATES,
        },
    )
)
