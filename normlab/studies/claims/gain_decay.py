"""Does weight decay of gains help before the branch and hurt after it?"""

from normlab.studies.base import NANO, RATES, AtLeast, AtMost, Claim, Grid, Picture, Study, register_study
from normlab.studies.estimators import Share, difference, interaction

GRID = f"{NANO} model.depth=8 {RATES}"
SOURCE = "arXiv:2605.26895"


def arm(placement: str, site: str, decay: float) -> str:
    return f"placement={placement},optim.groups.gains.{site}.decay={decay:g}"


INPUT, OUTPUT = ("pre", "input"), ("peri", "output")


def effect_of_decay(place: tuple[str, str]) -> tuple[str, str]:
    """Return the arms with and without decay of the gains."""
    # Ten times the decay of the matrices, so that 300 steps can show an effect.
    return arm(*place, 1.0), arm(*place, 0.0)


register_study(
    Study(
        name="gain_decay",
        question="Does weight decay of the gains help before the branch and hurt after it?",
        background=(
            "Decay of gains is reported to help where the norm stands on the input of a sub-layer, and to hurt where "
            "it stands on its output (arXiv:2605.26895). In pre-norm the gains of all norms on inputs are decayed, in "
            "Peri-LN those of the norms on outputs only. The decay is 1.0, ten times that of the matrices, so that 300 "
            "steps can show its effect."
        ),
        limits=(
            "Depth 8, 300 steps (77 thousand tokens), five learning rates from 3e-4 to 3e-2 in pre-norm and seven from "
            "1e-3 to 1 in Peri-LN. A decay of 0.1, as in long training, moves the gains by a few percent within these "
            "steps. In longer training the sign may be another. Each placement has its own init rule and learning "
            "rates, which the comparison of outputs with inputs includes."
        ),
        grids=[
            Grid("pre", f"{GRID} placement=pre optim.groups.gains.input.decay=0,1.0"),
            # Peri-LN has its best learning rate ten times as high as pre-norm.
            Grid("peri", f"{GRID.replace(RATES, 'optim.lr=1e-3,3e-3,1e-2,3e-2,1e-1,3e-1,1')} placement=peri "
                 "optim.groups.gains.output.decay=0,1.0"),
        ],
        claims=[
            Claim(
                "input", "Decay of the gains on inputs lowers the loss of pre-norm.",
                difference(*effect_of_decay(INPUT)), AtMost(0.0), SOURCE, effect=-0.02,
            ),
            Claim(
                "output", "Decay of the gains on outputs raises the loss of Peri-LN.",
                difference(*effect_of_decay(OUTPUT)), AtLeast(0.0), SOURCE, effect=0.02,
            ),
            Claim(
                "sites", "Decay of gains costs more on outputs than on inputs.",
                interaction(*effect_of_decay(OUTPUT), *effect_of_decay(INPUT)), AtLeast(0.0), SOURCE, effect=0.04,
            ),
        ],
        controls=[Claim("trains", "Pre-norm learns.", Share(arm(*INPUT, 0.0), lr="every"), AtMost(0.5))],
        pictures=[
            Picture(
                "lr", {"color": "placement"},
                by=["placement", "optim.groups.gains.input.decay", "optim.groups.gains.output.decay"],
            )
        ],
    )
)  # fmt: skip
