"""Which norms of a block can be left out?"""

from itertools import product

from normlab.catalogue.sites import SITES
from normlab.studies.base import AtLeast, AtMost, Claim, Grid, Study, register_study
from normlab.studies.estimators import Share, difference
from normlab.studies.over_grid import NEAR, OverGrid

GRID = "train.steps=300 eval.every=100 stats=off sweep.pack=16 norm=rmsnorm model.depth=4,16"
BLOCKS = {
    "pre": ("Pre-norm", "model=gpt2_nano placement=pre"),
    "peri": ("Peri-LN", "model=gpt2_nano placement=peri"),
    "gemma4": ("Gemma 4's block", "model=llama_nano placement=peri model.qk_norm=head model.v_norm=true"),
}
"""The title of each block, and the overrides in which it differs from the others."""
# The best rate of Peri-LN is near 0.3, and without the norm of an output it may be that of pre-norm, near 0.01.
RATES = {
    "pre": "3e-4,1e-3,3e-3,1e-2,3e-2,1e-1",
    "peri": "1e-3,3e-3,1e-2,3e-2,1e-1,3e-1,1,3",
    "gemma4": "3e-3,1e-2,3e-2,1e-1,3e-1,1,3",
}
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "pre": ("input_attn", "input_mlp", "final"),
    "peri": ("input_attn", "input_mlp", "output_attn", "output_mlp", "final"),
    "gemma4": ("input_attn", "qk", "v"),
}
"""The sites of each block that lose their norm, one at a time."""
HIGH_RATES = {"pre": LEFT_OUT["pre"], "peri": ("output_attn", "output_mlp", "final")}
"""The sites whose norm is to allow high learning rates."""
DEPTHS = 4, 16
DEEP = DEPTHS[-1]
# Rank 4 adds 2 % to the weights of a block of width 32; A.X-K2 has rank 16 in a wider model.
GATED = "norm.at.input_attn=gatednorm norm.at.input_attn.rank=4"
MARGIN = 0.05
THIS = "this project"
REDUNDANT = {("gemma4", "input_attn"): "Graef et al. 2024, arXiv:2407.09577 (FlashNorm)"}
"""The sources of single claims; the others are of this project."""


def grid(name: str, block: str, at: str = "") -> Grid:
    _, overrides = BLOCKS[block]
    return Grid(name, f"{GRID} optim.lr={RATES[block]} {overrides} {at}".strip())


def arm(block: str, depth: int, site: str = "", norm: str = "none") -> str:
    """Return the conditions of a block with another norm at a site, and with RMSNorm at each other one."""
    _, overrides = BLOCKS[block]
    conditions = [*overrides.split(), f"model.depth={depth}"]
    for optional_site in LEFT_OUT[block]:
        norm_there = "rmsnorm"
        if optional_site == site:
            norm_there = norm
        conditions.append(f"norm.at.{optional_site}={norm_there}")
    return ",".join(conditions)


def without(block: str, site: str) -> str:
    title, _ = BLOCKS[block]
    return f"{title} without a norm on {SITES[site].meaning}"


def loss_claims() -> list[Claim]:
    claims: list[Claim] = []
    for block, sites in LEFT_OUT.items():
        for site, depth in product(sites, DEPTHS):
            claims.append(
                Claim(
                    f"{block}_{site}_{depth}",
                    f"{without(block, site)} has a loss at most {MARGIN} nats/token above that with it, at depth "
                    f"{depth}.",
                    difference(arm(block, depth, site), arm(block, depth)),
                    AtMost(MARGIN),
                    REDUNDANT.get((block, site), THIS),
                    effect=0.0,
                )
            )
    return claims


def rate_claims() -> list[Claim]:
    claims: list[Claim] = []
    for block, sites in HIGH_RATES.items():
        for site in sites:
            left_out, whole = arm(block, DEEP, site), arm(block, DEEP)
            claims += [
                Claim(
                    f"{block}_{site}_rate",
                    f"{without(block, site)} trains well (within {NEAR} nats/token of its lowest loss) only at lower "
                    f"learning rates than with it, at depth {DEEP}.",
                    OverGrid("highest_rate", left_out, whole),
                    AtMost(1.0),
                    THIS,
                ),
                Claim(
                    f"{block}_{site}_sensitivity",
                    f"{without(block, site)} has a larger S over learning rates than with it, at depth {DEEP}.",
                    OverGrid("sensitivity", left_out, whole),
                    AtLeast(0.0),
                    THIS,
                    effect=0.1,
                ),
            ]
    return claims


register_study(
    Study(
        name="sites",
        question="Which norms of a block can be left out?",
        background=(
            "Pre-norm has three norms: on the inputs of attention and the MLP, and before the LM head. Peri-LN has one "
            "on the output of each sub-layer too, and Gemma 4's block also on the queries, keys and values of each "
            "head. Here each of them is left out (norm.at.SITE=none), one at a time. The study gemma_norms asks about "
            "one of them at one depth. In A.X-K2 the norm before attention is a GatedNorm, and the others are RMSNorm."
        ),
        limits=(
            "Width 32, depths 4 and 16, 300 steps (77 thousand tokens), six to eight learning rates for each block. A "
            "loss is that of runs that have learned, at the best rates of each arm; how many have not stands beside "
            "it. With a norm its gain is left out too. Only one norm is left out at a time: two that can each be left "
            "out may not both. S depends on the grid, and counts a diverged run as a loss of ln V. In Gemma 4 queries "
            "and keys are not divided by the root of the head's width; here they are, which the gains of their norms "
            "can undo."
        ),
        grids=[
            *(grid(block, block) for block in BLOCKS),
            *(
                grid(f"{block}_{site}", block, f"norm.at.{site}=none")
                for block, sites in LEFT_OUT.items()
                for site in sites
            ),
            grid("gated", "pre", GATED),
        ],
        claims=[
            *loss_claims(),
            *rate_claims(),
            *(
                Claim(
                    f"gated_{depth}",
                    f"With GatedNorm of rank 4 in place of RMSNorm on the input of attention, pre-norm has a lower "
                    f"loss at depth {depth}.",
                    difference(arm("pre", depth, "input_attn", "gatednorm"), arm("pre", depth)),
                    AtMost(0.0),
                    "Qiu et al. 2026, arXiv:2601.22966",
                    effect=-0.03,
                )
                for depth in DEPTHS
            ),
        ],
        controls=[
            Claim(f"{block}_trains", f"{title} learns at depth {DEEP}.", Share(arm(block, DEEP)), AtMost(0.5))
            for block, (title, _) in BLOCKS.items()
        ],
        settings=("small",),
    )
)  # fmt: skip
