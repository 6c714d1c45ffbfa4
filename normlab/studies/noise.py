"""How large is the noise over seeds, and does the whole procedure find differences where there are none?"""

from normlab.studies.base import NANO, RATES, AtMost, Claim, Grid, Picture, Study, register_study
from normlab.studies.estimators import Deviation, FalsePositives, Share

DEPTHS = (4, 8, 16)

register_study(
    Study(
        name="noise",
        question="How large is the noise over seeds, and does the procedure find differences where there are none?",
        background=(
            "At 124M parameters on FineWeb the final loss of equal runs has a standard deviation over seeds of 0.0013 "
            "nats/token (the log of modded-nanogpt, track 3). Small models with few tokens have more. Compare the "
            "margins of the other small studies with these numbers."
        ),
        limits=(
            "The splits of 16 seeds are not independent, and the rate of false positives applies to these runs. Other"
            " arms, above all those close to instability, have more noise over seeds than pre-norm."
        ),
        grids=[Grid("pre", f"{NANO} placement=pre model.depth=4,8,16 {RATES} seed=range(16)")],
        claims=[
            *(
                Claim(
                    f"deviation_{depth}",
                    f"At depth {depth} the standard deviation over seeds is at most 0.03 nats/token.",
                    Deviation(f"model.depth={depth}"),
                    AtMost(0.03),
                )
                for depth in DEPTHS
            ),
            *(
                Claim(
                    f"false_positives_{depth}",
                    f"At depth {depth} the procedure rejects at most 7 % of true nulls (5 % and simulation error).",
                    FalsePositives(f"model.depth={depth}"),
                    AtMost(0.07),
                )
                for depth in DEPTHS
            ),
        ],
        controls=[
            Claim("trains", "Pre-norm learns at depth 16.", Share("model.depth=16", lr="every"), AtMost(0.5)),
        ],
        pictures=[Picture("lr", {"color": "model.depth"})],
    )
)
